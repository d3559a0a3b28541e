# SPDX-License-Identifier: Apache-2.0
"""A request that D reads while P computes its prompt: which piece D reads next, and what it must read again.

A piece stays valid while P's epoch stays the same: P begins a new epoch before it overwrites blocks that it has
reported. P's final parameters have the epoch too, and their lease holds the blocks until after the last read. So if D's
epoch and blocks equal those of the parameters, all pieces were right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhma.errors import OtherPromptError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.pieces import piece, piece_end, rest
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.loads.ticket_follower import TicketFollower
from kvhma.vllm.loads.ticket_followers import TicketFollowers
from kvhma.vllm.metadata import ReadCommand as ReadCommand
from kvhma.vllm.wire.params import DIFFERS, LeaseKey, PrefillParams
from kvhma.vllm.wire.tickets import Ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request

PIECE_TOKENS = 512
"""Tokens of a piece, at least. Each piece costs a read and its checks."""

MAX_FOLLOWED_SHARE = 0.5
"""Share of D's blocks that requests may hold while P computes them: the rest is for requests that can run."""

_NO_LEASE = LeaseKey("", 0)
"""P holds nothing for readers yet."""

_PROGRESS_SECONDS = 5e-3
"""How long a step waits for progress of P: new requests wait as long."""


@dataclass
class FollowedLoad:
    """A load that follows a ticket, and how much of it D has read.

    Attributes:
        follower: P's progress.
        num_prompt_tokens: of D's request.
        command: the blocks to fill, and how many tokens; None before vLLM has allocated blocks.
        blocks: number of blocks that the load needs.
        checked: whether D has compared P's prompt with its own.
        is_compared_at_hand_off: whether the prompts differ so far, and an option may change D's prompt at the hand-off.
        epoch: of the pieces.
        done: tokens of all pieces that D has read or is reading.
        done_before: tokens of the pieces before the one that D is reading.
        is_reading: whether D is reading a piece.
        ranks_done: ranks that have read this piece.
        in_pieces: whether D reads pieces; if a read of one fails, D reads the rest at the hand-off.
    """

    follower: TicketFollower
    num_prompt_tokens: int
    command: ReadCommand | None = None
    blocks: int = 0
    checked: bool = False
    is_compared_at_hand_off: bool = False
    epoch: int = 0
    done: int = 0
    done_before: int = 0
    is_reading: bool = False
    ranks_done: int = 0
    in_pieces: bool = True

    def provisional(self) -> PrefillParams:
        """Return the parameters of P's request as far as they are known before the hand-off."""
        follower = self.follower
        if follower.source is None:
            raise RequestError("P has not replied yet")
        source = follower.source
        return PrefillParams(
            source.address,
            source.engine_id,
            source.incarnation_id,
            _NO_LEASE,
            lease=1.0,
            num_tokens=follower.total,
            prompt=follower.prompt,
            spans=(),
            tp_size=source.tp_size,
            pp_size=source.pp_size,
        )

    def next_piece(self, geometry: Geometry) -> ReadCommand | None:
        """Return the next piece to read, of at least `PIECE_TOKENS` tokens; None if there is nothing to read now."""
        command, follower = self.command, self.follower
        if command is None or self.is_reading or not self.in_pieces:
            return None
        with follower.lock:
            if follower.epoch != self.epoch:
                self.epoch, self.done = follower.epoch, 0
            end = piece_end(geometry, min(follower.tokens, command.num_tokens))
            if end - self.done < PIECE_TOKENS:
                return None
            tables = {group: list(table) for group, table in follower.tables.items()}
            groups = follower.groups
        spans = piece(geometry, command.spans, self.done, end)
        self.done_before, self.done = self.done, end
        if not any(len(span.ids) for span in spans):  # D's prefix cache has these tokens
            return None
        self.is_reading, self.ranks_done = True, 0
        remote = command.remote._replace(spans=tuple(Span(0, tables.get(group, [])) for group in range(groups)))
        return command._replace(remote=remote, num_tokens=end, spans=tuple(spans), outcome=None, piece=True)

    def note_piece_read(self, ranks: int, total_ranks: int, error: str) -> bool:
        """Count ranks that have read a piece; return whether all have. An `error` ends the reading in pieces."""
        self.ranks_done += ranks
        if error:
            self.in_pieces = False
        if self.ranks_done < total_ranks:
            return False
        self.is_reading = False
        if not self.in_pieces:
            self.done = self.done_before
        return True

    def last_piece(self, geometry: Geometry, remote: PrefillParams) -> ReadCommand:
        """Return the command that reads the rest, after P has handed off the request.

        It reads all tokens again if P may have overwritten those read before, or if P's blocks are others now.

        Raises:
            RequestError: P hands off another prompt than it reported.
        """
        follower = self.follower
        if self.command is None:
            raise RequestError("vLLM has not allocated blocks for it")
        if (remote.num_tokens, remote.prompt) != (follower.total, follower.prompt):
            raise RequestError(
                f"P hands off {remote.num_tokens} tokens, but it reported {follower.total}, or another prompt"
            )
        same = remote.epoch == self.epoch and all(
            group < len(remote.spans) and _begins_with(remote.spans[group], table)
            for group, table in follower.tables.items()
        )
        if not same:
            self.done = 0
        spans = tuple(rest(geometry, self.command.spans, self.done))
        return self.command._replace(remote=remote, spans=spans, held=self.command.spans)


class FollowedLoads:
    """Requests that D follows.

    Attributes:
        with_blocks: those that have blocks, by request.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        self._context = context
        self._followers = TicketFollowers(context.peers, context.settings.kv_lease_duration)
        self.with_blocks: dict[str, FollowedLoad] = {}
        self._blocks_taken = 0
        """Blocks of all requests in `with_blocks`."""

    def wait_for_progress(self, pending: Iterable[FollowedLoad | None]) -> None:
        """Wait a little for progress of P, in an engine that has nothing else to do.

        Otherwise vLLM would only schedule again. P may take seconds for a prompt, and an engine that spins meanwhile
        takes two cores. This does not wait while D reads a piece: then the worker waits, and the results of other
        steps come without delay. Loads of other connectors are not known here.

        Args:
            pending: for each load that has not ended, how it is followed; None for a load that is read as a whole.
        """
        followed = list(pending)
        if followed and all(load is not None and not load.is_reading for load in followed):
            self._followers.progressed.wait(_PROGRESS_SECONDS)
            self._followers.progressed.clear()

    def follow_ticket(self, request: Request, ticket: Ticket) -> FollowedLoad:
        """Follow the ticket of a request from now on.

        Raises:
            RequestError: D follows too many tickets already.
        """
        tokens = request.num_prompt_tokens
        # With host staging, a piece would have to stay in host memory until the digest of the whole prompt is made.
        engine = self._context.engine
        follower = self._followers.follow_ticket(ticket, tokens, is_own=engine.is_own(ticket.address))
        return FollowedLoad(follower, tokens, in_pieces=not engine.host_staged)

    def announced_tokens(self, request: Request, followed: FollowedLoad) -> int | None:
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
            loadable = engine.loadable_tokens(request.num_prompt_tokens)
            raise OtherPromptError(
                f"P computes {follower.total} tokens, but at most {loadable} of this prompt can be loaded. D computes "
                f"the last {engine.backoff} itself; with equal settings P leaves as many to D"
            )
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

    def on_blocks_allocated(self, request_id: str, followed: FollowedLoad, command: ReadCommand) -> None:
        """Note the blocks of a request, which the pieces fill."""
        followed.command = command
        followed.follower.on_blocks_allocated()
        self.with_blocks[request_id] = followed
        self._blocks_taken += followed.blocks
        self._followers.progressed.set()  # so that the next step reads at once what is settled

    def on_piece_read(self, request_id: str, ranks: int, error: str) -> None:
        """Note that ranks have read a piece of a request, or failed with an `error`."""
        followed = self.with_blocks.get(request_id)
        if followed is None:
            return
        engine = self._context.engine
        if error:
            self._context.stats.count("lost_pieces")
        followed.note_piece_read(ranks, engine.tp_size * engine.pp_size * engine.pcp_size, error)

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Cancel a ticket at P that D has never followed."""
        self._followers.cancel_ticket(ticket)
        self._context.stats.count("followed", label="given_up")

    def stop_following(self, request_id: str, followed: FollowedLoad, end: str) -> None:
        """Stop following a request; if it was refused or is not needed, cancel it at P.

        Args:
            request_id: of D's request.
            followed: its load.
            end: label of the counter: ``handed_over``; ``late``, if D reads all after the hand-off; ``lost``, if P has
                reported an error; ``refused``; ``given_up``.
        """
        if self.with_blocks.pop(request_id, None) is not None:
            self._blocks_taken -= followed.blocks
        self._followers.stop_follower(followed.follower, unwanted=end in ("refused", "given_up"))
        self._context.stats.count("followed", label=end)


def _begins_with(span: Span, table: list[int]) -> bool:
    return span.first == 0 and list(span.ids[: len(table)]) == table
