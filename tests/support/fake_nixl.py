# SPDX-License-Identifier: Apache-2.0
"""A NIXL without NIXL, for tests: agents of one process that move bytes, count descriptors, fail on demand.

It implements the contract that `kvhma.nixl` relies on, and nothing else: registered ranges, flat ids over rows, the
merge rule, progress and notifications only inside a poll. A released transfer runs on, and an agent may die.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma.nixl.library import LOCAL_SIDE

_NAMES = (
    "nixlBackendError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlRemoteDisconnectError",
)
ERRORS: dict[str, type[Exception]] = {name: type(name, (Exception,), {}) for name in _NAMES}
"""Exceptions named like NIXL's: kvhma distinguishes them by name."""

Pair = tuple[int, int, int]
"""A copy: local address, remote address, bytes."""


def _error(name: str) -> Exception:
    return ERRORS[name](name)


@dataclass(frozen=True, slots=True)
class Run:
    """Entries at equal distances, as NIXL stores a prepared list."""

    address: int
    nbytes: int
    stride: int
    count: int


def runs_of_views(views: NDArray[np.uint64]) -> list[Run]:
    """Return a run for every row ``(addr, len, device, stride, count)``; NIXL never joins them."""
    return [Run(address, size, stride, count) for address, size, _, stride, count in views.tolist()]


def runs_of_rows(rows: NDArray[np.uint64], find: Callable[[int, int], Any] = lambda address, nbytes: None) -> list[Run]:
    """Return the runs NIXL compresses rows ``(addr, len, device)`` into.

    Args:
        rows: uint64 of shape (n, 3).
        find: what is registered around (address, bytes); runs do not cross from one to the next.
    """
    runs: list[Run] = []
    last_key: Any = None
    last = 0
    for address, size, device in rows.tolist():
        key = (size, device, find(address, size))
        run = runs[-1] if runs else None
        if run is not None and key == last_key and run.count == 1 and address > last:
            runs[-1] = Run(run.address, size, address - last, 2)
        elif run is not None and key == last_key and run.count > 1 and address - last == run.stride:
            runs[-1] = Run(run.address, size, run.stride, run.count + 1)
        else:
            runs.append(Run(address, size, size, 1))
        last_key, last = key, address
    return runs


def merge(local: list[Run], local_ids: Sequence[int], remote: list[Run], remote_ids: Sequence[int]) -> list[Pair]:
    """Return the copies that NIXL makes of two lists of ids, merged by its rule.

    Neighbours merge if both ids go up by one within one run each and both runs are dense (stride equal to
    length).

    Raises:
        nixlInvalidParamError: the lists differ in length or are empty, an id is out of range, lengths differ.
    """
    if len(local_ids) != len(remote_ids) or not len(local_ids):
        raise _error("nixlInvalidParamError")
    pairs: list[Pair] = []
    before: tuple[int, int, int, int] | None = None
    for local_id, remote_id in zip(local_ids, remote_ids, strict=True):
        local_at, local_run, local_entry = _locate(local, int(local_id))
        remote_at, remote_run, remote_entry = _locate(remote, int(remote_id))
        nbytes = local_run.nbytes
        if nbytes != remote_run.nbytes:
            raise _error("nixlInvalidParamError")
        dense = local_run.stride == nbytes and remote_run.stride == nbytes
        if dense and before == (local_at, local_entry - 1, remote_at, remote_entry - 1):
            local_address, remote_address, size = pairs[-1]
            pairs[-1] = (local_address, remote_address, size + nbytes)
        else:
            local_address = local_run.address + local_entry * local_run.stride
            pairs.append((local_address, remote_run.address + remote_entry * remote_run.stride, nbytes))
        before = (local_at, local_entry, remote_at, remote_entry)
    return pairs


def _locate(runs: list[Run], index: int) -> tuple[int, Run, int]:
    entry = index
    if entry >= 0:
        for at, run in enumerate(runs):
            if entry < run.count:
                return at, run, entry
            entry -= run.count
    raise _error("nixlInvalidParamError")


class FakeNet:
    """Connects fake agents, and arranges failures.

    Attributes:
        agents: the living agents by name.
        polls: how many polls a transfer takes; 0 finishes inside the post, as a transport that copies inline
            does.
        fail: method name to exceptions that its next calls raise, first one first.
    """

    def __init__(self, polls: int = 0) -> None:
        """Make a net where transfers take `polls` polls."""
        self.agents: dict[str, FakeNixl] = {}
        self.polls = polls
        self.fail: dict[str, list[Exception]] = {}

    def kill(self, name: str) -> None:
        """Make an agent die: its peers find it disconnected from then on."""
        self.agents.pop(name)

    def check(self, method: str) -> None:
        """Raise what was arranged for this call."""
        if self.fail.get(method):
            raise self.fail[method].pop(0)


@dataclass(eq=False)
class FakeHandle:
    """A prepared list or a transfer."""

    agent: FakeNixl = field(repr=False)
    peer: str = ""
    runs: list[Run] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    notif: bytes = b""
    incarnation: int = 0
    left: int | None = None
    ended: bool = False
    released: bool = False

    def release(self) -> None:
        """Release it; NIXL continues the copy."""
        if self.left is not None and not self.ended:
            self.agent.released_in_flight += 1
        self.released = True


class FakeNixl:
    """Stands in for ``nixl_agent``.

    Attributes:
        calls: how often each method was called.
        released_in_flight: transfers that were released before they ended, which must never happen.
    """

    def __init__(self, name: str, net: FakeNet, *, strided: bool = True, telemetry: bool = True) -> None:
        """Join `net`; without `strided` it takes no (n, 5) rows, as NIXL before 1.5."""
        self.name = name
        self.net = net
        self.telemetry = telemetry
        self.calls: dict[str, int] = {}
        self.released_in_flight = 0
        self.registered: list[tuple[str, int, int, int]] = []
        self.remotes: dict[str, tuple[int, list[tuple[str, int, int, int]]]] = {}
        self.inbox: list[tuple[str, bytes]] = []
        self.strided = strided
        net.agents[name] = self

    def _call(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.net.check(method)

    # --- memory and peers

    def register_memory(self, reg_list: NDArray[np.uint64], mem_type: str) -> Any:
        """See nixl_agent."""
        self._call("register_memory")
        rows = [(mem_type, device, address, address + size) for address, size, device in reg_list.tolist()]
        self.registered += rows
        return rows

    def deregister_memory(self, dereg_list: Any) -> None:
        """See nixl_agent."""
        self._call("deregister_memory")
        for row in dereg_list:
            self.registered.remove(row)

    def get_agent_metadata(self) -> bytes:
        """See nixl_agent; it starts like the real one and then only says which object it is of."""
        raw = self.name.encode()
        return b"nixlSerDes|Agent" + len(raw).to_bytes(8, "little") + raw + b"|" + id(self).to_bytes(8, "little")

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """See nixl_agent."""
        self._call("add_remote_agent")
        for agent in self.net.agents.values():
            if agent.get_agent_metadata() == metadata:
                if agent.name in self.remotes and self.remotes[agent.name][0] != id(agent):
                    raise _error("nixlNotAllowedError")
                self.remotes[agent.name] = (id(agent), list(agent.registered))
                return agent.name.encode()
        raise _error("nixlMismatchError")

    def remove_remote_agent(self, agent: str) -> None:
        """See nixl_agent."""
        self._call("remove_remote_agent")
        if self.remotes.pop(agent, None) is None:
            raise _error("nixlNotFoundError")

    def check_remote_metadata(self, agent: str, descs: tuple[str, NDArray[np.uint64]]) -> bool:
        """See nixl_agent."""
        memory, rows = descs
        return agent in self.remotes and all(self._find(agent, memory, row) is not None for row in rows.tolist())

    def _find(self, agent: str, memory: str, row: list[int]) -> Any:
        ranges = self.registered if agent == LOCAL_SIDE else self.remotes[agent][1]
        address, size, device = row
        for kind, where, start, end in ranges:
            if (kind, where) == (memory, device) and start <= address and address + size <= end:
                return start
        return None

    def _reach(self, agent: str) -> FakeNixl:
        if agent not in self.remotes:
            raise _error("nixlNotFoundError")
        found = self.net.agents.get(agent)
        if found is None or id(found) != self.remotes[agent][0]:
            raise _error("nixlRemoteDisconnectError")
        return found

    # --- descriptors

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> Any:
        """See nixl_agent."""
        self._call("get_xfer_descs")
        return (mem_type, descs.copy()) if descs.shape[1] == 3 else None

    def prep_xfer_dlist(self, agent_name: str, xfer_list: NDArray[np.uint64], mem_type: str) -> FakeHandle:
        """See nixl_agent."""
        self._call("prep_xfer_dlist")
        wide = xfer_list.shape[1] == 5
        if wide and not self.strided:
            raise TypeError("prepXferDlist(): incompatible function arguments")
        if agent_name != LOCAL_SIDE and agent_name not in self.remotes:
            raise _error("nixlNotFoundError")
        device = int(xfer_list[0, 2])

        def find(address: int, nbytes: int) -> Any:
            start = self._find(agent_name, mem_type, [address, nbytes, device])
            if start is None:
                raise _error("nixlNotFoundError")
            return start

        runs = runs_of_views(xfer_list) if wide else runs_of_rows(xfer_list, find)
        for run in runs:
            find(run.address, (run.count - 1) * run.stride + run.nbytes)
        incarnation = 0 if agent_name == LOCAL_SIDE else self.remotes[agent_name][0]
        return FakeHandle(self, agent_name, runs=runs, incarnation=incarnation)

    # --- transfers

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: FakeHandle,
        local_indices: NDArray[np.int32],
        remote_xfer_side: FakeHandle,
        remote_indices: NDArray[np.int32],
        notif_msg: bytes = b"",
    ) -> FakeHandle:
        """See nixl_agent."""
        self._call("make_prepped_xfer")
        if operation != "READ":
            raise KeyError(operation)
        peer = remote_xfer_side.peer
        if local_xfer_side.released or remote_xfer_side.released or peer not in self.remotes:
            raise _error("nixlNotFoundError")
        pairs = merge(local_xfer_side.runs, local_indices.tolist(), remote_xfer_side.runs, remote_indices.tolist())
        return FakeHandle(self, peer, pairs=pairs, notif=notif_msg, incarnation=remote_xfer_side.incarnation)

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif_msg: bytes = b""
    ) -> FakeHandle:
        """See nixl_agent."""
        self._call("initialize_xfer")
        if operation != "READ":
            raise KeyError(operation)
        if remote_agent not in self.remotes:
            raise _error("nixlNotFoundError")
        pairs: list[Pair] = []
        for local, remote in zip(local_descs[1].tolist(), remote_descs[1].tolist(), strict=True):
            if local[1] != remote[1]:
                raise _error("nixlInvalidParamError")
            outside = self._find(LOCAL_SIDE, local_descs[0], local) is None
            if outside or self._find(remote_agent, remote_descs[0], remote) is None:
                raise _error("nixlNotFoundError")
            pairs.append((local[0], remote[0], local[1]))
        return FakeHandle(self, remote_agent, pairs=pairs, notif=notif_msg, incarnation=self.remotes[remote_agent][0])

    def transfer(self, handle: FakeHandle) -> str:
        """See nixl_agent; one that has ended may be posted again."""
        if handle.released or (handle.left is not None and not handle.ended):
            raise _error("nixlInvalidParamError")
        handle.left, handle.ended = self.net.polls, False
        return self._drive("transfer", handle)

    def check_xfer_state(self, handle: FakeHandle) -> str:
        """See nixl_agent."""
        if handle.left is None:
            raise _error("nixlNotPostedError")
        handle.left -= 1
        return self._drive("check_xfer_state", handle)

    def _drive(self, method: str, handle: FakeHandle) -> str:
        if handle.ended:
            return "DONE"
        try:
            self._call(method)
            if self.remotes.get(handle.peer, (None,))[0] != handle.incarnation:
                raise _error("nixlNotFoundError")
            peer = self._reach(handle.peer)
        except Exception:
            handle.ended = True
            raise
        if handle.left:
            return "PROC"
        for local, remote, nbytes in handle.pairs:
            ctypes.memmove(local, remote, nbytes)
        if handle.notif:
            peer.inbox.append((self.name, handle.notif))
        handle.ended = True
        return "DONE"

    def get_xfer_telemetry(self, handle: FakeHandle) -> Any:
        """See nixl_agent."""
        self._call("get_xfer_telemetry")
        if not self.telemetry:
            raise _error("nixlNoTelemetryError")
        return SimpleNamespace(
            descCount=len(handle.pairs),
            totalBytes=sum(nbytes for _, _, nbytes in handle.pairs),
            startTime=0,
            postDuration=0,
            xferDuration=0,
        )

    # --- notifications

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        """See nixl_agent."""
        self._call("send_notif")
        self._reach(remote_agent_name).inbox.append((self.name, notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """See nixl_agent."""
        self._call("get_new_notifs")
        news: dict[str, list[bytes]] = {}
        for name, message in self.inbox:
            news.setdefault(name, []).append(message)
        self.inbox.clear()
        return news
