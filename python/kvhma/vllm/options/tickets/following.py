# SPDX-License-Identifier: Apache-2.0
"""A request that D reads while P computes its prompt: which piece D reads next, and what it must read again.

A piece stays valid while P's epoch stays the same: P begins a new epoch before it overwrites blocks that it has
reported. P's final parameters have the epoch too, and their lease holds the blocks until after the last read. So if D's
epoch and blocks equal those of the parameters, all pieces were right.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span
from kvhma.pieces import piece, piece_end, rest
from kvhma.vllm.metadata import ReadCommand
from kvhma.vllm.options.tickets.ticket_follower import TicketFollower
from kvhma.vllm.wire.params import LeaseKey, PrefillParams

PIECE_TOKENS = 512
"""Tokens of a piece, at least. Each piece costs a read and its checks."""

_NO_LEASE = LeaseKey("", 0)
"""P holds nothing for readers yet."""


@dataclass
class FollowedLoad:
    """A load that follows a ticket, and how much of it D has read.

    Attributes:
        follower: P's progress.
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

    def provisional(self) -> PrefillParams | None:
        """Return the parameters of P's request as far as P has reported them; None before its first reply."""
        follower, source = self.follower, self.follower.source
        if source is None:
            return None
        return PrefillParams(
            address=source.address,
            spans=(),
            engine_id=source.engine_id,
            incarnation_id=source.incarnation_id,
            lease_key=_NO_LEASE,
            lease=1.0,
            num_tokens=follower.total,
            prompt=follower.prompt,
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

    def note_piece_read(self, ranks: int, total_ranks: int, *, is_lost: bool) -> None:
        """Count ranks that have read a piece. A lost one ends the reading in pieces."""
        self.ranks_done += ranks
        self.in_pieces &= not is_lost
        self.is_reading = self.ranks_done < total_ranks
        if not self.is_reading and not self.in_pieces:
            self.done = self.done_before

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


def _begins_with(span: Span, table: list[int]) -> bool:
    return span.first == 0 and list(span.ids[: len(table)]) == table
