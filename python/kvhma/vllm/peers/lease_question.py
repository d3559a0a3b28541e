# SPDX-License-Identifier: Apache-2.0
"""Did P hold the blocks until the read had ended? D asks after the read, so no clock is needed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from kvhma.errors import HandshakeError, HandshakeTimeoutError, LeaseEndedError, LeaseUnknownError, RequestError
from kvhma.text import one_line
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.peers import Call, Peers
from kvhma.vllm.wire.messages import (
    NONCE_BYTES,
    Finish,
    Leases,
    LeaseState,
    Outcome,
    Renew,
    WireClaim,
    write_claim,
)
from kvhma.vllm.wire.params import Address, Incarnation, LeaseClaim, not_the_engine
from kvhma.vllm.wire.proofs import Proving, is_proved


class LeaseQuestion:
    """One question to P about some completed reads: does it hold the blocks?

    Each lease has a unique key, from the request's end until P frees the blocks. If the lease still exists after the
    read, P has held the blocks all the time. This does not depend on clocks::

        P   held |--------------------------------------------------|--------> freed
        D             |------- read -------|   asked   answered
                                               |-----------|

    It asks at once over an idle connection. Without an idle connection `Peers` connects and asks. It belongs to one
    thread at a time.
    """

    def __init__(
        self,
        peers: Peers,
        address: Address,
        claims: Sequence[LeaseClaim],
        timeout: float,
        proving: Proving | None,
        outcomes: Sequence[Outcome] = (),
        *,
        contents: bool = False,
    ) -> None:
        """Ask.

        Args:
            peers: ask P.
            address: of P's scheduler, numeric.
            claims: what was read, and by which reader; at most `MAX_CLAIMS`.
            outcomes: of each claim, to release the claims that P held; empty to release nothing.
            contents: whether to ask P for the content digests of the blocks, too. Then nothing is released.
            timeout: seconds to wait for the answer; without an answer over an idle connection, twice as long again.
            proving: checks that the answer comes from the engine that was read; None without proofs.
        """
        self._peers = peers
        self._address = address
        self._claims = claims
        self._proving = proving
        self._question = _question([write_claim(claim) for claim in claims], outcomes, proving, contents=contents)
        self._timeout = timeout
        self._answer: Leases | None = None
        self._error: LeaseUnknownError | None = None
        self._client: Client | None = None
        self._call: Call[Leases] | None = None
        self._deadline = time.monotonic() + timeout
        client = peers.idle.take_client(address)
        if client is None:
            self._ask_anew()
        else:
            self._ask_over(client)

    @property
    def open(self) -> bool:
        """Whether P may still answer. Any thread may call this."""
        return self._answer is None and self._error is None and time.monotonic() < self._deadline

    def close(self) -> None:
        """Stop waiting for the answer."""
        if self._answer is None and self._error is None:
            self._fail(HandshakeTimeoutError("no answer in time"))
        client, self._client = self._client, None
        if client is not None:
            self._peers.idle.release_client(self._address, client)
        call, self._call = self._call, None
        if call is not None:
            self._peers.cancel(call)

    def fileno(self) -> int | None:
        """Return the file descriptor of the idle connection that was used; None without it."""
        return None if self._client is None else self._client.fileno()

    def poll(self) -> bool:
        """Return whether P has answered, or will not answer. Never waits."""
        if self._client is not None:
            self._poll_client(self._client)
        if self._call is not None and self._call.done():
            self._take_result(self._call)
        if not self.open:
            self.close()
            return True
        return False

    def check(self, index: int, remote: Incarnation) -> None:
        """Check that P held the blocks of the claim at `index`, when it was this incarnation. P has answered.

        Raises:
            HandshakeError: P did not hold them, because it is another incarnation now.
            LeaseEndedError: P did not hold them.
            LeaseUnknownError: there is no valid answer.
            RequestError: P handed out other parameters than those of the claim.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        state = LeaseState.ENDED if self._answer is None else self._answer.states[index]
        if state is LeaseState.HELD:
            return
        found = None if self._answer is None else self._answer.incarnation_id
        if found is not None and int.from_bytes(found, "big") != remote.incarnation_id:
            expected = f"{remote.incarnation_id:016x}"
            raise HandshakeError(not_the_engine("kvhma.instance", expected, found.hex(), remote.address))
        name = one_line(self._claims[index].key.request_id)
        if state is LeaseState.OTHER:
            raise RequestError(f"P handed out other parameters for {name!r} than these: they were changed on the way")
        why = (
            "it has too many readers"
            if state is LeaseState.FULL
            else "its lease has ended, or other readers have read it"
        )
        raise LeaseEndedError(f"P does not hold {name!r} for this reader: {why}")

    def content(self, index: int) -> bytes | None:
        """Return P's content digest for the claim at `index`; None if P has none yet."""
        contents = None if self._answer is None else self._answer.contents
        return None if contents is None or len(contents) != len(self._claims) else contents[index]

    def _ask_over(self, client: Client) -> None:
        try:
            client.send(self._question)
        except HandshakeError:
            client.close()
            self._ask_anew()
        else:
            self._client = client

    def _poll_client(self, client: Client) -> None:
        if not client.poll():
            return
        self._client = None
        try:
            self._take_answer(client.receive(Leases))
        except HandshakeError as error:
            if time.monotonic() < self._deadline:
                self._ask_anew()  # P had closed the old connection
            else:
                self._fail(error)
        self._peers.idle.release_client(self._address, client)

    def _ask_anew(self) -> None:
        self._deadline = time.monotonic() + 2 * self._timeout
        self._call = self._peers.ask(self._address, self._question, Leases, deadline=self._deadline)

    def _take_result(self, call: Call[Leases]) -> None:
        self._call = None
        error = call.exception()
        if error is None:
            self._take_answer(call.result())
        else:
            self._fail(error)

    def _take_answer(self, answer: Leases) -> None:
        question, proving = self._question, self._proving
        if len(answer.states) != len(self._claims):
            self._fail(HandshakeError(f"{len(self._claims)} claims, {len(answer.states)} answers"))
        elif proving is not None and not is_proved(proving.shared, question.nonce, question.claims, answer):
            self._fail(HandshakeError("the answer is not of the engine that was read"))
        else:
            self._answer = answer

    def _fail(self, error: BaseException) -> None:
        self._error = LeaseUnknownError(f"P has not confirmed that the blocks were held while they were read: {error}")


def _question(
    claims: list[WireClaim], outcomes: Sequence[Outcome], proving: Proving | None, *, contents: bool
) -> Renew | Finish:
    key, nonce = (
        (None, bytes(NONCE_BYTES)) if proving is None else (proving.reader_key, secrets.token_bytes(NONCE_BYTES))
    )
    if outcomes:
        return Finish(claims, list(outcomes), key, nonce)
    return Renew(claims, key, nonce, contents)
