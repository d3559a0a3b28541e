# SPDX-License-Identifier: Apache-2.0
"""Did P hold the blocks until the read had ended? D asks after the read, so no clock is needed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import cached_property

from kvhma.errors import HandshakeError, LeaseEndedError, LeaseUnknownError, RequestError
from kvhma.text import one_line
from kvhma.vllm.peers.peers import Peers
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

    It belongs to one thread at a time.
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
            timeout: half of the seconds to wait for the answer: an idle connection may be dead, and a new one be asked.
            proving: checks that the answer comes from the engine that was read; None without proofs.
        """
        self._peers = peers
        self._claims = claims
        self._proving = proving
        self._question = _question([write_claim(claim) for claim in claims], outcomes, proving, contents=contents)
        deadline = time.monotonic() + 2 * timeout
        self._call = peers.ask(address, self._question, Leases, deadline=deadline)

    @property
    def open(self) -> bool:
        """Whether P may still answer. Any thread may call this."""
        return not self._call.done()

    def close(self) -> None:
        """Stop waiting for the answer."""
        self._peers.cancel(self._call)

    def poll(self) -> bool:
        """Return whether P has answered, or will not answer. Never waits."""
        return self._call.done()

    def check(self, index: int, remote: Incarnation) -> None:
        """Check that P held the blocks of the claim at `index`, when it was this incarnation. P has answered.

        Raises:
            HandshakeError: P did not hold them, because it is another incarnation now.
            LeaseEndedError: P did not hold them.
            LeaseUnknownError: there is no valid answer.
            RequestError: P handed out other parameters than those of the claim.
        """
        answer = self._answer
        state = answer.states[index]
        if state is LeaseState.HELD:
            return
        found = answer.incarnation_id
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
        contents = self._answer.contents
        return None if contents is None or len(contents) != len(self._claims) else contents[index]

    @cached_property
    def _answer(self) -> Leases:
        """P's answer.

        Raises:
            LeaseUnknownError: there is no valid answer.
        """
        question, proving = self._question, self._proving
        try:
            answer = self._call.result(0)
            if len(answer.states) != len(self._claims):
                raise HandshakeError(f"{len(self._claims)} claims, {len(answer.states)} answers")
            if proving is not None and not is_proved(proving.shared, question.nonce, question.claims, answer):
                raise HandshakeError("the answer is not of the engine that was read")
        except BaseException as error:  # a panic in Rust is no Exception
            text = f"P has not confirmed that the blocks were held while they were read: {error}"
            raise LeaseUnknownError(text) from error
        return answer


def _question(
    claims: list[WireClaim], outcomes: Sequence[Outcome], proving: Proving | None, *, contents: bool
) -> Renew | Finish:
    key, nonce = (
        (None, bytes(NONCE_BYTES)) if proving is None else (proving.reader_key, secrets.token_bytes(NONCE_BYTES))
    )
    if outcomes:
        return Finish(claims, list(outcomes), key, nonce)
    return Renew(claims, key, nonce, contents)
