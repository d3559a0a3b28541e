# SPDX-License-Identifier: Apache-2.0
"""The owner of a NIXL agent: registration, peers, prepared lists and everything in flight."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import expand_views
from kvhma.errors import HandshakeError, KvhmaError, PeerLostError, RequestError, TransferError
from kvhma.geometry import Geometry, Memory, Region
from kvhma.nixl.arrays import check_ids, check_rows, count_entries
from kvhma.nixl.handshake import WARM_UP, Hello, decode_hello, encode_hello
from kvhma.nixl.library import LOCAL_SIDE, PROGRESS_DELAY_US, NixlAgent, NixlHandle, open_nixl, takes_strided, translate
from kvhma.nixl.transfer import Telemetry, TransferHandle

_READ = "READ"
_POLL_SECONDS = 5e-4
_SCRATCH_BYTES = 4096


@dataclass(eq=False)
class Peer:
    """A connected agent whose memory can be read.

    Valid until it is lost, disconnected, or replaced by another hello of the same name.

    Attributes:
        name: name of its agent.
        generation: random number of its life; after a restart the same name has another one.
        geometry: its caches.
        extra: bytes its engine put into the hello.
        gone: why nothing can be read from it any more; None while it is connected.
    """

    name: str
    generation: int
    geometry: Geometry = field(repr=False)
    extra: bytes = field(default=b"", repr=False)
    gone: str | None = None


@dataclass(eq=False)
class PreparedList:
    """A list of descriptors that NIXL keeps, to be chosen from by id.

    Entry ``e`` of view ``v`` has the id ``e`` plus the counts of all views before ``v``.

    Attributes:
        peer: whose memory it is; None for our own.
        count: ids go from 0 to ``count - 1``.
    """

    peer: Peer | None
    count: int
    _handle: NixlHandle | None = field(repr=False)
    _owner: Agent = field(repr=False)

    def release(self) -> None:
        """Give it back to NIXL. Transfers made from it are not affected; a second call does nothing."""
        self._owner._release(self)


class Agent:
    """One NIXL agent and everything made with it.

    It may be used from several threads at once. Calls that make a transfer return after the transport took
    it, which for one that copies inline is after the copy: call them from a thread that can wait, no lock is
    held meanwhile.

    The agent keeps every transfer until it has ended, whether or not the caller does, because NIXL would
    release a forgotten one while it still writes. The memory itself is the caller's: registered memory must
    stay mapped until :meth:`close`, also because peers may be reading it.

    Attributes:
        name: name of the agent, unique among the peers of a peer.
        generation: random number of this life of the agent.
        strided: whether views go to NIXL as they are; False: written out, one row per entry.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        progress_delay_us: int = PROGRESS_DELAY_US,
        strided: bool | None = None,
        nixl: NixlAgent | None = None,
    ) -> None:
        """Make the agent.

        Args:
            name: unique name of the agent.
            backends: NIXL's transports, in order of preference.
            num_threads: transport threads, which share transfers of 1,024 descriptors or more. With 0 a transport
                that copies inline does it in the calling thread.
            progress_delay_us: microseconds that NIXL's progress thread sleeps while no event wakes it, from 0 to
                1,000,000. 0 lets it poll without a pause, which takes a processor core.
            strided: False to write views out even where NIXL takes them; None to go by NIXL's version.
            nixl: what to use in place of a new ``nixl_agent``.

        Raises:
            ImportError: NIXL is not installed, or lacks something it needs.
            RequestError: the delay is out of range, or a backend takes no number of threads.
            TransferError: NIXL cannot start a backend.
        """
        self.name = name
        self.generation = secrets.randbits(64)
        self._given = nixl is not None
        self._options: dict[str, Any] = {
            "backends": backends,
            "num_threads": num_threads,
            "progress_delay_us": progress_delay_us,
        }
        self._nixl: NixlAgent | None = nixl or open_nixl(name, **self._options)
        self.strided = takes_strided(self._nixl) if strided is None else strided
        self._telemetry = True
        # _setup makes registration, adding and removing peers one after the other; it is held while NIXL connects or
        # pins memory, never while we wait for a peer. _lock guards the fields below, and is held while a transfer is
        # made, so that no list is released below it; never over a post, a poll or a wait.
        # Order: _setup, a transfer's own lock, _lock.
        self._setup = threading.RLock()
        self._lock = threading.RLock()
        self._closing = False
        self._registered: dict[tuple[Memory, int], list[tuple[int, int]]] = {}
        self._registrations: list[Any] = []
        self._peers: dict[str, Peer] = {}
        self._hellos: dict[str, Hello] = {}
        self._prepared: set[PreparedList] = set()
        self._live: set[TransferHandle] = set()
        self._reaped: list[TransferHandle] = []
        # Registered at once, so that later hellos do not differ by it.
        self._scratch_bytes = np.zeros(_SCRATCH_BYTES, dtype=np.uint8)
        self._scratch = Region(self._scratch_bytes.ctypes.data, _SCRATCH_BYTES)
        self._register(self._scratch)
        self._knows_blobs = self._nixl.get_agent_metadata().startswith(_blob_start(name))

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- memory --------------------------------------------------------------------------------------------

    def register(self, geometry: Geometry) -> None:
        """Register the regions of a geometry, each once, whichever geometry it comes with.

        Raises:
            RequestError: a region overlaps registered memory without being part of it. NIXL would take it,
                and then not find descriptors behind the overlap.
            TransferError: NIXL refused a region.
        """
        with self._setup:
            # Larger ones first, so that a region inside another one is seen to be covered.
            for region in sorted(geometry.regions, key=lambda r: (r.base, -r.bytes)):
                if not self._covers(region):
                    self._register(region)

    def _register(self, region: Region) -> None:
        nixl = self._open()
        try:
            self._registrations.append(nixl.register_memory(_row(region), region.memory))
        except Exception as exc:
            raise translate(exc, f"cannot register {region}") from exc
        spans = self._registered.setdefault((region.memory, region.device), [])
        insort(spans, (region.base, region.base + region.bytes))

    def _covers(self, region: Region) -> bool:
        spans = self._registered.get((region.memory, region.device), [])
        end = region.base + region.bytes
        after = bisect_right(spans, region.base, key=lambda span: span[0])
        if after and end <= spans[after - 1][1]:
            return True
        if (after and spans[after - 1][1] > region.base) or (after < len(spans) and spans[after][0] < end):
            raise RequestError(f"{region} overlaps registered memory without being part of it")
        return False

    # --- peers ---------------------------------------------------------------------------------------------

    def hello(self, geometry: Geometry, extra: bytes = b"") -> bytes:
        """Return the message that lets a peer read our caches; `extra` is the engine's own, up to 64 KiB.

        Raises:
            RequestError: a region of the geometry is not registered.
            HandshakeError: a field is too long.
        """
        with self._setup:
            for region in geometry.regions:
                if not self._covers(region):
                    raise RequestError(f"{region} is not registered")
            metadata = self._open().get_agent_metadata()
        return encode_hello(metadata, geometry, name=self.name, generation=self.generation, extra=extra)

    def prewarm_transport(self) -> None:
        """Connect to an agent of this process, let another one connect to us, read from each other, and part again.

        A transport works out how to talk to a peer once for each kind of connection, on the side that connects and on
        the side that is connected to: UCX takes tens of milliseconds for the first peer on the same host. After this,
        first peers find that done. It takes a quarter of a second.

        Raises:
            RequestError: the agent was given its ``nixl``.
            TransferError: NIXL cannot make other agents, or they cannot connect.
        """
        if self._given:
            raise RequestError(f"agent {self.name!r} was given its NIXL and cannot make others")
        # One for each part: UCX would go the way back over the connection that is there, which is of another kind.
        with (
            Agent(f"{self.name}-owner", **self._options) as owner,
            Agent(f"{self.name}-reader", **self._options) as reader,
        ):
            for local, remote in ((self, owner), (reader, self)):
                scratch = Geometry(regions=(remote._scratch,), groups=(), layers=())
                local.disconnect(local.connect(remote.hello(scratch)))

    def connect(self, hello: bytes, *, expect: str | None = None, timeout: float = 10.0) -> Peer:
        """Connect to the sender of a hello, and warm the connection up.

        The same hello again returns the same peer. Another one under the same name replaces the peer, which
        is how to get on after it was lost: transfers from the old one end first, then its prepared lists are
        released.

        Args:
            hello: what the peer's :meth:`hello` returned; any bytes are safe.
            expect: the only name that is accepted. Give it where it is known: else a peer can take another's
                place.
            timeout: seconds to wait for transfers from a replaced peer, and again for the peer to answer.

        Raises:
            HandshakeError: not a hello, or one that NIXL refuses or that contradicts itself.
            PeerLostError: the peer is gone already.
            TransferError: nobody is at the peer's address, the peer does not answer, its memory cannot be read, or
                transfers from the replaced peer did not end in time.
        """
        said = decode_hello(hello)
        name = said.name
        if expect is not None and name != expect:
            raise HandshakeError(f"the hello is from {name!r}, expected {expect!r}")
        if name == self.name:
            raise HandshakeError(f"the hello has our own name {name!r}")
        while True:
            with self._setup:
                nixl = self._open()
                known = self._peers.get(name)
                if known is None:
                    self._add(nixl, said)
                    peer = Peer(name, said.generation, said.geometry, said.extra)
                    with self._lock:
                        self._peers[name] = peer
                        self._hellos[name] = said
                    break
                if known.gone is None and said == self._hellos[name]:
                    return known
            self.disconnect(known, timeout)
        self._warm_up(peer, timeout)
        return peer

    def _add(self, nixl: NixlAgent, said: Hello) -> None:
        name = said.name
        # NIXL merges a blob into whichever agent it names, so a peer could add to what is known of another one. The
        # blob's form is NIXL's own business: look into it only if ours has the form we know.
        if self._knows_blobs and not said.metadata.startswith(_blob_start(name)):
            raise HandshakeError(f"the metadata in the hello of {name!r} is not that agent's")
        try:
            added = nixl.add_remote_agent(said.metadata)
        except Exception as exc:
            raise translate(exc, f"NIXL cannot take on {name!r}", HandshakeError) from exc
        loaded = added.decode(errors="replace") if isinstance(added, bytes) else added
        try:
            if loaded != name:
                raise HandshakeError(f"the metadata in the hello of {name!r} is of agent {loaded!r}")
            for region in said.geometry.regions:
                if not nixl.check_remote_metadata(name, _descriptors(nixl, _row(region), region.memory)):
                    raise HandshakeError(f"{name!r} did not register {region}")
        except Exception as exc:
            if loaded not in self._peers:
                with contextlib.suppress(Exception):
                    nixl.remove_remote_agent(loaded)
            if isinstance(exc, KvhmaError):
                raise
            raise translate(exc, f"cannot connect to {name!r}", HandshakeError) from exc

    def _warm_up(self, peer: Peer, timeout: float) -> None:
        # Adding an agent and sending it a notification only start to connect, and a transfer that follows waits for
        # the rest, tens of milliseconds. A small read that is waited for here leaves nothing to set up.
        region = next((region for region in peer.geometry.regions if region.memory == "DRAM"), None)
        if region is None:  # whether the transport reads device memory into host memory is not ours to find out
            self.notify(peer, WARM_UP)
            return
        size = min(region.bytes, _SCRATCH_BYTES)
        try:
            done = self.read(peer, _row(self._scratch, size), _row(region, size), WARM_UP).wait(timeout)
        except KvhmaError:
            self.disconnect(peer, timeout)
            raise
        if not done:
            with self._lock:
                peer.gone = peer.gone or f"no answer in {timeout} s"
            raise TransferError(f"peer {peer.name!r}: {peer.gone}")

    def disconnect(self, peer: Peer, timeout: float = 10.0) -> None:
        """Forget a peer, lost or not: its transfers end first, then its prepared lists are released.

        Raises:
            TransferError: transfers did not end in `timeout` seconds. The peer stays unusable; call again.
        """
        with self._lock:
            if self._peers.get(peer.name) is not peer:
                return
            peer.gone = peer.gone or "disconnected"
            live = [transfer for transfer in self._live if transfer.peer is peer]
        # NIXL would remove it under its transfers, answer "not found" for them from then on, and let them land later
        # all the same.
        _drain(live, timeout, f"peer {peer.name!r}")
        with self._setup:
            with self._lock:
                nixl = self._nixl
                if nixl is None or self._peers.get(peer.name) is not peer:
                    return
                self._release_all(prepared for prepared in self._prepared if prepared.peer is peer)
                del self._peers[peer.name], self._hellos[peer.name]
            try:
                nixl.remove_remote_agent(peer.name)
            except Exception as exc:
                # Newer versions of NIXL remove an agent by themselves once a transfer finds it disconnected.
                if type(exc).__name__ != "nixlNotFoundError":
                    raise translate(exc, f"cannot remove peer {peer.name!r}") from exc

    def notify(self, peer: Peer, message: bytes) -> None:
        """Send a message that :meth:`notifications` of the peer returns.

        Raises:
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot send it.
        """
        nixl = self._usable(peer)
        try:
            nixl.send_notif(peer.name, message)
        except Exception as exc:
            error = translate(exc, f"cannot notify {peer.name!r}")
            self._note(peer, error)
            raise error from exc

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return the messages that came since the last call, each with the name its sender gives itself.

        Those of finished transfers are among them; those that only open a connection are not. The sender need
        not be one of our peers, and what it sends is not to be trusted.

        Raises:
            TransferError: NIXL cannot read them.
        """
        nixl = self._open()
        try:
            news = nixl.get_new_notifs()
        except Exception as exc:
            raise translate(exc, "cannot read notifications") from exc
        return [(name, message) for name, messages in news.items() for message in messages if message != WARM_UP]

    # --- prepared lists ------------------------------------------------------------------------------------

    def prepare_local(self, views: NDArray[np.uint64], memory: Memory = "DRAM") -> PreparedList:
        """Let NIXL keep views of our own memory.

        Args:
            views: C-contiguous uint64 of shape (n, 5), rows ``(addr, len, device, stride, count)``, n at
                least 1.
            memory: kind of the memory.

        Raises:
            RequestError: another form, or outside what is registered.
            AddressOverflowError: a view ends behind 2**64.
        """
        return self._prepare(None, views, memory)

    def prepare_remote(self, peer: Peer, views: NDArray[np.uint64], memory: Memory = "DRAM") -> PreparedList:
        """Let NIXL keep views of a peer's memory, as :meth:`prepare_local` does of ours.

        Raises:
            PeerLostError: the peer is gone.
            RequestError: another form, or outside what the peer registered.
            AddressOverflowError: a view ends behind 2**64.
        """
        return self._prepare(peer, views, memory)

    def _prepare(self, peer: Peer | None, views: NDArray[np.uint64], memory: Memory) -> PreparedList:
        what = "local views" if peer is None else f"views of {peer.name!r}"
        check_rows(views, what, columns=5)
        if not len(views):
            raise RequestError(f"{what}: no rows")
        nixl = self._usable(peer)
        name = LOCAL_SIDE if peer is None else peer.name
        rows = views if self.strided else expand_views(views)
        try:
            handle = nixl.prep_xfer_dlist(name, rows, memory)
        except Exception as exc:
            error = translate(exc, f"cannot prepare {what} within registered {memory}", RequestError)
            self._note(peer, error)
            raise error from exc
        with self._lock:
            try:
                self._usable(peer)  # it may have gone while NIXL was at it
            except KvhmaError:
                handle.release()
                raise
            prepared = PreparedList(peer, count_entries(views), handle, self)
            self._prepared.add(prepared)
        return prepared

    def _release(self, prepared: PreparedList) -> None:
        with self._lock:
            handle, prepared._handle = prepared._handle, None
            self._prepared.discard(prepared)
            if handle is not None:
                with contextlib.suppress(Exception):  # NIXL tries again when the handle is collected
                    handle.release()

    def _release_all(self, prepared: Iterable[PreparedList]) -> None:
        for one in list(prepared):
            self._release(one)

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
        """Start to read descriptors of a peer into ours; NIXL merges nothing here.

        Args:
            peer: whose memory is read.
            local: C-contiguous uint64 of shape (n, 3), rows ``(addr, len, device)``; n may be 0.
            remote: the same for the peer, with equal lengths row by row.
            notif: message the peer gets once all is read, by the poll that finds it done; empty for none.
            local_memory: kind of our memory.
            remote_memory: kind of the peer's memory.

        Raises:
            RequestError: the arrays have another form, do not fit each other, or leave registered memory.
                Nothing was started.
            AddressOverflowError: a row ends behind 2**64. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        check_rows(local, "local descriptors")
        check_rows(remote, "remote descriptors")
        _check_equal(len(local), len(remote), "descriptors")

        def make(nixl: NixlAgent) -> NixlHandle:
            ours = _descriptors(nixl, local, local_memory)
            theirs = _descriptors(nixl, remote, remote_memory)
            return nixl.initialize_xfer(_READ, ours, theirs, peer.name, notif)

        return self._start(peer, len(local), notif, make)

    def read_ids(
        self,
        local: PreparedList,
        local_ids: NDArray[np.int32],
        remote: PreparedList,
        remote_ids: NDArray[np.int32],
        notif: bytes = b"",
    ) -> TransferHandle:
        """Start to read prepared descriptors of a peer into ours.

        NIXL merges neighbours: ids that go up by one at the same places on both sides, within one dense view
        each.

        Args:
            local: a list of :meth:`prepare_local`.
            local_ids: C-contiguous int32 of shape (n,); n may be 0.
            remote: a list of :meth:`prepare_remote`.
            remote_ids: the same for the peer.
            notif: message the peer gets once all is read, by the poll that finds it done; empty for none.

        Raises:
            RequestError: the ids have another form, do not fit the lists or each other. Nothing was started.
            PeerLostError: the peer is gone.
            TransferError: NIXL cannot start it.
        """
        check_ids(local_ids, "local ids")
        check_ids(remote_ids, "remote ids")
        _check_equal(len(local_ids), len(remote_ids), "ids")
        peer = remote.peer
        if peer is None or local.peer is not None:
            raise RequestError("read_ids takes a list of prepare_local and one of prepare_remote, in this order")

        def make(nixl: NixlAgent) -> NixlHandle:
            ours, theirs = local._handle, remote._handle
            if ours is None or theirs is None or local._owner is not self:
                raise RequestError("a prepared list was released or is of another agent")
            return nixl.make_prepped_xfer(_READ, ours, local_ids, theirs, remote_ids, notif)

        return self._start(peer, len(local_ids), notif, make)

    def _start(self, peer: Peer, count: int, notif: bytes, make: Callable[[NixlAgent], NixlHandle]) -> TransferHandle:
        if not count:
            # NIXL has no empty transfers, but the peer still waits for the word that it may free its blocks.
            if notif:
                self.notify(peer, notif)
            self._usable(peer)
            return TransferHandle.empty(peer)
        with self._lock:
            nixl = self._usable(peer)
            try:
                handle = make(nixl)
            except KvhmaError:
                raise
            except Exception as exc:
                what = f"cannot read {count} descriptors of {peer.name!r} within registered memory"
                error = translate(exc, what, RequestError)
                self._note(peer, error)
                raise error from exc
            transfer = TransferHandle(peer, nixl, handle, self._measure, self._ended)
            self._live.add(transfer)
        transfer.post()
        return transfer

    def _measure(self, nixl: NixlAgent, handle: NixlHandle) -> Telemetry | None:
        if not self._telemetry:
            return None
        try:
            raw = nixl.get_xfer_telemetry(handle)
        except Exception:
            # NIXL's environment can turn off what we asked for; that is no reason to fail, nor to ask again.
            self._telemetry = False
            return None
        return Telemetry(raw.descCount, raw.totalBytes, raw.startTime, raw.postDuration, raw.xferDuration)

    def _ended(self, transfer: TransferHandle, error: KvhmaError | None) -> None:
        with self._lock:
            self._live.discard(transfer)
            if transfer.aborted:
                self._reaped.append(transfer)
            self._note(transfer.peer, error)

    def poll(self) -> list[TransferHandle]:
        """Drive the aborted transfers.

        Returns:
            Those that have ended since the last call, well or badly, each once: their memory is free now.
        """
        with self._lock:
            aborted = [transfer for transfer in self._live if transfer.aborted]
        for transfer in aborted:
            transfer.drive()
        with self._lock:
            reaped, self._reaped = self._reaped, []
        return reaped

    # --- state ---------------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0) -> None:
        """Wait for everything in flight, then release, disconnect and deregister everything.

        Raises:
            TransferError: transfers did not end in `timeout` seconds. Nothing was released, nothing new can
                be started, and the memory must not be freed; call again.
        """
        with self._lock:
            self._closing = True
            live = list(self._live)
        _drain(live, timeout, f"agent {self.name!r}")
        with self._setup:
            with self._lock:
                nixl, self._nixl = self._nixl, None
                if nixl is None:
                    return
                self._release_all(self._prepared)
                names = list(self._peers)
                for peer in self._peers.values():
                    peer.gone = peer.gone or "the agent was closed"
                self._peers.clear()
                self._hellos.clear()
            # A peer that died may be unknown to NIXL by now, and what cannot be deregistered goes with the agent.
            for name in names:
                with contextlib.suppress(Exception):
                    nixl.remove_remote_agent(name)
            for registration in self._registrations:
                with contextlib.suppress(Exception):
                    nixl.deregister_memory(registration)
            self._registrations.clear()
            self._registered.clear()

    def _open(self) -> NixlAgent:
        if self._nixl is None or self._closing:
            raise TransferError(f"agent {self.name!r} is closed")
        return self._nixl

    def _usable(self, peer: Peer | None) -> NixlAgent:
        with self._lock:
            nixl = self._open()
            if peer is not None and (peer.gone is not None or self._peers.get(peer.name) is not peer):
                raise PeerLostError(f"peer {peer.name!r}: {peer.gone or 'not of this agent'}; connect again")
            return nixl

    def _note(self, peer: Peer | None, error: KvhmaError | None) -> None:
        if peer is not None and isinstance(error, PeerLostError):
            with self._lock:
                peer.gone = peer.gone or str(error)


def _row(region: Region, size: int | None = None) -> NDArray[np.uint64]:
    return np.array([[region.base, region.bytes if size is None else size, region.device]], dtype=np.uint64)


def _descriptors(nixl: NixlAgent, rows: NDArray[np.uint64], memory: Memory) -> Any:
    made = nixl.get_xfer_descs(rows, memory)
    if made is None:  # NIXL's way to refuse a form: a line in the log and no exception
        raise RequestError(f"NIXL makes no descriptors of {rows.dtype} of shape {rows.shape}, {memory}")
    return made


def _check_equal(local: int, remote: int, what: str) -> None:
    if local != remote:
        raise RequestError(f"{local} local and {remote} remote {what}")


def _drain(transfers: list[TransferHandle], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while left := [transfer for transfer in transfers if not transfer.drive()]:
        if time.monotonic() >= deadline:
            raise TransferError(f"{what}: {len(left)} transfers still in flight after {timeout} s")
        time.sleep(_POLL_SECONDS)


def _blob_start(name: str) -> bytes:
    raw = name.encode()
    return b"nixlSerDes|Agent" + len(raw).to_bytes(8, "little") + raw + b"|"
