# SPDX-License-Identifier: Apache-2.0
"""The listener of an engine, in its scheduler's process: it answers other engines.

It answers whatever it is sent, if only with :class:`Problem`; nothing that arrives can stop it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec
import zmq

from kvhma.errors import HandshakeError
from kvhma.text import one_line
from kvhma.vllm.wire.messages import (
    MAX_QUESTION_BYTES,
    PROTOCOL,
    Answer,
    AskEngineInfo,
    AskHello,
    Done,
    EngineInfo,
    Leases,
    Outcome,
    Problem,
    Question,
    RankHello,
    Refused,
    Release,
    Renew,
    read_claim,
    read_question,
)
from kvhma.vllm.wire.names import endpoint
from kvhma.vllm.wire.params import Address, LeaseClaim

logger = logging.getLogger("vllm.kvhma")


class LeaseService(Protocol):
    """What a listener asks about leases, from its own thread."""

    def renew(self, claims: list[LeaseClaim]) -> list[float | None]:
        """Extend leases; return when each ends now, None for one that is not held for this reader."""

    def release(self, claims: list[LeaseClaim], outcome: Outcome) -> None:
        """Take readers off requests."""


class Listener:
    """Answers other engines."""

    def __init__(
        self,
        address: Address,
        *,
        engine_id: str,
        incarnation_id: int,
        hellos: Mapping[tuple[int, int], bytes],
        leases: LeaseService,
    ) -> None:
        """Bind and start to answer.

        Args:
            address: where to bind; a name or a numeric address.
            engine_id: what this engine calls itself.
            incarnation_id: random number of this process.
            hellos: messages of :mod:`kvhma.nixl.handshake` of the workers, by pipeline and tensor rank.
            leases: of the requests that are kept for other engines.

        Raises:
            HandshakeError: the address cannot be bound; the text names it and the setting.
        """
        self._hellos = dict(hellos)
        self._engine_id = engine_id
        self._incarnation_id = incarnation_id.to_bytes(8, "big")
        self._leases = leases
        self._stop = threading.Event()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_QUESTION_BYTES),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.RCVHWM, 64),
            (zmq.SNDHWM, 64),
            (zmq.IPV6, int(":" in address.host)),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(endpoint(address))
        except zmq.ZMQError as error:
            self._socket.close()
            raise HandshakeError(
                f"cannot listen at {address}: {error}; set side_channel_host and side_channel_port"
            ) from error
        self._thread = threading.Thread(target=self._run, name="kvhma-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._socket:
            while not self._stop.is_set():
                with contextlib.suppress(zmq.ZMQError):
                    if self._socket.poll(200):
                        self._serve(self._socket.recv_multipart(zmq.NOBLOCK))

    def _serve(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1]:
            return  # no request socket of ours sent this, so none waits for an answer
        try:
            answer = self._answer(read_question(frames[2]))
        except HandshakeError as error:
            answer = Problem(str(error))
        except Exception:
            logger.exception("kvhma: cannot answer on the side channel")
            answer = Problem("an error on this side, see its log")
        # A peer that does not read loses its answers; the socket's high-water mark bounds what waits for it.
        self._socket.send_multipart([frames[0], b"", msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    def _answer(self, question: Question) -> Answer:
        match question:
            case AskEngineInfo():
                if question.protocol != PROTOCOL:
                    return Problem(f"protocol is {question.protocol} on your side, {PROTOCOL} on this side")
                return EngineInfo(PROTOCOL, self._engine_id, self._incarnation_id, sorted(self._hellos))
            case AskHello():
                data = self._hellos.get((question.pp_rank, question.tp_rank))
                if data is None:
                    ranks = f"pipeline {question.pp_rank}, tensor {question.tp_rank}"
                    return Problem(f"no worker of rank {ranks}; there are {len(self._hellos)}")
                return RankHello(data)
            case Renew():
                return Leases(time.monotonic(), self._leases.renew([read_claim(claim) for claim in question.claims]))
            case Release():
                self._leases.release([read_claim(claim) for claim in question.claims], question.outcome)
                return Done()
            case Refused():
                engine_id, text = one_line(question.engine_id), one_line(question.text)
                logger.warning("kvhma: engine %s cannot read our caches: %s", engine_id, text)
                return Done()
