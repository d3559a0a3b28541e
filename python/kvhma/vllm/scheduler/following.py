# SPDX-License-Identifier: Apache-2.0
"""A request that D reads while P computes its prompt: what is read next, and what has to be read again.

A piece counts for as long as P's epoch stays the same: P begins another one before it overwrites anything that it has
follower of. The parameters that P hands out at the end have the epoch too, and under their lease the blocks are held until
after the last read; so what is equal to them then was right all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhma.errors import OtherPromptError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.pieces import piece, piece_end, rest
from kvhma.vllm.metadata import Load as ReadCommand
from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.scheduler.ticket_followers import TicketFollower, TicketFollowers
from kvhma.vllm.wire.params import LeaseKey, PrefillParams
from kvhma.vllm.wire.tickets import Ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NO_LEASE = LeaseKey("", 0)
"""Nothing is kept for a reader yet."""

_PROGRESS_SECONDS = 5e-3
"""How long a step waits for P: new requests wait as long."""


@dataclass
class FollowedLoad:
    """How far a followed load is.

    Attributes:
        follower: what P says.
        num_prompt_tokens: of D's request.
        command: what is to be filled, and with how many tokens; None before it has blocks.
        blocks: that it takes.
        checked: whether what P computes is what D asks for.
        is_compared_at_hand_off: whether only what P hands over will say, since it may be the multimodal items that differ.
        epoch: of the pieces.
        done: tokens of the pieces that were read, and of the one that is being read.
        done_before: tokens of those without that one.
        is_reading: whether one is.
        ranks_done: that have read it.
        in_pieces: whether pieces are read; if one was lost, all that is left is read at the end.
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
        """Return what is known of P's request before it hands it over."""
        follower = self.follower
        if follower.source is None:
            raise RequestError("P has not said yet who it is")
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

    def next_piece(self, geometry: Geometry, min_tokens: int) -> ReadCommand | None:
        """Return the next piece to read, of `min_tokens` tokens; None if there is none now."""
        command, follower = self.command, self.follower
        if command is None or self.is_reading or not self.in_pieces:
            return None
        with follower.lock:
            if follower.epoch != self.epoch:
                self.epoch, self.done = follower.epoch, 0
            end = piece_end(geometry, min(follower.tokens, command.num_tokens))
            if end - self.done < min_tokens:
                return None
            tables = {group: list(table) for group, table in follower.tables.items()}
            groups = follower.groups
        spans = piece(geometry, command.spans, self.done, end)
        self.done_before, self.done = self.done, end
        if not any(len(span.ids) for span in spans):  # D has them in its prefix cache
            return None
        self.is_reading, self.ranks_done = True, 0
        remote = command.remote._replace(spans=tuple(Span(0, tables.get(group, [])) for group in range(groups)))
        return command._replace(remote=remote, num_tokens=end, spans=tuple(spans), outcome=None, piece=True)

    def note_piece_read(self, ranks: int, total_ranks: int, error: str) -> bool:
        """Take note that more ranks have read a piece; return whether all have."""
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
        """Return the load of what is left to read, now that P has handed the request over.

        All of it, if what was read before may have been overwritten since, or is not where P says that it is.

        Raises:
            RequestError: P had said something else before.
        """
        follower = self.follower
        if self.command is None:
            raise RequestError("it has no blocks")
        if (remote.num_tokens, remote.prompt) != (follower.total, follower.prompt):
            raise RequestError(
                f"P has computed {remote.num_tokens} tokens, it had said {follower.total}, or other ones"
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
    """Requests that D follows, and those of them that have blocks."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without any."""
        self._context = context
        settings = context.settings
        self._followers = TicketFollowers(
            settings.handshake_timeout, settings.kv_lease_duration, context.secrets, context.stats
        )
        self.with_blocks: dict[str, FollowedLoad] = {}
        self._blocks_taken = 0
        """Blocks of theirs."""

    def close(self) -> None:
        """Ask P no more."""
        self._followers.close()

    def wait_for_progress(self, pending: Iterable[FollowedLoad | None]) -> None:
        """Wait a little for what P says, in an engine that has nothing else to do: vLLM would only schedule again.

        A prompt may take P seconds, and an engine that spins meanwhile takes two cores. While a piece is read the
        worker waits, and the results of other steps are not kept waiting. Other connectors' loads are not known here.

        Args:
            pending: what is followed of each load that has not ended; None for one that is read as a whole.
        """
        followed = list(pending)
        if followed and all(load is not None and not load.is_reading for load in followed):
            self._followers.progressed.wait(_PROGRESS_SECONDS)
            self._followers.progressed.clear()

    def follow_ticket(self, request: Request, ticket: Ticket) -> FollowedLoad:
        """Ask P about a request from now on.

        Raises:
            RequestError: too many are followed.
        """
        tokens = request.num_prompt_tokens
        # Through host memory a piece would have to stay there until the digest of all of it is made.
        engine = self._context.engine
        follower = self._followers.follow_ticket(ticket, tokens, is_own=engine.is_own(ticket.address))
        return FollowedLoad(follower, tokens, in_pieces=not engine.host_staged)

    def announced_tokens(self, request: Request, followed: FollowedLoad) -> int | None:
        """Return how many tokens P will hand over, if P has said so and there is room for them; else None.

        Raises:
            OtherPromptError: of another prompt, or more than can be taken over.
            RequestError: P will not.
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
        """Compare what P computes with what is asked for; return whether it takes P's multimodal items to do so."""
        engine = self._context.engine
        if follower.total > request.num_prompt_tokens or (
            self._context.prompts.make_digest(request, follower.total) != follower.prompt
        ):
            if self._context.settings.trusts_items and follower.total <= request.num_prompt_tokens:
                return True
            raise OtherPromptError(f"P computes {follower.total} tokens, or its adapter, items or salt are others")
        if engine.is_ahead(follower.total, request.num_prompt_tokens):
            loadable = engine.loadable_tokens(request.num_prompt_tokens)
            raise OtherPromptError(
                f"P computes {follower.total} tokens, of this prompt at most {loadable} can be loaded: the last "
                f"{engine.backoff} are computed here, and P leaves as many with equal settings"
            )
        return False

    def _has_room(self, followed: FollowedLoad, tokens: int) -> bool:
        """Return whether a request may take blocks before P has computed its prompt; else it does afterwards."""
        geometry, manager = self._context.geometry, self._context.manager
        if geometry is None or manager is None:
            return True
        followed.blocks = sum(
            1 + group.speculative if group.kind == "ssm" else -(-tokens // (group.block_size * group.cp_size))
            for group in geometry.groups
        )
        share = self._context.settings.max_followed_share * (manager.block_pool.num_gpu_blocks - 1)
        return bool(self._blocks_taken + followed.blocks <= share)

    def on_blocks_allocated(self, request_id: str, followed: FollowedLoad, command: ReadCommand) -> None:
        """Take note that a request has blocks, and what is to be filled."""
        followed.command = command
        self.with_blocks[request_id] = followed
        self._blocks_taken += followed.blocks
        self._followers.progressed.set()  # what was settled before is read at once

    def on_piece_read(self, request_id: str, ranks: int, error: str) -> None:
        """Take note that more ranks have read a piece of a request."""
        followed = self.with_blocks.get(request_id)
        if followed is None:
            return
        engine = self._context.engine
        if error:
            self._context.stats.count("lost_pieces")
        followed.note_piece_read(ranks, engine.tp_size * engine.pp_size * engine.pcp_size, error)

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Tell P that a request is not needed, of which it was not asked anything."""
        self._followers.cancel_ticket(ticket)
        self._context.stats.count("followed", label="given_up")

    def stop_following(self, request_id: str, followed: FollowedLoad, end: str) -> None:
        """Ask P no more about a request; unless it has said all, it hears that the request is not needed.

        Args:
            request_id: D's name of it.
            followed: what is known of it.
            end: ``handed_over``; ``late``, if all is read at the end; ``lost``, if P has said why there is nothing to
                read; ``refused``; ``given_up``.
        """
        if self.with_blocks.pop(request_id, None) is not None:
            self._blocks_taken -= followed.blocks
        self._followers.stop_follower(followed.follower, unwanted=end in ("refused", "given_up"))
        self._context.stats.count("followed", label=end)


def _begins_with(span: Span, table: list[int]) -> bool:
    return span.first == 0 and list(span.ids[: len(table)]) == table
