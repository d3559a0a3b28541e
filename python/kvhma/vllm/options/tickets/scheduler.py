# SPDX-License-Identifier: Apache-2.0
"""Tickets in the scheduler: D follows requests at P, and reads them in pieces while P computes their prompts.

The load's table decides what happens to D's requests, in the order of its effects: see
`kvhma.vllm.loads.load_machine`. P's part is :class:`kvhma.vllm.options.tickets.settling.SettlingRequests`.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Any

from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.vllm.failures import refused
from kvhma.vllm.loads.load_machine import Load, LoadEffect, LoadEvent, LoadState
from kvhma.vllm.loads.received_params import check_one_way
from kvhma.vllm.metadata import ReadCommand, StepMetadata, WorkerReport
from kvhma.vllm.options.tickets.following import FollowedLoad
from kvhma.vllm.options.tickets.settling import TICKET, SettlingRequests, read_ticket_id
from kvhma.vllm.options.tickets.ticket_follower import Ticket, TicketFollower
from kvhma.vllm.options.tickets.ticket_followers import TicketFollowers
from kvhma.vllm.prompts.prompt import is_sample
from kvhma.vllm.wire.params import DIFFERS, PrefillParams, read_address

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvhma.vllm.scheduler import KvhmaScheduler

MAX_FOLLOWED_SHARE = 0.5
"""Share of D's blocks that requests may hold while P computes them: the rest is for requests that can run."""

_PROGRESS_SECONDS = 5e-3
"""How long a step waits for progress of P: new requests wait as long."""

_ENDS: dict[enum.Enum, str] = {
    LoadEffect.TICKET_HANDED_OFF: "handed_over",
    LoadEffect.TICKET_LATE: "late",
    LoadEffect.TICKET_LOST: "lost",
    LoadEffect.TICKET_REFUSED: "refused",
    LoadEffect.TICKET_CANCELLED: "given_up",
}
"""Labels of the counter of followed tickets; `late` means that D has read nothing before the hand-off."""

_UNWANTED = (LoadEffect.TICKET_REFUSED, LoadEffect.TICKET_CANCELLED)
"""Ends after which P is asked to stop."""


class Room(SettlingRequests):
    """Requests that P computes for followers, and requests that D follows.

    Attributes:
        followed: all that D follows, by request.
        with_blocks: those that have blocks, by request.
    """

    def __init__(self, core: KvhmaScheduler) -> None:
        """Start without requests."""
        super().__init__(core.context, core.prefill)
        self._decode = core.decode
        self._followers = TicketFollowers(core.context.peers, core.context.settings.kv_lease_duration)
        self.followed: dict[str, FollowedLoad] = {}
        self.with_blocks: dict[str, FollowedLoad] = {}
        self._blocks_taken = 0
        """Blocks of all requests in `with_blocks`."""

    def on_request_added(self, request: Request, params: dict[str, Any]) -> bool:
        """Begin to follow a request that P computes at the same time, or to publish how far one is."""
        if params.get(TICKET) is None:
            return False
        if not params.get("do_remote_prefill"):
            self.open_offer(request, params)
            return False
        load, decode = Load(request), self._decode
        try:
            ticket = self._read_ticket(params)
            if request.get_skip_reading_prefix_cache():
                self._cancel_ticket(ticket)
                decode.compute_unread(load)
            elif self._context.engine.loadable_tokens(request.num_prompt_tokens) == 0:
                self._cancel_ticket(ticket)
                decode.move_load(load, LoadEvent.NOTHING_TO_LOAD)
            else:
                self._context.rooms.wake(self)
                self.followed[load.request_id] = self._follow_ticket(request, ticket)
                decode.move_load(load, LoadEvent.TICKET)
        except KvhmaError as error:
            decode.fail_load(load, refused(str(error)))
        return True

    def on_request_rejected(self, request: Request, params: dict[str, Any]) -> bool:
        """Cancel the ticket of a request that vLLM has rejected."""
        if params.get(TICKET) is None:
            return False
        self._cancel_ticket(self._read_ticket(params))
        return True

    def _read_ticket(self, params: dict[str, Any]) -> Ticket:
        check_one_way(params)
        ticket = Ticket(read_ticket_id(params), read_address(params))
        self._decode.received.check_source(ticket.address)
        return ticket

    def _follow_ticket(self, request: Request, ticket: Ticket) -> FollowedLoad:
        # With host staging, a piece would have to stay in host memory until the digest of the whole prompt is made.
        engine = self._context.engine
        follower = self._followers.follow_ticket(
            ticket, request.num_prompt_tokens, is_own=engine.is_own(ticket.address)
        )
        return FollowedLoad(follower, in_pieces=not engine.host_staged)

    def _cancel_ticket(self, ticket: Ticket) -> None:
        """Cancel a ticket at P that D has never followed."""
        self._followers.cancel_ticket(ticket)
        self._context.stats.count("followed", label="given_up")

    # --- Before the request has blocks --------------------------------------------------------------------------

    def on_tokens_asked(self, load: Load) -> None:
        """Act on P's progress with a ticket whose request has no blocks yet."""
        followed = self.followed.get(load.request_id)
        if followed is None or load.state is not LoadState.FOLLOWING:
            return
        if (params := followed.follower.handed_off_params()) is not None:
            self._decode.move_load(load, LoadEvent.HANDED_OFF)
            load.since = time.monotonic()
            self._decode.add_params(load, params)
        elif not is_sample(load.request_id):  # samples share P's blocks: each reads all of them after the hand-off
            try:
                load.num_tokens = self._announced_tokens(load.request, followed) or 0
            except OtherPromptError as error:
                self._decode.fall_back(load, "other_prompt", str(error))
            except KvhmaError as error:
                load.refusal = refused(str(error))
                self._decode.move_load(load, LoadEvent.TICKET_LOST)

    def remote_before_hand_off(self, request_id: str) -> PrefillParams | None:
        """Return the parameters of P's request as far as they are known."""
        followed = self.followed.get(request_id)
        return None if followed is None else followed.provisional()

    def _announced_tokens(self, request: Request, followed: FollowedLoad) -> int | None:
        """Return how many tokens D will load; None before P has reported that, or if there is no room yet.

        Raises:
            OtherPromptError: P computes another prompt, or more tokens than D can load.
            RequestError: P will not hand off the request.
        """
        follower = followed.follower
        if follower.error:
            raise RequestError(follower.error)
        if follower.source is None:
            return None
        if not followed.checked:
            followed.is_compared_at_hand_off = self._check(request, follower)
            followed.checked = True
        if followed.is_compared_at_hand_off:
            return None
        tokens = min(follower.total, self._context.engine.loadable_tokens(request.num_prompt_tokens))
        return tokens if tokens > 0 and self._has_room(followed, tokens) else None

    def _check(self, request: Request, follower: TicketFollower) -> bool:
        """Compare P's prompt with D's; return whether an option may change D's prompt before that."""
        engine = self._context.engine
        if follower.total > request.num_prompt_tokens or (
            self._context.prompts.make_digest(request, follower.total) != follower.prompt
        ):
            if (
                any(room.changes_prompts for room in self._context.rooms)
                and follower.total <= request.num_prompt_tokens
            ):
                return True
            raise OtherPromptError(
                f"P's prompt of {follower.total} tokens differs, or its adapter, items or salt do: {DIFFERS}"
            )
        if engine.is_ahead(follower.total, request.num_prompt_tokens):
            raise OtherPromptError(engine.why_ahead(follower.total, request.num_prompt_tokens))
        return False

    def _has_room(self, followed: FollowedLoad, tokens: int) -> bool:
        """Return whether a request may get blocks before P has computed its prompt; if not, it gets them afterwards."""
        geometry, manager = self._context.geometry, self._context.manager
        if geometry is None or manager is None:
            return True
        followed.blocks = sum(
            1 + group.speculative if group.kind == "ssm" else -(-tokens // group.tokens_per_entry)
            for group in geometry.groups
        )
        share = MAX_FOLLOWED_SHARE * (manager.block_pool.num_gpu_blocks - 1)
        return bool(self._blocks_taken + followed.blocks <= share)

    # --- Pieces -------------------------------------------------------------------------------------------------

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Also order the next piece of each followed load."""
        needs_next = super().on_step(output, metadata)
        for request_id, followed in list(self.with_blocks.items()):
            self._read_next_piece(self._decode.pending[request_id], followed)
        return needs_next

    def _read_next_piece(self, load: Load, followed: FollowedLoad) -> None:
        """Order the next piece of a followed load, or the rest after the hand-off; not while it reads a piece."""
        follower, geometry, decode = followed.follower, self._context.geometry, self._decode
        params = follower.handed_off_params()
        if followed.is_reading or geometry is None:
            return
        if load.end is not None:
            decode.move_load(load, LoadEvent.CANCELLED)
        elif follower.error:
            load.refusal = refused(follower.error)
            decode.move_load(load, LoadEvent.TICKET_LOST)
        elif params is not None:
            try:
                remote = decode.received.read_of_known(params, load.request.num_prompt_tokens)
                command = followed.last_piece(geometry, remote)
            except KvhmaError as error:
                load.refusal = refused(str(error))
                decode.move_load(load, LoadEvent.UNREADABLE)
            else:  # from then on it is a load like others
                decode.move_load(load, LoadEvent.HANDED_OFF, decode.claims.take_handed_off(load, command))
        elif (piece := followed.next_piece(geometry)) is not None:
            decode.move_load(load, LoadEvent.SETTLED, piece)

    def wait_for_progress(self) -> None:
        """Wait a little for progress of P, in an engine that has nothing else to do.

        Otherwise vLLM would only schedule again. P may take seconds for a prompt, and an engine that spins meanwhile
        takes two cores. This does not wait while D reads a piece: then the worker waits, and the results of other
        steps come without delay. Loads of other connectors are not known here.
        """
        followed = self.followed.values()
        if len(followed) == len(self._decode.pending) and not any(load.is_reading for load in followed):
            self._followers.progressed.wait(_PROGRESS_SECONDS)
            self._followers.progressed.clear()

    def on_results(self, report: WorkerReport) -> None:
        """Also count the ranks that have read their piece of a request, or failed."""
        super().on_results(report)
        engine = self._context.engine
        for request_id in report.pieces.keys() & self.with_blocks.keys():
            if is_lost := request_id in report.lost_pieces:
                self._context.stats.count("lost_pieces")
            self.with_blocks[request_id].note_piece_read(report.pieces[request_id], engine.workers, is_lost=is_lost)

    def carry_out(self, load: Load, effect: enum.Enum, command: ReadCommand | None) -> None:
        """Note the blocks that the pieces fill, or stop following a request."""
        request_id = load.request_id
        if effect is LoadEffect.PLACE and command is not None:
            followed = self.with_blocks[request_id] = self.followed[request_id]
            followed.command = command
            followed.follower.on_blocks_allocated()
            self._blocks_taken += followed.blocks
            self._followers.progressed.set()  # so that the next step reads at once what is settled
        elif effect in _ENDS:
            followed = self.followed.pop(request_id)
            if self.with_blocks.pop(request_id, None) is not None:
                self._blocks_taken -= followed.blocks
            self._followers.stop_follower(followed.follower, unwanted=effect in _UNWANTED)
            self._context.stats.count("followed", label=_ENDS[effect])
