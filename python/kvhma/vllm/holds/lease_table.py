# SPDX-License-Identifier: Apache-2.0
"""P's table of finished requests: which blocks P holds for readers, and for how long.

P holds a request's blocks until it has been read and no reader is left, or until its lease ends. Only this table knows
whether P still holds them: P frees blocks only after their request has left the table. After its read a reader asks P
and gets the state `held`, or sees its mark on the lease board. Then P has held the blocks all the time. No clocks need
to agree for that.
"""

from __future__ import annotations

import enum
import hmac
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import BlockUsers
from kvhma.vllm.holds.lease_boards import LeaseBoards
from kvhma.vllm.wire.lease_board import mark_of
from kvhma.vllm.wire.messages import MAX_CONTENTS_BYTES, LeaseState, Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_READERS = 64
"""Readers that a request may have at a time; a prompt has perhaps ten samples."""

LATE_READER_SECONDS = 2.0
"""After one of several readers has read, how long P holds the blocks for readers that have not claimed them yet."""

OVERDUE_SECONDS = 1.0
"""How long P holds blocks after it has found that their lease was not renewed in time.

P itself may be late: renewals stay unread while its process is stopped or gets no processor time.
"""

Ids: TypeAlias = NDArray[np.int64]
Blocks: TypeAlias = "Sequence[KVCacheBlock]"


class LeaseEnd(enum.Enum):
    """Why a request left the table."""

    READ = "read"
    """It was read."""

    UNCLAIMED = "unclaimed"
    """Its lease ended, and no engine ever claimed it."""

    NOT_RENEWED = "not_renewed"
    """Its lease ended, and a reader that had claimed it neither read nor released it."""

    UNREAD = "unread"
    """Its lease ended, and all readers that had claimed it released it unread."""

    EVICTED = "evicted"
    """No engine had claimed or read it, and newer requests needed its room."""

    RESET = "reset"
    """The engine has reset its caches: its weights may be others now, or it has slept."""


class EndedLease(NamedTuple):
    """A request that has left the table, its blocks, which P must free, and whether it was expendable."""

    key: LeaseKey
    blocks: Blocks
    is_expendable: bool


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """What P holds now.

    Attributes:
        requests: number of held requests.
        blocks: number of held blocks; those of a shared prefix count once.
        oldest_unread_seconds: since the oldest request finished that no engine has claimed or read; 0 if there is no
            such request. Expendable requests do not count: no reader may ever come.
        expendable: how many of the requests are expendable.
    """

    requests: int
    blocks: int
    oldest_unread_seconds: float
    expendable: int = 0


@dataclass(slots=True)
class _Held:
    """A held request. Times are seconds of the monotonic clock.

    Attributes:
        digest: of the parameters that name it.
        ids: of its blocks, each once.
        blocks: vLLM's.
        since: when it finished.
        expires: when its lease ends.
        is_expendable: whether it may be evicted at any time.
        readers: readers that have claimed it and not released it, and when each claim ends unless renewed.
        claimed: whether it ever had a reader.
        read: whether a reader has read it, or no longer needs it.
        late_readers_until: after it was read, until when P holds it for readers that have not claimed it yet.
        overdue_since: when P first found that its lease was not renewed in time; None if it was.
        content: digest of the blocks' content; None unless the workers have summed it.
        place: of its mark on the lease boards; None if the boards were full.
    """

    digest: bytes
    ids: Ids
    blocks: Blocks
    since: float
    expires: float
    is_expendable: bool = False
    readers: dict[int, float] = field(default_factory=dict)
    claimed: bool = False
    read: bool = False
    late_readers_until: float = 0.0
    overdue_since: float | None = None
    content: bytes | None = None
    place: int | None = None

    def check_over(self, now: float) -> bool:
        """Return whether its lease has ended, and note whether it is overdue."""
        if self.expires > now:
            return False
        if self.read and not self.readers:
            return True  # there is no reader whose renewal P may have missed
        if self.overdue_since is None:
            self.overdue_since = now
        return now - self.overdue_since >= OVERDUE_SECONDS

    def why_ended(self) -> LeaseEnd:
        """Return why its lease ends now."""
        if self.read:
            return LeaseEnd.READ
        if self.readers:
            return LeaseEnd.NOT_RENEWED
        return LeaseEnd.UNREAD if self.claimed else LeaseEnd.UNCLAIMED


class LeaseTable:
    """Finished requests whose blocks P holds for readers. Safe to use from several threads.

    A claim has the request's name, its random generation, and the digest of the parameters that P returned for its
    blocks. A client that lacks one of them can neither renew nor release, nor use up a reader's place.

    **Unread blocks have a bound**, :attr:`max_unread_blocks`; P evicts the oldest requests first. The bound counts the
    blocks of requests without a reader; a block that several such requests share counts once. P never evicts a request
    that has a reader, and does not count it. So decode engines that are slower than P lose nothing: P waits for them,
    as it would without a bound. P may always hold one request, even if it alone exceeds the bound.

    P does not know the tenant of a request, and the rule needs no tenants: one that leaves requests unread loses them
    first, because they are the oldest. A decode engine claims or reads its requests within 50 ms, or one of its steps.
    Until then they are safe, unless P computes or hits as many other blocks as the bound. The front end decides how
    many requests a tenant may have.

    **Expendable requests**, which an option holds, are evicted before all others. They may be evicted at any time, even
    while they are read: the reader computes what it cannot read.

    Times are seconds of :func:`time.monotonic` in this process, which is P's clock. Only P decides how long a lease is.

    Attributes:
        max_unread_blocks: bound of the unread blocks; None for no bound.
        held: the held requests, for those who only ask whether there are any. Reading it takes no lock.
        ended: leases that have ended since :meth:`drain_ended`, by why they ended, for the same use.
        digests_refused: claims and releases since :meth:`take_digests_refused` with another digest than their request.
    """

    def __init__(self, lease: float) -> None:
        """Start empty; `lease` is how many seconds P holds a request after each renewal."""
        self.max_unread_blocks: int | None = None
        self.digests_refused = 0
        self._lease = lease
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        self._held: dict[LeaseKey, _Held] = {}
        """In the order in which they finished."""
        self.held: Collection[LeaseKey] = self._held
        self.ended: dict[LeaseEnd, list[EndedLease]] = {}
        self._without_reader = BlockUsers()
        self._held_blocks = BlockUsers()
        self._boards = LeaseBoards()

    def show_on_boards(self, boards: LeaseBoards) -> None:
        """Hide all marks on the old boards; requests that P holds from now on are shown on these."""
        with self._lock:
            for held in self._held.values():
                self._boards.hide_mark(held.place)
                held.place = None
            self._boards = boards

    def hold(
        self,
        key: LeaseKey,
        digest: bytes,
        ids: Sequence[int] | Ids,
        blocks: Blocks = (),
        *,
        expendable_seconds: float | None = None,
    ) -> None:
        """Hold a request that has finished.

        Args:
            key: of its lease, with a new generation.
            digest: of the parameters that P returns for it.
            ids: of the blocks that P holds for it, each once, in any order. They count a block once that several
                requests hold.
            blocks: vLLM's objects of these, which :meth:`drain_ended` returns in the same order.
            expendable_seconds: how long to hold an expendable request unless it is claimed; None for any other, which
                P holds for one lease.
        """
        now = time.monotonic()
        seconds = self._lease if expendable_seconds is None else expendable_seconds
        held = _Held(digest, np.asarray(ids, np.int64), blocks, now, now + seconds, expendable_seconds is not None)
        with self._lock:
            if self._boards.free:
                held.place = self._boards.show_mark(mark_of(key, digest))
            self._held[key] = held
            self._without_reader.add(held.ids)
            self._held_blocks.add(held.ids)
            if self.max_unread_blocks is not None and self._without_reader.used > self.max_unread_blocks:
                self._evict_oldest(self.max_unread_blocks, spared=key)

    def _evict_oldest(self, bound: int, spared: LeaseKey) -> None:
        unread = [(key, held) for key, held in self._held.items() if not held.readers and key != spared]
        unread.sort(key=lambda item: not item[1].is_expendable)
        for key, held in unread:
            if self._without_reader.has_own(held.ids):  # otherwise newer requests hold the same blocks
                self._end_lease(key, LeaseEnd.EVICTED)
            if self._without_reader.used <= bound:
                return

    def expendable(self) -> list[tuple[LeaseKey, Blocks]]:
        """Return the expendable requests and their blocks as they are evicted: the oldest first, those read last."""
        with self._lock:
            found = [(key, held) for key, held in self._held.items() if held.is_expendable]
        found.sort(key=lambda item: bool(item[1].readers))
        return [(key, held.blocks) for key, held in found]

    def evict(self, key: LeaseKey) -> None:
        """Evict an expendable request, even while it is read."""
        with self._lock:
            if key in self._held:
                self._end_lease(key, LeaseEnd.EVICTED)

    def renew(self, claims: Sequence[LeaseClaim]) -> list[LeaseState]:
        """Extend leases, and add new readers; return the state of each claim."""
        now = time.monotonic()
        with self._lock:
            return [self._renew_claim(claim, now) for claim in claims]

    def _renew_claim(self, claim: LeaseClaim, now: float) -> LeaseState:
        state, held = self._find_claimed(claim, now)
        if held is not None:
            if not held.readers:
                self._without_reader.remove(held.ids)
            held.readers[claim.reader] = now + self._lease
            held.expires = max(held.expires, now + self._lease)
        return state

    def _find_claimed(self, claim: LeaseClaim, now: float) -> tuple[LeaseState, _Held | None]:
        """Return the state of a claim, and the request that P holds for it, which counts as claimed from now on."""
        held = self._held.get(claim.key)
        if held is None:
            return LeaseState.ENDED, None
        if not self._is_of_params(held, claim):
            return LeaseState.OTHER, None
        if not self._admit_reader(held, claim.reader, now):
            return LeaseState.FULL, None
        # P holds it even if its time is up: only `drain_ended` ends it then, and has not done so yet.
        held.claimed, held.overdue_since = True, None
        return LeaseState.HELD, held

    def _is_of_params(self, held: _Held, claim: LeaseClaim) -> bool:
        """Return whether a claim has the digest of the parameters that P returned."""
        same = hmac.compare_digest(held.digest, claim.digest)
        self.digests_refused += not same
        return same

    def _admit_reader(self, held: _Held, reader: int, now: float) -> bool:
        """Return whether there is room for a reader; readers that have stopped renewing make room."""
        if reader not in held.readers and len(held.readers) >= MAX_READERS:
            for known in [known for known, until in held.readers.items() if until <= now]:
                del held.readers[known]
            if not held.readers:
                self._without_reader.add(held.ids)
        return reader in held.readers or len(held.readers) < MAX_READERS

    def check_and_release(self, claims: Sequence[LeaseClaim], outcomes: Sequence[Outcome]) -> list[LeaseState]:
        """Return the state of each claim, as :meth:`renew` does, and release the held ones, as :meth:`release` does."""
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
        """Store the digest of the content of a request's blocks."""
        with self._lock:
            if (held := self._held.get(key)) is not None:
                held.content = content

    def contents(self, claims: Sequence[LeaseClaim]) -> list[bytes | None]:
        """Return the content digest of each claim; None if it is not there yet, or does not fit in the reply."""
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
        """Remove readers from requests; claims whose request P does not hold are ignored.

        P frees blocks once they have been read and no reader is left. It holds blocks that no reader could read until
        their lease ends, so that another engine can get the same parameters.
        """
        now = time.monotonic()
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.key)
                if held is not None and self._is_of_params(held, claim):
                    self._release_reader(held, claim, outcome, now)

    def _release_reader(self, held: _Held, claim: LeaseClaim, outcome: Outcome, now: float) -> None:
        if held.readers.pop(claim.reader, None) is not None and not held.readers:
            self._without_reader.add(held.ids)
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
        self._boards.hide_mark(held.place)  # before `drain_ended` can return it, and its blocks are freed
        self._held_blocks.remove(held.ids)
        if not held.readers:
            self._without_reader.remove(held.ids)
        why = LeaseEnd.READ if held.read else why
        self.ended.setdefault(why, []).append(EndedLease(key, held.blocks, held.is_expendable))
        del self._held[key]  # last: if it were in neither table, `is_empty` could let the engine sleep
        self._has_ended.notify()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until a lease has ended, or for so many seconds; return at once if P holds nothing."""
        with self._lock:
            if self._held:
                self._has_ended.wait_for(lambda: bool(self.ended), seconds)

    @property
    def is_empty(self) -> bool:
        """Whether P holds nothing, and no lease has ended since :meth:`drain_ended`. Takes no lock."""
        return not self._held and not self.ended

    def has_ended(self) -> bool:
        """Return whether :meth:`drain_ended` has something to do: leases that have ended, or whose time is up."""
        now = time.monotonic()
        with self._lock:
            return bool(self.ended) or any(held.expires <= now for held in self._held.values())

    def drain_ended(self) -> dict[LeaseEnd, list[EndedLease]]:
        """Return the requests whose lease has ended since the last call, each once, by why it ended."""
        now = time.monotonic()
        with self._lock:
            for key, held in list(self._held.items()):
                if held.check_over(now):
                    self._end_lease(key, held.why_ended())
            ended, self.ended = self.ended, {}
        return ended

    def end_all(self) -> None:
        """End every lease: the caches are reset."""
        with self._lock:
            for key in list(self._held):
                self._end_lease(key, LeaseEnd.RESET)

    def take_digests_refused(self) -> int:
        """Return how many claims and releases since the last call had another digest than their request."""
        with self._lock:
            refused, self.digests_refused = self.digests_refused, 0
        return refused

    def usage(self) -> LeaseUsage:
        """Return what P holds now."""
        now = time.monotonic()
        with self._lock:
            needed = (held for held in self._held.values() if not (held.readers or held.read or held.is_expendable))
            oldest = next((held.since for held in needed), now)
            expendable = sum(held.is_expendable for held in self._held.values())
            return LeaseUsage(len(self._held), self._held_blocks.used, now - oldest, expendable)

    def __len__(self) -> int:
        return len(self._held)
