# SPDX-License-Identifier: Apache-2.0
"""What vLLM's allocator makes of a model, in the numbers that are published of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvhma.models import STATE_KINDS, CacheKind, Model
from kvhma.models.block_size import KernelBlock, kernel_block_size
from kvhma.models.pages import state_bytes
from support.groups import cache_groups, kv_bytes


@dataclass(frozen=True)
class Summary:
    """A model's cache in numbers, for one rank.

    Attributes:
        groups: kind and number of groups, in the order of the block tables.
        tensors: memory ranges that all groups share.
        padded_slots: places ``(group, tensor)`` without a layer.
        block_size: tokens of a logical block; of the longest, where groups differ.
        kernel_block: tokens of a kernel block in such a block.
        state_bytes: bytes of one layer's state, 0 without state.
        kv_bytes: bytes of one token in the attention layer that has the most, 0 without attention.
    """

    groups: tuple[tuple[CacheKind, int], ...]
    tensors: int
    padded_slots: int
    block_size: int
    kernel_block: int
    state_bytes: int
    kv_bytes: int

    @property
    def ratio(self) -> int:
        """Kernel blocks in a logical block."""
        return self.block_size // self.kernel_block


def summary(
    model: Model, *, tp_size: int = 1, block_size: int = 16, kernel_block: KernelBlock = "flashinfer"
) -> Summary:
    """Return what the allocator makes of a model. Arguments and errors as for `layout`."""
    groups = cache_groups(model, tp_size=tp_size, block_size=block_size)
    tensors = max(len(group.layers) for group in groups)
    kinds = list(dict.fromkeys(group.kind for group in groups))
    # A block of state has no separate kernel blocks.
    logical = max((group.block_size for group in groups if group.kind not in STATE_KINDS), default=groups[0].block_size)
    return Summary(
        groups=tuple((kind, sum(group.kind == kind for group in groups)) for kind in kinds),
        tensors=tensors,
        padded_slots=len(groups) * tensors - len(model.specs),
        block_size=logical,
        kernel_block=kernel_block_size(kernel_block, logical) if model.has_attention else logical,
        state_bytes=state_bytes(model.state, tp_size=tp_size) if model.state else 0,
        kv_bytes=kv_bytes(model, tp_size=tp_size),
    )
