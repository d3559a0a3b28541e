# SPDX-License-Identifier: Apache-2.0
"""LeaseTable and courier, over the real side channel."""

import threading
import time

import pytest

from kvhma.errors import HandshakeTimeoutError, LeaseEndedError
from kvhma.vllm.scheduler import leases as leases_module
from kvhma.vllm.scheduler.leases import LeaseRenewer, LeaseTable, claim_all
from kvhma.vllm.wire import side_channel
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey
from kvhma.vllm.wire.side_channel import Client, ClientPool, Listener, Outcome, Renew
from support.engines.engine import free_port


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def claim(hold, reader=1):
    return LeaseClaim(hold, reader)


def test_a_lease_ends():
    ledger = LeaseTable(0.05)
    hold = ledger.hold("a")
    assert ledger.drain_ended() == ([], [])
    time.sleep(0.06)
    assert ledger.renew([claim(hold)]) == [None]  # not struck off yet, and not to be had any more
    assert ledger.drain_ended() == ([], ["a"])
    assert ledger.drain_ended() == ([], [])


def test_a_renewal_extends_it():
    ledger = LeaseTable(0.3)
    hold = ledger.hold("a")
    for _ in range(4):
        time.sleep(0.1)
        (expires,) = ledger.renew([claim(hold)])
        assert expires > time.monotonic() + 0.2
    assert ledger.drain_ended() == ([], [])


def test_a_release_is_reported_once():
    ledger = LeaseTable(60)
    hold = ledger.hold("a")
    ledger.release([claim(hold), claim(hold), claim(LeaseKey("b", 1))], Outcome.READ)
    assert ledger.renew([claim(hold)]) == [None]
    assert ledger.drain_ended() == (["a"], [])
    assert ledger.drain_ended() == ([], [])


def test_an_old_generation_holds_nothing():
    ledger = LeaseTable(60)
    old = ledger.hold("a")
    ledger.release([claim(old)], Outcome.READ)
    new = ledger.hold("a")
    assert ledger.renew([claim(old), claim(new)])[0] is None
    ledger.release([claim(old)], Outcome.READ)
    assert ledger.drain_ended() == (["a"], [])
    assert len(ledger) == 1


def test_readers_share_a_request():
    """The first reader had it alone: of three samples with the same parameters two lost their blocks."""
    ledger = LeaseTable(60)
    hold = ledger.hold("a")
    assert None not in ledger.renew([claim(hold, reader) for reader in (1, 2, 3)])
    for reader in (2, 1):
        ledger.release([claim(hold, reader)], Outcome.READ)
        assert len(ledger) == 1
    assert ledger.renew([claim(hold, 3)]) != [None]
    ledger.release([claim(hold, 3)], Outcome.READ)
    assert ledger.drain_ended() == (["a"], [])


def test_a_reader_that_fails_leaves_the_request_to_the_next():
    """Any release gave the blocks back, so that another decode engine found none."""
    ledger = LeaseTable(60)
    hold = ledger.hold("a")
    ledger.renew([claim(hold, 1)])
    ledger.release([claim(hold, 1)], Outcome.UNREAD)
    assert ledger.drain_ended() == ([], [])
    assert ledger.renew([claim(hold, 2)]) != [None]
    ledger.release([claim(hold, 2)], Outcome.READ)
    assert ledger.drain_ended() == (["a"], [])


def test_one_that_fails_after_another_has_read_is_the_last():
    ledger = LeaseTable(60)
    hold = ledger.hold("a")
    ledger.renew([claim(hold, 1), claim(hold, 2)])
    ledger.release([claim(hold, 1)], Outcome.READ)
    ledger.release([claim(hold, 2)], Outcome.UNREAD)
    assert ledger.drain_ended() == (["a"], [])


def test_a_lease_that_nobody_could_read_under_ends_as_expired():
    ledger = LeaseTable(0.05)
    hold = ledger.hold("a")
    ledger.renew([claim(hold, 1)])
    ledger.release([claim(hold, 1)], Outcome.UNREAD)
    time.sleep(0.06)
    assert ledger.drain_ended() == ([], ["a"])


def test_a_reader_that_dies_keeps_the_blocks_for_its_lease_only():
    ledger = LeaseTable(0.2)
    hold = ledger.hold("a")
    ledger.renew([claim(hold, 1)])
    time.sleep(0.15)
    ledger.renew([claim(hold, 2)])
    ledger.release([claim(hold, 2)], Outcome.READ)
    assert ledger.drain_ended() == ([], [])
    time.sleep(0.06)
    assert ledger.drain_ended() == (["a"], []), "read, so no lease that ended unread"


def test_siblings_that_have_not_claimed_yet_have_a_moment(monkeypatch):
    monkeypatch.setattr(leases_module, "SIBLING_SECONDS", 0.1)
    ledger = LeaseTable(60)
    for name in ("in time", "late"):
        hold = ledger.hold(name)
        ledger.renew([claim(hold, 1)])
        ledger.release([claim(hold, 1)], Outcome.READ_BY_SIBLING)
        assert ledger.drain_ended() == ([], [])
        if name == "in time":
            assert ledger.renew([claim(hold, 2)])[0] > time.monotonic() + 50
            time.sleep(0.12)
            assert ledger.drain_ended() == ([], []), "a claim outlasts the moment"
            ledger.release([claim(hold, 2)], Outcome.READ)
        else:
            time.sleep(0.12)
            assert ledger.renew([claim(hold, 2)]) == [None]
        assert ledger.drain_ended() == ([name], [])


def test_that_moment_does_not_outlast_the_lease():
    ledger = LeaseTable(0.05)
    hold = ledger.hold("a")
    ledger.release([claim(hold, 1)], Outcome.READ_BY_SIBLING)
    time.sleep(0.06)
    assert ledger.drain_ended() == (["a"], [])


def test_readers_have_a_bound():
    ledger = LeaseTable(0.2)
    hold = ledger.hold("a")
    most = leases_module.MAX_READERS
    answers = ledger.renew([claim(hold, reader) for reader in range(most + 1)])
    assert answers.index(None) == most
    assert ledger.renew([claim(hold, 0)]) != [None], "those that are known may stay"
    time.sleep(0.15)
    ledger.renew([claim(hold, 0)])
    time.sleep(0.1)
    assert ledger.renew([claim(hold, most)]) != [None], "those that are silent make room"


@pytest.fixture
def address():
    return Address("127.0.0.1", free_port())


@pytest.fixture
def courier():
    made = LeaseRenewer(timeout=0.3, max_peers=2)
    yield made
    made.close()


def listen(address, ledger):
    return Listener(address, engine_id="p", instance=1, hellos={(0, 0): b"hello"}, desk=ledger)


def end_of(ledger, hold):
    return ledger._held[hold].expires


def test_the_courier_keeps_a_lease_and_lets_go(address, courier):
    ledger = LeaseTable(0.4)
    listener = listen(address, ledger)
    try:
        hold = ledger.hold("a")
        expires = end_of(ledger, hold)
        courier.track(address, claim(hold), every=0.05)
        until(lambda: end_of(ledger, hold) > expires + 0.5)
        assert ledger.drain_ended() == ([], [])
        courier.release(address, claim(hold), Outcome.READ)
        until(lambda: len(ledger) == 0)
        assert ledger.drain_ended() == (["a"], [])
    finally:
        listener.close()


def test_the_courier_survives_a_listener_that_comes_late(address, courier):
    ledger = LeaseTable(5)
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
        courier.track(Address("127.0.0.1", port), claim(LeaseKey(str(port), 1)), every=0.05)
    assert len(courier._peers) == 2


@pytest.mark.parametrize("host", ["", "no such host!", "256.1.1.1", "::zz", "a b", "*", "x" * 300])
def test_the_courier_survives_any_address(courier, host, address):
    ledger = LeaseTable(5)
    lost = claim(LeaseKey("lost", 1))
    courier.track(Address(host, 1), lost, every=0.05)
    courier.release(Address(host, 1), lost, Outcome.READ)
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
def lines(address):
    lines = ClientPool(address, 2)
    yield lines
    lines.close()


def ask(lines, *claims, timeout=2.0, margin=0.1):
    leases = claim_all(lines, claims, timeout=timeout, margin=margin)
    return leases[0] if len(leases) == 1 else leases


@pytest.fixture
def ledger(address):
    ledger = LeaseTable(1.0)
    listener = listen(address, ledger)
    yield ledger
    listener.close()


def test_a_read_inside_its_lease_is_one_question(lines, ledger):
    lease = ask(lines, claim(ledger.hold("a")))
    assert covers(lease, time.monotonic())
    assert lease.fences == 0
    lease.close()


def test_a_read_close_to_the_end_is_asked_for_again(lines, ledger):
    lease = ask(lines, claim(ledger.hold("a")), margin=10)
    assert covers(lease, time.monotonic())
    assert lease.fences == 1
    lease.close()


def test_a_read_past_the_end(lines, ledger):
    lease = ask(lines, claim(ledger.hold("a")))
    time.sleep(1.1)
    with pytest.raises(LeaseEndedError, match="P does not hold 'a' any more"):
        covers(lease, time.monotonic())
    lease.close()


def test_a_second_reader(lines, ledger):
    """It was told that the blocks were read already, although they were all still there."""
    hold = ledger.hold("a")
    leases = [ask(lines, claim(hold, reader)) for reader in (1, 2)]
    assert all(covers(lease, time.monotonic()) for lease in leases)
    ledger.release([claim(hold, 1), claim(hold, 2)], Outcome.READ)
    late = ask(lines, claim(hold, 3))
    with pytest.raises(LeaseEndedError, match="it was read and nobody claimed it"):
        covers(late, time.monotonic())
    for lease in (*leases, late):
        lease.close()


def test_nobody_answers(lines):
    lease = ask(lines, claim(LeaseKey("a", 1)), timeout=0.1, margin=0.1)
    with pytest.raises(LeaseEndedError, match=r"no answer in 0\.1 s"):
        covers(lease, time.monotonic())
    lease.close()


def test_claims_of_a_step_are_one_question(lines, ledger, monkeypatch):
    questions = []
    send = Client.send
    monkeypatch.setattr(Client, "send", lambda self, question: (questions.append(question), send(self, question)))
    holds = [ledger.hold(name) for name in "ab"]
    first, unknown, second = ask(lines, claim(holds[0]), claim(LeaseKey("c", 1)), claim(holds[1]))
    assert covers(first, time.monotonic())
    with pytest.raises(LeaseEndedError, match="P does not hold 'c' any more"):
        covers(unknown, time.monotonic())
    assert covers(second, time.monotonic())
    assert [type(question) for question in questions] == [Renew]
    for lease in (first, unknown, second):
        lease.close()


def test_one_of_several_is_asked_for_again(lines, ledger):
    near, far = ask(lines, claim(ledger.hold("a")), claim(ledger.hold("b")), margin=0.5)
    assert covers(far, time.monotonic())
    time.sleep(0.6)
    assert covers(near, time.monotonic())
    assert (near.fences, far.fences) == (1, 0)
    for lease in (near, far):
        lease.close()


def test_a_line_is_kept_for_the_next_question_unless_it_waits(lines, ledger):
    for name in "ab":
        (lease,) = claim_all(lines, [claim(ledger.hold(name))], timeout=2, margin=0.1)
        socket = lease.socket
        assert covers(lease, time.monotonic())
        assert lease.socket is None
        lease.close()
        if name == "a":
            kept = socket
    assert socket is kept
    waits = lines.take()
    waits.send(Renew([]))
    lines.give_back(waits)
    assert waits.socket.closed
    idle = lines.take()
    lines.close()
    lines.give_back(idle)
    assert idle.socket.closed


def test_an_answer_for_other_claims_than_were_asked(address, lines):
    class Confused(LeaseTable):
        def renew(self, claims):
            return [*super().renew(claims), 1e9]

    listener = listen(address, Confused(1.0))
    try:
        lease = ask(lines, claim(LeaseKey("a", 1)))
        with pytest.raises(LeaseEndedError, match="1 claims, 2 answers"):
            covers(lease, time.monotonic())
        lease.close()
    finally:
        listener.close()


def test_a_line_whose_connection_has_ended_for_good_is_not_waited_for(lines, ledger):
    (lease,) = claim_all(lines, [claim(ledger.hold("a"))], timeout=2, margin=0.1)
    assert covers(lease, time.monotonic())
    lease.close()
    dead = lines.take()
    dead.socket.disconnect(dead.socket.LAST_ENDPOINT)  # a frame that is none of ZMQ's leaves it like this
    lines.give_back(dead)
    begun = time.monotonic()
    (lease,) = claim_all(lines, [claim(ledger.hold("b"))], timeout=2, margin=0.1)
    assert covers(lease, time.monotonic()), "asked over a new one"
    assert dead.socket.closed
    assert time.monotonic() - begun < 2
    lease.close()
    alone = lines.take()
    alone.socket.disconnect(alone.socket.LAST_ENDPOINT)
    with pytest.raises(HandshakeTimeoutError, match="cannot ask"):
        alone.send(Renew([]))
    alone.close()


def test_releases_do_not_keep_renewals_from_being_said(address, courier):
    ledger = LeaseTable(0.6)
    said = []

    class Busy:
        """While it answers, another request is let go of."""

        def renew(self, claims):
            said.append("renew")
            return ledger.renew(claims)

        def release(self, claims, outcome):
            said.append("release")
            courier.release(address, claim(LeaseKey("another", len(said))), Outcome.READ)

    listener = Listener(address, engine_id="p", instance=1, hellos={}, desk=Busy())
    try:
        hold = ledger.hold("a")
        courier.track(address, claim(hold), every=0.05)
        courier.release(address, claim(LeaseKey("another", 0)), Outcome.READ)
        until(lambda: said.count("release") > 50 and said.count("renew") > 5)
        time.sleep(0.8)
        assert ledger.drain_ended() == ([], [])
    finally:
        listener.close()


def test_a_name_that_is_looked_up_for_long_keeps_no_other_engine_waiting(address, courier, monkeypatch):
    ledger = LeaseTable(5)
    go_on = threading.Event()
    getaddrinfo = side_channel.getaddrinfo

    def slowly(host, *more, **options):
        if host == "slow":
            go_on.wait(10)
            host = "localhost"
        return getaddrinfo(host, *more, **options)

    monkeypatch.setattr(side_channel, "getaddrinfo", slowly)
    listener = listen(address, ledger)
    try:
        holds = ledger.hold("at once"), ledger.hold("later")
        first, later = (end_of(ledger, hold) for hold in holds)
        courier.track(Address("slow", address.port), claim(holds[1]), every=0.05)
        courier.track(address, claim(holds[0]), every=0.05)
        until(lambda: end_of(ledger, holds[0]) > first + 0.2)
        assert end_of(ledger, holds[1]) == later
        go_on.set()
        until(lambda: end_of(ledger, holds[1]) > later)
    finally:
        go_on.set()
        listener.close()


def test_the_courier_knows_what_p_holds(address, courier):
    ledger = LeaseTable(5)
    hold = ledger.hold("a")
    here, gone = claim(hold, 1), claim(LeaseKey("b", 1), 1)
    assert courier.held(address, here) is None
    listener = listen(address, ledger)
    try:
        for one in (here, gone):
            courier.track(address, one, every=1)
        until(lambda: None not in {courier.held(address, one) for one in (here, gone)})
        assert (courier.held(address, here), courier.held(address, gone)) == (True, False)
        courier.release(address, here, Outcome.READ)
        assert courier.held(address, here) is None
    finally:
        listener.close()


def test_every_outcome_reaches_p(address, courier):
    heard = []

    class LeaseService:
        def renew(self, claims):
            return [None for _ in claims]

        def release(self, claims, outcome):
            heard.extend((one.hold.request_id, outcome) for one in claims)

    listener = Listener(address, engine_id="p", instance=1, hellos={}, desk=LeaseService())
    try:
        said = [(str(number), outcome) for number, outcome in enumerate([*Outcome, *Outcome, Outcome.UNREAD])]
        for name, outcome in said:
            courier.release(address, claim(LeaseKey(name, 1)), outcome)
        until(lambda: len(heard) == len(said))
        assert heard == said
    finally:
        listener.close()
