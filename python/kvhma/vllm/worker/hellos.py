# SPDX-License-Identifier: Apache-2.0
"""What the workers of an engine say of themselves: asked for, bounded, and checked to be theirs."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.nixl import HandshakePayload, decode_handshake
from kvhma.vllm.wire.client import Client
from kvhma.vllm.wire.messages import NONCE_BYTES, AskHello, RankHello
from kvhma.vllm.wire.proofs import verify_hello


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself.

    Attributes:
        data: its message of :mod:`kvhma.nixl.handshake`.
        payload: the same, decoded.
        engine_key: public key by which its engine proves its answers.
    """

    data: bytes
    payload: HandshakePayload
    engine_key: bytes


class HelloBudget:
    """Bytes of hellos that are stored, of all handshakes under way or of all engines. Safe to use from several threads.

    Half of the bytes are divided equally, so that engines with long hellos leave room for the others; the rest is for
    who comes first.
    """

    def __init__(self, limit: int, handshakes: int) -> None:
        """Start empty: at most `limit` bytes for at most so many handshakes, or engines."""
        self._limit = limit
        self._share = limit // 2 // handshakes
        self._lock = threading.Lock()
        self._free = limit - self._share * handshakes
        self._beyond: dict[object, int] = {}
        """Bytes of each handshake beyond its share."""

    def note(self, handshake: object, stored: int) -> None:
        """Note how many bytes a handshake, or an engine, stores in all; 0 when it has ended.

        Raises:
            HandshakeTimeoutError: there is no room for them now.
        """
        with self._lock:
            before = self._beyond.pop(handshake, 0)
            beyond = max(0, stored - self._share)
            self._free += before
            if beyond > self._free:
                raise HandshakeTimeoutError(
                    f"hellos of {stored} bytes: with those of other engines it would be more than {self._limit}"
                )
            self._free -= beyond
            if beyond:
                self._beyond[handshake] = beyond


def ask_hellos(
    client: Client, ranks: Sequence[tuple[int, int]], deadline: float, note: Callable[[int], None]
) -> list[Hello]:
    """Ask an engine for the hellos of its workers.

    Args:
        client: of its listener.
        ranks: pipeline and tensor rank of each.
        deadline: for all of them, on the monotonic clock.
        note: called with the bytes that are stored of all of them, whenever there are more; it raises if that is too
            much.

    Raises:
        HandshakeError: what comes is no hello, or not signed by the agent whose name it has, or the workers are of
            several engines; what `note` raises.
    """
    hellos: list[Hello] = []
    stored = 0
    for pp_rank, tp_rank in ranks:
        nonce = secrets.token_bytes(NONCE_BYTES)
        client.on_received = lambda received, before=stored: note(before + received)
        answer = client.ask(AskHello(pp_rank, tp_rank, nonce), RankHello, deadline=deadline)
        stored += len(answer.data)
        payload = decode_handshake(answer.data)
        # A hello is no secret. Only its agent signs it for a nonce that was never used, and the name is the key's.
        if not payload.public_key:
            raise HandshakeError(f"the hello of {payload.name!r} has no key")
        if not verify_hello(payload.public_key, nonce, answer.engine_key, answer.data, answer.signature):
            raise HandshakeError(f"the hello of {payload.name!r} was not signed by that agent")
        hellos.append(Hello(answer.data, payload, answer.engine_key))
    client.on_received = None
    if len({hello.engine_key for hello in hellos}) > 1:
        raise HandshakeError("the workers are of several engines: they name different keys")
    return hellos
