# SPDX-License-Identifier: Apache-2.0
"""P's table of the finished requests whose blocks it keeps for others, and for how long.

P keeps a request's blocks until it has been read and no reader is left, or until its lease ends. Whether they are still
kept is known here and nowhere else; blocks are freed only after their request has left the table. So a reader that is
told `held` after its read, or sees its mark on the lease board, knows that the blocks were kept all the time, whatever
any clock says.
"""

from __future__ import annotations

import enum
import hmac
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import BlockUsers
from kvhma.vllm.scheduler.lease_boards import LeaseBoards
from kvhma.vllm.wire.lease_board import mark_of
from kvhma.vllm.wire.messages import MAX_CONTENTS_BYTES, LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey

MAX_READERS = 64
"""Readers that a request may have at a time; samples of one prompt are some ten."""

LATE_READER_SECONDS = 2.0
"""How long blocks that one of several readers has read are kept for those that have not claimed them yet."""

OVERDUE_SECONDS = 1.0
"""How long blocks are kept after a step has found that their lease was not renewed in time.

P may be the one that is late: while a process is stopped or gets no time, renewals wait for it unread.
"""

Blocks: TypeAlias = NDArray[np.int64]


class LeaseEnd(enum.Enum):
    """Why a request left the table."""

    READ = "read"
    """It was read."""

    UNCLAIMED = "unclaimed"
    """Its lease ended, and no engine had ever claimed it."""

    NOT_RENEWED = "not_renewed"
    """Its lease ended, and who had claimed it had neither read nor released it."""

    UNREAD = "unread"
    """Its lease ended, and who had claimed it had released it unread."""

    EVICTED = "evicted"
    """Nobody had claimed or read it, and newer ones needed its place."""

    SLEPT = "slept"
    """The engine slept, and what it held is gone."""

    KEPT_TURN_READ = "read answer"
    """It was an answer, and was read."""

    KEPT_TURN_EXPIRED = "expired answer"
    """It was an answer, and no next turn has read it in time."""

    KEPT_TURN_EVICTED = "given up answer"
    """It was an answer, and others needed its blocks."""


KEPT_TURN_ENDS = {
    LeaseEnd.READ: LeaseEnd.KEPT_TURN_READ,
    LeaseEnd.UNCLAIMED: LeaseEnd.KEPT_TURN_EXPIRED,
    LeaseEnd.NOT_RENEWED: LeaseEnd.KEPT_TURN_EXPIRED,
    LeaseEnd.UNREAD: LeaseEnd.KEPT_TURN_EXPIRED,
    LeaseEnd.EVICTED: LeaseEnd.KEPT_TURN_EVICTED,
    LeaseEnd.SLEPT: LeaseEnd.KEPT_TURN_EVICTED,
}
"""Why an answer left the table, by why another request would have."""


class EndedLease(NamedTuple):
    """A request that has left the table, and its blocks, which are to be freed."""

    key: LeaseKey
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """What is kept now.

    Attributes:
        requests: that are kept.
        blocks: that they pin; those of a shared prefix count once.
        oldest_unread_seconds: since the oldest one that nobody has claimed or read had finished; 0 without one. Answers
            do not count: nobody may ever ask for them.
        kept_turns: how many of the requests are answers.
    """

    requests: int
    blocks: int
    oldest_unread_seconds: float
    kept_turns: int = 0


@dataclass(slots=True)
class _Held:
    """A request that is kept. Times are seconds of the monotonic clock.

    Attributes:
        digest: of the parameters that name it.
        blocks: their ids, each once, as vLLM's tables have them.
        since: when it had finished.
        expires: when its lease ends.
        is_turn: whether it is an answer, kept for the next turn of its conversation.
        readers: who has claimed it and not released it yet, and until when that counts if it is not renewed.
        claimed: whether it ever had a reader.
        read: whether a reader has read it, or does not need it any more.
        late_readers_until: until when it is kept for readers that have not claimed it yet, once it has been read.
        overdue_since: when a step first found that its lease was not renewed in time; None if it was.
        content: digest of what the blocks hold; None until the workers have summed it, if they do.
        place: on the boards, where readers see that it is kept; None if it has none.
    """

    digest: bytes
    blocks: Blocks
    since: float
    expires: float
    is_turn: bool = False
    readers: dict[int, float] = field(default_factory=dict)
    claimed: bool = False
    read: bool = False
    late_readers_until: float = 0.0
    overdue_since: float | None = None
    content: bytes | None = None
    place: int | None = None

    def check_over(self, now: float) -> bool:
        """Return whether it is not to be kept any more, and take note if its lease is overdue."""
        if self.expires > now:
            return False
        if self.read and not self.readers:
            return True  # there is nobody whose renewal may have been missed
        if self.overdue_since is None:
            self.overdue_since = now
        return now - self.overdue_since >= OVERDUE_SECONDS

    def why_ended(self) -> LeaseEnd:
        """Return why it ends now."""
        if self.read:
            return LeaseEnd.READ
        if self.readers:
            return LeaseEnd.NOT_RENEWED
        return LeaseEnd.UNREAD if self.claimed else LeaseEnd.UNCLAIMED


class LeaseTable:
    """Requests whose blocks are kept for their readers. Safe to use from several threads.

    A claim names what it reads: the request, its random generation, and the digest of the parameters that were handed
    out for its blocks. Who lacks one of them can neither renew, nor release, nor take the place of a reader.

    **Blocks that nobody reads have a bound**, :attr:`max_unread_blocks`; the oldest ones go first. What counts are
    blocks of requests without a reader, one that several of them share once. A request that is being read never has to
    go, and does not count: decode engines that are slower than P keep it waiting, as they do without a bound, and lose
    nothing. One request may always be kept, also if it alone is more than the bound.

    P does not know whose request is whose, and the rule needs no names: who leaves requests unread loses them first,
    being the oldest. Others have to read or claim theirs, which a decode engine does within 50 ms, or a step of its
    own, before P has computed (or found in its prefix cache) as many other blocks as the bound. How many requests a
    tenant may have is for the front end to decide.

    **Answers**, which a decode engine keeps for the next turns of their conversations, go before all others, and may be
    given up at any time, also while they are read: who reads them computes what it cannot have.

    Times are seconds of :func:`time.monotonic` in this process, which is P's clock. How long a lease is, only P says.

    Attributes:
        max_unread_blocks: bound of the blocks that nobody reads; None for no bound.
    """

    def __init__(self, lease: float) -> None:
        """Start empty; `lease` is how many seconds a request is kept after each renewal."""
        self.max_unread_blocks: int | None = None
        self._digests_refused = 0
        self._lease = lease
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        self._held: dict[LeaseKey, _Held] = {}
        """In the order in which they finished."""
        self._ended: dict[LeaseEnd, list[EndedLease]] = {}
        self._without_reader = BlockUsers()
        self._held_blocks = BlockUsers()
        self._boards = LeaseBoards()

    def show_on_boards(self, boards: LeaseBoards) -> None:
        """Show on these boards what is kept from now on."""
        with self._lock:
            for held in self._held.values():
                self._boards.hide_mark(held.place)
                held.place = None
            self._boards = boards

    def hold(
        self,
        key: LeaseKey,
        digest: bytes,
        blocks: Sequence[int] | Blocks,
        *,
        turn_seconds: float | None = None,
    ) -> None:
        """Keep a request that has finished.

        Args:
            key: names it, with a new generation.
            digest: of the parameters that are handed out for it.
            blocks: ids of the blocks that are kept for it, each once, in any order.
            turn_seconds: for how long it is kept if nobody claims it; None if it is no answer, but for a lease.
        """
        now = time.monotonic()
        seconds = self._lease if turn_seconds is None else turn_seconds
        held = _Held(digest, np.asarray(blocks, np.int64), now, now + seconds, turn_seconds is not None)
        mark = mark_of(key, digest)
        with self._lock:
            held.place = self._boards.show_mark(mark)
            self._held[key] = held
            self._without_reader.add(held.blocks)
            self._held_blocks.add(held.blocks)
            self._evict_oldest(spared=key)

    def _evict_oldest(self, spared: LeaseKey) -> None:
        bound = self.max_unread_blocks
        if bound is None or self._without_reader.used <= bound:
            return
        unread = [(key, held) for key, held in self._held.items() if not held.readers and key != spared]
        unread.sort(key=lambda item: not item[1].is_turn)
        for key, held in unread:
            if self._without_reader.has_own(held.blocks):  # else nothing is gained: newer ones keep the same
                self._end_lease(key, LeaseEnd.EVICTED)
            if self._without_reader.used <= bound:
                return

    def kept_turns(self) -> list[tuple[LeaseKey, Blocks]]:
        """Return the answers and their blocks in the order in which they are given up: those being read go last."""
        with self._lock:
            found = [(key, held) for key, held in self._held.items() if held.is_turn]
        found.sort(key=lambda item: bool(item[1].readers))
        return [(key, held.blocks) for key, held in found]

    def evict(self, key: LeaseKey) -> None:
        """Give up an answer, whoever reads it."""
        with self._lock:
            if key in self._held:
                self._end_lease(key, LeaseEnd.EVICTED)

    def renew(self, claims: Sequence[LeaseClaim]) -> list[LeaseState]:
        """Extend leases, and take readers that are new; return the state of each claim."""
        now = time.monotonic()
        with self._lock:
            return [self._renew_claim(claim, now) for claim in claims]

    def _renew_claim(self, claim: LeaseClaim, now: float) -> LeaseState:
        state, held = self._find_claimed(claim, now)
        if held is not None:
            if not held.readers:
                self._without_reader.remove(held.blocks)
            held.readers[claim.reader] = now + self._lease
            held.expires = max(held.expires, now + self._lease)
        return state

    def _find_claimed(self, claim: LeaseClaim, now: float) -> tuple[LeaseState, _Held | None]:
        """Return the state of a claim, and what is held for it, which was claimed by now."""
        held = self._held.get(claim.key)
        if held is None:
            return LeaseState.ENDED, None
        if not self._is_of_params(held, claim):
            return LeaseState.OTHER, None
        if not self._admit_reader(held, claim.reader, now):
            return LeaseState.FULL, None
        # One whose time was up counts as held: only `drain_ended` gives its blocks back, and it has not yet.
        held.claimed, held.overdue_since = True, None
        return LeaseState.HELD, held

    def _is_of_params(self, held: _Held, claim: LeaseClaim) -> bool:
        """Return whether a claim is one of the parameters that were handed out."""
        same = hmac.compare_digest(held.digest, claim.digest)
        self._digests_refused += not same
        return same

    def _admit_reader(self, held: _Held, reader: int, now: float) -> bool:
        """Return whether there is room for a reader; those that do not renew any more make room."""
        if reader not in held.readers and len(held.readers) >= MAX_READERS:
            for known in [known for known, until in held.readers.items() if until <= now]:
                del held.readers[known]
            if not held.readers:
                self._without_reader.add(held.blocks)
        return reader in held.readers or len(held.readers) < MAX_READERS

    def check_and_release(self, claims: Sequence[LeaseClaim], outcomes: Sequence[Outcome]) -> list[LeaseState]:
        """Return the state of each claim as :meth:`renew` does, and release those that are held, as :meth:`release`."""
        now = time.monotonic()
        with self._lock:
            return [
                self._check_and_release_claim(claim, outcome, now)
                for claim, outcome in zip(claims, outcomes, strict=True)
            ]

    def _check_and_release_claim(self, claim: LeaseClaim, outcome: Outcome, now: float) -> LeaseState:
        state, held = self._find_claimed(claim, now)
        if held is not None:
            held.expires = max(held.expires, now + self._lease)
            self._release_reader(held, claim, outcome, now)
        return state

    def note_content(self, key: LeaseKey, content: bytes) -> None:
        """Take note of the digest of what a request's blocks hold."""
        with self._lock:
            if (held := self._held.get(key)) is not None:
                held.content = content

    def contents(self, claims: Sequence[LeaseClaim]) -> list[bytes | None]:
        """Return the digest of each claim; None where it is not there yet, or no room in an answer."""
        found: list[bytes | None] = []
        room = MAX_CONTENTS_BYTES
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.key)
                content = held.content if held is not None and self._is_of_params(held, claim) else None
                fits = content is not None and len(content) <= room
                found.append(content if fits else None)
                room -= len(content) if content is not None and fits else 0
        return found

    def release(self, claims: Sequence[LeaseClaim], outcome: Outcome) -> None:
        """Take readers off requests; those that are not held are passed over.

        Blocks are freed once they have been read and no reader is left. Blocks that no reader could read are kept for
        their lease, so that another engine can be given the same parameters.
        """
        now = time.monotonic()
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.key)
                if held is not None and self._is_of_params(held, claim):
                    self._release_reader(held, claim, outcome, now)

    def _release_reader(self, held: _Held, claim: LeaseClaim, outcome: Outcome, now: float) -> None:
        if held.readers.pop(claim.reader, None) is not None and not held.readers:
            self._without_reader.add(held.blocks)
        if outcome is not Outcome.UNREAD:
            held.read = True
        if outcome is Outcome.READ_SHARED:
            held.late_readers_until = now + LATE_READER_SECONDS
        if held.read:
            held.expires = min(held.expires, max(now, held.late_readers_until, *held.readers.values()))
            if not held.readers and held.expires <= now:
                self._end_lease(claim.key, LeaseEnd.READ)

    def _end_lease(self, key: LeaseKey, why: LeaseEnd) -> None:
        held = self._held[key]
        self._boards.hide_mark(held.place)  # before anybody can hear that the blocks may be freed
        self._held_blocks.remove(held.blocks)
        if not held.readers:
            self._without_reader.remove(held.blocks)
        why = LeaseEnd.READ if held.read else why
        self._ended.setdefault(KEPT_TURN_ENDS[why] if held.is_turn else why, []).append(EndedLease(key, held.blocks))
        del self._held[key]  # after that: who sees it in neither frees nothing, and may rest for long
        self._has_ended.notify()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until :meth:`drain_ended` has something to return, but no longer; not at all if nothing is kept."""
        with self._lock:
            if self._held:
                self._has_ended.wait_for(lambda: bool(self._ended), seconds)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept, and nothing has ended since :meth:`drain_ended`. Takes no lock."""
        return not self._held and not self._ended

    def has_ended(self) -> bool:
        """Return whether :meth:`drain_ended` has something to do: requests that have left, or whose time is up."""
        now = time.monotonic()
        with self._lock:
            return bool(self._ended) or any(held.expires <= now for held in self._held.values())

    def drain_ended(self) -> dict[LeaseEnd, list[EndedLease]]:
        """Return the requests that are not kept any more since the last call, each once, by why they ended."""
        if self.is_empty:  # most steps of most engines
            return {}
        now = time.monotonic()
        with self._lock:
            for key in [key for key, held in self._held.items() if held.check_over(now)]:
                self._end_lease(key, self._held[key].why_ended())
            ended, self._ended = self._ended, {}
        return ended

    def end_all(self) -> None:
        """End every lease: what was kept is gone."""
        with self._lock:
            for key in list(self._held):
                self._end_lease(key, LeaseEnd.SLEPT)

    def take_digests_refused(self) -> int:
        """Return how many claims and releases since the last call had a digest that is not their request's."""
        if not self._digests_refused:
            return 0
        with self._lock:
            refused, self._digests_refused = self._digests_refused, 0
        return refused

    def usage(self) -> LeaseUsage:
        """Return what is kept now."""
        now = time.monotonic()
        with self._lock:
            unread = (held.since for held in self._held.values() if not (held.readers or held.read or held.is_turn))
            turns = sum(held.is_turn for held in self._held.values())
            return LeaseUsage(len(self._held), self._held_blocks.used, now - next(unread, now), turns)

    def __len__(self) -> int:
        return len(self._held)
