# SPDX-License-Identifier: Apache-2.0
"""Turns of a chat that D holds after their answer, so that P reads them for the next turn.

    turn one    P | prompt |           D | prompt | answer |        D holds the blocks, and names them in its answer
    turn two    P | read from D .......................| computed |  hand-off to D as usual
                    prompt   answer                      new tokens

A next turn may never come, so no reader renews these leases. D frees a kept turn after a timeout, when it needs the
blocks, or when P has read it. P asks D first, and computes what D does not hold.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import first_entries
from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.planning import live_spans
from kvhma.vllm.holds.engine_loop import STEPS_UNDER_WAY
from kvhma.vllm.holds.held_blocks import hold_blocks
from kvhma.vllm.holds.lease_table import Blocks, Ids, LeaseEnd
from kvhma.vllm.holds.prefill import FINISHED_WELL
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.options.doors import SchedulerDoor
from kvhma.vllm.prompts.prompt import is_sample
from kvhma.vllm.wire.params import LeaseKey, PrefillParams, Prefix
from kvhma.vllm.wire.peer_log import logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvhma.vllm.metadata import StepMetadata
    from kvhma.vllm.scheduler import KvhmaScheduler

_MAX_PREFIXES = 16
_PREFIX_TOKENS = 64
"""Prefixes of a kept turn that are named, for a next prompt that differs later; and the fewest tokens between two."""

_ROOM_SHARE = 1 / 32
"""Share of the blocks that D evicts at once if a running request lacks blocks."""


@dataclass(frozen=True)
class _SettlingTurn:
    """A turn whose state is written by a step that has not ended. It must not be read before then.

    Attributes:
        key: of its lease.
        digest: of its parameters.
        held: its blocks, of :func:`kvhma.vllm.holds.held_blocks.hold_blocks`.
        step: number of the last step that was built when the answer ended.
    """

    key: LeaseKey
    digest: bytes
    held: tuple[Ids, Blocks]
    step: int


_ENDS: dict[enum.Enum, str] = {LeaseEnd.READ: "read", LeaseEnd.EVICTED: "evicted", LeaseEnd.RESET: "evicted"}
"""Labels of the counter of kept turns, by why they ended; the others have expired."""


class Room(SchedulerDoor):
    """D holds finished turns, and evicts them when their blocks are needed. P reads them."""

    def __init__(self, core: KvhmaScheduler) -> None:
        """Start without turns."""
        self._context = core.context
        self._prefill = core.prefill
        self._decode = core.decode
        self._settling: list[_SettlingTurn] = []
        self._steps = 0
        """Steps that were built."""
        self._unplaced: Request | None = None
        """The request that vLLM asked about last, if it has no blocks yet."""
        self._placed: dict[str, Request] = {}
        self._loaded: dict[str, Request] = {}
        """Requests with blocks, and those of them whose load has ended and that no step has scheduled since."""
        self._unfilled: dict[str, Mapping[int, int]] = {}
        """The first filled token of each group whose first blocks a request's load has not filled."""

    def on_request_added(self, request: Request, params: dict[str, Any]) -> bool:
        """Load what another engine holds of the last turn of a request that this engine prefills."""
        if not params.get("do_remote_prefill") and params.get("kvhma") is not None:
            threshold = self._context.settings.kv_recompute_threshold
            self._decode.add_optional(request, lambda: self._read_last_turn(request, params), threshold)
        return False

    def _read_last_turn(self, request: Request, params: Mapping[str, Any]) -> PrefillParams:
        """Return what another engine may hold of the last turn of a request."""
        remote = readable_part(self._context, request, params)
        if remote.engine_id == self._context.engine.engine_id:
            raise RequestError("this engine itself holds the last turn's answer")
        return remote

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> dict[str, Any] | None:
        """Hold the blocks of a turn.

        Returns:
            ``kv_transfer_params`` for the prefill of the next turn; None if D does not hold the blocks.
        """
        self._stop_tracking(request.request_id)
        unfilled = self._unfilled.pop(request.request_id, {})
        return None if tables is None else self._hold_turn(request, tables, unfilled)

    def _hold_turn(
        self, request: Request, tables: Sequence[Sequence[int]], unfilled: Mapping[int, int]
    ) -> dict[str, Any] | None:
        geometry, manager, asked = self._context.geometry, self._context.manager, request.kv_transfer_params
        if not isinstance(asked, dict) or not asked.get("do_remote_prefill") or geometry is None or manager is None:
            return None
        # vLLM returns the parameters of one sample at most. A prompt of embeddings comes back as tokens.
        if (
            request.status.name not in FINISHED_WELL
            or is_sample(request.request_id)
            or request.prompt_embeds is not None
        ):
            return None
        try:
            remote = self._describe(request, geometry, tables, unfilled)
        except KvhmaError:
            logger.exception("kvhma: the answer to %s cannot be held for its next turn", request.request_id)
            return None
        if remote is None:
            return None
        engine = self._context.engine
        params, digest = remote.to_params(self._context.secrets, next_turn=True)
        held = hold_blocks(manager, request, tables, geometry.null_block, self._context.may_take)
        if engine.has_state and _in_flight(request):
            self._settling.append(_SettlingTurn(remote.lease_key, digest, held, self._steps))
        else:
            self._hold(remote.lease_key, digest, held)
        return params

    def _describe(
        self, request: Request, geometry: Geometry, tables: Sequence[Sequence[int]], unfilled: Mapping[int, int]
    ) -> PrefillParams | None:
        """Return the parameters of a turn; None if another engine could not read all of it."""
        tokens = self._tokens_written(request)
        if tokens <= 0:
            return None
        spans = live_spans(geometry, None, self._context.transfer_tables(tables))
        spans = filled_spans(geometry, spans, unfilled)
        counts = self._readable_counts(geometry, spans, request.num_prompt_tokens, tokens)
        if not counts or counts[-1] != tokens:
            return None
        digests = self._context.prompts.make_prefix_digests(request, counts[:-1])
        prefixes = tuple(map(Prefix, counts[:-1], digests))
        return self._prefill.describe_request(request, tokens, spans)._replace(prefixes=prefixes)

    def _hold(self, key: LeaseKey, digest: bytes, held: tuple[Ids, Blocks]) -> None:
        seconds = self._context.settings.decoder_kv_blocks_ttl
        self._context.leases.hold(key, digest, *held, expendable_seconds=seconds)

    def _tokens_written(self, request: Request) -> int:
        """Return for how many first tokens of a request its caches are right; 0 if that is not known.

        The last token is sampled and not computed. With async scheduling a step in flight may still compute it. Its
        attention cache is appended after the others, but a state then includes one token more::

            tokens       t0 ... t(n-2) t(n-1)       t(n-1) ends the answer
            settled      ------------>              the attention cache of these does not change
            in flight                  ----->       after it, a state includes all n

        vLLM subtracts rejected drafts, but not drafts after the last token.
        """
        tokens: int = request.num_computed_tokens
        if not self._context.engine.has_state:
            known: int = request.num_tokens
            return min(tokens - _in_flight(request), known)
        return 0 if self._context.engine.drafted_state or tokens > request.num_tokens else tokens

    def _readable_counts(self, geometry: Geometry, spans: Sequence[Span], prompt: int, tokens: int) -> list[int]:
        """Return how many first tokens P may read of blocks that hold `tokens`, fewest first.

        A state is right for all tokens only. A window must be held from the first token that the next token attends to.
        """
        counts = {tokens}
        if not self._context.engine.has_state:
            step = max(_PREFIX_TOKENS, -(-tokens // _MAX_PREFIXES))
            # Templates often differ where an answer begins.
            counts |= {prompt, prompt - 16, *range(step, tokens, step)}
        return [
            count
            for count in sorted(counts)
            if 0 < count <= tokens
            and all(
                span.first <= first
                for span, first in zip(spans, first_entries(geometry.core, count, [0] * len(spans)), strict=True)
            )
        ]

    def on_blocks_wanted(self, request: Request) -> None:
        """Note that vLLM is about to look for blocks for a waiting request."""
        self._unplaced = request

    def on_blocks_allocated(self, request: Request) -> None:
        """Note that vLLM has found blocks for a request."""
        self._unplaced = None
        self._placed[request.request_id] = request

    def on_request_loaded(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        """Note that a load has ended. vLLM does not ask about its request again before it schedules it."""
        if request_id in self._placed:
            self._loaded[request_id] = self._placed[request_id]
        if first_tokens:
            self._unfilled[request_id] = first_tokens

    def _stop_tracking(self, request_id: str) -> None:
        """Drop what is known of a request that has ended or is scheduled."""
        self._placed.pop(request_id, None)
        self._loaded.pop(request_id, None)

    def needs_step(self) -> bool:
        """Return whether a step in flight may still write to a turn that D will hold."""
        return bool(self._settling)

    def reset_cache(self) -> None:
        """Hold every turn that may still be written to: its lease ends with all others, and no engine reads it."""
        for turn in self._settling:
            self._hold(turn.key, turn.digest, turn.held)
        self._settling.clear()

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Evict kept turns if requests lack blocks."""
        freed = self._prefill.free_ended_leases()  # after vLLM last looked for blocks
        self._steps += 1
        if self._settling:
            self._hold_settled()
        for name in output.num_scheduled_tokens:
            self._stop_tracking(name)
        request, self._unplaced = self._unplaced, None
        if request is not None:
            self._evict(max(0 if freed else 1, self._blocks_lacking(request)))  # vLLM found too few for it
        elif output.preempted_req_ids:
            self.make_room()
        elif self._loaded:  # they may lack only a place in the batch
            self._evict(self._room + max(map(self._blocks_lacking, self._loaded.values())))
        return True  # it counts the steps, and what they schedule

    def make_room(self) -> bool:
        """Evict some kept turns; return whether there were any."""
        return self._evict(self._room)

    def on_expendable_ended(self, why: enum.Enum, count: int) -> None:
        """Count what became of kept turns."""
        self._context.stats.count("answers", count, label=_ENDS.get(why, "expired"))

    @property
    def _room(self) -> int:
        manager = self._context.manager
        return 0 if manager is None else int(manager.block_pool.num_gpu_blocks * _ROOM_SHARE) + 1

    def _evict(self, blocks: int) -> bool:
        """Evict the oldest turns until so many blocks become free; return whether there were any turns."""
        manager = self._context.manager
        if manager is None or blocks <= 0:
            return False
        turns = self._context.leases.expendable()
        for key, held in turns:
            if blocks <= 0:
                break
            self._context.leases.evict(key)
            blocks -= sum(block.ref_cnt == 1 and not block.is_null for block in held)
        return bool(turns)

    def _blocks_lacking(self, request: Request) -> int:
        """Return how many more blocks a request needs than it has and than are free."""
        manager, geometry = self._context.manager, self._context.geometry
        if manager is None or geometry is None:
            return 0
        needed: int = sum(-(-request.num_tokens // group.block_size) + 1 for group in geometry.groups)
        own = sum(map(len, self._context.transfer_tables(manager.get_block_ids(request.request_id))))
        free: int = manager.block_pool.get_num_free_blocks()
        return needed - own - free

    def _hold_settled(self) -> None:
        """Hold the turns whose last step has ended: from now on P may read them."""
        waiting = []
        for turn in self._settling:
            if self._steps - turn.step >= STEPS_UNDER_WAY:
                self._hold(turn.key, turn.digest, turn.held)
            else:
                waiting.append(turn)
        self._settling = waiting


def _in_flight(request: Request) -> int:
    """Return how many tokens of a request steps in flight compute."""
    return int(getattr(request, "num_in_flight_tokens", request.num_output_placeholders))


def filled_spans(geometry: Geometry, spans: Sequence[Span], unfilled: Mapping[int, int]) -> list[Span]:
    """Exclude the blocks of each group that begin before its first filled token.

    Such a block is not right from its start::

    | zeroed ... filled | filled            | ...
    ^ span.first  ^ token                             the first block is left out
    """
    filled = []
    for index, (group, span) in enumerate(zip(geometry.groups, spans, strict=True)):
        first = -(-unfilled.get(index, 0) // group.tokens_per_entry)
        skip = max(0, first - span.first) if len(span.ids) else 0
        filled.append(Span(span.first + skip, span.ids[skip:]) if skip else span)
    return filled


def readable_part(context: SchedulerContext, request: Request, params: Mapping[str, Any]) -> PrefillParams:
    """Return the part of a kept turn with which a prompt begins; at least one token is left to compute.

    Args:
        context: of P.
        request: of the next turn.
        params: what D returned with the answer.

    Returns:
        the parameters, with fewer tokens if only these are equal.

    Raises:
        RequestError: `params` are not as an engine wrote them.
        OtherPromptError: the prompt differs before the end of the first prefix that can be read.
    """
    engine = context.engine
    prompt: int = request.num_prompt_tokens
    remote = PrefillParams.from_params(params, context.secrets, num_prompt_tokens=max(prompt, engine.max_model_len))
    loadable = engine.loadable_tokens(prompt)
    is_loadable = loadable > 0 and remote.num_tokens <= prompt and not engine.is_ahead(remote.num_tokens, prompt)
    if is_loadable and context.prompts.make_digest(request, remote.num_tokens) == remote.prompt:
        return remote._replace(num_tokens=min(loadable, remote.num_tokens))
    prefixes = [prefix for prefix in remote.prefixes if prefix.num_tokens <= loadable]
    own = context.prompts.make_prefix_digests(request, [prefix.num_tokens for prefix in prefixes])
    agreed = [prefix.num_tokens for prefix, digest in zip(prefixes, own, strict=True) if prefix.digest == digest]
    if not agreed:
        raise OtherPromptError(
            f"the prompt differs from the last turn in its {remote.num_tokens} tokens, or in adapter, items or salt"
        )
    return remote._replace(num_tokens=max(agreed))
