# SPDX-License-Identifier: Apache-2.0
"""Notifications that peers send through NIXL are dropped and counted."""

import threading

import pytest

pytest.importorskip("cryptography")

from kvhma.nixl import WARM_UP, Agent
from kvhma.vllm.device.cache_device import HOST
from kvhma.vllm.peers import notifications
from kvhma.vllm.peers.notifications import NotificationDrain
from support.counted import Counted
from support.fake_nixl import ERRORS, FakeNet, FakeNixl
from support.waiting import until


class Drained:
    """An agent that drains its notifications often."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(notifications, "_INTERVAL_SECONDS", 0.02)
        self.net = FakeNet()
        self.nixl = FakeNixl("P", self.net)
        self.agent = Agent("P", nixl=self.nixl)
        self.counted = Counted()
        self.drain = NotificationDrain(self.agent, HOST, self.counted)

    @property
    def dropped(self):
        return self.counted.numbers["dropped_notifications"]


@pytest.fixture
def drained(monkeypatch):
    made = Drained(monkeypatch)
    yield made
    made.drain.close(5)
    assert not any(thread.name == "kvhma-notifications" for thread in threading.enumerate())


def test_strangers_fill_nothing(drained):
    """S12: notifications that peers sent piled up in NIXL for as long as the worker lived."""
    drained.nixl.inbox += [("stranger", bytes(1000))] * 5000
    drained.nixl.inbox += [("D", WARM_UP)] * 7
    until(lambda: drained.dropped == 5000)
    assert not drained.nixl.inbox


def test_errors_end_nothing(drained):
    drained.net.fail["get_new_notifs"] = [ERRORS["nixlBackendError"]("no"), SystemError("panic"), KeyboardInterrupt()]
    drained.nixl.inbox.append(("stranger", b"x"))
    until(lambda: drained.dropped == 1)
    assert not drained.net.fail["get_new_notifs"]
    assert drained.counted.by_label("thread_restarts") == {"kvhma-notifications": 1}, (
        "what is no Exception begins the thread anew"
    )
