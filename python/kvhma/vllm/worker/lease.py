# SPDX-License-Identifier: Apache-2.0
"""The lease under which one load reads: did P keep the blocks until the read had ended?"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from kvhma.errors import HandshakeError, LeaseEndedError, LeaseUnknownError
from kvhma.text import one_line
from kvhma.vllm.wire.client import Client, ClientPool
from kvhma.vllm.wire.messages import Leases, Renew, write_claim
from kvhma.vllm.wire.params import LeaseClaim

_UNCONFIRMED = "P has not confirmed that the blocks were held while they were read"

_CLOCK_DRIFT = 1.001
"""How much faster P's clock may go than ours."""


class RenewCall:
    """One question to P that renews some claims, shared by the leases of these claims. It is asked at once.

    Attributes:
        asked: when it was asked, by our monotonic clock.
    """

    def __init__(self, clients: ClientPool, claims: Sequence[LeaseClaim]) -> None:
        """Ask. Raises HandshakeError if P cannot be asked."""
        self.asked = time.monotonic()
        self._clients = clients
        self._users = len(claims)
        self._claims = len(claims)
        self._answer: Leases | None = None
        self._error: LeaseUnknownError | None = None
        self._client: Client | None = clients.send(Renew([write_claim(claim) for claim in claims]))

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable once P has answered; None if the answer was read."""
        return None if self._client is None else self._client.socket

    def answer(self) -> Leases | None:
        """Return the answer, None if it is not here yet; raise LeaseUnknownError if it cannot be used."""
        if self._client is not None and self._client.answered():
            try:
                self._answer = self._client.receive_leases(self._claims)
            except HandshakeError as error:
                self._error = LeaseUnknownError(f"{_UNCONFIRMED}: {error}")
            self._give_back()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answer

    def leave(self) -> None:
        """Say that one of the leases does not need the answer any more."""
        self._users -= 1
        if not self._users:
            self._give_back()

    def _give_back(self) -> None:
        if self._client is not None:
            self._clients.release(self._client)
            self._client = None


class Lease:
    """The lease under which one load reads. P is asked when the read begins, and has answered when it ends.

    Leases of one :func:`claim_all` share its question and belong to one thread at a time.

    Attributes:
        late_checks: questions that had to be asked after the read.
    """

    def __init__(
        self, clients: ClientPool, claim: LeaseClaim, call: RenewCall, index: int, timeout: float, margin: float
    ) -> None:
        """Take the answer at `index` of a call; :func:`claim_all` has the other arguments."""
        self._clients = clients
        self._claim = claim
        self._call = call
        self._index = index
        self._timeout = timeout
        self._margin = margin
        self.late_checks = 0

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable once P has answered; None if the answer was read."""
        return self._call.socket

    def close(self) -> None:
        """Do not wait for an answer any more."""
        self._call.leave()

    def covers(self, ended: float) -> bool | None:
        """Return whether P held the blocks until the read ended at `ended`, by our clock; None if it is not known yet.

        P's answer says when the lease ends by P's clock, and was given after we asked by ours:

                     asked                      ended            latest   + margin < expires
            D ---------|--------------------------|------------->
            P -------------|clock---------------------------------|-----------|------>
                                                     clock + (ended - asked) and the drift

        An answer in time costs nothing. If the lease may have ended meanwhile, P is asked a second time: an answer to a
        question asked after the read needs no clock.

        Raises:
            LeaseEndedError: it did not.
            LeaseUnknownError: P does not answer in time.
        """
        asked = self._call.asked
        answer = self._call.answer()
        if answer is None:
            if time.monotonic() - max(asked, ended) > self._timeout:
                raise LeaseUnknownError(f"{_UNCONFIRMED}: no answer in {self._timeout} s")
            return None
        expires = answer.expires[self._index]
        if expires is None:
            name = one_line(self._claim.key.request_id)
            raise LeaseEndedError(
                f"P does not hold {name!r} any more: its lease has ended, or it was read and nobody claimed it"
            )
        latest = answer.clock + (ended - asked) * _CLOCK_DRIFT
        if asked >= ended or latest + self._margin < expires:
            return True
        self.late_checks += 1
        second = RenewCall(self._clients, [self._claim])
        self._call.leave()
        self._call, self._index = second, 0
        return None


def claim_all(clients: ClientPool, claims: Sequence[LeaseClaim], *, timeout: float, margin: float) -> list[Lease]:
    """Claim requests of one P with one question, without waiting for the answer.

    Args:
        clients: of P's scheduler.
        claims: what is read, and by whom; at most `MAX_CLAIMS`.
        timeout: seconds to wait for an answer once a read has ended.
        margin: seconds by which a read has to end before its lease does.

    Raises:
        HandshakeError: P cannot be asked.
    """
    call = RenewCall(clients, claims)
    return [Lease(clients, claim, call, index, timeout, margin) for index, claim in enumerate(claims)]
