# SPDX-License-Identifier: Apache-2.0
"""Identities of another engine's workers: D asks for them, bounds their size, and checks their signatures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhma.errors import HandshakeError
from kvhma.nixl import HandshakePayload, decode_handshake
from kvhma.vllm.peers.client import Client
from kvhma.vllm.wire.messages import NONCE_BYTES, AskWorkerIdentity, SignedWorkerIdentity
from kvhma.vllm.wire.proofs import verify_identity


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity of a worker, with a valid signature.

    Attributes:
        data: its message of :mod:`kvhma.nixl.handshake`.
        payload: the decoded message.
        engine_key: public key with which its engine proves answers.
    """

    data: bytes
    payload: HandshakePayload
    engine_key: bytes


def ask_worker_identities(
    client: Client, ranks: Sequence[tuple[int, int]], deadline: float, note: Callable[[int], None]
) -> list[WorkerIdentity]:
    """Ask an engine for the identities of its workers.

    Args:
        client: of its listener.
        ranks: pipeline and tensor rank of each.
        deadline: for all identities, on the monotonic clock.
        note: called with the bytes of all identities received so far, whenever there are more. It raises if they are
            too many.

    Raises:
        HandshakeError: an answer is not a worker identity, or was not signed by the agent that it names; or the workers
            belong to several engines.
        Exception: from `note`.
    """
    identities: list[WorkerIdentity] = []
    stored = 0
    for pp_rank, tp_rank in ranks:
        nonce = secrets.token_bytes(NONCE_BYTES)
        client.on_received = lambda received, before=stored: note(before + received)
        answer = client.ask(AskWorkerIdentity(pp_rank, tp_rank, nonce), SignedWorkerIdentity, deadline=deadline)
        stored += len(answer.data)
        payload = decode_handshake(answer.data)
        # An identity is public. Only its agent can sign it for a new nonce: the agent's name comes from its key.
        if not payload.public_key:
            raise HandshakeError(f"the identity of worker {payload.name!r} has no key")
        if not verify_identity(payload.public_key, nonce, answer.engine_key, answer.data, answer.signature):
            raise HandshakeError(f"the identity of worker {payload.name!r} was not signed by that agent")
        identities.append(WorkerIdentity(answer.data, payload, answer.engine_key))
    client.on_received = None
    if len({identity.engine_key for identity in identities}) > 1:
        raise HandshakeError("the workers are of several engines: they name different keys")
    return identities
