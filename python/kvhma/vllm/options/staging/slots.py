# SPDX-License-Identifier: Apache-2.0
"""Slots of the staging pool in host memory, for devices whose memory cannot be registered."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhma.errors import RequestError
from kvhma.geometry import Span
from kvhma.vllm.caches.formats import transferred_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvhma.vllm.config.settings import Settings

NAME = "staging"
"""The name of this option in `extras`."""


@dataclass(frozen=True, slots=True)
class SlotRanges:
    """The use of the slots.

    Slot 0 is unused, like the null block 0::

        | 0 | for reads by other engines: the scheduler's | for own loads: each worker's |

    Attributes:
        reads: for blocks that other engines read from here.
        loads: for blocks that this engine reads from others.
    """

    reads: range
    loads: range

    @classmethod
    def of(cls, reads: int, loads: int) -> SlotRanges:
        """Return ranges with these numbers of slots."""
        return cls(range(1, 1 + reads), range(1 + reads, 1 + reads + loads))

    @property
    def count(self) -> int:
        """Slots of the pool, the null slot included."""
        return 1 + len(self.reads) + len(self.loads)


def staging_slots(config: VllmConfig, caches: KVCacheConfig, settings: Settings) -> SlotRanges:
    """Return the slots of an engine: the number of blocks in the settings, for each of its roles."""
    role = config.kv_transfer_config
    assert role is not None  # noqa: S101
    groups = [caches.kv_cache_groups[index].kv_cache_spec for index in transferred_groups(caches)]
    # At least one request of any length fits at a time.
    longest = sum(-(-config.model_config.max_model_len // spec.block_size) + 1 for spec in groups)
    count = settings.staging_blocks or max(caches.num_blocks // 4, min(longest, caches.num_blocks))
    return SlotRanges.of(count if role.is_kv_producer else 0, count if role.is_kv_consumer else 0)


class Slots:
    """Free slots. Safe to use from several threads."""

    def __init__(self, numbers: range) -> None:
        """Start with all slots free."""
        self._total = len(numbers)
        self._lock = threading.Lock()
        self._free = list(numbers)

    def take_slots(self, spans: Sequence[Span]) -> tuple[Span, ...] | None:
        """Return the lowest free slots for blocks, for each group; None while too few are free.

        Raises:
            RequestError: there are more blocks than slots.
        """
        count = sum(len(span.ids) for span in spans)
        if count > self._total:
            raise RequestError(f"{count} blocks go through host memory, staging_blocks has room for {self._total}")
        with self._lock:
            if count > len(self._free):
                return None
            return tuple(Span(span.first, [heapq.heappop(self._free) for _ in span.ids]) for span in spans)

    def release_slots(self, places: Sequence[Span]) -> None:
        """Return slots to the free list."""
        with self._lock:
            for span in places:
                for number in span.ids:
                    heapq.heappush(self._free, number)
