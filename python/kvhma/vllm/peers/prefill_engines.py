# SPDX-License-Identifier: Apache-2.0
"""Prefill engines that a decode worker reads from: one handshake and one plan each, for a bounded number of engines."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvhma._kvhma import Plan
from kvhma.errors import HandshakeError, HandshakeTimeoutError, KvhmaError, TransferError, UnsupportedPairError
from kvhma.nixl import HandshakePayload, Peer
from kvhma.planning import plan as make_plan
from kvhma.vllm.config.identity import check_same_model, decode_extra
from kvhma.vllm.config.net_devices import unreachable
from kvhma.vllm.counters import Counters
from kvhma.vllm.peers.board_reader import BoardMemory, BoardReader
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.lease_question import LeaseQuestion
from kvhma.vllm.peers.names import resolve
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.peers.worker_identity import WorkerIdentity, ask_worker_identities
from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, Done, EngineInfo, Refused
from kvhma.vllm.wire.params import Address, Incarnation, leads_back, not_the_engine
from kvhma.vllm.wire.proofs import Proving

logger = logging.getLogger("vllm.kvhma")

_FAILURE_SECONDS = 1.0
"""How long a permanent error of a handshake is returned again for the same engine, without a new handshake."""

_MAX_AT_ADDRESS = 4
"""Most handshakes that run with one address. Untrusted parameters may claim any number of engines there."""

_MAX_IDENTITIES_BYTES = 256 << 20
"""Most bytes of worker identities in all running handshakes; the same limit holds for all known engines."""


@dataclass(eq=False)
class PrefillEngine:
    """A prefill engine whose handshake is done.

    Attributes:
        address: where its scheduler listens.
        incarnation_id: random number of its incarnation.
        plan: what this worker reads from its ranks.
        peers: its workers, in the order of the plan's sources; None where nothing is read.
        side_channel: asks its scheduler.
        numeric: where its scheduler listens, without a name.
        proving: keys for checking its proofs; None with a secret, because TLS authenticates its answers then.
        boards: lease boards of the workers that are read from; empty if D has to ask instead.
        identity_bytes: of its worker identities, which are mostly stored with the peers.
        active_loads: loads that have acquired it and not released it yet.
        used_at: when it was last acquired or released, on the monotonic clock.
        question: the last question about its leases; None before the first.
    """

    address: Address
    incarnation_id: int
    plan: Plan
    peers: list[Peer | None]
    side_channel: Peers
    numeric: Address
    proving: Proving | None
    boards: tuple[BoardReader, ...]
    identity_bytes: int
    active_loads: int = 0
    used_at: float = field(default_factory=time.monotonic)
    question: LeaseQuestion | None = None

    @property
    def gone(self) -> str | None:
        """Why it cannot be read from any more; None if it can be read."""
        return next((peer.gone for peer in self.peers if peer is not None and peer.gone), None)


class PrefillEngines:
    """Prefill engines by address. Safe to use from several threads; one handshake at a time with each incarnation.

    Engines of the setting ``prefill_engines`` always have room. Beside them there is room for ``max_peers`` others.

    Attributes:
        side_channel: asks their schedulers.
    """

    def __init__(self, context: WorkerContext, counters: Counters) -> None:
        """Start without engines."""
        self._context = context
        self._settings = context.settings
        self._agent = context.agent
        self._boards = BoardMemory(context.agent)
        self._counters = counters
        sources = self._settings.sources(has_secret=context.secrets.enabled)
        self.side_channel = Peers(self._settings.handshake_timeout, context.secrets, counters, sources)
        self._lock = threading.Lock()
        self._engines: OrderedDict[Address, PrefillEngine] = OrderedDict()
        """Known engines, the least recently used first."""
        # The key is all that parameters say of an engine: wrong parameters must not fail requests with right ones.
        self._waiting: dict[Incarnation, list[Callable[[KvhmaError | None], None]]] = {}
        """The callbacks that wait for each running handshake."""
        self._received: dict[Incarnation, int] = {}
        """Bytes of worker identities that each running handshake has received so far."""
        self._failed: dict[Incarnation, tuple[float, KvhmaError]] = {}

    def acquire_engine(
        self, remote: Incarnation, after_handshake: Callable[[KvhmaError | None], None]
    ) -> PrefillEngine | None:
        """Return a known engine, to be released with :meth:`release_engine`; None if a handshake has begun.

        Args:
            remote: the engine that a request's parameters name.
            after_handshake: if no engine was returned, another thread calls it after the handshake, with the error or
                with None. Then acquire again.

        Raises:
            HandshakeError: a moment ago it was another engine than in the parameters, or of another protocol version.
            HandshakeTimeoutError: there is no room for it now, because D reads from `max_peers` other engines or has
                handshakes with them.
            UnsupportedPairError: its caches cannot be read into ours, or are of another model. It was notified.
            TransferError: the connection failed.
        """
        with self._lock:
            engine = self._find(remote)
            if engine is not None:
                self._note_acquired(engine)
                return engine
            failed_at, error = self._failed.get(remote, (0.0, None))
            if error is not None and time.monotonic() - failed_at < _FAILURE_SECONDS:
                raise error.with_traceback(None)
            waiting = self._waiting.get(remote)
            if waiting is not None:
                waiting.append(after_handshake)
                return None
            self._check_room(remote.address)
            self._waiting[remote] = [after_handshake]
        self._begin_handshake(remote)
        return None

    def _note_acquired(self, engine: PrefillEngine) -> None:
        """Note a load from an engine; the caller holds the lock."""
        self._engines.move_to_end(engine.address)
        engine.active_loads += 1
        engine.used_at = time.monotonic()

    def release_engine(self, engine: PrefillEngine) -> None:
        """Note that a load has ended. An engine without active loads can be evicted."""
        with self._lock:
            engine.active_loads -= 1
            engine.used_at = time.monotonic()
            unusable = engine.gone is not None and not engine.active_loads
            if not unusable or self._engines.get(engine.address) is not engine:
                return
            del self._engines[engine.address]
        self._begin_disconnect(engine)

    def unused_engines(self, since: float) -> list[PrefillEngine]:
        """Return the engines that no load has acquired or released since a time on the monotonic clock."""
        with self._lock:
            engines = self._engines.values()
            return [engine for engine in engines if not engine.active_loads and engine.used_at < since]

    def evict_engine(self, engine: PrefillEngine, since: float) -> bool:
        """Evict an engine and disconnect, if it is still in :meth:`unused_engines`; return whether it was evicted."""
        with self._lock:
            known = self._engines.get(engine.address) is engine
            if not known or engine.active_loads or engine.used_at >= since:
                return False
            del self._engines[engine.address]
        self._begin_disconnect(engine)
        return True

    def preconnect(
        self, address: Address, info: EngineInfo, after_handshake: Callable[[KvhmaError | None], None]
    ) -> None:
        """Begin the handshake with an unknown engine before its first request.

        Args:
            address: where its scheduler listens.
            info: its answer to `AskEngineInfo`.
            after_handshake: as for :meth:`acquire_engine`.

        Raises:
            KvhmaError: as for :meth:`acquire_engine`.
        """
        remote = Incarnation(address, info.engine_id, int.from_bytes(info.incarnation_id, "big"), *_sizes(info))
        engine = self.acquire_engine(remote, after_handshake)
        if engine is not None:
            self.release_engine(engine)

    def close(self) -> None:
        """Close all side channels, but not the agent, which owns the connections."""
        with self._lock:
            self._engines.clear()
        self.side_channel.close()

    # --- known engines; with the lock held -----------------------------------------------------------------

    def _find(self, remote: Incarnation) -> PrefillEngine | None:
        # A request may name a known engine by another of its addresses. Any peer can claim to be an incarnation, so
        # this is trusted only of the operator's addresses.
        preconnected = (self._engines.get(address) for address in self._settings.prefill_engines)
        for engine in (self._engines.get(remote.address), *preconnected):
            if engine is not None and engine.incarnation_id == remote.incarnation_id and engine.gone is None:
                return engine
        return None

    def _unnamed_engines(self) -> list[PrefillEngine]:
        """Return the known engines that the operator did not name, the least recently used first."""
        named = self._settings.prefill_engines
        return [engine for engine in self._engines.values() if engine.address not in named]

    def _check_room(self, address: Address) -> None:
        """Refuse a handshake while there is no room for the engine. The operator's engines always have room."""
        max_peers = self._settings.max_peers
        if sum(remote.address == address for remote in self._waiting) >= _MAX_AT_ADDRESS:
            self._counters.count("refused_engines")
            raise HandshakeTimeoutError(f"no room for {address}: {_MAX_AT_ADDRESS} handshakes with it are under way")
        if address in self._settings.prefill_engines:
            return
        loading = sum(engine.active_loads > 0 for engine in self._unnamed_engines())
        waiting = sum(remote.address not in self._settings.prefill_engines for remote in self._waiting)
        if loading + waiting >= max_peers:
            self._counters.count("refused_engines")
            raise HandshakeTimeoutError(
                f"no room for {address}: max_peers is {max_peers}, and {loading} other engines are being read from and "
                f"{waiting} are in a handshake"
            )

    def _add_engine(self, engine: PrefillEngine, dropped: list[PrefillEngine]) -> None:
        """Add an engine; evict an older engine at its address, and idle engines until there is room.

        Raises:
            HandshakeTimeoutError: its worker identities are too large beside those of the engines being read from.
        """
        if (replaced := self._engines.pop(engine.address, None)) is not None:
            dropped.append(replaced)
        is_other = engine.address not in self._settings.prefill_engines
        idle = [known for known in self._unnamed_engines() if not known.active_loads]
        while idle and (
            len(self._unnamed_engines()) + is_other > self._settings.max_peers
            or self._identity_bytes(engine) > _MAX_IDENTITIES_BYTES
        ):
            # At random among the older half. With one engine more than there is room for, used in turns, strict LRU
            # would always evict the engine that is needed next.
            old = idle.pop(random.randrange((len(idle) + 1) // 2))  # noqa: S311
            dropped.append(self._engines.pop(old.address))
        if self._identity_bytes(engine) > _MAX_IDENTITIES_BYTES:
            self._counters.count("refused_engines")
            dropped.append(engine)
            raise _too_large(engine.identity_bytes)
        self._engines[engine.address] = engine

    def _identity_bytes(self, engine: PrefillEngine) -> int:
        """Return the bytes of worker identities of an engine and of all known engines."""
        return engine.identity_bytes + sum(known.identity_bytes for known in self._engines.values())

    # --- handshakes ----------------------------------------------------------------------------------------

    def _begin_handshake(self, remote: Incarnation) -> None:
        # A thread for each engine: an engine that does not answer must not delay others.
        try:
            in_thread("kvhma-handshake", lambda: self._handshake(remote))
        except RuntimeError as error:
            with self._lock:
                _, *callbacks = self._waiting.pop(remote)
            failure = HandshakeTimeoutError(f"no handshake with {remote.address}: {error}")
            for after_handshake in callbacks:
                after_handshake(failure)
            raise failure from error

    def _handshake(self, remote: Incarnation) -> None:
        started = time.monotonic()
        dropped: list[PrefillEngine] = []
        failure: KvhmaError | None = None
        try:
            engine = self._connect(remote)
            with self._lock:
                self._add_engine(engine, dropped)
        except KvhmaError as error:
            failure = error
        except BaseException as error:  # a panic in Rust is no Exception, and loads wait for this thread
            logger.exception("kvhma: internal error during the handshake with %s", remote.address)
            failure = HandshakeError(f"internal error during the handshake: {type(error).__name__}: {error}")
        if failure is None:
            self._counters.count("handshakes")
            self._counters.record(handshake_seconds=time.monotonic() - started)
        with self._lock:
            if failure is not None:
                self._note_failure(remote, failure)
            waiting = self._waiting.pop(remote)
        for after_handshake in waiting:
            try:
                after_handshake(failure)
            except BaseException:  # call the other callbacks as well
                logger.exception("kvhma: internal error after the handshake with %s", remote.address)
        for old in dropped:
            self._disconnect(old)

    def _note_failure(self, remote: Incarnation, failure: KvhmaError) -> None:
        """Store a permanent error for a moment; after a transient one a retry may follow at once. The lock is held."""
        now = time.monotonic()
        self._failed = {key: failed for key, failed in self._failed.items() if now - failed[0] < _FAILURE_SECONDS}
        if not isinstance(failure, (HandshakeTimeoutError, TransferError)):
            # The frames of its traceback would hold the engine's answers in memory.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
            self._failed[remote] = (now, failure)

    def _connect(self, remote: Incarnation) -> PrefillEngine:
        self._context.device.choose()
        timeout = self._settings.handshake_timeout
        numeric = resolve(remote.address, timeout)
        self.side_channel.check_host(remote.address, numeric)
        peers: list[Peer | None] = []
        self.side_channel.idle.close_clients(numeric)
        client = Client(numeric, timeout, self._context.secrets)
        try:
            plan, identities = self._agree(remote, client)
            for index, identity in enumerate(identities):
                read = index in plan.sources
                peers.append(self._agent.connect(identity.data, timeout=timeout, warm_up=False) if read else None)
            boards = self._boards_of(peers)
        except BaseException as error:
            client.close()
            self._disconnect_peers(peers)
            if isinstance(error, TransferError) and (why := unreachable(numeric)):
                raise TransferError(f"{error}; {why}") from error
            raise
        finally:
            with self._lock:
                self._received.pop(remote, None)
        self.side_channel.idle.release_client(numeric, client)
        proving = None if self._context.secrets.enabled else self._proving(identities[0].engine_key)
        stored = sum(len(identity.data) for identity in identities)
        return PrefillEngine(
            remote.address, remote.incarnation_id, plan, peers, self.side_channel, numeric, proving, boards, stored
        )

    def _boards_of(self, peers: list[Peer | None]) -> tuple[BoardReader, ...]:
        """Check whose memory each peer is; return readers of their boards, or of none if P does not write to all.

        The checks are the first reads of the peers: metadata that an attacker edited may name memory that a worker does
        not have.

        All boards of an engine have the same marks. But an attacker may replay the identity of another engine's worker
        beside its own worker, whose board it can forge. So a board only verifies its own worker's memory.

        Raises:
            HandshakeError: the memory of a worker is not that of the key which signed its identity.
            TransferError: a worker could not be read from now.
        """
        timeout, with_secret = self._settings.handshake_timeout, self._context.secrets.enabled
        # As for the answers: the engine decides its number of ranks, so the deadline is for all of them together.
        deadline = time.monotonic() + self._settings.replies_timeout

        def left() -> float:
            return max(0.0, min(timeout, deadline - time.monotonic()))

        with ExitStack() as opened:
            boards: list[BoardReader | None] = []
            for peer in filter(None, peers):
                board = self._boards.checked_reader(peer, left(), with_secret=with_secret)
                if board is not None:
                    opened.callback(board.close)
                boards.append(board)
            for peer in filter(None, peers):
                self._agent.warm_up(peer, left())
            useful = tuple(board for board in boards if board is not None and board.useful)
            if len(useful) < len(boards):
                return ()
            opened.pop_all()
            return useful

    def _proving(self, engine_key: bytes) -> Proving:
        own = self._context.proof_key
        return Proving(own.public, own.shared(engine_key))

    def _agree(self, remote: Incarnation, client: Client) -> tuple[Plan, list[WorkerIdentity]]:
        """Ask an engine for its worker identities and plan the reads."""
        # The engine decides its number of ranks, so the deadline is for all of them together.
        deadline = time.monotonic() + self._settings.replies_timeout
        info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        if info.engine_id == self._context.engine_id != remote.engine_id:
            raise HandshakeError(leads_back(remote.address, remote.engine_id))
        _check_info(remote, info)
        identities = ask_worker_identities(client, info.ranks, deadline, partial(self._note_received, remote))
        try:
            plan = self._plan([identity.payload for identity in identities])
        except UnsupportedPairError as error:
            client.ask(Refused(self._context.engine_id, str(error)[:4000]), Done)
            raise
        for _, finding in plan.findings:
            logger.info("kvhma: reading from %s: %s", remote.engine_id, finding.text)
        return plan, identities

    def _note_received(self, remote: Incarnation, nbytes: int) -> None:
        """Note the bytes of worker identities that a handshake has received so far.

        Raises:
            HandshakeTimeoutError: those of all running handshakes are too large.
        """
        with self._lock:
            self._received[remote] = nbytes
            if sum(self._received.values()) > _MAX_IDENTITIES_BYTES:
                raise _too_large(nbytes)

    def _plan(self, payloads: list[HandshakePayload]) -> Plan:
        models = [decode_extra(payload.extra).model for payload in payloads]
        for model in models:
            check_same_model(self._context.identity, model)
        return make_plan(self._context.geometry, [payload.geometry for payload in payloads])

    def _begin_disconnect(self, engine: PrefillEngine) -> None:
        """Disconnect in another thread: disconnecting waits for reads of boards in flight."""
        try:
            done = in_thread("kvhma-handshake", self._context.device.chosen(lambda: self._disconnect(engine)))
        except RuntimeError:  # there can be no more threads
            self._disconnect(engine)
        else:
            done.add_done_callback(_log_failure)

    def _disconnect(self, engine: PrefillEngine) -> None:
        with self._lock:
            used = any(known.numeric == engine.numeric for known in self._engines.values())
        if not used:
            self.side_channel.idle.close_clients(engine.numeric)
        for board in engine.boards:
            board.close()
        self._disconnect_peers(engine.peers)
        for board in engine.boards:
            board.close()  # a read in flight has ended by now

    def _disconnect_peers(self, peers: list[Peer | None]) -> None:
        """Disconnect from workers, except those that another known engine also has.

        An engine may be known by two addresses, or be known again after D lost only some of its ranks.
        """
        for peer in peers:
            if peer is None:
                continue
            with self._lock:
                used = any(peer in engine.peers for engine in self._engines.values())
            if used:
                continue
            try:
                self._agent.disconnect(peer, self._settings.handshake_timeout)
            except KvhmaError as error:
                # Its transfers are still in flight, so the peer stays unusable until the agent is closed.
                logger.warning("kvhma: %s", error)


def _too_large(nbytes: int) -> HandshakeTimeoutError:
    return HandshakeTimeoutError(
        f"worker identities of {nbytes} bytes: with other engines' they would be more than {_MAX_IDENTITIES_BYTES}"
    )


def _log_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        logger.error("kvhma: internal error while an engine was disconnected", exc_info=error)


def _sizes(info: EngineInfo) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks and of pipeline stages of an engine."""
    return len({tp_rank for _, tp_rank in info.ranks}), len({pp_rank for pp_rank, _ in info.ranks})


def _check_info(remote: Incarnation, info: EngineInfo) -> None:
    """Check that an engine is the engine of a request's parameters, and that it has all its workers.

    Layers of a missing stage would look like layers that P does not have.
    """
    tp_size, pp_size = _sizes(info)
    for field_name, expected, found in (
        ("remote_engine_id", remote.engine_id, info.engine_id),
        ("kvhma.instance", f"{remote.incarnation_id:016x}", info.incarnation_id.hex()),
        ("tp_size", remote.tp_size or tp_size, tp_size),
        ("pp_size", remote.pp_size or pp_size, pp_size),
    ):
        if expected != found:
            raise HandshakeError(not_the_engine(field_name, expected, found, remote.address))
    if len(set(info.ranks)) != tp_size * pp_size:
        raise HandshakeError(
            f"{remote.address} has {len(info.ranks)} workers, expected {tp_size} x {pp_size} (tp_size x pp_size)"
        )
