# SPDX-License-Identifier: Apache-2.0
"""P's table of the finished requests whose blocks it keeps for others, and for how long.

P keeps a request's blocks until it has been read and no reader is left, or until its lease ends. Whether they are still
kept is known here and nowhere else; the workers report a request as sent only after it has left the table.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey, new_nonce

MAX_READERS = 64
"""Readers that a request may have at a time; samples of one prompt are some ten."""

LATE_READER_SECONDS = 2.0
"""How long blocks that one of several readers has read are kept for those that have not claimed them yet."""


@dataclass(slots=True)
class _Held:
    """A request that is kept. Times are seconds of the monotonic clock.

    Attributes:
        expires: when its lease ends.
        readers: who has claimed it and not released it yet, and until when that counts if it is not renewed.
        read: whether a reader has read it, or does not need it any more.
        late_readers_until: until when it is kept for readers that have not claimed it yet, once it has been read.
    """

    expires: float
    readers: dict[int, float] = field(default_factory=dict)
    read: bool = False
    late_readers_until: float = 0.0


class LeaseTable:
    """Requests whose blocks are kept for their readers. Safe to use from several threads.

    Times are seconds of :func:`time.monotonic` in this process, which is P's clock.
    """

    def __init__(self, lease: float) -> None:
        """Start empty; `lease` is how many seconds a request is kept after each renewal."""
        self._lease = lease
        self._lock = threading.Lock()
        self._held: dict[LeaseKey, _Held] = {}
        self._released: list[str] = []
        self._expired: list[str] = []

    def add(self, request_id: str) -> LeaseKey:
        """Keep a request that has finished."""
        key = LeaseKey(request_id, new_nonce())
        with self._lock:
            self._held[key] = _Held(time.monotonic() + self._lease)
        return key

    def renew(self, claims: list[LeaseClaim]) -> list[float | None]:
        """Extend leases; return when each ends now, None for one that is not held (or has too many readers)."""
        now = time.monotonic()
        ends: list[float | None] = []
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.key)
                # One that has run out counts as ended; the next `drain_ended` takes it away.
                if held is None or held.expires <= now or not self._admit(held, claim.reader, now):
                    ends.append(None)
                    continue
                held.readers[claim.reader] = held.expires = now + self._lease
                ends.append(held.expires)
        return ends

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        """Take readers off requests; those that are not held are passed over.

        Blocks are freed once they have been read and no reader is left. Blocks that no reader could read are kept for
        their lease, so that another engine can be given the same parameters.
        """
        now = time.monotonic()
        with self._lock:
            for claim in claims:
                held = self._held.get(claim.key)
                if held is None:
                    continue
                held.readers.pop(claim.reader, None)
                if outcome is not Outcome.UNREAD:
                    held.read = True
                if outcome is Outcome.READ_SHARED:
                    held.late_readers_until = now + LATE_READER_SECONDS
                if held.read:
                    held.expires = min(held.expires, max(now, held.late_readers_until, *held.readers.values()))
                if held.expires <= now:
                    self._end(claim.key)

    @staticmethod
    def _admit(held: _Held, reader: int, now: float) -> bool:
        """Return whether there is room for a reader; those that do not renew any more make room."""
        if reader not in held.readers and len(held.readers) >= MAX_READERS:
            held.readers = {known: until for known, until in held.readers.items() if until > now}
        return reader in held.readers or len(held.readers) < MAX_READERS

    def _end(self, key: LeaseKey) -> None:
        held = self._held.pop(key)
        (self._released if held.read else self._expired).append(key.request_id)

    def drain_ended(self) -> tuple[list[str], list[str]]:
        """Return the requests that were read and those whose lease ended unread since the last call, each once."""
        now = time.monotonic()
        with self._lock:
            for key in [key for key, held in self._held.items() if held.expires <= now]:
                self._end(key)
            released, self._released = self._released, []
            expired, self._expired = self._expired, []
        return released, expired

    def __len__(self) -> int:
        return len(self._held)
