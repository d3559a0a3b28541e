# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent with its registered memory, peers, prepared lists and transfers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import check_rows
from kvhma.errors import HandshakeError, KvhmaError, RequestError, TransferError
from kvhma.geometry import Geometry, Memory, Region
from kvhma.nixl.arrays import check_ids, row_of
from kvhma.nixl.handshake import WARM_UP, decode_handshake, encode_handshake
from kvhma.nixl.library import (
    AgentOptions,
    NixlAgent,
    NixlHandle,
    make_descriptors,
    open_nixl,
    takes_strided,
    translate,
)
from kvhma.nixl.memory import RegisteredMemory
from kvhma.nixl.peer import Peer, add_peer, metadata_start, remove_peer
from kvhma.nixl.ports import came_by_tcp, received_bytes
from kvhma.nixl.prepared import Preparations, PreparedList, PreparedRead
from kvhma.nixl.scratch import Scratch
from kvhma.nixl.session import Session
from kvhma.nixl.transfer import InFlight, Piece, TransferHandle
from kvhma.nixl.window import cut_rows

_DEFAULTS = AgentOptions()
_READ = "READ"


class Agent:
    """One NIXL agent with its memory, peers and transfers.

    Several threads may use it at once. A call that starts a transfer returns when the transport has accepted the
    transfer. A transport that copies inline has finished the copy by then, so call from a thread that can wait; no lock
    is held during the copy.

    The agent holds every transfer until it has ended, even if the caller does not, because NIXL would release an
    unreferenced transfer while it still writes. The caller owns the memory: registered memory must stay mapped until
    :meth:`close`, because peers may be reading it.

    Attributes:
        name: name of the agent, unique among the peers of a peer.
        incarnation: random number; an agent that restarts under the same name gets another number.
        strided: whether NIXL gets views as they are; False: written out, one row per entry.
    """

    def __init__(
        self,
        name: str,
        options: AgentOptions = _DEFAULTS,
        *,
        nixl: NixlAgent | None = None,
        public_key: bytes = b"",
    ) -> None:
        """Make the agent.

        Args:
            name: unique name of the agent.
            options: transports, threads and the progress thread.
            nixl: a ``nixl_agent`` to use instead of a new one.
            public_key: added to its handshake payloads; the name must end in :func:`kvhma.nixl.key_hash` of the key.

        Raises:
            ImportError: NIXL is not installed, or lacks a needed part.
            RequestError: an option is out of range, or no backend has a number of threads.
            TransferError: NIXL cannot start a backend, or no backend lets peers read this agent's memory.
        """
        self.name = name
        self.incarnation = secrets.randbits(64)
        self._public_key = public_key
        self._given = nixl is not None
        self._options = options
        opened = nixl or open_nixl(name, options)
        self.strided = takes_strided(opened) if options.strided is None else options.strided
        self._session = Session(name, opened)
        self._memory = RegisteredMemory()
        self._prepared = Preparations(self._session, strided=self.strided)
        self._in_flight = InFlight(self._session)
        # Register at once, so that all handshake payloads of the agent have the same metadata for it.
        self._scratch = Scratch()
        self._memory.register(opened, [self._scratch.host])
        # NIXL does not document its metadata format. A peer's metadata is checked only if this agent's has the known
        # form.
        self._knows_metadata = self._metadata(opened).startswith(metadata_start(name))

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory --------------------------------------------------------------------------------------------

    def register(self, geometry: Geometry) -> None:
        """Register the regions of a geometry. A region of several geometries is registered once.

        Args:
            geometry: a rank's cache in this process's memory.

        Raises:
            RequestError: a region overlaps registered memory without being part of it. NIXL would accept it, and then
                not find descriptors after the overlap.
            TransferError: NIXL refused a region.
        """
        with self._session.setup:
            self._memory.register(self._session.open(), geometry.regions)

    def covers(self, region: Region) -> bool:
        """Return whether all of a region is registered.

        Args:
            region: address, bytes, kind and device of some memory.

        Raises:
            RequestError: only a part of the region is registered.
        """
        with self._session.setup:
            return self._memory.covers(region)

    def register_scratch(self, region: Region) -> None:
        """Register unused memory of a device, into which :meth:`connect` reads a few bytes.

        Without it, the first read into device memory also sets up the device. Call it before :meth:`handshake_payload`.

        Args:
            region: at least a few bytes of the device's memory.

        Raises:
            RequestError: it overlaps registered memory without being part of it.
            TransferError: NIXL refused it.
        """
        with self._session.setup:
            self._memory.register(self._session.open(), [region])
            self._scratch.device = region

    # --- peers ---------------------------------------------------------------------------------------------

    def handshake_payload(self, geometry: Geometry, extra: bytes = b"") -> bytes:
        """Return the message that lets a peer read these caches.

        Args:
            geometry: geometry of the registered caches.
            extra: bytes for the engine's own use, up to 64 KiB.

        Raises:
            RequestError: a region of the geometry is not registered.
            HandshakeError: a field is too long, or the name does not end in the hash of the agent's key.
            TransferError: NIXL cannot describe the agent to peers.
        """
        with self._session.setup:
            for region in geometry.regions:
                if not self._memory.covers(region):
                    raise RequestError(f"{region} is not registered")
            metadata = self._metadata(self._session.open())
        return encode_handshake(
            metadata,
            geometry,
            name=self.name,
            incarnation=self.incarnation,
            extra=extra,
            public_key=self._public_key,
        )

    def _metadata(self, nixl: NixlAgent) -> bytes:
        try:
            return nixl.get_agent_metadata()
        except Exception as exc:
            backends = "its backends" if self._given else f"its backends {list(self._options.backends)}"
            what = f"no peer can connect to agent {self.name!r}: one of {backends} must let peers read memory"
            raise translate(exc, what) from exc

    def prewarm_transport(self) -> None:
        """Connect to an agent of this process, let a second one connect to this agent, and disconnect both.

        A transport works out how to reach a peer once for each kind of connection, on both sides. For the first peer on
        the same host UCX needs tens of milliseconds. After this call the first peers need not wait for it. The call
        takes a quarter of a second.

        Raises:
            RequestError: the agent was made with ``nixl``.
            TransferError: NIXL cannot make other agents, or they cannot connect.
        """
        if self._given:
            raise RequestError(f"agent {self.name!r} was given its NIXL and cannot make others")
        # One agent for each direction: for the reverse direction UCX would reuse the first agent's connection.
        with (
            Agent(f"{self.name}-owner", self._options) as owner,
            Agent(f"{self.name}-reader", self._options) as reader,
        ):
            for local, remote in ((self, owner), (reader, self)):
                scratch = Geometry(regions=(remote._scratch.host,), groups=(), layers=())
                local.disconnect(local.connect(remote.handshake_payload(scratch)))

    def connect(
        self, payload: bytes, *, expect: str | None = None, timeout: float = 10.0, warm_up: bool = True
    ) -> Peer:
        """Connect to the sender of a handshake payload, and warm up the connection.

        The same payload again returns the same peer. Another payload with the same name, as after a restart, replaces
        the peer: first the transfers from the old peer end, then its prepared lists are released.

        Args:
            payload: the result of the peer's :meth:`handshake_payload`; any bytes are safe.
            expect: the only accepted name. Pass it if you know it; otherwise a peer can replace another peer.
            timeout: seconds to wait for transfers from a replaced peer, and again for the peer to answer.
            warm_up: whether to read from a new peer. If not, call :meth:`warm_up` later, for example after a check of
                what a first read of the caller's found.

        Raises:
            HandshakeError: not a handshake payload, or one that NIXL refuses or that contradicts itself.
            PeerLostError: the peer is already gone.
            TransferError: nothing listens at the peer's address, the peer does not answer, its memory cannot be read,
                or transfers from the replaced peer did not end in time.
        """
        remote = decode_handshake(payload)
        if expect is not None and remote.name != expect:
            raise HandshakeError(f"the handshake payload is from {remote.name!r}, expected {expect!r}")
        if remote.name == self.name:
            raise HandshakeError(f"the handshake payload has this agent's own name {remote.name!r}")
        while True:
            with self._session.setup:
                nixl = self._session.open()
                known = self._session.peers.get(remote.name)
                if known is None:
                    peer = add_peer(nixl, remote, self._session.peers, check_start=self._knows_metadata)
                    with self._session.lock:
                        self._session.peers[remote.name] = peer
                    break
                if known.gone is None and remote == known.payload:
                    return known
            self.disconnect(known, timeout)
        if warm_up:
            self.warm_up(peer, timeout)
        return peer

    def warm_up(self, peer: Peer, timeout: float = 10.0) -> None:
        """Read a few bytes of a peer's caches, so that no later transfer waits until the connection is set up.

        A second read shows whether they come over TCP. If not, the bytes in flight from the peer are not bounded.

        A peer that is warm already is left alone: others may read from it.

        Args:
            peer: the result of :meth:`connect` without `warm_up`.
            timeout: seconds to wait for the peer to answer.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: the peer does not answer, or its memory cannot be read. It was disconnected, or is unusable.
        """
        # Adding an agent and sending it a notification only start to connect. The next transfer would wait for the
        # connection, for tens of milliseconds.
        if peer.is_warm:
            return
        rows = self._scratch.for_read(peer)
        if rows is None:
            self.notify(peer, WARM_UP)
            peer.is_warm = True
            return
        local, remote, size = rows

        def read(notif: bytes = b"") -> bool:
            kinds: dict[str, Any] = {"local_memory": local.memory, "remote_memory": remote.memory}
            return self.read(peer, row_of(local, size), row_of(remote, size), notif, **kinds).wait(timeout)

        try:
            done = read(WARM_UP)
            before = received_bytes()
            done = done and read()
        except KvhmaError:
            self.disconnect(peer, timeout)
            raise
        if not done:
            with self._session.lock:
                peer.gone = peer.gone or f"no answer in {timeout} s"
            raise TransferError(f"peer {peer.name!r}: {peer.gone}")
        if not came_by_tcp(size, before, received_bytes()):
            peer.window = None
        peer.is_warm = True

    def disconnect(self, peer: Peer, timeout: float = 10.0) -> None:
        """Disconnect a peer, lost or not: first its transfers end, then its prepared lists are released.

        Args:
            peer: the result of :meth:`connect`.
            timeout: seconds to wait for its transfers.

        Raises:
            TransferError: transfers did not end in `timeout` seconds. The peer stays unusable; call again.
        """
        with self._session.lock:
            if self._session.peers.get(peer.name) is not peer:
                return
            peer.gone = peer.gone or "disconnected"
        # NIXL would remove a peer that has transfers. It then answers "not found" for them, although they still write.
        self._in_flight.drain(timeout, f"peer {peer.name!r}", peer)
        with self._session.setup:
            with self._session.lock:
                nixl = self._session.forget(peer)
                self._prepared.release_all(peer)
            if nixl is not None:
                remove_peer(nixl, peer)

    def notify(self, peer: Peer, message: bytes) -> None:
        """Send a message that :meth:`notifications` of the peer returns.

        Args:
            peer: the result of :meth:`connect`.
            message: bytes as they are.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot send it.
        """
        nixl = self._session.usable(peer)
        try:
            nixl.send_notif(peer.name, message)
        except Exception as exc:
            raise self._session.failure(exc, f"cannot notify {peer.name!r}", peer) from exc

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return the messages since the last call, each with the name that its sender claims.

        Messages of finished transfers are included; messages that only open a connection are not. The sender need not
        be a peer of this agent, and its message is untrusted.

        Raises:
            TransferError: NIXL cannot read them.
        """
        nixl = self._session.open()
        try:
            received = nixl.get_new_notifs()
        except Exception as exc:
            raise translate(exc, "cannot read notifications") from exc
        return [(name, message) for name, messages in received.items() for message in messages if message != WARM_UP]

    # --- prepared lists ------------------------------------------------------------------------------------

    def prepare(self, peer: Peer | None, views: NDArray[np.uint64], memory: Memory = "DRAM") -> PreparedList:
        """Let NIXL hold views of memory; docs/nixl.md says when that pays off.

        Args:
            peer: the owner of the memory; None for this agent.
            views: C-contiguous uint64 of shape (n, 5), rows ``(addr, len, device, stride, count)``, n at
                least 1.
            memory: kind of the memory.

        Returns:
            The list, for :meth:`read_ids`.

        Raises:
            PeerLostError: the peer is gone.
            RequestError: the views have another form, or are outside of registered memory.
            AddressOverflowError: a view ends after 2**64, or there are more than 2**31 - 1 entries.
        """
        return self._prepared.prepare(peer, views, memory)

    # --- transfers -----------------------------------------------------------------------------------------

    def read(
        self,
        peer: Peer,
        local: NDArray[np.uint64],
        remote: NDArray[np.uint64],
        notif: bytes = b"",
        *,
        local_memory: Memory = "DRAM",
        remote_memory: Memory = "DRAM",
    ) -> TransferHandle:
        """Start to read descriptors of a peer's memory into local descriptors. NIXL does not merge them.

        Over TCP it is read in pieces: all reads from the peer together have at most
        :data:`kvhma.nixl.window.WINDOW_BYTES` in flight. Then the polls post the later pieces.

        Args:
            peer: the owner of the memory that is read.
            local: C-contiguous uint64 of shape (n, 3), rows ``(addr, len, device)``; n may be 0.
            remote: the same for the peer, with equal lengths row by row.
            notif: message to the peer, sent by the poll that finds the read done; empty for no message.
            local_memory: kind of the local memory.
            remote_memory: kind of the peer's memory.

        Returns:
            The read in flight: poll it, or wait for it.

        Raises:
            RequestError: the arrays have another form, do not fit each other, or leave registered memory.
                Nothing was started.
            AddressOverflowError: a row ends after 2**64. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        _check_pair(local, remote)
        if not len(local):
            return self._start_nothing(peer, notif)
        cut = [(local, remote)]
        if peer.window is not None:
            if local[:, 1].max() > self._memory.longest:  # before it is cut into too many pieces
                raise RequestError(f"a row of {local[:, 1].max()} bytes is longer than any registered memory")
            cut = cut_rows(local, remote, peer.window.piece_bytes)
        own, later = (notif, b"") if len(cut) == 1 else (b"", notif)
        pieces = [
            Piece(_making(peer, *rows, own, local_memory, remote_memory), int(rows[0][:, 1].sum())) for rows in cut
        ]
        return self._in_flight.start(peer, len(local), pieces, later)

    def prepare_read(
        self,
        peer: Peer,
        local: NDArray[np.uint64],
        remote: NDArray[np.uint64],
        *,
        local_memory: Memory = "DRAM",
        remote_memory: Memory = "DRAM",
    ) -> PreparedRead:
        """Let NIXL hold a read that is posted often with the same bytes and the same destination.

        Args:
            peer: the owner of the memory that is read.
            local: C-contiguous uint64 of shape (n, 3), rows ``(addr, len, device)``; n at least 1.
            remote: the same for the peer, with equal lengths row by row.
            local_memory: kind of the local memory.
            remote_memory: kind of the peer's memory.

        Returns:
            The read; nothing is read before its :meth:`PreparedRead.post`.

        Raises:
            RequestError: the arrays have another form, do not fit each other, or leave registered memory.
            AddressOverflowError: a row ends after 2**64.
            PeerLostError: the peer is gone.
        """
        _check_pair(local, remote)
        if not len(local):
            raise RequestError("a prepared read has no rows")
        make = _making(peer, local, remote, b"", local_memory, remote_memory)
        return self._prepared.prepare_read(peer, len(local), make, self._in_flight)

    def read_ids(
        self,
        local: PreparedList,
        local_ids: NDArray[np.int32],
        remote: PreparedList,
        remote_ids: NDArray[np.int32],
        notif: bytes = b"",
    ) -> TransferHandle:
        """Start to read prepared descriptors of a peer into prepared local descriptors.

        NIXL merges neighbours: ids that increase by one at the same positions on both sides, within one dense view on
        each side. Over TCP this does not bound the bytes in flight, as :meth:`read` does.

        Args:
            local: a list of :meth:`prepare`, of this agent's own memory.
            local_ids: C-contiguous int32 of shape (n,); n may be 0.
            remote: a list of a peer's memory.
            remote_ids: the same for the peer.
            notif: message to the peer, sent by the poll that finds the read done; empty for no message.

        Returns:
            The read in flight: poll it, or wait for it.

        Raises:
            RequestError: the ids have another form, do not fit the lists, or differ in number. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        check_ids(local_ids, "local ids")
        check_ids(remote_ids, "remote ids")
        if len(local_ids) != len(remote_ids):
            raise RequestError(f"{len(local_ids)} local and {len(remote_ids)} remote ids")
        peer = remote.peer
        if peer is None or local.peer is not None:
            raise RequestError("read_ids takes a list of own memory and one of a peer's, in this order")

        def make(nixl: NixlAgent) -> NixlHandle:
            local_handle, remote_handle = self._prepared.handle(local), self._prepared.handle(remote)
            if local_handle is None or remote_handle is None:
                raise RequestError("a prepared list was released or belongs to another agent")
            return nixl.make_prepped_xfer(_READ, local_handle, local_ids, remote_handle, remote_ids, notif)

        if not len(local_ids):
            return self._start_nothing(peer, notif)
        return self._in_flight.start(peer, len(local_ids), [Piece(make)])

    def _start_nothing(self, peer: Peer, notif: bytes) -> TransferHandle:
        if notif:  # the peer waits for it before it frees its blocks
            self.notify(peer, notif)
        return self._in_flight.start_nothing(peer)

    def poll(self) -> list[TransferHandle]:
        """Poll the aborted transfers.

        Returns:
            The transfers that have ended since the last call, successful or not, each once. Their memory is free now.
        """
        return self._in_flight.poll_aborted()

    # --- state ---------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Return how many transfers have not ended; they may still write to their memory."""
        return sum(not transfer.drive() for transfer in self._in_flight.running())

    def close(self, timeout: float = 10.0) -> None:
        """Wait for all transfers, then release, disconnect and deregister everything.

        Raises:
            TransferError: transfers did not end in `timeout` seconds. Nothing was released, nothing new can be started,
                and the memory must not be freed; call again.
        """
        self._session.begin_closing()
        self._in_flight.drain(timeout, f"agent {self.name!r}")
        with self._session.setup:
            nixl, peers = self._session.close()
            if nixl is None:
                return
            self._prepared.release_all()
            for peer in peers:
                with contextlib.suppress(Exception):  # NIXL may no longer know a peer that died
                    nixl.remove_remote_agent(peer.name)
            self._memory.deregister_all(nixl)


def _check_pair(local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
    check_rows("local descriptors", local)
    check_rows("remote descriptors", remote)
    if len(local) != len(remote):
        raise RequestError(f"{len(local)} local and {len(remote)} remote descriptors")


def _making(
    peer: Peer,
    local: NDArray[np.uint64],
    remote: NDArray[np.uint64],
    notif: bytes,
    local_memory: Memory,
    remote_memory: Memory,
) -> Callable[[NixlAgent], NixlHandle]:
    """Return a function that makes a read of checked rows."""

    def make(nixl: NixlAgent) -> NixlHandle:
        local_descriptors = make_descriptors(nixl, local, local_memory)
        remote_descriptors = make_descriptors(nixl, remote, remote_memory)
        return nixl.initialize_xfer(_READ, local_descriptors, remote_descriptors, peer.name, notif)

    return make
