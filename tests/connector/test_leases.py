# SPDX-License-Identifier: Apache-2.0
"""Leases of P and D over the real side channel."""

import threading
import time

import pytest

from kvhma.errors import HandshakeTimeoutError, LeaseEndedError
from kvhma.vllm.scheduler import lease_table
from kvhma.vllm.scheduler.lease_renewer import LeaseRenewer
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.wire import names
from kvhma.vllm.wire.client import Client, ClientPool
from kvhma.vllm.wire.messages import Outcome, Renew
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey
from kvhma.vllm.wire.server import Listener
from kvhma.vllm.worker.lease import claim_all
from support.engines.engine import free_port


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def claim(key, reader=1):
    return LeaseClaim(key, reader)


def test_a_lease_ends():
    table = LeaseTable(0.05)
    key = table.add("a")
    assert table.drain_ended() == ([], [])
    time.sleep(0.06)
    assert table.renew([claim(key)]) == [None]  # not drained yet, and not renewed any more
    assert table.drain_ended() == ([], ["a"])
    assert table.drain_ended() == ([], [])


def test_a_renewal_extends_it():
    table = LeaseTable(0.3)
    key = table.add("a")
    for _ in range(4):
        time.sleep(0.1)
        (expires,) = table.renew([claim(key)])
        assert expires > time.monotonic() + 0.2
    assert table.drain_ended() == ([], [])


def test_a_release_is_reported_once():
    table = LeaseTable(60)
    key = table.add("a")
    table.release([claim(key), claim(key), claim(LeaseKey("b", 1))], Outcome.READ)
    assert table.renew([claim(key)]) == [None]
    assert table.drain_ended() == (["a"], [])
    assert table.drain_ended() == ([], [])


def test_an_old_generation_holds_nothing():
    table = LeaseTable(60)
    old = table.add("a")
    table.release([claim(old)], Outcome.READ)
    new = table.add("a")
    assert table.renew([claim(old), claim(new)])[0] is None
    table.release([claim(old)], Outcome.READ)
    assert table.drain_ended() == (["a"], [])
    assert len(table) == 1


def test_readers_share_a_request():
    """The first reader had it alone: of three samples with the same parameters two lost their blocks."""
    table = LeaseTable(60)
    key = table.add("a")
    assert None not in table.renew([claim(key, reader) for reader in (1, 2, 3)])
    for reader in (2, 1):
        table.release([claim(key, reader)], Outcome.READ)
        assert len(table) == 1
    assert table.renew([claim(key, 3)]) != [None]
    table.release([claim(key, 3)], Outcome.READ)
    assert table.drain_ended() == (["a"], [])


def test_a_reader_that_fails_leaves_the_request_to_the_next():
    """Any release gave the blocks back, so that another decode engine found none."""
    table = LeaseTable(60)
    key = table.add("a")
    table.renew([claim(key, 1)])
    table.release([claim(key, 1)], Outcome.UNREAD)
    assert table.drain_ended() == ([], [])
    assert table.renew([claim(key, 2)]) != [None]
    table.release([claim(key, 2)], Outcome.READ)
    assert table.drain_ended() == (["a"], [])


def test_one_that_fails_after_another_has_read_is_the_last():
    table = LeaseTable(60)
    key = table.add("a")
    table.renew([claim(key, 1), claim(key, 2)])
    table.release([claim(key, 1)], Outcome.READ)
    table.release([claim(key, 2)], Outcome.UNREAD)
    assert table.drain_ended() == (["a"], [])


def test_a_lease_that_nobody_could_read_under_ends_as_expired():
    table = LeaseTable(0.05)
    key = table.add("a")
    table.renew([claim(key, 1)])
    table.release([claim(key, 1)], Outcome.UNREAD)
    time.sleep(0.06)
    assert table.drain_ended() == ([], ["a"])


def test_a_reader_that_dies_keeps_the_blocks_for_its_lease_only():
    table = LeaseTable(0.2)
    key = table.add("a")
    table.renew([claim(key, 1)])
    time.sleep(0.15)
    table.renew([claim(key, 2)])
    table.release([claim(key, 2)], Outcome.READ)
    assert table.drain_ended() == ([], [])
    time.sleep(0.06)
    assert table.drain_ended() == (["a"], []), "read, so no lease that ended unread"


def test_readers_that_have_not_claimed_yet_have_a_moment(monkeypatch):
    monkeypatch.setattr(lease_table, "LATE_READER_SECONDS", 0.1)
    table = LeaseTable(60)
    for name in ("in time", "late"):
        key = table.add(name)
        table.renew([claim(key, 1)])
        table.release([claim(key, 1)], Outcome.READ_SHARED)
        assert table.drain_ended() == ([], [])
        if name == "in time":
            assert table.renew([claim(key, 2)])[0] > time.monotonic() + 50
            time.sleep(0.12)
            assert table.drain_ended() == ([], []), "a claim outlasts the moment"
            table.release([claim(key, 2)], Outcome.READ)
        else:
            time.sleep(0.12)
            assert table.renew([claim(key, 2)]) == [None]
        assert table.drain_ended() == ([name], [])


def test_that_moment_does_not_outlast_the_lease():
    table = LeaseTable(0.05)
    key = table.add("a")
    table.release([claim(key, 1)], Outcome.READ_SHARED)
    time.sleep(0.06)
    assert table.drain_ended() == (["a"], [])


def test_readers_have_a_bound():
    table = LeaseTable(0.2)
    key = table.add("a")
    most = lease_table.MAX_READERS
    answers = table.renew([claim(key, reader) for reader in range(most + 1)])
    assert answers.index(None) == most
    assert table.renew([claim(key, 0)]) != [None], "those that are known may stay"
    time.sleep(0.15)
    table.renew([claim(key, 0)])
    time.sleep(0.1)
    assert table.renew([claim(key, most)]) != [None], "those that are silent make room"


@pytest.fixture
def address():
    return Address("127.0.0.1", free_port())


@pytest.fixture
def renewer():
    made = LeaseRenewer(timeout=0.3, max_peers=2)
    yield made
    made.close()


def listen(address, table):
    return Listener(address, engine_id="p", incarnation_id=1, hellos={(0, 0): b"hello"}, leases=table)


def end_of(table, key):
    return table._held[key].expires


def test_the_renewer_keeps_a_lease_and_releases_it(address, renewer):
    table = LeaseTable(0.4)
    listener = listen(address, table)
    try:
        key = table.add("a")
        expires = end_of(table, key)
        renewer.track(address, claim(key), every=0.05)
        until(lambda: end_of(table, key) > expires + 0.5)
        assert table.drain_ended() == ([], [])
        renewer.release(address, claim(key), Outcome.READ)
        until(lambda: len(table) == 0)
        assert table.drain_ended() == (["a"], [])
    finally:
        listener.close()


def test_the_renewer_survives_a_listener_that_comes_late(address, renewer):
    table = LeaseTable(5)
    key = table.add("a")
    expires = end_of(table, key)
    renewer.track(address, claim(key), every=0.05)
    time.sleep(0.8)
    listener = listen(address, table)
    try:
        until(lambda: end_of(table, key) > expires)
    finally:
        listener.close()


def test_the_renewer_takes_no_more_engines_than_it_may(renewer):
    for port in range(1, 10):
        renewer.track(Address("127.0.0.1", port), claim(LeaseKey(str(port), 1)), every=0.05)
    assert len(renewer._sessions) == 2


@pytest.mark.parametrize("host", ["", "no such host!", "256.1.1.1", "::zz", "a b", "*", "x" * 300])
def test_the_renewer_survives_any_address(renewer, host, address):
    table = LeaseTable(5)
    lost = claim(LeaseKey("lost", 1))
    renewer.track(Address(host, 1), lost, every=0.05)
    renewer.release(Address(host, 1), lost, Outcome.READ)
    listener = listen(address, table)
    try:
        key = table.add("a")
        expires = end_of(table, key)
        renewer.track(address, claim(key), every=0.05)
        until(lambda: end_of(table, key) > expires)
    finally:
        listener.close()


def covers(lease, ended):
    deadline = time.monotonic() + 5
    while (said := lease.covers(ended)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return said


@pytest.fixture
def clients(address):
    clients = ClientPool(address, 2)
    yield clients
    clients.close()


def ask(clients, *claims, timeout=2.0, margin=0.1):
    leases = claim_all(clients, claims, timeout=timeout, margin=margin)
    return leases[0] if len(leases) == 1 else leases


@pytest.fixture
def table(address):
    table = LeaseTable(1.0)
    listener = listen(address, table)
    yield table
    listener.close()


def test_a_read_inside_its_lease_is_one_question(clients, table):
    lease = ask(clients, claim(table.add("a")))
    assert covers(lease, time.monotonic())
    assert lease.late_checks == 0
    lease.close()


def test_a_read_close_to_the_end_is_asked_for_again(clients, table):
    lease = ask(clients, claim(table.add("a")), margin=10)
    assert covers(lease, time.monotonic())
    assert lease.late_checks == 1
    lease.close()


def test_a_read_past_the_end(clients, table):
    lease = ask(clients, claim(table.add("a")))
    time.sleep(1.1)
    with pytest.raises(LeaseEndedError, match="P does not hold 'a' any more"):
        covers(lease, time.monotonic())
    lease.close()


def test_a_second_reader(clients, table):
    """It was told that the blocks were read already, although they were all still there."""
    key = table.add("a")
    leases = [ask(clients, claim(key, reader)) for reader in (1, 2)]
    assert all(covers(lease, time.monotonic()) for lease in leases)
    table.release([claim(key, 1), claim(key, 2)], Outcome.READ)
    late = ask(clients, claim(key, 3))
    with pytest.raises(LeaseEndedError, match="it was read and nobody claimed it"):
        covers(late, time.monotonic())
    for lease in (*leases, late):
        lease.close()


def test_nobody_answers(clients):
    lease = ask(clients, claim(LeaseKey("a", 1)), timeout=0.1, margin=0.1)
    with pytest.raises(LeaseEndedError, match=r"no answer in 0\.1 s"):
        covers(lease, time.monotonic())
    lease.close()


def test_claims_of_a_step_are_one_question(clients, table, monkeypatch):
    questions = []
    send = Client.send
    monkeypatch.setattr(Client, "send", lambda self, question: (questions.append(question), send(self, question)))
    keys = [table.add(name) for name in "ab"]
    first, unknown, second = ask(clients, claim(keys[0]), claim(LeaseKey("c", 1)), claim(keys[1]))
    assert covers(first, time.monotonic())
    with pytest.raises(LeaseEndedError, match="P does not hold 'c' any more"):
        covers(unknown, time.monotonic())
    assert covers(second, time.monotonic())
    assert [type(question) for question in questions] == [Renew]
    for lease in (first, unknown, second):
        lease.close()


def test_one_of_several_is_asked_for_again(clients, table):
    near, far = ask(clients, claim(table.add("a")), claim(table.add("b")), margin=0.5)
    assert covers(far, time.monotonic())
    time.sleep(0.6)
    assert covers(near, time.monotonic())
    assert (near.late_checks, far.late_checks) == (1, 0)
    for lease in (near, far):
        lease.close()


def test_a_connection_is_kept_for_the_next_question_unless_it_waits(clients, table):
    for name in "ab":
        (lease,) = claim_all(clients, [claim(table.add(name))], timeout=2, margin=0.1)
        socket = lease.socket
        assert covers(lease, time.monotonic())
        assert lease.socket is None
        lease.close()
        if name == "a":
            kept = socket
    assert socket is kept
    waits = clients.take()
    waits.send(Renew([]))
    clients.release(waits)
    assert waits.socket.closed
    idle = clients.take()
    clients.close()
    clients.release(idle)
    assert idle.socket.closed


def test_an_answer_for_other_claims_than_were_asked(address, clients):
    class Confused(LeaseTable):
        def renew(self, claims):
            return [*super().renew(claims), 1e9]

    listener = listen(address, Confused(1.0))
    try:
        lease = ask(clients, claim(LeaseKey("a", 1)))
        with pytest.raises(LeaseEndedError, match="1 claims, 2 answers"):
            covers(lease, time.monotonic())
        lease.close()
    finally:
        listener.close()


def test_a_connection_that_has_ended_for_good_is_not_waited_for(clients, table):
    (lease,) = claim_all(clients, [claim(table.add("a"))], timeout=2, margin=0.1)
    assert covers(lease, time.monotonic())
    lease.close()
    dead = clients.take()
    dead.socket.disconnect(dead.socket.LAST_ENDPOINT)  # what is not ZMQ leaves it like this
    clients.release(dead)
    begun = time.monotonic()
    (lease,) = claim_all(clients, [claim(table.add("b"))], timeout=2, margin=0.1)
    assert covers(lease, time.monotonic()), "asked over a new one"
    assert dead.socket.closed
    assert time.monotonic() - begun < 2
    lease.close()
    alone = clients.take()
    alone.socket.disconnect(alone.socket.LAST_ENDPOINT)
    with pytest.raises(HandshakeTimeoutError, match="cannot ask"):
        alone.send(Renew([]))
    alone.close()


def test_releases_do_not_keep_renewals_from_being_said(address, renewer):
    table = LeaseTable(0.6)
    said = []

    class Busy:
        """While it answers, another request is released."""

        def renew(self, claims):
            said.append("renew")
            return table.renew(claims)

        def release(self, claims, outcome):
            said.append("release")
            renewer.release(address, claim(LeaseKey("another", len(said))), Outcome.READ)

    listener = Listener(address, engine_id="p", incarnation_id=1, hellos={}, leases=Busy())
    try:
        key = table.add("a")
        renewer.track(address, claim(key), every=0.05)
        renewer.release(address, claim(LeaseKey("another", 0)), Outcome.READ)
        until(lambda: said.count("release") > 50 and said.count("renew") > 5)
        time.sleep(0.8)
        assert table.drain_ended() == ([], [])
    finally:
        listener.close()


def test_a_name_that_is_looked_up_for_long_keeps_no_other_engine_waiting(address, renewer, monkeypatch):
    table = LeaseTable(5)
    go_on = threading.Event()
    getaddrinfo = names.getaddrinfo

    def slowly(host, *more, **options):
        if host == "slow":
            go_on.wait(10)
            host = "localhost"
        return getaddrinfo(host, *more, **options)

    monkeypatch.setattr(names, "getaddrinfo", slowly)
    listener = listen(address, table)
    try:
        keys = table.add("at once"), table.add("later")
        first, later = (end_of(table, key) for key in keys)
        renewer.track(Address("slow", address.port), claim(keys[1]), every=0.05)
        renewer.track(address, claim(keys[0]), every=0.05)
        until(lambda: end_of(table, keys[0]) > first + 0.2)
        assert end_of(table, keys[1]) == later
        go_on.set()
        until(lambda: end_of(table, keys[1]) > later)
    finally:
        go_on.set()
        listener.close()


def test_the_renewer_knows_what_p_holds(address, renewer):
    table = LeaseTable(5)
    key = table.add("a")
    here, gone = claim(key, 1), claim(LeaseKey("b", 1), 1)
    assert renewer.held(address, here) is None
    listener = listen(address, table)
    try:
        for one in (here, gone):
            renewer.track(address, one, every=1)
        until(lambda: None not in {renewer.held(address, one) for one in (here, gone)})
        assert (renewer.held(address, here), renewer.held(address, gone)) == (True, False)
        renewer.release(address, here, Outcome.READ)
        assert renewer.held(address, here) is None
    finally:
        listener.close()


def test_every_outcome_reaches_p(address, renewer):
    heard = []

    class LeaseService:
        def renew(self, claims):
            return [None for _ in claims]

        def release(self, claims, outcome):
            heard.extend((one.key.request_id, outcome) for one in claims)

    listener = Listener(address, engine_id="p", incarnation_id=1, hellos={}, leases=LeaseService())
    try:
        said = [(str(number), outcome) for number, outcome in enumerate([*Outcome, *Outcome, Outcome.UNREAD])]
        for name, outcome in said:
            renewer.release(address, claim(LeaseKey(name, 1)), outcome)
        until(lambda: len(heard) == len(said))
        assert heard == said
    finally:
        listener.close()


def test_answers_to_other_claims_say_nothing_of_what_is_held(address, renewer):
    """An answer of another length was not used, but one was waited for as if nothing were wrong."""
    asked = []

    class Confused:
        def renew(self, claims):
            asked.append(len(claims))
            return [1e9] * (len(claims) + 1)

        def release(self, claims, outcome):
            asked.append(outcome)

    listener = Listener(address, engine_id="p", incarnation_id=1, hellos={}, leases=Confused())
    try:
        one = claim(LeaseKey("a", 1))
        renewer.track(address, one, every=0.05)
        until(lambda: asked.count(1) > 3)
        assert renewer.held(address, one) is None
        renewer.release(address, one, Outcome.READ)
        until(lambda: Outcome.READ in asked)
    finally:
        listener.close()


def test_an_engine_whose_name_is_not_known_makes_room_for_another(renewer):
    unknown = Address("no-such-host.invalid", 1)
    for _ in range(2):
        renewer.release(unknown, claim(LeaseKey("a", 1)), Outcome.READ)
        until(lambda: unknown not in renewer._sessions, seconds=20)
