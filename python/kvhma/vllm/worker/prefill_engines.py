# SPDX-License-Identifier: Apache-2.0
"""Engines that a decode worker reads from: shaken hands with once, planned once, kept within a bound."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvhma._kvhma import Plan
from kvhma.errors import HandshakeError, HandshakeTimeoutError, KvhmaError, TransferError, UnsupportedPairError
from kvhma.geometry import Geometry
from kvhma.nixl import Agent, Hello, Peer, decode_hello
from kvhma.text import one_line
from kvhma.vllm.identity import ModelIdentity, check_same_model, decode_extra
from kvhma.vllm.settings import Settings
from kvhma.vllm.wire.client import Client, ClientPool
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, AskHello, Done, EngineInfo, RankHello, Refused
from kvhma.vllm.wire.names import resolve
from kvhma.vllm.wire.params import Address, Incarnation

logger = logging.getLogger("vllm.kvhma")

_FAILURE_SECONDS = 1.0
"""How long a handshake that failed for a lasting reason stands for the next ones with the same engine."""

_ANSWERS = 4
"""Timeouts that an engine has for all of its answers."""

_MOST_BYTES = 256 << 20
"""Bytes of the hellos of all ranks of an engine."""


@dataclass(eq=False)
class PrefillEngine:
    """An engine that can be read from.

    Attributes:
        address: where its scheduler listens.
        instance: random number of its life.
        plan: what we read from its ranks.
        peers: its workers, in the order of the plan's sources; None where nothing is read.
        lines: to its scheduler.
        hellos: hashes of what its workers said of themselves, by the name of their agent.
    """

    address: Address
    instance: int
    plan: Plan
    peers: list[Peer | None]
    lines: ClientPool
    hellos: dict[str, bytes]
    loads: int = 0

    @property
    def gone(self) -> str | None:
        """Why it cannot be read from any more; None if it can."""
        return next((peer.gone for peer in self.peers if peer is not None and peer.gone), None)


class PrefillEngines:
    """Sources by address. Safe to use from several threads; one handshake at a time with each engine."""

    def __init__(
        self,
        agent: Agent,
        geometry: Geometry,
        identity: ModelIdentity,
        settings: Settings,
        engine_id: str,
        shook: Callable[[float], None],
    ) -> None:
        """Start empty; `shook` is told the seconds of each handshake."""
        self._agent = agent
        self._geometry = geometry
        self._identity = identity
        self._settings = settings
        self._engine_id = engine_id
        self._shook = shook
        self._lock = threading.Lock()
        self._sources: OrderedDict[Address, PrefillEngine] = OrderedDict()
        self._pending: dict[tuple[Address, int], list[Callable[[KvhmaError | None], None]]] = {}
        self._failed: dict[tuple[Address, int], tuple[float, KvhmaError]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def borrow(self, remote: Incarnation, later: Callable[[KvhmaError | None], None]) -> PrefillEngine | None:
        """Return the source of an engine, to be given back with :meth:`give_back`, or None until it is known.

        Args:
            remote: the engine that a request was told of.
            later: called from another thread after a handshake, if one is needed, with the error or with None. Then
                ask again.

        Raises:
            HandshakeError: it was, a moment ago, another engine than the request was told, or spoke
                another version; or there are too many handshakes at a time.
            UnsupportedPairError: its caches cannot be read into ours, or are of another model; it has been told so.
            TransferError: it could not be connected to.
        """
        key = (remote.address, remote.incarnation_id)
        with self._lock:
            source = self._find(remote)
            if source is not None:
                self._sources.move_to_end(source.address)
                source.loads += 1
                return source
            since, error = self._failed.get(key, (0.0, None))
            if error is not None and time.monotonic() - since < _FAILURE_SECONDS:
                raise error.with_traceback(None)
            waiting = self._pending.get(key)
            if waiting is not None:
                waiting.append(later)
                return None
            if len(self._pending) >= self._settings.max_peers:
                raise HandshakeTimeoutError(f"{len(self._pending)} other engines do not answer")
            self._pending[key] = [later]
        # A thread for each engine: one that does not answer must not keep others waiting.
        thread = threading.Thread(target=self._shake, args=(remote,), name="kvhma-handshake", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                others = [one for one in self._pending.pop(key) if one is not later]
            failure = HandshakeTimeoutError(f"no handshake with {remote.address}: {error}")
            for one in others:
                one(failure)
            raise failure from error
        return None

    def _find(self, remote: Incarnation) -> PrefillEngine | None:
        # Requests may name an engine that was met by another of its addresses. Anybody can claim to be a life, so only
        # addresses that the operator gave stand for others.
        met = (self._sources.get(address) for address in self._settings.prefill_engines)
        for source in (self._sources.get(remote.address), *met):
            if source is not None and source.instance == remote.incarnation_id and source.gone is None:
                return source
        return None

    def meet(self, address: Address, later: Callable[[KvhmaError | None], None]) -> None:
        """Get to know an engine before a request comes from it; nothing happens if it is known. Waits for its answer.

        Raises:
            HandshakeError: it does not answer, or said so a moment ago; others as for :meth:`borrow`.
        """
        timeout = self._settings.handshake_timeout
        with Client(resolve(address, timeout), timeout) as client:
            roster = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        found = self.borrow(
            Incarnation(address, roster.engine_id, int.from_bytes(roster.incarnation_id, "big"), None), later
        )
        if found is not None:
            self.give_back(found)

    def instances(self) -> dict[str, int]:
        """Return the engines that are known, by address, and which life of theirs it is."""
        with self._lock:
            return {str(address): source.instance for address, source in self._sources.items()}

    def give_back(self, source: PrefillEngine) -> None:
        """Say that a load has ended; a source that nobody uses can be dropped."""
        with self._lock:
            source.loads -= 1
        if source.gone is not None:
            self._drop(source)

    def close(self) -> None:
        """Hang up everywhere. The agent, which has the connections, is not closed."""
        with self._lock:
            sources = list(self._sources.values())
            self._sources.clear()
        for source in sources:
            source.lines.close()

    def _shake(self, remote: Incarnation) -> None:
        key = (remote.address, remote.incarnation_id)
        started = time.monotonic()
        dropped: list[PrefillEngine] = []
        failure: KvhmaError | None = None
        try:
            source = self._connect(remote)
        except Exception as error:
            if not isinstance(error, KvhmaError):
                logger.exception("kvhma: a handshake with %s met an error of the connector's own", remote.address)
            failure = error if isinstance(error, KvhmaError) else HandshakeError(f"{type(error).__name__}: {error}")
        with self._lock:
            now = time.monotonic()
            self._failed = {of: one for of, one in self._failed.items() if now - one[0] < _FAILURE_SECONDS}
            if failure is None:
                dropped = self._keep(source)
            elif not isinstance(failure, (HandshakeTimeoutError, TransferError)):  # those may pass: try again
                # Its frames hold all that the engine said.
                failure.__traceback__ = failure.__cause__ = failure.__context__ = None
                self._failed[key] = (now, failure)
            waiting = self._pending.pop(key)
        if failure is None:
            self._shook(time.monotonic() - started)
        for later in waiting:
            later(failure)
        for old in dropped:
            self._disconnect(old)

    def _keep(self, source: PrefillEngine) -> list[PrefillEngine]:
        """Return what has to go for it: an earlier life of the same engine, and engines nobody has used for longest."""
        replaced = self._sources.pop(source.address, None)
        self._sources[source.address] = source
        dropped = [] if replaced is None else [replaced]
        idle = [old for old in self._sources.values() if not old.loads and old is not source]
        while len(self._sources) > self._settings.max_peers and idle:
            dropped.append(self._sources.pop(idle.pop(0).address))
        return dropped

    def _connect(self, remote: Incarnation) -> PrefillEngine:
        timeout = self._settings.handshake_timeout
        lines = ClientPool(resolve(remote.address, timeout), timeout)
        client = lines.take()
        peers: list[Peer | None] = []
        try:
            plan, said, hellos = self._agree(remote, client)
            # Whom nothing is read from is not connected, and has no name that counts.
            names = {said[index].name: hashlib.blake2b(hellos[index]).digest() for index in plan.sources}
            self._check_names(remote.address, names)
            for index, data in enumerate(hellos):
                peers.append(self._agent.connect(data, timeout=timeout) if index in plan.sources else None)
        except BaseException:
            client.close()
            self._part(peers)
            raise
        lines.give_back(client)
        return PrefillEngine(remote.address, remote.incarnation_id, plan, peers, lines, names)

    def _check_names(self, address: Address, names: dict[str, bytes]) -> None:
        # A hello is no secret: whoever repeats another engine's, changed, would be connected in its place. Where the
        # operator says that an engine is, it is.
        if address in self._settings.prefill_engines:
            return
        with self._lock:
            others = [one for one in self._sources.values() if one.address != address and one.gone is None]
            for source in others:
                for name in source.hellos.keys() & names.keys():
                    if source.hellos[name] != names[name]:
                        raise TransferError(
                            f"{address} says that it has the agent {one_line(name)!r}, which is at {source.address}"
                        )

    def _agree(self, remote: Incarnation, client: Client) -> tuple[Plan, list[HandshakePayload], list[bytes]]:
        """Ask an engine who it is, and plan what we read from it; the plan, and what its workers say."""
        # An engine has as many ranks as it says: all of them together may take no longer than this.
        deadline = time.monotonic() + _ANSWERS * self._settings.handshake_timeout
        roster = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        self._check(remote, roster)
        hellos: list[bytes] = []
        for pp, tp in roster.ranks:
            hellos.append(client.ask(AskHello(pp, tp), RankHello, deadline=deadline).data)
            if sum(map(len, hellos)) > _MOST_BYTES:
                raise HandshakeError(f"the hellos of {remote.address} have more than {_MOST_BYTES} bytes")
        said = [decode_handshake(data) for data in hellos]
        models = [decode_extra(hello.extra).model for hello in said]
        try:
            for model in models:
                check_same_model(self._identity, model)
            plan = make_plan(
                self._geometry,
                [hello.geometry for hello in said],
                descriptor_bytes=self._settings.descriptor_bytes,
            )
        except UnsupportedPairError as error:
            client.ask(Refused(self._engine_id, str(error)[:4000]), Done)
            raise
        for _, finding in plan.findings:
            logger.info("kvhma: reading from %s: %s", remote.engine_id, finding.text)
        return plan, said, hellos

    def _check(self, remote: Incarnation, roster: EngineInfo) -> None:
        tp_size = len({tp for _, tp in roster.ranks})
        for field_name, told, found in (
            ("remote_engine_id", remote.engine_id, roster.engine_id),
            ("kvhma.instance", f"{remote.incarnation_id:016x}", roster.incarnation_id.hex()),
            ("tp_size", remote.tp_size or tp_size, tp_size),
        ):
            if told != found:
                raise HandshakeError(
                    f"{field_name} is {told!r} in kv_transfer_params, {found!r} at {remote.address}: "
                    "the blocks are gone, or were never there"
                )

    def _drop(self, source: PrefillEngine) -> None:
        with self._lock:
            if source.loads or self._sources.get(source.address) is not source:
                return
            del self._sources[source.address]
        self._disconnect(source)

    def _disconnect(self, source: PrefillEngine) -> None:
        source.lines.close()
        self._part(source.peers)

    def _part(self, peers: list[Peer | None]) -> None:
        """Disconnect from peers through which no other source reads.

        An engine may have two addresses, or be met again when only some of its ranks were lost.
        """
        for peer in peers:
            if peer is None:
                continue
            with self._lock:
                used = any(peer in source.peers for source in self._sources.values())
            if used:
                continue
            try:
                self._agent.disconnect(peer, self._settings.handshake_timeout)
            except KvhmaError as error:
                # Its transfers are still in flight; it stays unusable until the agent is closed.
                logger.warning("kvhma: %s", error)
