# SPDX-License-Identifier: Apache-2.0
"""Ledger and courier, over the real side channel."""

import time

import pytest

from kvhma.vllm.leases import Courier, Ledger
from kvhma.vllm.params import Address
from kvhma.vllm.side_channel import Listener
from support.engines.engine import free_port


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def key(hold):
    return hold.request_id, hold.generation


def test_a_lease_ends():
    ledger = Ledger(0.05)
    hold, expires = ledger.hold("a")
    assert expires > time.monotonic()
    assert ledger.strike_off() == ([], [])
    time.sleep(0.06)
    assert ledger.renew([key(hold)]) == [None]  # not struck off yet, and not to be had any more
    assert ledger.strike_off() == ([], ["a"])
    assert ledger.strike_off() == ([], [])


def test_a_release_is_reported_once():
    ledger = Ledger(60)
    hold, _ = ledger.hold("a")
    ledger.release([key(hold), key(hold), ("b", 1)])
    assert ledger.renew([key(hold)]) == [None]
    assert ledger.strike_off() == (["a"], [])
    assert ledger.strike_off() == ([], [])


def test_an_old_generation_holds_nothing():
    ledger = Ledger(60)
    old, _ = ledger.hold("a")
    ledger.release([key(old)])
    new, _ = ledger.hold("a")
    assert ledger.renew([key(old), key(new)])[0] is None
    ledger.release([key(old)])
    assert ledger.strike_off() == (["a"], [])
    assert len(ledger) == 1


@pytest.fixture
def address():
    return Address("127.0.0.1", free_port())


@pytest.fixture
def courier():
    made = Courier(timeout=0.3, max_peers=2)
    yield made
    made.close()


def listen(address, ledger):
    return Listener(address, engine_id="p", instance=1, hellos={(0, 0): b"hello"}, desk=ledger)


def test_the_courier_keeps_a_lease_and_lets_go(address, courier):
    ledger = Ledger(0.4)
    listener = listen(address, ledger)
    try:
        hold, expires = ledger.hold("a")
        courier.track(address, hold, every=0.05)
        until(lambda: (courier.expires(hold) or 0) > expires + 0.5)
        assert ledger.strike_off() == ([], [])
        courier.release(address, hold)
        until(lambda: len(ledger) == 0)
        assert ledger.strike_off() == (["a"], [])
        assert courier.expires(hold) is None
    finally:
        listener.close()


def test_the_courier_survives_a_listener_that_comes_late(address, courier):
    ledger = Ledger(5)
    hold, expires = ledger.hold("a")
    courier.track(address, hold, every=0.05)
    time.sleep(0.8)
    listener = listen(address, ledger)
    try:
        until(lambda: (courier.expires(hold) or 0) > expires)
    finally:
        listener.close()


def test_the_courier_takes_no_more_engines_than_it_may(courier):
    ledger = Ledger(5)
    for port in range(1, 10):
        hold, _ = ledger.hold(str(port))
        courier.track(Address("127.0.0.1", port), hold, every=0.05)
    assert len(courier._peers) == 2


@pytest.mark.parametrize("host", ["", "no such host!", "256.1.1.1", "::zz", "a b", "*", "x" * 300])
def test_the_courier_survives_any_address(courier, host, address):
    ledger = Ledger(5)
    lost, _ = ledger.hold("lost")
    courier.track(Address(host, 1), lost, every=0.05)
    courier.release(Address(host, 1), lost)
    listener = listen(address, ledger)
    try:
        hold, expires = ledger.hold("a")
        courier.track(address, hold, every=0.05)
        until(lambda: (courier.expires(hold) or 0) > expires)
    finally:
        listener.close()
