# SPDX-License-Identifier: Apache-2.0
"""P's worker shares its caches, D's worker copies rows from them.

A copy takes the place of NIXL's transfer of a part. Everything else of a read stays. Before it D zeroes what is not
covered; after it comes the proof that P held the blocks while they were read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from kvhma.errors import HandshakeError, KvhmaError
from kvhma.nixl import Peer, TransferHandle
from kvhma.nixl.transfer import Telemetry
from kvhma.tensors.copying import Piece, Pieces, copy_rows, launch_copy
from kvhma.text import one_line
from kvhma.vllm.config.identity import EngineExtra, decode_extra
from kvhma.vllm.options.copies.offers import NAME, map_offer, read_offer, share
from kvhma.vllm.options.doors import WorkerDoor
from kvhma.vllm.reads.read_parts import ReadPart
from kvhma.vllm.threads import SupervisedThread

if TYPE_CHECKING:
    import torch

    from kvhma.geometry import Geometry
    from kvhma.vllm.device.memory import Memory
    from kvhma.vllm.peers.worker_context import WorkerContext
    from kvhma.vllm.reads.results import LoadResults

logger = logging.getLogger("vllm.kvhma")

_CONFIRM_BYTES = 64
"""Most bytes that are read through NIXL after a copy."""


@dataclass(eq=False)
class Copied:
    """A copy of a part's rows, and after it a read of some of their bytes through NIXL.

    That read shows that the peer has not closed its agent meanwhile, as a peer does before it dies or sleeps: what is
    mapped here stays readable.

    Attributes:
        launched: the copy on a device; None once it has ended.
        source: what it reads, which must stay mapped as long.
        confirm: starts the read.
        confirmed: the read; None before it is started.
    """

    launched: torch.Event | None
    source: Pieces | None
    confirm: Callable[[], TransferHandle]
    confirmed: TransferHandle | None = None

    @property
    def telemetry(self) -> Telemetry | None:
        """NIXL's measurements of the read."""
        return None if self.confirmed is None else self.confirmed.telemetry

    @property
    def finished(self) -> bool:
        """Whether nothing writes to its destination any more."""
        return self.confirmed is not None and self.confirmed.finished

    def poll(self) -> Literal["running", "done"]:
        """Make progress and return the state.

        Raises:
            TransferError: the peer is gone, or NIXL lost the read.
        """
        if self.launched is not None and not self.launched.query():
            return "running"
        self.launched = self.source = None
        if self.confirmed is None:
            self.confirmed = self.confirm()
        return self.confirmed.poll()


@dataclass(eq=False)
class MappedPeer:
    """Caches of a peer that are mapped here, and when they were last read."""

    pieces: Pieces
    used_at: float


class Room(WorkerDoor):
    """Copies from peers whose caches can be mapped; the others are read through NIXL."""

    @classmethod
    def share(cls, caches: Mapping[str, torch.Tensor], *, authenticated: bool) -> dict[str, Any]:
        """Offer the caches to processes of this host. What cannot be shared is read through NIXL."""
        try:
            if not authenticated:
                raise HandshakeError("peers need a secret, so that only they map memory: set secret_file")
            return {NAME: share(caches.values())}
        except KvhmaError as error:
            logger.warning("kvhma: no peer of this host can copy from the caches: %s", error)
            return {}

    @staticmethod
    def map_caches(geometry: Geometry, extra: EngineExtra, *, authenticated: bool) -> Pieces:
        """Map the caches of another engine's worker.

        Args:
            geometry: its caches.
            extra: of its identity.
            authenticated: whether it has the secret of this engine.

        Raises:
            HandshakeError: they cannot be mapped; the text says why.
        """
        raw = extra.options.get(NAME)
        if raw is None:
            raise HandshakeError("it offers no memory")
        if not authenticated:
            raise HandshakeError("without a secret any process could offer memory")
        try:
            pieces = map_offer(read_offer(bytes(raw)))
        except (OSError, RuntimeError) as error:
            raise HandshakeError(f"its memory cannot be mapped: {one_line(str(error), 200)}") from error
        for region in geometry.regions:
            if not pieces.has(region.base, region.bytes):
                raise HandshakeError(f"it does not offer {region}")
        return pieces

    def __init__(self, context: WorkerContext, memory: Memory, results: LoadResults) -> None:
        """Begin without peers."""
        self._memory = memory
        self._own = _pieces(memory)
        self._authenticates = context.secrets.enabled
        self._agent = context.agent
        self._stats = results.stats
        self._lease = context.settings.kv_lease_duration
        self._mapped: WeakKeyDictionary[Peer, MappedPeer | None] = WeakKeyDictionary()
        """None for a peer whose memory cannot be mapped."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watch: SupervisedThread | None = None

    def reader(self, peer: Peer) -> Callable[[ReadPart], Copied] | None:
        """Return a function that copies a part from the peer; None if the peer is read through NIXL."""
        with self._lock:
            if peer not in self._mapped:
                self._mapped[peer] = self._map(peer)
            mapped = self._mapped[peer]
            if mapped is None:
                return None
            mapped.used_at = time.monotonic()
            return partial(self._copy, peer, mapped.pieces)

    def _map(self, peer: Peer) -> MappedPeer | None:
        try:
            if peer.geometry.regions[0].memory != self._memory.kind:
                raise HandshakeError("its caches are in memory of another kind")
            pieces = self.map_caches(peer.geometry, decode_extra(peer.payload.extra), authenticated=self._authenticates)
        except KvhmaError as error:
            logger.info("kvhma: reads from %s go through NIXL: %s", peer.name, error)
            return None
        logger.info("kvhma: reads from %s are copies: its caches are mapped here", peer.name)
        if self._watch is None:
            self._watch = SupervisedThread("kvhma-copies", self._unmap_unused, self._stats)
        return MappedPeer(pieces, time.monotonic())

    def _copy(self, peer: Peer, source: Pieces, part: ReadPart) -> Copied:
        local, remote = (rows[:1].copy() for rows in (part.local, part.remote))
        local[:, 1] = remote[:, 1] = np.minimum(local[:, 1], _CONFIRM_BYTES)
        kind = self._memory.kind
        confirm = partial(self._agent.read, peer, local, remote, local_memory=kind, remote_memory=kind)
        self._stats.count("copied_bytes", int(part.local[:, 1].sum()))
        if kind == "DRAM":
            copy_rows(self._own, source, part.local, part.remote)
            return Copied(None, None, confirm)
        copy = partial(launch_copy, self._own, source, part.local, part.remote)
        return Copied(self._memory.device.launch(copy, None), source, confirm)

    def _unmap_unused(self) -> None:
        """Unmap, within a lease, what is not read any more: its owner may be dead or asleep."""
        while not self._closing.wait(self._lease / 4):
            self._unmap(time.monotonic() - self._lease / 2)

    def _unmap(self, before: float) -> None:
        with self._lock:
            for peer, mapped in list(self._mapped.items()):
                if mapped is not None and (mapped.used_at < before or peer.gone is not None):
                    del self._mapped[peer]

    def close(self, timeout: float) -> None:
        """Unmap everything."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join(timeout)
        with self._lock:
            self._mapped.clear()


def _pieces(memory: Memory) -> Pieces:
    """Return the registered memory: from each region to the end of its storage, which may have further regions."""
    found: list[Piece] = []
    for region in sorted(memory.geometry.regions, key=lambda region: region.base):
        if not found or region.base >= found[-1].address + len(found[-1].content):
            content = memory.from_address(region.base)
            found.append(Piece(region.base, content.numpy() if memory.kind == "DRAM" else content))
    return Pieces(found)
