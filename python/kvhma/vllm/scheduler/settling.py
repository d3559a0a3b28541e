# SPDX-License-Identifier: Apache-2.0
"""Progress of requests that decode engines follow: which tokens are settled while P computes the rest.

A step is settled when its results are back, not when it was built: with async scheduling vLLM builds the next step
before that. So every step has a number, which the workers send back with its results.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvhma.errors import KvhmaError
from kvhma.pieces import settled_tokens, settling_groups
from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.scheduler.ticket_table import TicketTable
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Incarnation, LeaseClaim
from kvhma.vllm.wire.tickets import read_ticket_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvhma")


@dataclass
class _Followed:
    """A request with a ticket.

    Attributes:
        ticket: its ticket.
        total: tokens that P will hand off.
        prompt: digest of these tokens.
        steps: number of each step in flight, and how many tokens are computed after it.
        begun: whether it was scheduled since it was added or preempted.
        tokens: number of settled tokens.
        blocks: blocks that P has published, by index of the group.
    """

    ticket: bytes
    total: int
    prompt: str
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    begun: bool = False
    tokens: int = 0
    blocks: dict[int, list[KVCacheBlock]] = field(default_factory=dict)


class SettlingRequests:
    """Requests with a ticket, and how many of their tokens are settled.

    Attributes:
        tickets: the progress that P publishes.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        self._context = context
        self.tickets = TicketTable(context.settings.kv_lease_duration)
        # Another reader with the same parameters gets as much time as another sample of a prompt.
        self.tickets.on_cancelled = lambda claim: context.leases.release([claim], Outcome.READ_SHARED)
        self._followed: dict[str, _Followed] = {}
        self._step: int | None = None
        """Number of the last step; None before the first ticket, when no number is needed."""
        self._settled = -1
        """Number of the last step that is settled; -1 before the first one is."""
        self._computing: deque[int] = deque()
        """Steps in flight that compute something, if the engine drafts."""

    def on_request_added(self, request: Request, source: Incarnation, total: int) -> bool:
        """Add a new request, of which P will hand off `total` tokens; return whether it can be followed."""
        params: Any = request.kv_transfer_params
        try:
            ticket = read_ticket_id(params)
        except KvhmaError as error:
            peer_log.logger.warning("kvhma: request %s cannot be followed: %s", request.request_id, error)
            return False
        if ticket is None or self._context.geometry is None:
            return False
        prompt = self._context.prompts.make_digest(request, total)
        groups = len(self._context.geometry.groups)
        if not self.tickets.open_ticket(ticket, request.request_id, source, groups, total, prompt):
            peer_log.logger.warning(
                "kvhma: request %s cannot be followed: its ticket is in use already, or P has too many tickets",
                request.request_id,
            )
            return False
        self._followed[request.request_id] = _Followed(ticket, total, prompt)
        if self._step is None:
            self._step = 0  # earlier steps have no number, and the last of them may still be in flight
        return True

    def on_step(self, output: SchedulerOutput) -> int | None:
        """Note what a step computes; return its number, or None before the first ticket.

        This publishes preemptions before the workers can overwrite blocks: they get the step afterwards.
        """
        if self._step is None:
            return None
        self._step += 1
        if self._context.engine.drafts and output.total_num_scheduled_tokens:
            self._computing.append(self._step)
        for request_id in output.preempted_req_ids or ():
            if (followed := self._followed.get(request_id)) is not None:
                self._restart(followed)
        if self._followed:
            for request_id, computed in _computed_before(output).items():
                if (followed := self._followed.get(request_id)) is not None:
                    self._note_scheduled(request_id, followed, computed, output)
        return self._step

    def _restart(self, followed: _Followed) -> None:
        """Note that the computed blocks of a request may be overwritten from now on."""
        followed.steps.clear()
        followed.begun, followed.tokens, followed.blocks = False, 0, {}
        self.tickets.begin_epoch(followed.ticket)

    def _note_scheduled(self, request_id: str, followed: _Followed, computed: int, output: SchedulerOutput) -> None:
        assert self._step is not None  # noqa: S101
        known = followed.steps[-1][1] if followed.steps else followed.tokens
        if computed < min(known, followed.total):
            self._restart(followed)  # vLLM computes blocks again that another connector failed to fill
        if not followed.begun and computed:
            # It is a hit of the prefix cache. An earlier step may still be computing it, or this step, if another
            # connector fills blocks during it.
            filled = self._step if output.has_sync_kv_loads else self._step - 1
            followed.steps.append((filled, self._settled_hit(request_id, computed, output)))
        followed.begun = True
        followed.steps.append((self._step, computed + output.num_scheduled_tokens[request_id]))
        self._publish_settled(request_id, followed)

    def _settled_hit(self, request_id: str, computed: int, output: SchedulerOutput) -> int:
        """Return how many tokens of a hit no other request of the same step computes."""
        geometry, manager = self._context.geometry, self._context.manager
        if geometry is None or manager is None:
            return 0
        groups = [
            (self._context.engine.transfer_groups[index], geometry.groups[index].block_size)
            for index in settling_groups(geometry)
        ]
        written: list[set[int]] = [set() for _ in groups]
        for name, before in _computed_before(output).items():
            if name != request_id:
                tables = manager.get_blocks(name).blocks
                for ids, (group, size) in zip(written, groups, strict=True):
                    ids.update(block.block_id for block in tables[group][before // size :])
        tables = manager.get_blocks(request_id).blocks
        for ids, (group, size) in zip(written, groups, strict=True):
            hits = enumerate(tables[group][: computed // size] if ids else ())
            first = next((index for index, block in hits if block.block_id in ids), None)
            if first is not None:
                computed = min(computed, size * first)
        return computed

    def on_step_results(self, step: int) -> None:
        """Note that the results of a step are back."""
        if self._context.engine.drafts:
            # If this step has computed something, the steps before it are settled: a device runs them in order.
            while self._computing and self._computing[0] < step:
                self._computing.popleft()
            if not self._computing or self._computing[0] > step:
                return
            step -= 1
        self._settled = max(self._settled, step)
        for request_id, followed in self._followed.items():
            self._publish_settled(request_id, followed)

    def _publish_settled(self, request_id: str, followed: _Followed) -> None:
        """Publish the settled tokens, if they are more than before."""
        tokens = followed.tokens
        while followed.steps and followed.steps[0][0] <= self._settled:
            tokens = max(tokens, followed.steps.popleft()[1])
        geometry, manager = self._context.geometry, self._context.manager
        if tokens == followed.tokens or geometry is None or manager is None or not self._can_settle:
            return
        followed.tokens = tokens
        tokens = min(tokens, followed.total)
        if not (whole := settled_tokens(geometry, tokens)):
            return
        tables = manager.get_blocks(request_id).blocks
        groups = {index: self._context.engine.transfer_groups[index] for index in settling_groups(geometry)}
        if any(tables[groups[index]][: len(blocks)] != blocks for index, blocks in followed.blocks.items()):
            self.tickets.begin_epoch(followed.ticket)  # vLLM has copied blocks and freed the old ones
            followed.blocks = {}
        new_blocks = {}
        for index, group in groups.items():
            size, known = geometry.groups[index].block_size, followed.blocks.setdefault(index, [])
            more = tables[group][len(known) : tokens // size]
            known += more
            new_blocks[index] = size, [block.block_id for block in more]
        self.tickets.settle_tokens(followed.ticket, whole, new_blocks)

    @property
    def _can_settle(self) -> bool:
        """Whether decode engines can read blocks before the end: not with host staging or pipeline stages."""
        engine = self._context.engine
        return not engine.host_staged and engine.pp_size == 1

    def is_cancelled(self, request_id: str) -> bool:
        """Return whether the follower of a request has cancelled it."""
        followed = self._followed.get(request_id)
        return followed is not None and self.tickets.is_cancelled(followed.ticket)

    def prompt_digest(self, request: Request, tokens: int) -> str:
        """Return the digest of a request's first tokens; a followed request has it already."""
        followed = self._followed.get(request.request_id)
        if followed is not None and followed.total == tokens:
            return followed.prompt
        return self._context.prompts.take_digest(request, tokens)

    def epoch(self, request_id: str) -> int:
        """Return the epoch of a request; 0 if it has no ticket."""
        followed = self._followed.get(request_id)
        return 0 if followed is None else self.tickets.epoch(followed.ticket)

    def on_request_finished(
        self, request_id: str, params: dict[str, Any] | None, claim: LeaseClaim | None = None
    ) -> None:
        """Note that a request has ended; without `params` there is no hand-off. The `claim` is that of the `params`."""
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        if params is None:
            self.tickets.end_ticket(
                followed.ticket, ended="P does not hold it: it was aborted, or P cannot hand it off"
            )
        else:
            self.tickets.end_ticket(followed.ticket, params=json.dumps(params).encode(), claim=claim)

    def end_all(self) -> None:
        """End all tickets: the caches are gone."""
        self.tickets.end_all("P has slept, and its caches are empty")
        self._followed.clear()


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each scheduled request were computed before the step."""
    found = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return found | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
