# SPDX-License-Identifier: Apache-2.0
"""Prefill engines that a decode worker reads from: one handshake and one plan each, kept within a bound."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhma._kvhma import Plan
from kvhma.errors import HandshakeError, HandshakeTimeoutError, KvhmaError, TransferError, UnsupportedPairError
from kvhma.nixl import HandshakePayload, Peer
from kvhma.planning import plan as make_plan
from kvhma.vllm.counters import Counters
from kvhma.vllm.devices import unreachable
from kvhma.vllm.identity import check_same_model, decode_extra
from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.client import Client, ClientPool
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, Done, EngineInfo, Refused
from kvhma.vllm.wire.names import resolve
from kvhma.vllm.wire.params import Address, Incarnation, leads_back
from kvhma.vllm.wire.proofs import Proving
from kvhma.vllm.worker.board_reader import BoardMemory, BoardReader
from kvhma.vllm.worker.context import WorkerContext
from kvhma.vllm.worker.hellos import Hello, HelloBudget, ask_hellos

logger = logging.getLogger("vllm.kvhma")

_FAILURE_SECONDS = 1.0
"""How long a handshake that failed for a lasting reason stands for the next ones with the same engine."""

_HANDSHAKE_TIMEOUTS = 4
"""Timeouts of one answer that all answers of a handshake may take together."""

_MAX_AT_ADDRESS = 4
"""Handshakes under way with one address: whoever writes parameters may have it be any number of engines."""

_MAX_HELLOS_BYTES = 256 << 20
"""Bytes of the hellos of all handshakes under way, and as many of all known engines."""


@dataclass(eq=False)
class PrefillEngine:
    """A prefill engine whose handshake is done.

    Attributes:
        address: where its scheduler listens.
        incarnation_id: random number of its incarnation.
        plan: what we read from its ranks.
        peers: its workers, in the order of the plan's sources; None where nothing is read.
        clients: of its side channel.
        proving: how its answers are proved; None where a secret does that.
        boards: where its workers show what they hold, of each that is read from; empty if it has to be asked.
        hello_bytes: of its workers' hellos, most of which are kept with the peers.
        active_loads: loads that have acquired it and not released it yet.
        used_at: when it was last acquired or released, on the monotonic clock.
    """

    address: Address
    incarnation_id: int
    plan: Plan
    peers: list[Peer | None]
    clients: ClientPool
    proving: Proving | None
    boards: tuple[BoardReader, ...]
    hello_bytes: int
    active_loads: int = 0
    used_at: float = field(default_factory=time.monotonic)

    @property
    def gone(self) -> str | None:
        """Why it cannot be read from any more; None if it can."""
        return next((peer.gone for peer in self.peers if peer is not None and peer.gone), None)


class PrefillEngines:
    """Prefill engines by address. Safe to use from several threads; one handshake at a time with each incarnation.

    Those of the setting ``prefill_engines`` always have room; beside them there is room for ``max_peers`` others.
    """

    def __init__(self, context: WorkerContext, counters: Counters) -> None:
        """Start empty."""
        self._context = context
        self._settings = context.settings
        self._agent = context.agent
        self._boards = BoardMemory(context.agent)
        self._counters = counters
        room = self._settings.max_peers + len(self._settings.prefill_engines)
        self._budget = HelloBudget(_MAX_HELLOS_BYTES, room)
        self._kept = HelloBudget(_MAX_HELLOS_BYTES, room)
        self._lock = threading.Lock()
        self._engines: OrderedDict[Address, PrefillEngine] = OrderedDict()
        """Known engines, the one that was not used for longest first."""
        # By all that parameters say of an engine: one that says something wrong of it must not fail those that do not.
        self._waiting: dict[Incarnation, list[Callable[[KvhmaError | None], None]]] = {}
        """Who waits for each handshake that is under way."""
        self._failed: dict[Incarnation, tuple[float, KvhmaError]] = {}

    def acquire(
        self, remote: Incarnation, after_handshake: Callable[[KvhmaError | None], None]
    ) -> PrefillEngine | None:
        """Return a known engine, to be released with :meth:`release`; None if a handshake with it was begun.

        Args:
            remote: the engine that a request's parameters name.
            after_handshake: if None is returned, called from another thread after the handshake, with its error or with
                None. Acquire again then.

        Raises:
            HandshakeError: it was, a moment ago, another engine than the parameters say, or spoke another version.
            HandshakeTimeoutError: there is no room for it now: loads from, or handshakes with, `max_peers` others are
                under way.
            UnsupportedPairError: its caches cannot be read into ours, or are of another model; it has been told so.
            TransferError: it could not be connected to.
        """
        with self._lock:
            engine = self._find(remote)
            if engine is not None:
                self._take(engine)
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

    def acquire_known(self, remote: Incarnation) -> PrefillEngine | None:
        """Return a known engine as :meth:`acquire` does; None if there is none, and nothing is begun."""
        with self._lock:
            engine = self._find(remote)
            if engine is not None:
                self._take(engine)
            return engine

    def _take(self, engine: PrefillEngine) -> None:
        """Take note of a load from an engine; the lock is held."""
        self._engines.move_to_end(engine.address)
        engine.active_loads += 1
        engine.used_at = time.monotonic()

    def release(self, engine: PrefillEngine) -> None:
        """Say that a load has ended. An engine without active loads can be forgotten."""
        with self._lock:
            engine.active_loads -= 1
            engine.used_at = time.monotonic()
            unusable = engine.gone is not None and not engine.active_loads
            if not unusable or self._engines.get(engine.address) is not engine:
                return
            self._forget(engine)
        if any(board.in_flight for board in engine.boards):  # which is waited for
            with contextlib.suppress(RuntimeError):  # there can be no more threads
                in_thread("kvhma-disconnect", self._context.device.chosen(lambda: self._disconnect(engine)))
                return
        self._disconnect(engine)

    def unused(self, since: float) -> list[PrefillEngine]:
        """Return the engines that no load has acquired or released since a time on the monotonic clock."""
        with self._lock:
            return [one for one in self._engines.values() if not one.active_loads and one.used_at < since]

    def drop(self, engine: PrefillEngine, since: float) -> bool:
        """Forget an engine and disconnect from it, if it is known and :meth:`unused` still; return whether."""
        with self._lock:
            known = self._engines.get(engine.address) is engine
            if not known or engine.active_loads or engine.used_at >= since:
                return False
            self._forget(engine)
        self._disconnect(engine)
        return True

    def preconnect(self, address: Address, after_handshake: Callable[[KvhmaError | None], None]) -> None:
        """Shake hands with an engine before a request comes from it, unless it is known. Waits for its first answer.

        Args:
            address: where its scheduler listens.
            after_handshake: as for :meth:`acquire`.

        Raises:
            HandshakeError: it does not answer, or failed a moment ago; others as for :meth:`acquire`.
        """
        timeout = self._settings.handshake_timeout
        with Client(resolve(address, timeout), timeout, self._context.secrets) as client:
            info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        remote = Incarnation(address, info.engine_id, int.from_bytes(info.incarnation_id, "big"), *_sizes(info))
        engine = self.acquire(remote, after_handshake)
        if engine is not None:
            self.release(engine)

    def close(self) -> None:
        """Close all side channels. The connections are the agent's, which is not closed."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            engine.clients.close()

    # --- known engines; with the lock held -----------------------------------------------------------------

    def _find(self, remote: Incarnation) -> PrefillEngine | None:
        # A request may name a known engine by another of its addresses. Anybody can claim to be an incarnation, so only
        # the addresses that the operator gave stand for others.
        preconnected = (self._engines.get(address) for address in self._settings.prefill_engines)
        for engine in (self._engines.get(remote.address), *preconnected):
            if engine is not None and engine.incarnation_id == remote.incarnation_id and engine.gone is None:
                return engine
        return None

    def _others(self) -> list[PrefillEngine]:
        """Return the known engines that the operator did not name, the one that was not used for longest first."""
        return [one for one in self._engines.values() if one.address not in self._settings.prefill_engines]

    def _check_room(self, address: Address) -> None:
        """Refuse a handshake for which nothing could go: strangers do not take the room of the operator's engines."""
        most = self._settings.max_peers
        if sum(one.address == address for one in self._waiting) >= _MAX_AT_ADDRESS:
            self._counters.count("refused_engines")
            raise HandshakeTimeoutError(f"no room for {address}: {_MAX_AT_ADDRESS} handshakes with it are under way")
        if address in self._settings.prefill_engines:
            return
        loading = sum(one.active_loads > 0 for one in self._others())
        waiting = sum(one.address not in self._settings.prefill_engines for one in self._waiting)
        if loading + waiting >= most:
            self._counters.count("refused_engines")
            raise HandshakeTimeoutError(
                f"no room for {address}: max_peers is {most}, and {loading} other engines are being read from and "
                f"{waiting} shaken hands with"
            )

    def _forget(self, engine: PrefillEngine) -> PrefillEngine:
        self._kept.note(engine, 0)
        return self._engines.pop(engine.address)

    def _add(self, engine: PrefillEngine, dropped: list[PrefillEngine]) -> None:
        """Know an engine; drop what was known at its address, and idle ones that leave no room for it.

        Raises:
            HandshakeTimeoutError: its hellos are too much beside those of the engines that are being read from.
        """
        if (replaced := self._engines.get(engine.address)) is not None:
            dropped.append(self._forget(replaced))
        others = self._others()
        idle = [one for one in others if not one.active_loads]
        is_other = engine.address not in self._settings.prefill_engines
        for _ in range(len(others) + is_other - self._settings.max_peers):
            if not idle:
                break
            # By chance: in turns among one more than there is room for, the one that was not used for longest is next.
            old = idle.pop(random.randrange((len(idle) + 1) // 2))  # noqa: S311
            dropped.append(self._forget(old))
        while True:
            try:
                self._kept.note(engine, engine.hello_bytes)
                break
            except HandshakeTimeoutError:
                if not idle:
                    self._counters.count("refused_engines")
                    dropped.append(engine)
                    raise
            largest = max(idle, key=lambda one: one.hello_bytes)
            idle.remove(largest)
            dropped.append(self._forget(largest))
        self._engines[engine.address] = engine

    # --- handshakes ----------------------------------------------------------------------------------------

    def _begin_handshake(self, remote: Incarnation) -> None:
        # A thread for each engine: one that does not answer must not keep others waiting.
        try:
            in_thread("kvhma-handshake", lambda: self._handshake(remote))
        except RuntimeError as error:
            with self._lock:
                _, *others = self._waiting.pop(remote)
            failure = HandshakeTimeoutError(f"no handshake with {remote.address}: {error}")
            for after_handshake in others:
                after_handshake(failure)
            raise failure from error

    def _handshake(self, remote: Incarnation) -> None:
        started = time.monotonic()
        dropped: list[PrefillEngine] = []
        failure: KvhmaError | None = None
        try:
            engine = self._connect(remote)
            with self._lock:
                self._add(engine, dropped)
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
            except BaseException:  # the others wait as well
                logger.exception("kvhma: internal error after the handshake with %s", remote.address)
        for old in dropped:
            self._disconnect(old)

    def _note_failure(self, remote: Incarnation, failure: KvhmaError) -> None:
        """Let a lasting failure stand for a moment; one that may pass is tried again at once. The lock is held."""
        now = time.monotonic()
        self._failed = {of: one for of, one in self._failed.items() if now - one[0] < _FAILURE_SECONDS}
        if not isinstance(failure, (HandshakeTimeoutError, TransferError)):
            # The frames of its traceback hold all that the engine said.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
            self._failed[remote] = (now, failure)

    def _connect(self, remote: Incarnation) -> PrefillEngine:
        self._context.device.choose()
        timeout = self._settings.handshake_timeout
        numeric = resolve(remote.address, timeout)
        clients = ClientPool(numeric, timeout, self._context.secrets)
        peers: list[Peer | None] = []
        client = clients.take()
        try:
            plan, hellos = self._agree(remote, client)
            for index, hello in enumerate(hellos):
                peers.append(self._agent.connect(hello.data, timeout=timeout) if index in plan.sources else None)
            boards = self._boards_of(peers)
        except BaseException as error:
            client.close()
            self._disconnect_peers(peers)
            if isinstance(error, TransferError) and (why := unreachable(numeric)):
                raise TransferError(f"{error}; {why}") from error
            raise
        finally:
            self._budget.note(remote, 0)
        clients.release(client)
        proving = None if self._context.secrets.enabled else self._proving(hellos[0].engine_key)
        stored = sum(len(hello.data) for hello in hellos)
        return PrefillEngine(remote.address, remote.incarnation_id, plan, peers, clients, proving, boards, stored)

    def _boards_of(self, peers: list[Peer | None]) -> tuple[BoardReader, ...]:
        """Return readers of the boards of all workers that are read from; none if one of these has none.

        All boards of an engine show the same. But a stranger may repeat the hello of another engine's worker beside
        that of its own, whose board it writes as it likes: what a board shows is true of the memory beside it only.
        """
        boards: list[BoardReader] = []
        for peer in peers:
            if peer is None:
                continue
            if (board := self._board_of(peer)) is None:
                for one in boards:
                    one.close()
                return ()
            boards.append(board)
        return tuple(boards)

    def _board_of(self, peer: Peer) -> BoardReader | None:
        """Return a reader of a worker's board, which has read it once: what that takes is set up then."""
        address = decode_extra(peer.payload.extra).board
        if not address:
            return None
        try:
            board = self._boards.reader(peer, address)
        except KvhmaError as error:
            logger.info("kvhma: %r is asked for its leases: %s", peer.name, error)
            return None
        board.look(time.monotonic())
        if board.useful:
            return board
        board.close()
        return None

    def _proving(self, engine_key: bytes) -> Proving:
        own = self._context.proof_key
        return Proving(own.public, own.shared(engine_key))

    def _agree(self, remote: Incarnation, client: Client) -> tuple[Plan, list[Hello]]:
        """Ask an engine for its workers' hellos and plan what we read."""
        # An engine has as many ranks as it says: all of them together may take no longer than this.
        deadline = time.monotonic() + _HANDSHAKE_TIMEOUTS * self._settings.handshake_timeout
        info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        if info.engine_id == self._context.engine_id != remote.engine_id:
            raise HandshakeError(leads_back(remote.address, remote.engine_id))
        _check_info(remote, info)
        hellos = ask_hellos(client, info.ranks, deadline, lambda stored: self._budget.note(remote, stored))
        try:
            plan = self._plan([hello.payload for hello in hellos])
        except UnsupportedPairError as error:
            client.ask(Refused(self._context.engine_id, str(error)[:4000]), Done)
            raise
        for _, finding in plan.findings:
            logger.info("kvhma: reading from %s: %s", remote.engine_id, finding.text)
        return plan, hellos

    def _plan(self, hellos: list[HandshakePayload]) -> Plan:
        models = [decode_extra(hello.extra).model for hello in hellos]
        for model in models:
            check_same_model(self._context.identity, model)
        return make_plan(
            self._context.geometry,
            [hello.geometry for hello in hellos],
            descriptor_bytes=self._settings.descriptor_bytes,
            max_descriptors=self._settings.max_descriptors,
        )

    def _disconnect(self, engine: PrefillEngine) -> None:
        engine.clients.close()
        for board in engine.boards:
            board.close()
        self._disconnect_peers(engine.peers)
        for board in engine.boards:
            board.close()  # a reading that was in flight has ended by now

    def _disconnect_peers(self, peers: list[Peer | None]) -> None:
        """Disconnect from workers that are no other known engine's too.

        An engine may be known by two addresses, or again after only some of its ranks were lost.
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
                # Its transfers are still in flight; it stays unusable until the agent is closed.
                logger.warning("kvhma: %s", error)


def _sizes(info: EngineInfo) -> tuple[int, int]:
    """Return how many tensor-parallel ranks and pipeline stages an engine has."""
    return len({tp_rank for _, tp_rank in info.ranks}), len({pp_rank for pp_rank, _ in info.ranks})


def _check_info(remote: Incarnation, info: EngineInfo) -> None:
    """Check that an engine is the one that the parameters of a request name, and that none of its workers is missing.

    The layers of a stage that has not said hello would be taken for layers that P does not have.
    """
    tp_size, pp_size = _sizes(info)
    for field_name, expected, found in (
        ("remote_engine_id", remote.engine_id, info.engine_id),
        ("kvhma.instance", f"{remote.incarnation_id:016x}", info.incarnation_id.hex()),
        ("tp_size", remote.tp_size or tp_size, tp_size),
        ("pp_size", remote.pp_size or pp_size, pp_size),
    ):
        if expected != found:
            raise HandshakeError(
                f"{field_name} is {expected!r} in kv_transfer_params, {found!r} at {remote.address}: "
                "the blocks are gone, or were never there"
            )
    if len(set(info.ranks)) != tp_size * pp_size:
        raise HandshakeError(
            f"{remote.address} has {len(info.ranks)} workers, {tp_size} x {pp_size} (tp_size x pp_size) are expected"
        )
