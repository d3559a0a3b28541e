# SPDX-License-Identifier: Apache-2.0
"""P's worker shares its caches, D's worker copies rows from them.

A copy takes the place of NIXL's transfer of a part. Everything else of a read stays. Before it D zeroes what is not
covered; after it comes the proof that P held the blocks while they were read.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvhma.errors import HandshakeError, KvhmaError, PeerLostError, TransferError
from kvhma.nixl import Peer, TransferHandle
from kvhma.nixl.transfer import Telemetry
from kvhma.tensors.copying import Content, Extents, copy_rows, launch_copy
from kvhma.text import one_line
from kvhma.vllm.config.identity import EngineExtra, decode_extra
from kvhma.vllm.options.copies.offers import NAME, map_offer, read_offer, share
from kvhma.vllm.options.doors import WorkerDoor
from kvhma.vllm.reads.read_parts import ReadPart, TransferInFlight
from kvhma.vllm.threads import SupervisedThread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvhma.geometry import Geometry
    from kvhma.vllm.device.memory import Memory
    from kvhma.vllm.peers.worker_context import WorkerContext
    from kvhma.vllm.reads.results import LoadResults

logger = logging.getLogger("vllm.kvhma")

_CONFIRM_BYTES = 64
"""Most bytes that are read through NIXL after a copy.

Mapped memory stays readable. Only this read fails if P's worker has closed its agent or died while its scheduler still
holds the blocks. It also finds memory that is mapped and is not P's cache.
"""


@dataclass(eq=False)
class CopiedPart:
    """A copy of a part's rows, and after it the read that confirms it.

    Attributes:
        launched: the copy on a device; None once it has ended.
        source: what it reads there, which must stay mapped as long.
        confirm: starts the read.
        differs: whether the read has found other bytes than the copy.
        confirmed: the read; None before it is started.
        failed: whether it ended before.
    """

    launched: torch.Event | None
    source: Extents | None
    confirm: Callable[[], TransferHandle]
    differs: Callable[[], bool]
    confirmed: TransferHandle | None = None
    failed: bool = False

    @property
    def telemetry(self) -> Telemetry | None:
        """NIXL's measurements of the read."""
        return None if self.confirmed is None else self.confirmed.telemetry

    @property
    def finished(self) -> bool:
        """Whether nothing writes to its destination any more."""
        return self.failed or (self.confirmed is not None and self.confirmed.finished)

    def poll(self) -> Literal["running", "done"]:
        """Make progress and return the state.

        Raises:
            TransferError: the peer is gone, NIXL lost the read, or the copy was not of the peer's caches.
            RuntimeError: the device has failed.
        """
        try:
            if self.launched is not None and not self.launched.query():
                return "running"
            self.launched = self.source = None
            if self.confirmed is None:
                self.confirmed = self.confirm()
        except BaseException:  # nothing was read, and after a device error nothing runs there any more
            self.launched = self.source = None
            self.failed = True
            raise
        state = self.confirmed.poll()
        if state == "done" and self.differs():
            raise TransferError(f"the mapped memory of {self.confirmed.peer.name!r} is not its caches")
        return state


@dataclass(eq=False)
class MappedPeer:
    """Caches of a peer that are mapped here, and when they were last read."""

    extents: Extents
    used_at: float


def map_caches(geometry: Geometry, extra: EngineExtra, *, authenticated: bool) -> Extents:
    """Map the caches of another engine's worker.

    Args:
        geometry: its caches.
        extra: of its identity.
        authenticated: whether it has the secret of this engine.

    Raises:
        HandshakeError: they cannot be mapped; the text says why.
    """
    if (raw := extra.options.get(NAME)) is None:
        raise HandshakeError("it offers no memory")
    if not authenticated:
        raise HandshakeError("without a secret any process could offer memory")
    try:
        extents = map_offer(read_offer(bytes(raw)), geometry.regions[0].memory)
    except KvhmaError:
        raise
    except Exception as error:  # of the system or of torch
        raise HandshakeError(f"its memory cannot be mapped: {one_line(str(error), 200)}") from error
    for region in geometry.regions:
        if not extents.has(region.base, region.bytes):
            raise HandshakeError(f"it does not offer {region}")
    return extents


class Room(WorkerDoor):
    """Copies from peers whose caches can be mapped; the others are read through NIXL."""

    @classmethod
    def share(cls, caches: Mapping[str, torch.Tensor], *, authenticated: bool) -> dict[str, Any]:
        """Return an offer of the caches; nothing if they cannot be shared, so that NIXL reads them."""
        try:
            if not authenticated:
                raise HandshakeError("peers need a secret, so that only they map memory: set secret_file")
            return {NAME: share(caches.values())}
        except KvhmaError as error:
            logger.warning("kvhma: no peer of this host can copy from the caches: %s", error)
            return {}

    @classmethod
    def check_identity(cls, geometry: Geometry, extra: EngineExtra, *, authenticated: bool) -> None:
        """Map what the identity offers, once."""
        map_caches(geometry, extra, authenticated=authenticated)

    def __init__(self, context: WorkerContext, memory: Memory, results: LoadResults) -> None:
        """Begin without peers."""
        self._memory = memory
        self._own = _extents(memory)
        self._authenticates = context.secrets.enabled
        self._agent = context.agent
        self._stats = results.stats
        self._lease = context.settings.kv_lease_duration
        self._mapped: WeakKeyDictionary[Peer, MappedPeer | None] = WeakKeyDictionary()
        """None for a peer whose memory cannot be mapped."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watch: SupervisedThread | None = None

    def reader(self, peer: Peer) -> Callable[[ReadPart], TransferInFlight] | None:
        """Return a function that copies a part from the peer; None if the peer is read through NIXL."""
        return None if self._extents_of(peer) is None else partial(self._copy, peer)

    def _extents_of(self, peer: Peer) -> Extents | None:
        with self._lock:
            if peer not in self._mapped:
                self._mapped[peer] = self._map(peer)
            if (mapped := self._mapped[peer]) is None:
                return None
            mapped.used_at = time.monotonic()
            return mapped.extents

    def _map(self, peer: Peer) -> MappedPeer | None:
        try:
            if peer.geometry.regions[0].memory != self._memory.kind:
                raise HandshakeError("its caches are in memory of another kind")
            if peer.geometry.regions[0].memory != "DRAM" and find_spec("triton") is None:
                raise HandshakeError("copies on a device need Triton")
            if not all(self._own.has(region.base, region.bytes) for region in self._memory.geometry.regions):
                raise HandshakeError("a region of this engine's caches is in several storages")
            extents = map_caches(peer.geometry, decode_extra(peer.payload.extra), authenticated=self._authenticates)
        except KvhmaError as error:
            logger.info("kvhma: reads from %s go through NIXL: %s", peer.name, error)
            return None
        logger.info("kvhma: reads from %s are copies: its caches are mapped here", peer.name)
        if self._watch is None:
            self._watch = SupervisedThread("kvhma-copies", self._memory.device.chosen(self._unmap_unused), self._stats)
        return MappedPeer(extents, time.monotonic())

    def _copy(self, peer: Peer, part: ReadPart) -> CopiedPart:
        launched, source = self._launch(peer, part)
        kind, row = self._memory.kind, random.randrange(max(1, len(part.local)))  # noqa: S311
        local, remote = (rows[row : row + 1].copy() for rows in (part.local, part.remote))
        local[:, 1] = remote[:, 1] = np.minimum(local[:, 1], _CONFIRM_BYTES)
        confirm = partial(self._agent.read, peer, local, remote, local_memory=kind, remote_memory=kind)
        self._stats.count("copied_bytes", int(part.local[:, 1].sum()))
        return CopiedPart(launched, source, confirm, self._comparing(peer, local))

    def _launch(self, peer: Peer, part: ReadPart) -> tuple[torch.Event | None, Extents | None]:
        """Copy; return what a device still does, and what it reads. An error after this keeps nothing mapped."""
        if (source := self._extents_of(peer)) is None:
            raise PeerLostError(f"the memory of {peer.name!r} is mapped no more")
        if self._memory.kind == "DRAM":
            copy_rows(self._own, source, part.local, part.remote)
            return None, None
        copy = partial(launch_copy, self._own, source, part.local, part.remote)
        return self._memory.device.launch(copy, None), source

    def _comparing(self, peer: Peer, rows: NDArray[np.uint64]) -> Callable[[], bool]:
        """Return whether bytes that were copied have changed since; on a device, where that would wait, never."""
        if self._memory.kind != "DRAM" or not len(rows):
            return lambda: False
        content = self._memory.from_address(int(rows[0, 0]))[: int(rows[0, 1])]
        copied = content.clone()

        def differs() -> bool:
            if torch.equal(content, copied):
                return False
            with self._lock:
                self._mapped[peer] = None
            return True

        return differs

    def _unmap_unused(self) -> None:
        """Unmap, within a lease, what is not read any more: its owner may be dead or asleep."""
        while not self._closing.wait(self._lease / 4):
            before = time.monotonic() - self._lease / 2
            with self._lock:
                unused = [peer for peer, known in self._mapped.items() if known and known.used_at < before]
                unmapped = [self._mapped.pop(peer) for peer in unused]
            # The device may take its time, so not with the lock held; and nothing of this thread stays until the next.
            unmapped.clear()
            unused.clear()

    def close(self, timeout: float) -> None:
        """Unmap everything."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join(timeout)
        with self._lock:
            self._mapped.clear()


def _extents(memory: Memory) -> Extents:
    """Return the registered memory: from each region to the end of its storage, which may have further regions."""
    found: list[tuple[int, Content]] = []
    for region in sorted(memory.geometry.regions, key=lambda region: region.base):
        if not found or region.base >= found[-1][0] + len(found[-1][1]):
            content = memory.from_address(region.base)
            found.append((region.base, content.numpy() if memory.kind == "DRAM" else content))
    return Extents(found)
