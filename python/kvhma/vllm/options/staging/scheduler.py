# SPDX-License-Identifier: Apache-2.0
"""P's scheduler gives a finished prompt slots in host memory, where other engines read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvhma.errors import RequestError
from kvhma.geometry import Span
from kvhma.planning import live_spans
from kvhma.vllm.metadata import StepMetadata
from kvhma.vllm.options.doors import SchedulerDoor
from kvhma.vllm.options.staging.slots import NAME, SlotRanges, Slots, staging_slots
from kvhma.vllm.wire.params import LeaseKey, PrefillParams
from kvhma.vllm.wire.peer_log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvhma.vllm.config.settings import Settings
    from kvhma.vllm.scheduler import KvhmaScheduler


@dataclass
class _Prompt:
    """A request that another engine decodes.

    Attributes:
        request: vLLM's.
        preemptions: how often it had been preempted when its blocks were copied; -1 before.
        slots: of its blocks; None without copies.
    """

    request: Request
    preemptions: int = -1
    slots: tuple[Span, ...] | None = None


class Room(SchedulerDoor):
    """Has the workers copy each prompt that they complete, and hands off the copies."""

    @classmethod
    def facts(cls, config: VllmConfig, caches: KVCacheConfig, settings: Settings) -> SlotRanges:
        """Return the slots."""
        return staging_slots(config, caches, settings)

    def __init__(self, core: KvhmaScheduler) -> None:
        """Start without requests."""
        self._context = core.context
        self._prefill = core.prefill
        self._slots = Slots(core.context.engine.extras[NAME].reads)
        self._prompts: dict[str, _Prompt] = {}
        self._held: dict[LeaseKey, tuple[Span, ...]] = {}
        """Slots of held requests."""

    def on_request_added(self, request: Request, params: dict[str, Any]) -> bool:
        """Note a request that another engine decodes."""
        if params.get("do_remote_decode") is True:
            self._prompts[request.request_id] = _Prompt(request)
        return False

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Order copies of the requests whose prompt this step completes.

        A request is copied again after each preemption. It then has other blocks, and all may be prefix-cache hits.
        """
        self._prefill.free_ended_leases()  # their slots, too
        copies = []
        for request_id, count in output.num_scheduled_tokens.items() if self._prompts else ():
            prompt, manager = self._prompts.get(request_id), self._context.manager
            if prompt is None or manager is None or self._context.geometry is None:
                continue
            request = prompt.request
            is_complete = request.num_computed_tokens + count >= request.num_prompt_tokens
            if is_complete and prompt.preemptions != request.num_preemptions:
                self._slots.release_slots(prompt.slots or ())
                tables = self._context.transfer_tables(manager.get_block_ids(request_id))
                spans = tuple(live_spans(self._context.geometry, None, tables))
                prompt.preemptions, prompt.slots = request.num_preemptions, self._take_slots(request_id, spans)
                if prompt.slots is not None:
                    copies.append((spans, prompt.slots))
        if copies:
            metadata.extras[NAME] = copies
        return bool(self._prompts)

    def _take_slots(self, request_id: str, spans: tuple[Span, ...]) -> tuple[Span, ...] | None:
        """Return slots for the blocks of a request; None if there is no room, and so no hand-off."""
        try:
            slots = self._slots.take_slots(spans)
        except RequestError as error:
            logger.warning("kvhma: cannot hand off request %s: %s", request_id, error)
            return None
        if slots is None:
            self._context.stats.count("staging_full")
            logger.warning(
                "kvhma: cannot hand off request %s: all staging_blocks hold requests that decode engines have not read "
                "yet; D computes the prompt",
                request_id,
            )
        return slots

    def handed_off_spans(self, request: Request, spans: list[Span]) -> list[Span] | None:
        """Return the slots of a request; None if it has none, or if they have the state of another token."""
        decoded = request.num_computed_tokens - request.num_prompt_tokens
        if decoded > 0 and self._context.engine.has_state:
            logger.warning(
                "kvhma: cannot hand off request %s: it decoded %d tokens, and the recurrent state in host memory "
                "(kv_buffer_device) is that of its prompt; send max_tokens=1 to P",
                request.request_id,
                decoded,
            )
            return None
        prompt = self._prompts.get(request.request_id)
        return None if prompt is None or prompt.slots is None else list(prompt.slots)

    def on_hand_off(self, request: Request, remote: PrefillParams) -> PrefillParams:
        """Note that the slots of a request belong to its lease."""
        self._held[remote.lease_key] = self._prompts.pop(request.request_id).slots or ()
        return remote

    def on_lease_ended(self, key: LeaseKey) -> None:
        """Release the slots of a request that P no longer holds."""
        self._slots.release_slots(self._held.pop(key, ()))

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> None:
        """Release the slots of a request that P does not hand off."""
        if (prompt := self._prompts.pop(request.request_id, None)) is not None:
            self._slots.release_slots(prompt.slots or ())
