# SPDX-License-Identifier: Apache-2.0
"""A request that D reads while P computes its prompt: what is read next, and what has to be read again.

A piece counts for as long as P's epoch stays the same: P begins another one before it overwrites anything that it has
told of. The parameters that P hands out at the end have the epoch too, and under their lease the blocks are held until
after the last read; so what is equal to them then was right all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhma.errors import OtherPromptError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.pieces import piece, piece_end, rest
from kvhma.vllm.metadata import Load
from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.scheduler.conversations import Conversation, Conversations
from kvhma.vllm.wire.params import LeaseKey, PrefillParams
from kvhma.vllm.wire.tickets import Ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NO_LEASE = LeaseKey("", 0)
"""Nothing is kept for a reader yet."""

_NEWS_SECONDS = 5e-3
"""How long a step waits for P: new requests wait as long."""


@dataclass
class FollowedLoad:
    """How far a followed load is.

    Attributes:
        conversation: what P says.
        num_prompt_tokens: of D's request.
        order: what is to be filled, and with how many tokens; None before it has blocks.
        blocks: that it takes.
        checked: whether what P computes is what D asks for.
        is_told_late: whether only what P hands over will say, since it may be the multimodal items that differ.
        epoch: of the pieces.
        done: tokens of the pieces that were read, and of the one that is being read.
        before: tokens of those without that one.
        reading: whether one is.
        ranks: that have read it.
        in_pieces: whether pieces are read; if one was lost, all that is left is read at the end.
    """

    conversation: Conversation
    num_prompt_tokens: int
    order: Load | None = None
    blocks: int = 0
    checked: bool = False
    is_told_late: bool = False
    epoch: int = 0
    done: int = 0
    before: int = 0
    reading: bool = False
    ranks: int = 0
    in_pieces: bool = True

    def provisional(self) -> PrefillParams:
        """Return what is known of P's request before it hands it over."""
        told = self.conversation
        if told.source is None:
            raise RequestError("P has not said yet who it is")
        source = told.source
        return PrefillParams(
            source.address,
            source.engine_id,
            source.incarnation_id,
            _NO_LEASE,
            lease=1.0,
            num_tokens=told.total,
            prompt=told.prompt,
            spans=(),
            tp_size=source.tp_size,
            pp_size=source.pp_size,
        )

    def next_piece(self, geometry: Geometry, least: int) -> Load | None:
        """Return the next piece to read, of `least` tokens; None if there is none now."""
        order, told = self.order, self.conversation
        if order is None or self.reading or not self.in_pieces:
            return None
        with told.lock:
            if told.epoch != self.epoch:
                self.epoch, self.done = told.epoch, 0
            end = piece_end(geometry, min(told.tokens, order.num_tokens))
            if end - self.done < least:
                return None
            tables = {group: list(table) for group, table in told.tables.items()}
            groups = told.groups
        spans = piece(geometry, order.spans, self.done, end)
        self.before, self.done = self.done, end
        if not any(len(span.ids) for span in spans):  # D has them in its prefix cache
            return None
        self.reading, self.ranks = True, 0
        remote = order.remote._replace(spans=tuple(Span(0, tables.get(group, [])) for group in range(groups)))
        return order._replace(remote=remote, num_tokens=end, spans=tuple(spans), outcome=None, piece=True)

    def note_read(self, ranks: int, of: int, lost: str) -> bool:
        """Take note that more ranks have read a piece; return whether all have."""
        self.ranks += ranks
        if lost:
            self.in_pieces = False
        if self.ranks < of:
            return False
        self.reading = False
        if not self.in_pieces:
            self.done = self.before
        return True

    def last_piece(self, geometry: Geometry, remote: PrefillParams) -> Load:
        """Return the load of what is left to read, now that P has handed the request over.

        All of it, if what was read before may have been overwritten since, or is not where P says that it is.

        Raises:
            RequestError: P had said something else before.
        """
        told = self.conversation
        if self.order is None:
            raise RequestError("it has no blocks")
        if (remote.num_tokens, remote.prompt) != (told.total, told.prompt):
            raise RequestError(f"P has computed {remote.num_tokens} tokens, it had said {told.total}, or other ones")
        same = remote.epoch == self.epoch and all(
            group < len(remote.spans) and _begins_with(remote.spans[group], table)
            for group, table in told.tables.items()
        )
        if not same:
            self.done = 0
        spans = tuple(rest(geometry, self.order.spans, self.done))
        return self.order._replace(remote=remote, spans=spans, held=self.order.spans)


class FollowedLoads:
    """Requests that D follows, and those of them that have blocks."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start without any."""
        self._context = context
        settings = context.settings
        self._conversations = Conversations(
            settings.handshake_timeout, settings.kv_lease_duration, context.secrets, context.stats
        )
        self.with_blocks: dict[str, FollowedLoad] = {}
        self._taken = 0
        """Blocks of theirs."""

    def close(self) -> None:
        """Ask P no more."""
        self._conversations.close()

    def wait_for_news(self, pending: Iterable[FollowedLoad | None]) -> None:
        """Wait a little for what P says, in an engine that has nothing else to do: vLLM would only schedule again.

        A prompt may take P seconds, and an engine that spins meanwhile takes two cores. While a piece is read the
        worker waits, and the results of other steps are not kept waiting. Other connectors' loads are not known here.

        Args:
            pending: what is followed of each load that has not ended; None for one that is read as a whole.
        """
        followed = list(pending)
        if followed and all(one is not None and not one.reading for one in followed):
            self._conversations.news.wait(_NEWS_SECONDS)
            self._conversations.news.clear()

    def follow(self, request: Request, ticket: Ticket) -> FollowedLoad:
        """Ask P about a request from now on.

        Raises:
            RequestError: too many are followed.
        """
        tokens = request.num_prompt_tokens
        # Through host memory a piece would have to stay there until the digest of all of it is made.
        engine = self._context.engine
        conversation = self._conversations.follow(ticket, tokens, own=engine.is_own(ticket.address))
        return FollowedLoad(conversation, tokens, in_pieces=not engine.host_staged)

    def look(self, request: Request, followed: FollowedLoad) -> int | None:
        """Return how many tokens P will hand over, if P has said so and there is room for them; else None.

        Raises:
            OtherPromptError: of another prompt, or more than can be taken over.
            RequestError: P will not.
        """
        told = followed.conversation
        if told.error:
            raise RequestError(told.error)
        if told.source is None:
            return None
        if not followed.checked:
            followed.is_told_late = self._check(request, told)
            followed.checked = True
        if followed.is_told_late:
            return None
        tokens = min(told.total, self._context.engine.loadable_tokens(request.num_prompt_tokens))
        return tokens if tokens > 0 and self._has_room(followed, tokens) else None

    def _check(self, request: Request, told: Conversation) -> bool:
        """Compare what P computes with what is asked for; return whether it takes P's multimodal items to do so."""
        engine = self._context.engine
        if told.total > request.num_prompt_tokens or (self._context.prompts.of(request, told.total) != told.prompt):
            if self._context.settings.trusts_items and told.total <= request.num_prompt_tokens:
                return True
            raise OtherPromptError(f"P computes {told.total} tokens, or its adapter, items or salt are others")
        if engine.is_ahead(told.total, request.num_prompt_tokens):
            most = engine.loadable_tokens(request.num_prompt_tokens)
            raise OtherPromptError(
                f"P computes {told.total} tokens, of this prompt at most {most} can be loaded: the last "
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
        return bool(self._taken + followed.blocks <= share)

    def place(self, request_id: str, followed: FollowedLoad, order: Load) -> None:
        """Take note that a request has blocks, and what is to be filled."""
        followed.order = order
        self.with_blocks[request_id] = followed
        self._taken += followed.blocks
        self._conversations.news.set()  # what was settled before is read at once

    def note_piece(self, request_id: str, ranks: int, lost: str) -> None:
        """Take note that more ranks have read a piece of a request."""
        followed = self.with_blocks.get(request_id)
        if followed is None:
            return
        engine = self._context.engine
        if lost:
            self._context.stats.count("lost_pieces")
        followed.note_read(ranks, engine.tp_size * engine.pp_size * engine.pcp_size, lost)

    def give_up(self, ticket: Ticket) -> None:
        """Tell P that a request is not needed, of which it was not asked anything."""
        self._conversations.give_up(ticket)
        self._context.stats.count("followed", label="given_up")

    def stop(self, request_id: str, followed: FollowedLoad, end: str) -> None:
        """Ask P no more about a request; unless it has said all, it hears that the request is not needed.

        Args:
            request_id: D's name of it.
            followed: what is known of it.
            end: ``handed_over``; ``late``, if all is read at the end; ``lost``, if P has said why there is nothing to
                read; ``refused``; ``given_up``.
        """
        if self.with_blocks.pop(request_id, None) is not None:
            self._taken -= followed.blocks
        self._conversations.stop(followed.conversation, unwanted=end in ("refused", "given_up"))
        self._context.stats.count("followed", label=end)


def _begins_with(span: Span, table: list[int]) -> bool:
    return span.first == 0 and list(span.ids[: len(table)]) == table
