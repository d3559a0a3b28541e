# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent with its registered memory, peers, prepared lists and transfers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

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
from kvhma.nixl.prepared import Preparations, PreparedList, PreparedRead
from kvhma.nixl.scratch import Scratch
from kvhma.nixl.session import Session
from kvhma.nixl.transfer import InFlight, Telemetry, TransferHandle

_DEFAULTS = AgentOptions()
_READ = "READ"


class Agent:
    """One NIXL agent and everything made with it.

    It may be used from several threads at once. A call that starts a transfer returns once the transport has taken
    it. A transport that copies inline has copied it by then, so call from a thread that can wait; no lock is held
    meanwhile.

    The agent keeps every transfer until it has ended, whether or not the caller does, because NIXL would
    release a forgotten one while it still writes. The memory itself is the caller's: registered memory must
    stay mapped until :meth:`close`, also because peers may be reading it.

    Attributes:
        name: name of the agent, unique among the peers of a peer.
        incarnation: random number; an agent that is started again under the same name has another one.
        strided: whether views go to NIXL as they are; False: written out, one row per entry.
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
            nixl: what to use in place of a new ``nixl_agent``.
            public_key: goes into its handshake payloads; the name has to end in :func:`kvhma.nixl.key_hash` of it.

        Raises:
            ImportError: NIXL is not installed, or lacks something it needs.
            RequestError: an option is out of range, or no backend takes a number of threads.
            TransferError: NIXL cannot start a backend.
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
        # Registered at once, so that all handshake payloads of the agent have the same metadata for it.
        self._scratch = Scratch()
        self._memory.register(opened, [self._scratch.host])
        # NIXL does not document the form of its metadata: a peer's is checked only if this agent's has the known form.
        self._knows_metadata = opened.get_agent_metadata().startswith(metadata_start(name))

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory --------------------------------------------------------------------------------------------

    def register(self, geometry: Geometry) -> None:
        """Register the regions of a geometry, each once, whichever geometry it comes with.

        Args:
            geometry: a rank's cache in this process's memory.

        Raises:
            RequestError: a region overlaps registered memory without being part of it. NIXL would take it,
                and then not find descriptors after the overlap.
            TransferError: NIXL refused a region.
        """
        with self._session.setup:
            self._memory.register(self._session.open(), geometry.regions)

    def covers(self, region: Region) -> bool:
        """Return whether all of a region is registered.

        Args:
            region: address, bytes, kind and device of some memory.

        Raises:
            RequestError: only a part of it is.
        """
        with self._session.setup:
            return self._memory.covers(region)

    def register_scratch(self, region: Region) -> None:
        """Register memory of a device, which nothing else uses, for :meth:`connect` to read a few bytes into.

        Without it the first read into a device's memory sets up what that takes. Call it before
        :meth:`handshake_payload`.

        Args:
            region: memory of the device, a few bytes long at least.

        Raises:
            RequestError: it overlaps registered memory without being part of it.
            TransferError: NIXL refused it.
        """
        with self._session.setup:
            self._memory.register(self._session.open(), [region])
            self._scratch.device = region

    # --- peers ---------------------------------------------------------------------------------------------

    def handshake_payload(self, geometry: Geometry, extra: bytes = b"") -> bytes:
        """Return the message that lets a peer read these caches; `extra` is for the engine's own use, up to 64 KiB.

        Args:
            geometry: of the registered caches.
            extra: bytes for the engine's own use, up to 64 KiB.

        Raises:
            RequestError: a region of the geometry is not registered.
            HandshakeError: a field is too long, or the name is not that of an agent with its key.
        """
        with self._session.setup:
            for region in geometry.regions:
                if not self._memory.covers(region):
                    raise RequestError(f"{region} is not registered")
            metadata = self._session.open().get_agent_metadata()
        return encode_handshake(
            metadata,
            geometry,
            name=self.name,
            incarnation=self.incarnation,
            extra=extra,
            public_key=self._public_key,
        )

    def prewarm_transport(self) -> None:
        """Connect to an agent of this process, let a second one connect to this agent, and disconnect both.

        A transport works out how to reach a peer once for each kind of connection, on the side that connects and on
        the side that is connected to: UCX takes tens of milliseconds for the first peer on the same host. After this
        call the first peers need not wait for it. The call takes a quarter of a second.

        Raises:
            RequestError: the agent was made with ``nixl``.
            TransferError: NIXL cannot make other agents, or they cannot connect.
        """
        if self._given:
            raise RequestError(f"agent {self.name!r} was given its NIXL and cannot make others")
        # One agent for each direction: for the way back UCX would use the connection that the first one already has.
        with (
            Agent(f"{self.name}-owner", self._options) as owner,
            Agent(f"{self.name}-reader", self._options) as reader,
        ):
            for local, remote in ((self, owner), (reader, self)):
                scratch = Geometry(regions=(remote._scratch.host,), groups=(), layers=())
                local.disconnect(local.connect(remote.handshake_payload(scratch)))

    def connect(self, payload: bytes, *, expect: str | None = None, timeout: float = 10.0) -> Peer:
        """Connect to the sender of a handshake payload, and warm the connection up.

        The same payload again returns the same peer. Another payload of the same name replaces the peer, as after a
        restart: transfers from the old one end first, then its prepared lists are released.

        Args:
            payload: what the peer's :meth:`handshake_payload` returned; any bytes are safe.
            expect: the only name that is accepted. Give it where it is known, else one peer can replace another.
            timeout: seconds to wait for transfers from a replaced peer, and again for the peer to answer.

        Raises:
            HandshakeError: not a handshake payload, or one that NIXL refuses or that contradicts itself.
            PeerLostError: the peer is gone already.
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
        self._warm_up(peer, timeout)
        return peer

    def _warm_up(self, peer: Peer, timeout: float) -> None:
        # Adding an agent and sending it a notification only start to connect, and a transfer that follows waits for
        # the rest, tens of milliseconds. A small read that is waited for leaves nothing to set up.
        rows = self._scratch.for_read(peer)
        if rows is None:
            self.notify(peer, WARM_UP)
            return
        local, remote, size = rows
        memory = {"local_memory": local.memory, "remote_memory": remote.memory}
        try:
            done = self.read(peer, row_of(local, size), row_of(remote, size), WARM_UP, **memory).wait(timeout)
        except KvhmaError:
            self.disconnect(peer, timeout)
            raise
        if not done:
            with self._session.lock:
                peer.gone = peer.gone or f"no answer in {timeout} s"
            raise TransferError(f"peer {peer.name!r}: {peer.gone}")

    def disconnect(self, peer: Peer, timeout: float = 10.0) -> None:
        """Forget a peer, lost or not: its transfers end first, then its prepared lists are released.

        Args:
            peer: of :meth:`connect`.
            timeout: seconds to wait for its transfers.

        Raises:
            TransferError: transfers did not end in `timeout` seconds. The peer stays unusable; call again.
        """
        with self._session.lock:
            if self._session.peers.get(peer.name) is not peer:
                return
            peer.gone = peer.gone or "disconnected"
        # NIXL would remove a peer that has transfers: from then on it answers "not found" for them, and they write all
        # the same.
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
            peer: of :meth:`connect`.
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
        """Return the messages that came since the last call, each with the name its sender gives itself.

        Those of finished transfers are among them; those that only open a connection are not. The sender need
        not be a peer of this agent, and what it sends is not to be trusted.

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
        """Let NIXL keep views of memory; docs/nixl.md says when that is worth it.

        Args:
            peer: whose memory it is; None for this agent's own.
            views: C-contiguous uint64 of shape (n, 5), rows ``(addr, len, device, stride, count)``, n at
                least 1.
            memory: kind of the memory.

        Returns:
            The list, for :meth:`read_ids`.

        Raises:
            PeerLostError: the peer is gone.
            RequestError: another form, or outside what is registered.
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
        """Start to read descriptors of a peer's memory into local ones; NIXL merges none of them.

        Args:
            peer: whose memory is read.
            local: C-contiguous uint64 of shape (n, 3), rows ``(addr, len, device)``; n may be 0.
            remote: the same for the peer, with equal lengths row by row.
            notif: message to the peer, sent by the poll that finds the read done; empty for none.
            local_memory: kind of the local memory.
            remote_memory: kind of the peer's memory.

        Returns:
            The read, under way: poll it, or wait for it.

        Raises:
            RequestError: the arrays have another form, do not fit each other, or leave registered memory.
                Nothing was started.
            AddressOverflowError: a row ends after 2**64. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        make = _reads_of(peer, local, remote, notif, local_memory, remote_memory)
        return self._start(peer, len(local), notif, make)

    def prepare_read(
        self,
        peer: Peer,
        local: NDArray[np.uint64],
        remote: NDArray[np.uint64],
        *,
        local_memory: Memory = "DRAM",
        remote_memory: Memory = "DRAM",
    ) -> PreparedRead:
        """Let NIXL keep a read that is posted often, always of the same bytes to the same place.

        Args:
            peer: whose memory is read.
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
        make = _reads_of(peer, local, remote, b"", local_memory, remote_memory)
        if not len(local):
            raise RequestError("a prepared read has no rows")
        return self._prepared.prepare_read(peer, len(local), make, self._in_flight)

    def read_ids(
        self,
        local: PreparedList,
        local_ids: NDArray[np.int32],
        remote: PreparedList,
        remote_ids: NDArray[np.int32],
        notif: bytes = b"",
    ) -> TransferHandle:
        """Start to read prepared descriptors of a peer into prepared local ones.

        NIXL merges neighbours: ids that go up by one at the same places on both sides, within one dense view
        each.

        Args:
            local: a list of :meth:`prepare`, of this agent's own memory.
            local_ids: C-contiguous int32 of shape (n,); n may be 0.
            remote: one of a peer's memory.
            remote_ids: the same for the peer.
            notif: message to the peer, sent by the poll that finds the read done; empty for none.

        Returns:
            The read, under way: poll it, or wait for it.

        Raises:
            RequestError: the ids have another form, do not fit the lists or each other. Nothing was started.
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
                raise RequestError("a prepared list was released or is of another agent")
            return nixl.make_prepped_xfer(_READ, local_handle, local_ids, remote_handle, remote_ids, notif)

        return self._start(peer, len(local_ids), notif, make)

    def _start(self, peer: Peer, count: int, notif: bytes, make: Callable[[NixlAgent], NixlHandle]) -> TransferHandle:
        if not count:
            # NIXL has no empty transfers, and the peer waits for the message before it frees its blocks.
            if notif:
                self.notify(peer, notif)
            self._session.usable(peer)
            return TransferHandle(peer, None, self._in_flight, Telemetry(0, 0))
        return self._in_flight.start(peer, count, make)

    def poll(self) -> list[TransferHandle]:
        """Drive the aborted transfers.

        Returns:
            Those that have ended since the last call, well or badly, each once: their memory is free now.
        """
        return self._in_flight.poll_aborted()

    # --- state ---------------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether a transfer was not seen to have ended. Nothing is polled for that."""
        return self._in_flight.is_running

    def in_flight(self) -> int:
        """Return how many transfers have not ended: their memory may still be written to."""
        return sum(not transfer.drive() for transfer in self._in_flight.running())

    def close(self, timeout: float = 10.0) -> None:
        """Wait for everything in flight, then release, disconnect and deregister everything.

        Raises:
            TransferError: transfers did not end in `timeout` seconds. Nothing was released, nothing new can
                be started, and the memory must not be freed; call again.
        """
        self._session.begin_closing()
        self._in_flight.drain(timeout, f"agent {self.name!r}")
        with self._session.setup:
            nixl, peers = self._session.close()
            if nixl is None:
                return
            self._prepared.release_all()
            for peer in peers:
                with contextlib.suppress(Exception):  # one that died may be unknown to NIXL by now
                    nixl.remove_remote_agent(peer.name)
            self._memory.deregister_all(nixl)


def _reads_of(
    peer: Peer,
    local: NDArray[np.uint64],
    remote: NDArray[np.uint64],
    notif: bytes,
    local_memory: Memory,
    remote_memory: Memory,
) -> Callable[[NixlAgent], NixlHandle]:
    """Check the rows of a read, and return what makes it."""
    check_rows("local descriptors", local)
    check_rows("remote descriptors", remote)
    if len(local) != len(remote):
        raise RequestError(f"{len(local)} local and {len(remote)} remote descriptors")

    def make(nixl: NixlAgent) -> NixlHandle:
        local_descriptors = make_descriptors(nixl, local, local_memory)
        remote_descriptors = make_descriptors(nixl, remote, remote_memory)
        return nixl.initialize_xfer(_READ, local_descriptors, remote_descriptors, peer.name, notif)

    return make
