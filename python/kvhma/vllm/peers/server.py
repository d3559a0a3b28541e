# SPDX-License-Identifier: Apache-2.0
"""The listener of an engine, in its scheduler's process: it answers other engines.

No message can stop it, and connections and bytes are bounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import msgspec

from kvhma.errors import HandshakeError
from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.connections import Connections
from kvhma.vllm.peers.sockets import Waker
from kvhma.vllm.threads import SupervisedThread
from kvhma.vllm.wire.messages import (
    PROTOCOL,
    QUESTIONS,
    Answer,
    AskEngineInfo,
    AskWorkerIdentity,
    Done,
    EngineInfo,
    Finish,
    Handler,
    Later,
    Leases,
    LeaseState,
    Outcome,
    Problem,
    Question,
    Refused,
    Release,
    Renew,
    SignedWorkerIdentity,
    read_claim,
    read_question,
)
from kvhma.vllm.wire.params import Address, LeaseClaim
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.proofs import ProofKey, prove, sign_identity
from kvhma.vllm.wire.secrets import Secrets

_BACKLOG = 1024


class LeaseService(Protocol):
    """What a listener asks about leases, from its own thread."""

    def renew(self, claims: list[LeaseClaim]) -> list[LeaseState]:
        """Renew leases; return the state of each."""

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        """Remove readers from requests."""

    def check_and_release(self, claims: list[LeaseClaim], outcomes: list[Outcome]) -> list[LeaseState]:
        """Return the state of each claim, and release the claims whose blocks are held."""

    def contents(self, claims: list[LeaseClaim]) -> list[bytes | None]:
        """Return the content digest of the blocks of each claim; None where it is not computed yet."""


@dataclass(frozen=True)
class LocalEngine:
    """What a listener tells other engines about its engine.

    Attributes:
        engine_id: name of the engine.
        incarnation_id: random number of its incarnation.
        worker_identities: by pipeline and tensor rank, the worker's message of :mod:`kvhma.nixl.handshake` and the
            Ed25519 private key that signs it.
        advertised: the address that other engines should use; None if it is not advertised.
    """

    engine_id: str
    incarnation_id: int
    worker_identities: Mapping[tuple[int, int], tuple[bytes, bytes]] = field(repr=False)
    advertised: Address | None = None


class Listener:
    """Answers other engines.

    It counts connections that it refuses or closes as ``side_channel_refused``, by reason:

    * ``secret``: the peer has another secret, or only one side has a secret.
    * ``message``: a question is too long, or comes before the last answer was taken.
    * ``time``: the peer is too slow.
    * ``room``: too many connections, or too many bytes.
    * ``error``: an error on this side.
    """

    def __init__(
        self,
        address: Address,
        engine: LocalEngine,
        *,
        leases: LeaseService,
        secrets: Secrets,
        counters: Counters,
        handlers: Mapping[type[Question], Handler] = MappingProxyType({}),
    ) -> None:
        """Bind and start to answer.

        Args:
            address: where to bind; a name or a numeric address.
            engine: that it answers for.
            leases: of the requests that P holds for other engines.
            secrets: of this engine. With a secret it answers only peers that have it too.
            counters: of this process.
            handlers: of options, by the kind of their questions.

        Raises:
            HandshakeError: it cannot bind to the address; the text names the address and the setting.
        """
        self._engine = engine
        self._leases = leases
        self._handlers = handlers
        self._kinds: tuple[type[Question], ...] = (*QUESTIONS, *handlers)
        self._secrets = secrets
        self._counters = counters
        self._proof_key = ProofKey()
        self._socket = _bind(address)
        self._progressed: deque[bytes] = deque()
        """Topics that questions wait for."""
        self._waker = Waker()
        self._stopping = False
        self._thread = SupervisedThread("kvhma-listener", self._serve, counters)

    def close(self) -> None:
        """Stop answering."""
        self._stopping = True
        self._waker.wake()
        self._thread.join()
        self._socket.close()
        self._waker.close()

    def begin_incarnation(self, incarnation_id: int) -> None:
        """Answer for a new incarnation of the engine. Any thread may call this."""
        self._engine = dataclasses.replace(self._engine, incarnation_id=incarnation_id)

    def notify_progress(self, topic: bytes) -> None:
        """Answer the questions that wait for a topic. Any thread may call this."""
        self._progressed.append(topic)
        self._waker.wake()

    def _serve(self) -> None:
        made = Connections(self._socket, self._secrets, self._answer_bytes, self._counters)
        with contextlib.closing(made) as connections:
            connections.register(self._waker, self._progressed)
            while not self._stopping:
                connections.serve()

    def _answer_bytes(self, data: memoryview) -> Answer | Later:
        return self._answer_or_problem(lambda: self._answer(read_question(data, self._kinds)))

    def _answer_or_problem(self, answer: Callable[[], Answer | Later]) -> Answer | Later:
        try:
            found = answer()
        except HandshakeError as error:
            return Problem(str(error))
        except BaseException:  # a panic in Rust is no Exception
            self._counters.count("side_channel_refused", label="error")
            logger.exception("kvhma: cannot answer on the side channel")
            return Problem("an error on this side, see its log")
        if not isinstance(found, Later):
            return found
        return found._replace(ask_again=lambda waited: self._answer_or_problem(lambda: found.ask_again(waited)))

    def _answer(self, question: Question) -> Answer | Later:
        engine = self._engine
        match question:
            case AskEngineInfo():
                if question.protocol != PROTOCOL:
                    return Problem(f"protocol is {question.protocol} on your side, {PROTOCOL} on this side")
                ranks = sorted(engine.worker_identities)
                return EngineInfo(PROTOCOL, engine.engine_id, self._incarnation_id, ranks, engine.advertised)
            case AskWorkerIdentity():
                identity = engine.worker_identities.get((question.pp_rank, question.tp_rank))
                if identity is None:
                    rank = f"pipeline {question.pp_rank}, tensor {question.tp_rank}"
                    return Problem(f"no worker of rank {rank}; there are {len(engine.worker_identities)}")
                data, private_key = identity
                engine_key = self._proof_key.public
                return SignedWorkerIdentity(
                    data, engine_key, sign_identity(private_key, question.nonce, engine_key, data)
                )
            case Renew():
                return self._state(question, self._leases.renew([read_claim(claim) for claim in question.claims]))
            case Finish():
                if len(question.outcomes) != len(question.claims):
                    return Problem(f"{len(question.claims)} claims, {len(question.outcomes)} outcomes")
                claims = [read_claim(claim) for claim in question.claims]
                return self._state(question, self._leases.check_and_release(claims, question.outcomes))
            case Release():
                self._leases.release([read_claim(claim) for claim in question.claims], question.outcome)
                return Done()
            case Refused():
                logger.warning(
                    "kvhma: engine %s cannot read the caches of this engine: %s", question.engine_id, question.text
                )
                return Done()
            case _:
                return self._handlers[type(question)](question, 0.0)

    def _state(self, question: Renew | Finish, states: list[LeaseState]) -> Leases:
        contents = None
        if isinstance(question, Renew) and question.contents:
            contents = self._leases.contents([read_claim(claim) for claim in question.claims])
        all_held = all(state is LeaseState.HELD for state in states)
        answer = Leases(states, contents=contents, incarnation_id=None if all_held else self._incarnation_id)
        if question.reader_key is None:
            return answer
        shared = self._proof_key.shared(question.reader_key)
        return msgspec.structs.replace(answer, proof=prove(shared, question.nonce, question.claims, answer))

    @property
    def _incarnation_id(self) -> bytes:
        return self._engine.incarnation_id.to_bytes(8, "big")


def _bind(address: Address) -> socket.socket:
    """Return a socket that listens at an address. For a name it prefers the first IPv4 address."""
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, place = min(places, key=lambda found: found[0] != socket.AF_INET)
        listening = socket.socket(family, kind)
        try:
            # A restarted engine may bind while connections of the last run are in TIME_WAIT.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # at :: it accepts IPv4 too, on every machine
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind(place)
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise HandshakeError(
            f"cannot listen at {address}: {error}; set side_channel_host and side_channel_port"
        ) from error
    return listening
