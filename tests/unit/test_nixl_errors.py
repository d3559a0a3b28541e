# SPDX-License-Identifier: Apache-2.0
"""NIXL may raise anything in any call: a caller of kvhma.nixl sees kvhma's errors only."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvhma.errors import KvhmaError, PeerLostError, TransferError
from kvhma.nixl import Agent, AgentOptions, PreparedList, PreparedRead, TransferHandle
from support.fake_nixl import ERRORS, FakeHandle, FakeNet, FakeNixl
from support.flat import flat_geometry, labelled, rows_of, views_of

KINDS = [ERRORS["nixlBackendError"], ERRORS["nixlNotFoundError"], ERRORS["nixlRemoteDisconnectError"], TypeError]
"""One of each kind that kvhma distinguishes; the last comes from the binding."""


class Faults:
    """What NIXL raises, and which of its methods were called.

    Attributes:
        raised: by method.
        called: methods.
    """

    def __init__(self) -> None:
        self.raised: dict[str, type[Exception]] = {}
        self.called: set[str] = set()

    def call(self, method: str) -> None:
        """Record a call; raise what is there for it."""
        self.called.add(method)
        if method in self.raised:
            raise self.raised[method](method)


class FaultyNixl:
    """A fake NIXL with faults."""

    def __init__(self, fake: FakeNixl, faults: Faults) -> None:
        self._fake = fake
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fake, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self._faults.call(name)
            return found(*arguments, **named)

        return call if callable(found) else found


class World:
    """Two agents, D connected to P, with lists, a prepared read and a read in flight; and a third, unknown to both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net, self.faults = FakeNet(), Faults()
        release = FakeHandle.release

        def release_or_raise(handle: FakeHandle) -> None:
            self.faults.call("release")
            release(handle)

        monkeypatch.setattr(FakeHandle, "release", release_or_raise)
        monkeypatch.setattr(
            "kvhma.nixl.agent.open_nixl", lambda name, options: FaultyNixl(FakeNixl(name, net), self.faults)
        )
        self.source, self.target, self.more = labelled(8), np.zeros(8 * 4096, np.uint8), np.zeros(4096, np.uint8)
        self.p, self.d, third = (Agent(name, AgentOptions(strided=True)) for name in "PDQ")
        self.d.register(flat_geometry(self.target))
        for agent in (self.p, third):
            agent.register(flat_geometry(self.source))
        self.peer = self.d.connect(self.p.handshake_payload(flat_geometry(self.source)))
        self.new_payload = third.handshake_payload(flat_geometry(self.source))
        self.lists = self.d.prepare(None, views_of(self.target)), self.d.prepare(self.peer, views_of(self.source))
        self.rows = rows_of(self.target, [1]), rows_of(self.source, [2])
        self.prepared = self.d.prepare_read(self.peer, *self.rows)
        net.polls = 2
        self.running = self.d.read(self.peer, *self.rows)
        nixl = self.d._session.open()
        self.unposted = TransferHandle(self.peer, self.d._in_flight, nixl, self.running._posted.copy())
        self.ids = np.array([1], np.int32)
        self.faults.called.clear()


def handshake(world: World) -> None:
    world.p.handshake_payload(flat_geometry(world.source))


def read_ids(world: World) -> None:
    local, remote = world.lists
    world.d.read_ids(local, world.ids, remote, world.ids)


def abort(world: World) -> None:
    world.running.abort()
    for _ in range(3):
        world.d.poll()


CALLS: dict[tuple[type, str], Callable[[World], object]] = {
    (Agent, "__init__"): lambda world: Agent("new"),
    (Agent, "register"): lambda world: world.d.register(flat_geometry(world.more)),
    (Agent, "covers"): lambda world: world.d.covers(flat_geometry(world.more).regions[0]),
    (Agent, "register_scratch"): lambda world: world.d.register_scratch(flat_geometry(world.more).regions[0]),
    (Agent, "handshake_payload"): handshake,
    (Agent, "prewarm_transport"): lambda world: world.d.prewarm_transport(),
    (Agent, "connect"): lambda world: world.d.connect(world.new_payload),
    (Agent, "warm_up"): lambda world: world.d.warm_up(world.d.connect(world.new_payload, warm_up=False)),
    (Agent, "disconnect"): lambda world: world.d.disconnect(world.peer),
    (Agent, "notify"): lambda world: world.d.notify(world.peer, b"text"),
    (Agent, "notifications"): lambda world: world.p.notifications(),
    (Agent, "prepare"): lambda world: world.d.prepare(world.peer, views_of(world.source)),
    (Agent, "read"): lambda world: world.d.read(world.peer, *world.rows, b"done").wait(1),
    (Agent, "prepare_read"): lambda world: world.d.prepare_read(world.peer, *world.rows),
    (Agent, "read_ids"): read_ids,
    (Agent, "poll"): abort,
    (Agent, "in_flight"): lambda world: world.d.in_flight(),
    (Agent, "close"): lambda world: world.d.close(),
    (TransferHandle, "poll"): lambda world: world.running.poll(),
    (TransferHandle, "wait"): lambda world: world.running.wait(1),
    (TransferHandle, "abort"): abort,
    (TransferHandle, "post"): lambda world: world.unposted.post(),
    (TransferHandle, "drive"): lambda world: world.running.drive(),
    (PreparedList, "release"): lambda world: world.lists[0].release(),
    (PreparedRead, "post"): lambda world: world.prepared.post().wait(1),
    (PreparedRead, "release"): lambda world: world.prepared.release(),
}
"""Every public call that may reach NIXL."""


def public(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


def test_every_public_call_is_here() -> None:
    for cls in (Agent, TransferHandle, PreparedList, PreparedRead):
        assert {name for of, name in CALLS if of is cls} - {"__init__"} == public(cls)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0].__name__}.{call[1]}")
def test_no_exception_of_nixl_comes_out(monkeypatch: pytest.MonkeyPatch, call: tuple[type, str]) -> None:
    """An exception of NIXL in any method that the call reaches, and in any that it reaches only after one."""
    for error in KINDS:
        todo: list[frozenset[str]] = [frozenset()]
        seen = set(todo)
        while todo:
            broken = todo.pop()
            with monkeypatch.context() as patch:
                world = World(patch)
                world.faults.raised = dict.fromkeys(broken, error)
                with contextlib.suppress(KvhmaError):
                    CALLS[call](world)
            if len(broken) < 2:
                more = {broken | {method} for method in world.faults.called} - seen
                seen |= more
                todo += more


def test_an_agent_that_no_peer_can_read_names_its_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.faults.raised["get_agent_metadata"] = ERRORS["nixlInvalidParamError"]
    with pytest.raises(TransferError, match=r"'files'.*\['POSIX'\].*nixlInvalidParamError"):
        Agent("files", AgentOptions(backends=("POSIX",)))


def test_a_prepared_list_of_a_lost_peer_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL may raise while it releases the list."""
    world = World(monkeypatch)
    prepare = FakeNixl.prep_xfer_dlist

    def prepare_and_lose(*arguments: Any) -> FakeHandle:
        world.peer.gone = "it ended"
        return prepare(*arguments)

    monkeypatch.setattr(FakeNixl, "prep_xfer_dlist", prepare_and_lose)
    world.faults.raised["release"] = ERRORS["nixlBackendError"]
    with pytest.raises(PeerLostError, match="it ended"):
        world.d.prepare(world.peer, views_of(world.source))
    assert "release" in world.faults.called
