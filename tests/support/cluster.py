# SPDX-License-Identifier: Apache-2.0
"""Prefill engines and decode ranks in numbers: real listeners, leases, renewers, handshakes and plans; no bytes move.

Needs neither vLLM nor NIXL. A prefill engine is the part of the connector in its scheduler's process. A decode engine
is the parts in its scheduler's and its workers' processes, without the threads that post and poll: there is nothing
to post.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvhma import Geometry, Span
from kvhma.errors import KvhmaError
from kvhma.models import models
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.nixl import Peer, decode_handshake, encode_handshake, key_hash
from kvhma.vllm.config.identity import encode_extra
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.loads.lease_renewer import LeaseRenewer
from kvhma.vllm.peers.lease_question import LeaseQuestion
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.peers.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.wire.lease_board import OWNER_BYTES, owner_of
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Address, Incarnation, LeaseKey, PrefillParams, random_id
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.identity import IDENTITY

MODEL = "gemma-3-4b"
BLOCKS = 4096
TOKENS = 1000
METADATA = bytes(8000)
"""As many bytes as NIXL's metadata of an agent with UCX."""

EXTRA = encode_extra(IDENTITY, vllm="0.32.0", place=0)
LEASE = 600.0
TIMEOUT = 60.0
"""Longer than a busy machine delays a process."""
SECRET = b"a secret of a simulation, of no use"


def geometries(ranks: int, base: int) -> list[Geometry]:
    """The ranks of an engine."""
    one = models()[MODEL]
    return [
        layout(one, LayoutOptions(num_blocks=BLOCKS, tp_rank=rank, tp_size=ranks, base=base + (rank << 44)))
        for rank in range(ranks)
    ]


def prompt_spans(geometry: Geometry) -> list[Span]:
    """Blocks of a prompt, each in one group."""
    counts = [-(-TOKENS // group.block_size) for group in geometry.groups]
    starts = [1 + sum(counts[:index]) for index in range(len(counts))]
    return [Span(0, list(range(start, start + count))) for start, count in zip(starts, counts, strict=True)]


class PrefillHost:
    """Prefill engines that answer, in this process."""

    def __init__(self, count: int, ranks: int, *, secret: bool = False) -> None:
        self.secrets = Secrets([SECRET] if secret else [])
        self.counted = Counted()
        self._geometries = geometries(ranks, 1 << 30)
        self._ranks = ranks
        self._listeners: list[Listener] = []
        self.leases = [LeaseTable(LEASE) for _ in range(count)]
        self._engines = [self._start(index) for index in range(count)]

    def _start(self, index: int) -> tuple[Address, LocalEngine]:
        address, incarnation = Address("127.0.0.1", free_port()), random_id()
        hellos = {}
        for rank, geometry in enumerate(self._geometries):
            private, public = new_agent_key()
            name = f"p{incarnation:x}-{rank}-{key_hash(public)}"
            hello = encode_handshake(
                METADATA, geometry, name=name, incarnation=incarnation, extra=EXTRA, public_key=public
            )
            hellos[0, rank] = hello, private
        engine = LocalEngine(f"p{incarnation:x}", incarnation, hellos)
        made = Listener(address, engine, leases=self.leases[index], secrets=self.secrets, counters=self.counted)
        self._listeners.append(made)
        return address, engine

    def finish(self, index: int, count: int) -> list[dict[str, object]]:
        """Finish prompts on one engine, as its scheduler does; return their parameters."""
        address, engine = self._engines[index]
        found = []
        spans = prompt_spans(self._geometries[0])
        for _ in range(count):
            remote = PrefillParams(
                address=address,
                engine_id=engine.engine_id,
                incarnation_id=engine.incarnation_id,
                lease_key=LeaseKey(f"cmpl-{random_id():x}", random_id()),
                lease=LEASE,
                num_tokens=TOKENS,
                prompt="0" * 32,
                spans=tuple(spans),
                tp_size=self._ranks,
                pp_size=1,
            )
            params, digest = remote.to_params(self.secrets)
            self.leases[index].hold(remote.lease_key, digest, [block for span in spans for block in span.ids])
            found.append(params)
        return found

    def remote(self, index: int) -> Incarnation:
        """One of the engines, as parameters name it."""
        address, engine = self._engines[index]
        return Incarnation(address, engine.engine_id, engine.incarnation_id, self._ranks)

    def held(self) -> int:
        """Requests that are still held."""
        return sum(len(table) for table in self.leases)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@dataclass
class BoardRead:
    """Stands for a prepared read of a board, which ends at once."""

    peer: Peer
    address: int

    def post(self) -> BoardRead:
        ctypes.memmove(self.address, owner_of(self.peer.payload.public_key), OWNER_BYTES)
        return self

    def wait(self, timeout: float) -> bool:
        return True

    def poll(self) -> str:
        return "done"

    def release(self) -> None:
        pass


class NoTransport:
    """Stands for an agent: every peer that sent its worker identity is connected, and its board is its own."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def connect(self, payload: bytes, *, timeout: float, warm_up: bool) -> Peer:
        remote = decode_handshake(payload)
        known = self._peers.get(remote.name)
        if known is None or known.gone is not None:
            known = self._peers[remote.name] = Peer(remote.name, remote.geometry, remote)
        return known

    def warm_up(self, peer: Peer, timeout: float) -> None:
        pass

    def register(self, geometry: Geometry) -> None:
        pass

    def prepare_read(self, peer: Peer, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> BoardRead:
        return BoardRead(peer, int(local[0, 0]))

    def disconnect(self, peer: Peer, timeout: float) -> None:
        peer.gone = "disconnected"
        self._peers.pop(peer.name, None)


@dataclass
class Took:
    """Durations in seconds of parts of the control path, one for each rank of each hand-off.

    Attributes:
        handshake: with an engine that was not known.
        plan: to find the engine and plan the read.
        question: to ask P whether it held the blocks, and receive its answer.
        path: all of it, without a handshake.
        errors: messages of the hand-offs that failed.
    """

    handshake: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    question: list[float] = field(default_factory=list)
    path: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __iadd__(self, other: Took) -> Took:
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))
        return self


class DecodeEngine:
    """A decode engine: its ranks, and the messages of its scheduler to prefill engines."""

    def __init__(self, ranks: Sequence[Geometry], settings: Settings, secrets: Secrets) -> None:
        self.counted = Counted()
        self.secrets = secrets
        self.ranks = [
            PrefillEngines(
                WorkerContext(settings, secrets, "d", IDENTITY, geometry, NoTransport()),  # type: ignore[arg-type]
                self.counted,
            )
            for geometry in ranks
        ]
        self._spans = prompt_spans(ranks[0])
        self.peers = Peers(settings.handshake_timeout, secrets, self.counted)
        self.renewer = LeaseRenewer(self.peers, self.counted, lambda seconds: True)

    def hand_off(self, params: dict[str, object], *, track: bool) -> Took:
        """Do the control path of a hand-off; with `track`, its lease is renewed meanwhile."""
        took = Took()
        remote = PrefillParams.from_params(params, self.secrets, num_prompt_tokens=TOKENS + 1)
        claim = remote.claim(random_id())
        if track:
            self.renewer.track_claim(remote.address, claim, every=0.5)
        outcome = Outcome.READ
        for rank in self.ranks:
            try:
                self._load(rank, remote, claim, took)
            except (KvhmaError, TimeoutError) as error:
                took.errors.append(f"{type(error).__name__}: {error}")
                outcome = Outcome.UNREAD
        self.renewer.release_claim(remote.address, claim, outcome)
        return took

    def connect(self, rank: int, remote: Incarnation) -> PrefillEngine:
        """Acquire an engine for one rank, after a handshake if it needs one."""
        return connect(self.ranks[rank], remote)

    def _load(self, rank: PrefillEngines, remote: PrefillParams, claim: object, took: Took) -> None:
        began = time.perf_counter()
        engine = rank.acquire_engine(remote.incarnation, lambda error: None)
        if engine is None:
            engine = connect(rank, remote.incarnation)
            took.handshake.append(time.perf_counter() - began)
            began = time.perf_counter()
        try:
            engine.plan.transfer(remote.num_tokens, self._spans, list(remote.spans))
            planned = time.perf_counter()
            ask(engine, claim, remote.incarnation)
            ended = time.perf_counter()
        finally:
            rank.release_engine(engine)
        took.plan.append(planned - began)
        took.question.append(ended - planned)
        took.path.append(ended - began)

    def close(self) -> None:
        self.renewer.close()
        self.peers.close()
        for rank in self.ranks:
            rank.close()


def connect(rank: PrefillEngines, remote: Incarnation) -> PrefillEngine:
    """Wait for handshakes until an engine is known: other loads may evict it again."""
    while True:
        done = threading.Event()
        errors: list[KvhmaError | None] = []
        engine = rank.acquire_engine(remote, lambda error, to=errors, done=done: (to.append(error), done.set())[1])
        if engine is not None:
            return engine
        if not done.wait(6 * TIMEOUT):  # to connect, and four times that for all answers
            raise TimeoutError("a handshake has no end")
        if errors[0] is not None:
            raise errors[0]


def ask(engine: PrefillEngine, claim: object, remote: Incarnation) -> None:
    """Ask P whether it held the blocks, and wait for the answer."""
    question = LeaseQuestion(engine.side_channel, engine.numeric, [claim], TIMEOUT, engine.proving)  # type: ignore[list-item]
    while not question.poll():
        time.sleep(0.0005)
    question.check(0, remote)


class DecodeHost:
    """Decode engines in this process, and threads that give them requests."""

    def __init__(self, count: int, ranks: int, *, secret: bool = False, **settings: object) -> None:
        own = geometries(ranks, 1 << 30)
        read = Settings.read({"handshake_timeout": TIMEOUT, **settings})
        secrets = Secrets([SECRET] if secret else [])
        self.engines = [DecodeEngine(own, read, secrets) for _ in range(count)]

    def run(
        self, work: Sequence[Sequence[dict[str, object]]], *, drivers: int, rate: float | None
    ) -> tuple[Took, float]:
        """Give each engine its requests in order; return the timings, and the seconds of the whole run.

        Args:
            work: parameters for each engine.
            drivers: threads; each has some of the engines.
            rate: hand-offs a second of all of them; None for one after the other.
        """
        results: list[Took] = []
        began = time.monotonic()

        def drive(first: int) -> None:
            took = Took()
            mine = [(engine, params) for engine, some in zip(self.engines, work, strict=True) for params in some]
            mine = mine[first::drivers]
            random.Random(first).shuffle(mine)
            for number, (engine, params) in enumerate(mine):
                if rate is not None:
                    time.sleep(max(0.0, began + number * drivers / rate - time.monotonic()))
                took += engine.hand_off(params, track=number % 4 == 0)
            results.append(took)

        threads = [threading.Thread(target=drive, args=(first,)) for first in range(drivers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        total = Took()
        for took in results:
            total += took
        return total, seconds

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@contextmanager
def cluster(
    prefill: tuple[int, int], decode: tuple[int, int], **settings: object
) -> Iterator[tuple[PrefillHost, DecodeHost]]:
    """Prefill and decode engines, each a number and their ranks, all in this process."""
    p, d = PrefillHost(*prefill), DecodeHost(*decode, **settings)
    try:
        yield p, d
    finally:
        d.close()
        p.close()
