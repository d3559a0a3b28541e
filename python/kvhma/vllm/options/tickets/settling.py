# SPDX-License-Identifier: Apache-2.0
"""Progress of requests that decode engines follow: which tokens are settled while P computes the rest.

A step is settled when its results are back, not when it was built: with async scheduling vLLM builds the next step
before that. So every step has a number, which the workers send back with its results.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvhma.errors import KvhmaError
from kvhma.pieces import settled_tokens, settling_groups
from kvhma.vllm.holds.prefill import PrefillScheduler
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.metadata import StepMetadata, WorkerReport
from kvhma.vllm.options.doors import SchedulerDoor
from kvhma.vllm.options.tickets.offers import Offer, OfferState, TicketTable, answer_questions
from kvhma.vllm.options.tickets.worker import OPTION, Step
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import Handler, Outcome, Question
from kvhma.vllm.wire.params import Hex128, LeaseClaim, PrefillParams, convert_params

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvhma")


TICKET = "kvhma_ticket"
"""Key of the ticket that a proxy draws when it asks P and D at once."""


class _Ticket(msgspec.Struct):
    kvhma_ticket: Hex128


class SettlingRequests(SchedulerDoor):
    """P's part of the option: requests with a ticket, and how many of their tokens are settled.

    Attributes:
        tickets: the progress that P publishes.
    """

    asleep = True

    def __init__(self, context: SchedulerContext, prefill: PrefillScheduler) -> None:
        """Start without requests."""
        self._context = context
        self._prefill = prefill
        self.tickets = TicketTable(context.settings.kv_lease_duration)
        self.tickets.on_progress = prefill.notify_progress
        # Another reader with the same parameters gets as much time as another sample of a prompt.
        self.tickets.on_cancelled = lambda claim: context.leases.release([claim], Outcome.READ_SHARED)
        self._offers: dict[str, Offer] = {}
        """Offers whose request is not over, by request."""
        self._step: int | None = None
        """Number of the last step; None before the first ticket, when no number is needed."""
        self._settled = -1
        """Number of the last step that is settled; -1 before the first one is."""
        self._computing: deque[int] = deque()
        """Steps in flight that compute something, if the engine drafts."""

    def open_offer(self, request: Request, params: Mapping[str, Any]) -> None:
        """Add a new request that has a ticket."""
        if self._context.geometry is None:
            return
        try:
            ticket = read_ticket_id(params)
        except KvhmaError as error:
            peer_log.logger.warning("kvhma: request %s cannot be followed: %s", request.request_id, error)
            return
        total = self._prefill.tokens_of_prompt(request)
        prompt = self._context.prompts.peek_digest(request, total)
        groups = len(self._context.geometry.groups)
        if not self.tickets.open_ticket(ticket, request.request_id, self._prefill.source, groups, total, prompt):
            peer_log.logger.warning(
                "kvhma: request %s cannot be followed: its ticket is in use already, or P has too many tickets",
                request.request_id,
            )
            return
        self._context.rooms.wake(self)
        self._offers[request.request_id] = self.tickets.offer(ticket)
        if self._step is None:
            self._step = 0  # earlier steps have no number, and the last of them may still be in flight

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Note what a step computes, and number it, from the first ticket on.

        This publishes preemptions before the workers can overwrite blocks: they get the step afterwards.
        """
        if self._step is None:
            return False
        self._step += 1
        metadata.extras[OPTION] = Step(self._step)
        if self._context.engine.drafts and output.total_num_scheduled_tokens:
            self._computing.append(self._step)
        for request_id in output.preempted_req_ids or ():
            if (offer := self._offers.get(request_id)) is not None:
                self._restart(offer)
        if self._offers:
            for request_id, computed in _computed_before(output).items():
                if (offer := self._offers.get(request_id)) is not None:
                    self._note_scheduled(offer, computed, output)
        return True

    def _restart(self, offer: Offer) -> None:
        """Note that the computed blocks of a request may be overwritten from now on."""
        offer.steps.clear()
        offer.begun = False
        self.tickets.begin_epoch(offer.ticket)

    def _note_scheduled(self, offer: Offer, computed: int, output: SchedulerOutput) -> None:
        assert self._step is not None  # noqa: S101
        known = offer.steps[-1][1] if offer.steps else offer.tokens
        if computed < min(known, offer.total):
            self._restart(offer)  # vLLM computes blocks again that another connector failed to fill
        if not offer.begun and computed:
            # It is a hit of the prefix cache. An earlier step may still be computing it, or this step, if another
            # connector fills blocks during it.
            filled = self._step if output.has_sync_kv_loads else self._step - 1
            offer.steps.append((filled, self._settled_hit(offer.request_id, computed, output)))
        offer.begun = True
        offer.steps.append((self._step, computed + output.num_scheduled_tokens[offer.request_id]))
        self._publish_settled(offer)

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

    def on_results(self, report: WorkerReport) -> None:
        """Note that the results of a step are back."""
        step: int | None = report.extras.get(OPTION)
        if step is None:
            return
        if self._context.engine.drafts:
            # If this step has computed something, the steps before it are settled: a device runs them in order.
            while self._computing and self._computing[0] < step:
                self._computing.popleft()
            if not self._computing or self._computing[0] > step:
                return
            step -= 1
        self._settled = max(self._settled, step)
        for offer in self._offers.values():
            self._publish_settled(offer)

    def _publish_settled(self, offer: Offer) -> None:
        """Publish the settled tokens, if they are more than before."""
        computed = 0
        while offer.steps and offer.steps[0][0] <= self._settled:
            computed = max(computed, min(offer.steps.popleft()[1], offer.total))
        if not computed:  # most offers in most steps
            return
        geometry, manager = self._context.geometry, self._context.manager
        if geometry is None or manager is None or not self._can_settle or offer.state is not OfferState.COMPUTING:
            return
        tokens = settled_tokens(geometry, computed)
        if tokens <= offer.tokens:
            return
        tables = manager.get_blocks(offer.request_id).blocks
        blocks = {}
        for index in settling_groups(geometry):
            size, table = geometry.groups[index].block_size, tables[self._context.engine.transfer_groups[index]]
            blocks[index] = size, [block.block_id for block in table[: computed // size]]
        if any(blocks[index][1][: len(ids)] != ids for index, (_, ids) in offer.blocks.items()):
            self.tickets.begin_epoch(offer.ticket)  # vLLM has copied blocks and freed the old ones
        self.tickets.settle_tokens(offer.ticket, tokens, blocks)

    @property
    def _can_settle(self) -> bool:
        """Whether decode engines can read blocks before the end: not with host staging or pipeline stages."""
        engine = self._context.engine
        return not engine.host_staged and engine.pp_size == 1

    def answer_questions(self) -> Mapping[type[Question], Handler]:
        """Return how the listener answers questions about tickets."""
        return answer_questions(self.tickets)

    def on_hand_off(self, request: Request, remote: PrefillParams) -> PrefillParams | None:
        """Return the parameters of a request with its epoch; None if its follower has cancelled it."""
        offer = self._offers.get(request.request_id)
        if offer is None:
            return remote
        return None if offer.state is OfferState.ENDED else remote._replace(epoch=offer.epoch)

    def on_request_held(self, request_id: str, params: Mapping[str, Any], claim: LeaseClaim) -> None:
        """Publish the parameters of a request whose blocks P holds."""
        if (offer := self._offers.pop(request_id, None)) is not None:
            self.tickets.hand_off(offer.ticket, params, claim)

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> None:
        """Publish the end of a request whose blocks P does not hold."""
        if (offer := self._offers.pop(request.request_id, None)) is not None:
            self.tickets.end_ticket(offer.ticket, "P does not hold it: it was aborted, or P cannot hand it off")

    def reset_cache(self) -> None:
        """End all offers."""
        self.tickets.end_all("P has reset its caches: its weights may be others now, or it has slept")


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each scheduled request were computed before the step."""
    found = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return found | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def read_ticket_id(params: Mapping[str, Any]) -> bytes:
    """Return the id of the ticket in ``kv_transfer_params``.

    Raises:
        RequestError: the value is not a ticket.
    """
    return bytes.fromhex(convert_params(params, _Ticket).kvhma_ticket)
