# SPDX-License-Identifier: Apache-2.0
"""Did P hold what was read until the read had ended? It is asked afterwards, so that no clock is needed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future

from kvhma.errors import HandshakeError, HandshakeTimeoutError, LeaseEndedError, LeaseUnknownError, RequestError
from kvhma.text import one_line
from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.client import Client, ClientPool
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
from kvhma.vllm.wire.params import LeaseClaim
from kvhma.vllm.wire.proofs import Proving, is_proved


class LeaseQuestion:
    """One question to P for some reads that have ended: does it hold what they read?

    P keeps a request under a key from the request's end until it frees the blocks, and uses no key twice. So when it
    says afterwards that it holds the blocks, it has held them all the time, whatever the clocks of both say::

        P   held |--------------------------------------------------|--------> freed
        D             |------- read -------|   asked   answered
                                               |-----------|

    It is asked at once if there is a connection; if not, a thread connects and asks. It belongs to one thread at a
    time.
    """

    def __init__(
        self,
        clients: ClientPool,
        claims: Sequence[LeaseClaim],
        timeout: float,
        proving: Proving | None,
        outcomes: Sequence[Outcome] = (),
        *,
        contents: bool = False,
    ) -> None:
        """Ask.

        Args:
            clients: of P's scheduler.
            claims: what was read, and by whom; at most `MAX_CLAIMS`.
            outcomes: of each claim, to release those that P held; none to release nothing.
            contents: whether P is asked for the digests of what the blocks hold, too; nothing is released then.
            timeout: seconds to wait for the answer, and as long for a new connection.
            proving: how the answer has to be proved to be of the engine that was read; None if it need not be.
        """
        self._clients = clients
        self._claims = claims
        self._proving = proving
        self._question = _question([write_claim(claim) for claim in claims], outcomes, proving, contents=contents)
        self._timeout = timeout
        self._answer: Leases | None = None
        self._error: LeaseUnknownError | None = None
        self._client: Client | None = None
        self._future: Future[Leases] | None = None
        self._deadline = time.monotonic() + timeout
        client = clients.take_idle()
        if client is None:
            self._ask_anew()
        else:
            self._ask_over(client)

    @property
    def open(self) -> bool:
        """Whether P may still answer. Any thread may ask."""
        return self._answer is None and self._error is None and time.monotonic() < self._deadline

    def close(self) -> None:
        """Do not wait for the answer any more."""
        if self._answer is None and self._error is None:
            self._fail(HandshakeTimeoutError("no answer in time"))
        client, self._client = self._client, None
        if client is not None:
            self._clients.release(client)

    def fileno(self) -> int | None:
        """Return what is readable once P has answered over a connection that was there; None without one."""
        return None if self._client is None else self._client.fileno()

    def poll(self) -> bool:
        """Return whether P has answered, or will not. Never waits."""
        if self._client is not None:
            self._poll_client(self._client)
        if self._future is not None:
            self._poll_future(self._future)
        if not self.open:
            self.close()
            return True
        return False

    def check(self, index: int) -> None:
        """Check that P held what the claim at `index` reads; the question has been answered.

        Raises:
            LeaseEndedError: it did not.
            LeaseUnknownError: it has not said.
            RequestError: it handed out other parameters than those of the claim.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        state = LeaseState.ENDED if self._answer is None else self._answer.states[index]
        if state is LeaseState.HELD:
            return
        name = one_line(self._claims[index].key.request_id)
        if state is LeaseState.OTHER:
            raise RequestError(f"P handed out other parameters for {name!r} than these: they were changed on the way")
        why = "it has too many readers" if state is LeaseState.FULL else "its lease has ended, or others have read it"
        raise LeaseEndedError(f"P does not hold {name!r} for this reader: {why}")

    def content(self, index: int) -> bytes | None:
        """Return P's digest of what the claim at `index` reads; None if P has none yet."""
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
            self._take(client.receive(Leases))
        except HandshakeError as error:
            if time.monotonic() < self._deadline:
                self._ask_anew()  # the connection was an old one, which P has ended
            else:
                self._fail(error)
        self._clients.release(client)

    def _ask_anew(self) -> None:
        self._deadline = time.monotonic() + 2 * self._timeout
        try:
            self._future = in_thread("kvhma-lease-question", self._ask_in_thread)
        except RuntimeError as error:
            self._fail(error)

    def _ask_in_thread(self) -> Leases:
        client = self._clients.take()
        try:
            return client.ask(self._question, Leases)
        finally:
            self._clients.release(client)

    def _poll_future(self, future: Future[Leases]) -> None:
        if future.done():
            error = future.exception()
            if error is None:
                self._take(future.result())
            else:
                self._fail(error)
            self._future = None

    def _take(self, answer: Leases) -> None:
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
