# SPDX-License-Identifier: Apache-2.0
"""Ledger and courier, over the real side channel."""

import time

import pytest

from kvhma.vllm.leases import Courier, Lease, LeaseEndedError, Ledger
from kvhma.vllm.params import Address, Claim, Hold
from kvhma.vllm.side_channel import Lines, Listener
from support.engines.engine import free_port


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def claim(hold, reader=1):
    return Claim(hold, reader)


def test_a_lease_ends():
    ledger = Ledger(0.05)
    hold = ledger.hold("a")
    assert ledger.strike_off() == ([], [])
    time.sleep(0.06)
    assert ledger.renew([claim(hold)]) == [None]  # not struck off yet, and not to be had any more
    assert ledger.strike_off() == ([], ["a"])
    assert ledger.strike_off() == ([], [])


def test_a_renewal_extends_it():
    ledger = Ledger(0.3)
    hold = ledger.hold("a")
    for _ in range(4):
        time.sleep(0.1)
        (expires,) = ledger.renew([claim(hold)])
        assert expires > time.monotonic() + 0.2
    assert ledger.strike_off() == ([], [])


def test_a_release_is_reported_once():
    ledger = Ledger(60)
    hold = ledger.hold("a")
    ledger.release([claim(hold), claim(hold), claim(Hold("b", 1))])
    assert ledger.renew([claim(hold)]) == [None]
    assert ledger.strike_off() == (["a"], [])
    assert ledger.strike_off() == ([], [])


def test_an_old_generation_holds_nothing():
    ledger = Ledger(60)
    old = ledger.hold("a")
    ledger.release([claim(old)])
    new = ledger.hold("a")
    assert ledger.renew([claim(old), claim(new)])[0] is None
    ledger.release([claim(old)])
    assert ledger.strike_off() == (["a"], [])
    assert len(ledger) == 1


def test_the_first_reader_has_it_alone():
    ledger = Ledger(60)
    hold = ledger.hold("a")
    assert ledger.renew([claim(hold, 1)]) != [None]
    assert ledger.renew([claim(hold, 2)]) == [None]
    ledger.release([claim(hold, 2)])
    assert len(ledger) == 1
    ledger.release([claim(hold, 1)])
    assert len(ledger) == 0


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


def end_of(ledger, hold):
    return ledger._held[hold].expires


def test_the_courier_keeps_a_lease_and_lets_go(address, courier):
    ledger = Ledger(0.4)
    listener = listen(address, ledger)
    try:
        hold = ledger.hold("a")
        expires = end_of(ledger, hold)
        courier.track(address, claim(hold), every=0.05)
        until(lambda: end_of(ledger, hold) > expires + 0.5)
        assert ledger.strike_off() == ([], [])
        courier.release(address, claim(hold))
        until(lambda: len(ledger) == 0)
        assert ledger.strike_off() == (["a"], [])
    finally:
        listener.close()


def test_the_courier_survives_a_listener_that_comes_late(address, courier):
    ledger = Ledger(5)
    hold = ledger.hold("a")
    expires = end_of(ledger, hold)
    courier.track(address, claim(hold), every=0.05)
    time.sleep(0.8)
    listener = listen(address, ledger)
    try:
        until(lambda: end_of(ledger, hold) > expires)
    finally:
        listener.close()


def test_the_courier_takes_no_more_engines_than_it_may(courier):
    for port in range(1, 10):
        courier.track(Address("127.0.0.1", port), claim(Hold(str(port), 1)), every=0.05)
    assert len(courier._peers) == 2


@pytest.mark.parametrize("host", ["", "no such host!", "256.1.1.1", "::zz", "a b", "*", "x" * 300])
def test_the_courier_survives_any_address(courier, host, address):
    ledger = Ledger(5)
    lost = claim(Hold("lost", 1))
    courier.track(Address(host, 1), lost, every=0.05)
    courier.release(Address(host, 1), lost)
    listener = listen(address, ledger)
    try:
        hold = ledger.hold("a")
        expires = end_of(ledger, hold)
        courier.track(address, claim(hold), every=0.05)
        until(lambda: end_of(ledger, hold) > expires)
    finally:
        listener.close()


def covers(lease, ended):
    deadline = time.monotonic() + 5
    while (said := lease.covers(ended)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return said


@pytest.fixture
def ledger(address):
    ledger = Ledger(1.0)
    listener = listen(address, ledger)
    yield ledger
    listener.close()


def test_a_read_inside_its_lease_is_one_question(address, ledger):
    lease = Lease(Lines(address, 2), claim(ledger.hold("a")), timeout=2, margin=0.1)
    assert covers(lease, time.monotonic())
    assert lease.questions == 1
    lease.close()


def test_a_read_close_to_the_end_is_asked_for_again(address, ledger):
    lease = Lease(Lines(address, 2), claim(ledger.hold("a")), timeout=2, margin=10)
    assert covers(lease, time.monotonic())
    assert lease.questions == 2
    lease.close()


def test_a_read_past_the_end(address, ledger):
    lease = Lease(Lines(address, 2), claim(ledger.hold("a")), timeout=2, margin=0.1)
    time.sleep(1.1)
    with pytest.raises(LeaseEndedError, match="P does not hold 'a' for us"):
        covers(lease, time.monotonic())
    lease.close()


def test_a_second_reader(address, ledger):
    hold = ledger.hold("a")
    first = Lease(Lines(address, 2), claim(hold, 1), timeout=2, margin=0.1)
    assert covers(first, time.monotonic())
    second = Lease(Lines(address, 2), claim(hold, 2), timeout=2, margin=0.1)
    with pytest.raises(LeaseEndedError, match="read already"):
        covers(second, time.monotonic())
    first.close()
    second.close()


def test_nobody_answers(address):
    lease = Lease(Lines(address, 2), claim(Hold("a", 1)), timeout=0.1, margin=0.1)
    with pytest.raises(LeaseEndedError, match=r"no answer in 0\.1 s"):
        covers(lease, time.monotonic())
    lease.close()
