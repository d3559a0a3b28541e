# SPDX-License-Identifier: Apache-2.0
"""What of a request's cache is computed for good while P goes on computing it, told to who follows its ticket.

A step is settled when its results are back, not when it was built: with asynchronous scheduling the next one is built
before. So every step has a number that the workers send back with its results.
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
        total: tokens that will be handed over.
        prompt: digest of them.
        steps: number of each step that is under way, and tokens that are computed after it.
        begun: whether it was scheduled since it was added or preempted.
        tokens: that are settled.
        blocks: of them that were told, by index of the group.
    """

    ticket: bytes
    total: int
    prompt: str
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    begun: bool = False
    tokens: int = 0
    blocks: dict[int, list[KVCacheBlock]] = field(default_factory=dict)


class SettlingRequests:
    """Requests with a ticket, and what of them is settled.

    Attributes:
        tickets: what others are told.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        self._context = context
        self.tickets = TicketTable(context.settings.kv_lease_duration)
        # Whoever else has the parameters gets the time that other samples of a prompt get.
        self.tickets.on_cancelled = lambda claim: context.leases.release([claim], Outcome.READ_SHARED)
        self._followed: dict[str, _Followed] = {}
        self._step: int | None = None
        """Number of the last step; None before the first ticket: nobody asks then."""
        self._settled = -1
        """Number of the last step that is settled; -1 before the first one is."""
        self._computing: deque[int] = deque()
        """Steps under way that compute something, where there are drafts."""

    def on_request_added(self, request: Request, source: Incarnation, total: int) -> bool:
        """Take a new request, of which `total` tokens will be handed over; return whether it can be followed."""
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
                "kvhma: request %s cannot be followed: its ticket was used, or too many are", request.request_id
            )
            return False
        self._followed[request.request_id] = _Followed(ticket, total, prompt)
        if self._step is None:
            self._step = 0  # the steps up to now have no number, and the last ones may not be over
        return True

    def on_step(self, output: SchedulerOutput) -> int | None:
        """Take note of what a step computes; return its number, None if nobody asks for it.

        What was preempted is told before anything can be overwritten: the workers get the step after this.
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
        """Take note that what was computed of a request may be overwritten from now on."""
        followed.steps.clear()
        followed.begun, followed.tokens, followed.blocks = False, 0, {}
        self.tickets.begin_epoch(followed.ticket)

    def _note_scheduled(self, request_id: str, followed: _Followed, computed: int, output: SchedulerOutput) -> None:
        assert self._step is not None  # noqa: S101
        known = followed.steps[-1][1] if followed.steps else followed.tokens
        if computed < min(known, followed.total):
            self._restart(followed)  # blocks that another connector should have filled are computed after all
        if not followed.begun and computed:
            # A hit of the prefix cache, which an earlier step may still be computing; or this one, if another connector
            # fills blocks within it.
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
        """Take note that the results of a step are back."""
        if self._context.engine.drafts:
            # Those before it are settled, if it has computed anything: a device does one after the other.
            while self._computing and self._computing[0] < step:
                self._computing.popleft()
            if not self._computing or self._computing[0] > step:
                return
            step -= 1
        self._settled = max(self._settled, step)
        for request_id, followed in self._followed.items():
            self._publish_settled(request_id, followed)

    def _publish_settled(self, request_id: str, followed: _Followed) -> None:
        """Tell what is settled by now, if it is more than was told."""
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
            self.tickets.begin_epoch(
                followed.ticket
            )  # some are others now: they were copied, and their places are free
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
        """Whether others can read blocks before the end: not through host memory, nor of several stages."""
        engine = self._context.engine
        return not engine.host_staged and engine.pp_size == 1

    def is_cancelled(self, request_id: str) -> bool:
        """Return whether the follower of a request does not need it any more."""
        followed = self._followed.get(request_id)
        return followed is not None and self.tickets.is_cancelled(followed.ticket)

    def prompt_digest(self, request: Request, tokens: int) -> str:
        """Return the digest of a request's first tokens, which was made before if others were told it."""
        followed = self._followed.get(request.request_id)
        if followed is not None and followed.total == tokens:
            return followed.prompt
        return self._context.prompts.take_digest(request, tokens)

    def epoch(self, request_id: str) -> int:
        """Return the epoch of a request; 0 if nobody can follow it."""
        followed = self._followed.get(request_id)
        return 0 if followed is None else self.tickets.epoch(followed.ticket)

    def on_request_finished(
        self, request_id: str, params: dict[str, Any] | None, claim: LeaseClaim | None = None
    ) -> None:
        """Take note that a request has ended; without parameters it is not handed over. They are read by a `claim`."""
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        if params is None:
            self.tickets.end_ticket(
                followed.ticket, ended="P has not kept it: it was aborted, or cannot be handed over"
            )
        else:
            self.tickets.end_ticket(followed.ticket, params=json.dumps(params).encode(), claim=claim)

    def end_all(self) -> None:
        """End all tickets: what was computed is gone."""
        self.tickets.end_all("P has slept, and its caches are empty")
        self._followed.clear()


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request of a step were computed before it."""
    found = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return found | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
