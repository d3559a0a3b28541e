# SPDX-License-Identifier: Apache-2.0
"""D's side of leases over the real side channel: D renews claims, and asks P after a read."""

import contextlib
import itertools
import socket
import threading
import time
from typing import NamedTuple

import pytest

from kvhma.errors import LeaseEndedError, LeaseUnknownError, RequestError
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.holds.lease_table import LeaseEnd, LeaseTable
from kvhma.vllm.loads import lease_renewer
from kvhma.vllm.loads.lease_renewer import LeaseRenewer
from kvhma.vllm.peers import names, peers, room
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.lease_question import LeaseQuestion
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire import secrets as wire_secrets
from kvhma.vllm.wire.messages import (
    MAX_CLAIMS,
    AskWorkerIdentity,
    Leases,
    LeaseState,
    Outcome,
    Renew,
    SignedWorkerIdentity,
    frame,
    frame_length,
    read_question,
    write_claim,
)
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey
from kvhma.vllm.wire.proofs import ProofKey, Proving, new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.leases import ended
from support.listening import hostile
from support.waiting import HANG_SECONDS, until

DIGEST = b"d" * 16
OPEN = Secrets()
GENERATIONS = itertools.count(1)
HELLOS = {(0, 0): (b"hello", new_agent_key()[0])}


class Panic(BaseException):
    """As PyO3 raises one: not an Exception."""


def key_of(name):
    return LeaseKey(name, 1)


def claim(key, reader=1, digest=DIGEST):
    return LeaseClaim(key, reader, digest)


def add(table, name):
    key = LeaseKey(name, next(GENERATIONS))
    table.hold(key, DIGEST, [])
    return key


@pytest.fixture
def address():
    return Address("127.0.0.1", free_port())


@contextlib.contextmanager
def renewing(*, timeout=0.3, secrets=OPEN, counted=None):
    """A renewer, and what asks for it."""
    counted = counted or Counted()
    with contextlib.closing(Peers(timeout, secrets, counted)) as asking:
        yield LeaseRenewer(asking, counted)


@pytest.fixture
def renewer():
    with renewing() as made:
        yield made


def listen(address, leases):
    return Listener(address, LocalEngine("p", 1, HELLOS), leases=leases, secrets=OPEN, counters=Counted())


def end_of(table, key):
    return table._held[key].expires


class LeaseService:
    """Answers every claim with one state, and remembers what it received."""

    def __init__(self, state=LeaseState.HELD):
        self.state = state
        self.renewed = []
        self.released = []

    def renew(self, claims):
        self.renewed.append((time.monotonic(), claims))
        return [self.state] * len(claims)

    def release(self, claims, outcome):
        self.released += [(one, outcome) for one in claims]


@pytest.fixture
def service(address):
    made = LeaseService()
    listener = listen(address, made)
    yield made
    listener.close()


# --- the renewer ---------------------------------------------------------------------------------------------


def test_the_renewer_keeps_a_lease_and_releases_it(address, renewer):
    table = LeaseTable(0.4)
    listener = listen(address, table)
    try:
        key = add(table, "a")
        expires = end_of(table, key)
        renewer.track_claim(address, claim(key), every=0.05)
        until(lambda: end_of(table, key) > expires + 0.5)
        renewer.release_claim(address, claim(key), Outcome.READ)
        until(lambda: len(table) == 0)
        assert ended(table)[LeaseEnd.READ] == ["a"]
    finally:
        listener.close()


def test_the_renewer_survives_a_listener_that_comes_late(address, renewer):
    table = LeaseTable(5)
    key = add(table, "a")
    expires = end_of(table, key)
    renewer.track_claim(address, claim(key), every=0.05)
    time.sleep(0.8)
    listener = listen(address, table)
    try:
        until(lambda: end_of(table, key) > expires)
    finally:
        listener.close()


@pytest.mark.parametrize("host", ["", "no such host!", "256.1.1.1", "::zz", "a b", "*", "x" * 300])
def test_the_renewer_survives_any_address(renewer, host, address, service):
    lost = claim(key_of("lost"))
    renewer.track_claim(Address(host, 1), lost, every=0.05)
    renewer.release_claim(Address(host, 1), lost, Outcome.READ)
    renewer.track_claim(address, claim(key_of("a")), every=0.05)
    until(lambda: service.renewed)


def silent_listeners(stack_of, count):
    """Return addresses that accept a connection, and never answer."""
    addresses = []
    for _ in range(count):
        listening = socket.create_server(("127.0.0.1", 0))
        stack_of.append(listening)
        addresses.append(Address("127.0.0.1", listening.getsockname()[1]))
    return addresses


@pytest.mark.parametrize("they", ["never end", "end"])
def test_addresses_that_never_answer_keep_no_good_claim_waiting(address, they, monkeypatch):
    """Formerly 64 requests with a bogus `remote_host` filled the renewer: it renewed no claims of other engines
    (S10)."""
    sockets = []
    monkeypatch.setattr(room, "MAX_WAITING", 64)
    service = LeaseService()
    known, fresh = Address("127.0.0.1", free_port()), address
    listeners = [listen(known, service), listen(fresh, service)]
    with renewing(timeout=10 * HANG_SECONDS if they == "never end" else 0.5) as renewer:
        good = claim(key_of("known"))
        renewer.track_claim(known, good, every=0.1)
        until(lambda: renewer.is_held(known, good))
        for bogus in silent_listeners(sockets, 200):
            renewer.track_claim(bogus, claim(key_of("bogus")), every=0.1)
        if they == "never end":
            service.renewed = []
            until(lambda: sum(good in claims for _, claims in service.renewed) >= 20)
        else:  # a new engine waits for some of them, not for all
            late = claim(key_of("fresh"))
            renewer.track_claim(fresh, late, every=0.1)
            until(lambda: renewer.is_held(fresh, late))
    for one in (*listeners, *sockets):
        one.close()


def test_500_silent_addresses_and_a_new_engine(address, service):
    """Formerly they took all threads for unknown peers, for so long that the lease of a new engine ended (T4)."""
    sockets = []
    with renewing(timeout=10 * HANG_SECONDS) as renewer:
        if renewer._peers._room.limit * 3 // 4 <= 500:
            pytest.skip("the process may not open enough files")
        for bogus in silent_listeners(sockets, 500):
            renewer.track_claim(bogus, claim(key_of("bogus")), every=0.1)
        new = claim(key_of("new"))
        renewer.track_claim(address, new, every=0.1)
        until(lambda: renewer.is_held(address, new))
    for one in sockets:
        one.close()


def test_addresses_of_a_strangers_choosing_are_bounded(address, service, caplog):
    """Formerly each bogus `remote_host` was kept until a thread had tried it, ten a second. After 12,000 of them a
    request could wait a second in the scheduler's step, which looked at all of them under a lock. Each made a line of
    the log."""
    with renewing() as renewer:
        good = claim(key_of("good"))
        renewer.track_claim(address, good, every=0.1)
        until(lambda: renewer.is_held(address, good))
        for number in range(3000):
            bogus, one = Address(f"127.0.{number % 250}.1", 1 + number // 250), claim(LeaseKey("bogus", number))
            renewer.track_claim(bogus, one, every=0.1)
            renewer.release_claim(bogus, one, Outcome.UNREAD)
        assert len(renewer._sessions) <= 1024
        service.renewed = []
        until(lambda: any(good in claims for _, claims in service.renewed))
        assert renewer.is_held(address, good)
    assert len(caplog.records) <= 20


def test_more_engines_than_may_be_asked_at_a_time_are_all_served(monkeypatch):
    """Formerly claims at more than `max_peers` engines were dropped without a line of the log."""
    monkeypatch.setattr(room, "MAX_WAITING", 2)
    places = [(Address("127.0.0.1", free_port()), LeaseService()) for _ in range(12)]
    listeners = [listen(*place) for place in places]
    with renewing() as renewer:
        for place, _ in places:
            renewer.track_claim(place, claim(key_of("a")), every=0.05)
        until(lambda: all(len(service.renewed) > 5 for _, service in places))
    for listener in listeners:
        listener.close()


def test_an_engine_that_becomes_slow_is_not_prompt_any_more(address, service, renewer, monkeypatch):
    monkeypatch.setattr(peers, "_RESPONSIVE_SECONDS", 0.1)
    known = renewer._peers._room
    one = claim(key_of("a"))
    renewer.track_claim(address, one, every=0.05)
    until(lambda: known.is_responsive(address))
    go_on = threading.Event()
    renew = service.renew
    service.renew = lambda claims: (go_on.wait(0.2), renew(claims))[1]
    until(lambda: not known.is_responsive(address))
    service.renew = renew
    until(lambda: known.is_responsive(address))


def test_the_renewer_begins_again_whatever_is_raised(address, service, monkeypatch, caplog):
    """A panic ended the one thread of the renewer, and with it all leases of the engine (S8)."""
    counted = Counted()
    take_message, left = lease_renewer._Session.take_message, [Panic("p"), Panic("q")]

    def panics(self, now):
        if left:
            raise left.pop()
        return take_message(self, now)

    monkeypatch.setattr(lease_renewer._Session, "take_message", panics)
    with renewing(counted=counted) as renewer:
        one = claim(key_of("a"))
        renewer.track_claim(address, one, every=0.05)
        until(lambda: renewer.is_held(address, one))
    assert counted.by_label("thread_restarts") == {"kvhma-peers": 2}
    assert "thread kvhma-peers crashed" in caplog.text


def test_many_claims_are_all_renewed_and_each_new_one_alone(address, service, renewer):
    """Formerly, if claims did not fit one message, some were chosen at random; each new request renewed all others
    too."""
    claims = [claim(key_of("n" * 500 + str(number))) for number in range(MAX_CLAIMS + 10)]
    for one in claims:
        renewer.track_claim(address, one, every=0.5)
    until(lambda: all(renewer.is_held(address, one) for one in claims))
    assert max(len(asked) for _, asked in service.renewed) <= MAX_CLAIMS
    service.renewed = []
    another = claim(key_of("another"))
    renewer.track_claim(address, another, every=0.5)
    until(lambda: renewer.is_held(address, another))
    assert any(asked == [another] for _, asked in service.renewed)


def test_releases_do_not_keep_renewals_from_being_said(address, renewer):
    said = []

    class Busy:
        """While it answers, another request is released."""

        def renew(self, claims):
            said.append("renew")
            return [LeaseState.HELD] * len(claims)

        def release(self, claims, outcome):
            said.append("release")
            renewer.release_claim(address, claim(LeaseKey("another", len(said))), Outcome.READ)

    listener = listen(address, Busy())
    try:
        renewer.track_claim(address, claim(key_of("a")), every=0.05)
        renewer.release_claim(address, claim(LeaseKey("another", 0)), Outcome.READ)
        until(lambda: said.count("release") > 50 and said.count("renew") > 5)
    finally:
        listener.close()


def test_a_name_that_is_looked_up_for_long_keeps_no_other_engine_waiting(address, renewer, service, monkeypatch):
    go_on = threading.Event()
    getaddrinfo = names.getaddrinfo

    def slowly(host, *more, **options):
        if host == "slow":
            go_on.wait(10)
            host = "localhost"
        return getaddrinfo(host, *more, **options)

    monkeypatch.setattr(names, "getaddrinfo", slowly)
    try:
        slow, later, first = Address("slow", address.port), claim(key_of("later")), claim(key_of("first"))
        renewer.track_claim(slow, later, every=0.05)
        renewer.track_claim(address, first, every=0.05)
        until(lambda: len(service.renewed) > 5)
        assert renewer.is_held(slow, later) is None
        go_on.set()
        until(lambda: renewer.is_held(slow, later))
    finally:
        go_on.set()


def test_the_renewer_knows_what_p_holds(address, renewer):
    table = LeaseTable(5)
    key = add(table, "a")
    here, gone, forged = claim(key, 1), claim(key_of("b"), 1), claim(key, 2, b"x" * 16)
    assert renewer.is_held(address, here) is None
    listener = listen(address, table)
    try:
        for one in (here, gone, forged):
            renewer.track_claim(address, one, every=1)
        until(lambda: None not in {renewer.is_held(address, one) for one in (here, gone, forged)})
        assert [renewer.is_held(address, one) for one in (here, gone, forged)] == [True, False, False]
        renewer.release_claim(address, here, Outcome.READ)
        assert renewer.is_held(address, here) is None
    finally:
        listener.close()


def test_every_outcome_reaches_p(address, service, renewer):
    said = [
        (claim(key_of(str(number))), outcome) for number, outcome in enumerate([*Outcome, *Outcome, Outcome.UNREAD])
    ]
    for one, outcome in said:
        renewer.release_claim(address, one, outcome)
    until(lambda: len(service.released) == len(said))
    assert service.released == said


def test_answers_to_other_claims_say_nothing_of_what_is_held(address, renewer):
    """Formerly an answer of another length was ignored, and the renewer waited for another as if nothing were wrong."""
    asked = []

    class Confused:
        def renew(self, claims):
            asked.append(len(claims))
            return [LeaseState.HELD] * (len(claims) + 1)

        def release(self, claims, outcome):
            asked.append(outcome)

    listener = listen(address, Confused())
    try:
        one = claim(key_of("a"))
        renewer.track_claim(address, one, every=0.05)
        until(lambda: asked.count(1) > 3)
        assert renewer.is_held(address, one) is None
        renewer.release_claim(address, one, Outcome.READ)
        until(lambda: Outcome.READ in asked)
    finally:
        listener.close()


def test_a_session_without_anything_to_say_ends_and_so_does_its_connection(address, service, monkeypatch):
    monkeypatch.setattr(lease_renewer, "_KEPT_SECONDS", 0.3)
    monkeypatch.setattr(peers, "_IDLE_SECONDS", 0.3)
    with renewing() as renewer:
        for name in ("no-such-host.invalid", address.host):
            renewer.release_claim(Address(name, address.port), claim(key_of("a")), Outcome.READ)
        until(lambda: service.released)
        until(lambda: not renewer._sessions and not renewer._peers._pools)
        renewer.release_claim(address, claim(key_of("b")), Outcome.READ)
        until(lambda: len(service.released) == 2)


def test_a_release_that_p_has_not_heard_is_said_once_more(address, renewer):
    """Otherwise P would hold blocks that were read long ago for a whole lease."""
    one = claim(key_of("a"))
    renewer.release_claim(address, one, Outcome.READ)
    until(lambda: any(session.failed for session in renewer._sessions.values()))
    service = LeaseService()
    listener = listen(address, service)
    try:
        until(lambda: service.released == [(one, Outcome.READ)])
    finally:
        listener.close()


def test_a_release_is_said_twice_at_most(address, renewer, monkeypatch):
    tried = []
    ask = Peers.ask
    monkeypatch.setattr(Peers, "ask", lambda self, *what: (tried.append(what), ask(self, *what))[1])
    renewer.release_claim(address, claim(key_of("a")), Outcome.READ)
    until(lambda: len(tried) == 2)
    (session,) = renewer._sessions.values()
    until(lambda: session.message is None)
    assert not session.releases


def test_a_listener_that_ended_a_connection_hears_the_next_question_all_the_same(address, renewer):
    """P's listener closes connections that are idle for long; formerly the first message over a closed one was lost."""
    first, second = LeaseService(), LeaseService()
    listener = listen(address, first)
    renewer.release_claim(address, claim(key_of("a")), Outcome.READ)
    until(lambda: first.released)
    listener.close()
    listener = listen(address, second)
    try:
        renewer.release_claim(address, claim(key_of("b")), Outcome.READ)
        until(lambda: second.released)
    finally:
        listener.close()


def test_an_engine_whose_secret_was_taken_back_is_not_told_of_leases_any_more(address, tmp_path, monkeypatch):
    """Formerly the connection to it stayed open as long as there were claims to renew."""
    monkeypatch.setattr(wire_secrets, "_REREAD_SECONDS", 0.02)
    file = tmp_path / "secrets"
    file.write_bytes(b"o" * 32)
    service, old = LeaseService(), Secrets([b"o" * 32])
    listener = Listener(address, LocalEngine("p", 1, HELLOS), leases=service, secrets=old, counters=Counted())
    with contextlib.closing(listener), renewing(secrets=Secrets.load(Settings(secret_file=str(file)))) as renewer:
        one = claim(key_of("a"))
        renewer.track_claim(address, one, every=0.05)
        until(lambda: len(service.renewed) > 2)
        # P does not notice, since it still accepts the secret that this connection has shown.
        file.write_bytes(b"n" * 32)
        time.sleep(0.3)
        service.renewed = []
        time.sleep(0.5)
        assert not service.renewed


def test_the_end_of_the_engine_waits_for_no_other_one():
    sockets = []
    with renewing(timeout=10 * HANG_SECONDS) as renewer:
        for bogus in silent_listeners(sockets, 8):
            renewer.track_claim(bogus, claim(key_of("a")), every=1)
        until(lambda: len(renewer._peers._active) > 2)
        renewer.close()
    for one in sockets:
        one.close()


# --- the question after a read -------------------------------------------------------------------------------


class Asking(NamedTuple):
    """How a worker reaches P."""

    peers: Peers
    address: Address

    @property
    def pool(self):
        return self.peers.pool(self.address)


@contextlib.contextmanager
def asking(address, timeout=2):
    with contextlib.closing(Peers(timeout, OPEN, Counted())) as made:
        yield Asking(made, address)


@pytest.fixture
def clients(address):
    with asking(address) as made:
        yield made


@pytest.fixture
def table(address):
    table = LeaseTable(0.3)
    listener = listen(address, table)
    yield table
    listener.close()


def ask(clients, *claims, timeout=2.0, proving=None, outcomes=()):
    """Ask, and wait for the answer as the poller does."""
    question = LeaseQuestion(*clients, claims, timeout, proving, outcomes)
    until(question.poll)
    assert not question.open
    return question


def test_what_is_held_after_the_read_was_held(clients, table):
    ask(clients, claim(add(table, "a"))).check(0)


def test_who_has_read_releases_with_the_same_question(clients, table):
    key, other = add(table, "a"), add(table, "b")
    gone = key_of("c")
    claims, outcomes = [claim(key), claim(gone), claim(other)], [Outcome.READ, Outcome.READ, Outcome.READ_SHARED]
    question = ask(clients, *claims, outcomes=outcomes)
    question.check(0)
    question.check(2)
    with pytest.raises(LeaseEndedError):
        question.check(1)
    assert ended(table) == {LeaseEnd.READ: ["a"]}
    assert len(table) == 1, "one of several readers keeps it a little longer"


def test_a_reader_that_releases_leaves_the_others_theirs(clients, table):
    key = add(table, "a")
    ask(clients, claim(key, 1))
    ask(clients, claim(key, 2), outcomes=[Outcome.READ]).check(0)
    assert ended(table) == {}
    ask(clients, claim(key, 1), outcomes=[Outcome.READ]).check(0)
    assert ended(table) == {LeaseEnd.READ: ["a"]}


def test_each_claim_has_an_outcome(clients, table):
    """A list that is too short would leave it to chance which blocks are freed."""
    claims = [claim(add(table, "a")), claim(add(table, "b"))]
    with pytest.raises(LeaseUnknownError, match="2 claims, 1 outcomes"):
        ask(clients, *claims, outcomes=[Outcome.READ]).check(0)
    assert len(table) == 2


def test_what_is_not_held_after_the_read_may_have_been_lost(clients, table):
    key = add(table, "a")
    until(lambda: ended(table).get(LeaseEnd.UNCLAIMED))
    with pytest.raises(LeaseEndedError, match="P does not hold 'a' for this reader: its lease has ended") as caught:
        ask(clients, claim(key)).check(0)
    assert not isinstance(caught.value, LeaseUnknownError)


def test_a_second_reader(clients, table):
    """Formerly the answer was that the blocks had been read already, although they were all still held."""
    key = add(table, "a")
    for reader in (1, 2):
        ask(clients, claim(key, reader)).check(0)
    table.release([claim(key, 1), claim(key, 2)], Outcome.READ)
    with pytest.raises(LeaseEndedError, match="or other readers have read it"):
        ask(clients, claim(key, 3)).check(0)


def test_other_parameters_than_were_handed_out(clients, table):
    """Formerly P's table knew the request and its reader, not the blocks: other blocks in the parameters were read."""
    with pytest.raises(RequestError, match="P handed out other parameters for 'a' than these"):
        ask(clients, claim(add(table, "a"), digest=b"x" * 16)).check(0)


def proving_with(clients):
    """The result of a handshake with the engine, for a worker that no peer reads from."""
    own = ProofKey()
    with clients.pool.take_client() as client:
        engine_key = client.ask(AskWorkerIdentity(0, 0, bytes(16)), SignedWorkerIdentity).engine_key
    return Proving(own.public, own.shared(engine_key))


def test_an_answer_is_of_the_engine_that_was_read(clients, table):
    """An untrusted listener may repeat P's identity, so that D reads from P, and answer about leases in P's place.

    Formerly D then never asked P's table, and used blocks of another request.
    """
    key = add(table, "a")
    proving = proving_with(clients)
    ask(clients, claim(key), proving=proving).check(0)

    said = []

    def answer_for_p(raw):
        """Ask P about the attacker's own request with D's nonce, and return P's reply as the answer."""
        length = frame_length(raw.recv(4, socket.MSG_WAITALL))
        question = read_question(raw.recv(length, socket.MSG_WAITALL))
        own = Renew([write_claim(claim(key))], question.reader_key, question.nonce)
        with clients.pool.take_client() as relay:
            states, proof = [LeaseState.HELD], relay.ask(own, Leases).proof
        said.append(proof)
        raw.sendall(frame(Leases(states, proof if len(said) > 1 else None)))

    with hostile(answer_for_p, connections=2) as imitator:
        for _ in range(2):
            with asking(imitator) as theirs, pytest.raises(LeaseUnknownError, match="not of the engine that was read"):
                ask(theirs, claim(key_of("victim")), proving=proving).check(0)
    assert len(said) == 2


def test_too_many_readers(address, clients):
    listener = listen(address, LeaseService(LeaseState.FULL))
    try:
        with pytest.raises(LeaseEndedError, match="too many readers"):
            ask(clients, claim(key_of("a"))).check(0)
    finally:
        listener.close()


def test_claims_of_a_step_are_one_question(clients, table, monkeypatch):
    questions = []
    send = Client.send

    def sends(self, question, **more):
        questions.append(question)
        send(self, question, **more)

    monkeypatch.setattr(Client, "send", sends)
    question = ask(clients, claim(add(table, "a")), claim(key_of("c")), claim(add(table, "b")))
    question.check(0)
    with pytest.raises(LeaseEndedError, match="P does not hold 'c' for this reader"):
        question.check(1)
    question.check(2)
    assert [type(asked) for asked in questions] == [Renew]


@pytest.mark.parametrize("kept", [False, True])
def test_nobody_answers(address, kept):
    """No wait takes longer than its timeout, over an open connection and over a new one."""
    listening = socket.create_server((address.host, address.port))
    with listening, asking(address, 0.2) as clients:
        if kept:
            clients.pool.release_client(clients.pool.take_client())
        question = LeaseQuestion(*clients, [claim(key_of("a"))], 0.2, None)
        assert (question.fileno() is not None) == kept
        until(question.poll)
        with pytest.raises(LeaseUnknownError, match="P has not confirmed that the blocks were held"):
            question.check(0)
        assert clients.pool.take_idle_client() is None


def test_nobody_is_there(clients):
    with pytest.raises(LeaseUnknownError, match="has not confirmed"):
        ask(clients, claim(key_of("a"))).check(0)


def test_a_connection_is_kept_for_the_next_question(clients, table):
    ask(clients, claim(add(table, "a"))).check(0)
    client = clients.pool.take_idle_client()
    assert client is not None
    clients.pool.release_client(client)
    question = LeaseQuestion(*clients, [claim(add(table, "b"))], 2.0, None)
    assert question.fileno() == client.fileno(), "no thread was needed"
    until(question.poll)
    question.check(0)
    assert question.fileno() is None
    with clients.pool.take_client() as kept:
        assert kept is client


def test_a_connection_that_p_has_ended_costs_no_load(clients, address):
    """An engine closes idle connections; formerly the loads whose question used such a connection failed."""
    first, second = LeaseService(), LeaseService()
    listener = listen(address, first)
    ask(clients, claim(key_of("a"))).check(0)
    listener.close()
    listener = listen(address, second)
    try:
        ask(clients, claim(key_of("b"))).check(0)
        assert [claims for _, claims in second.renewed] == [[claim(key_of("b"))]]
    finally:
        listener.close()


def test_a_connection_that_p_ends_while_it_is_asked_costs_no_load(clients, address):
    """The same a moment later: D had sent the question already."""
    listening = socket.create_server((address.host, address.port))
    clients.pool.release_client(clients.pool.take_client())
    question = LeaseQuestion(*clients, [claim(key_of("a"))], 2.0, None)
    assert question.fileno() is not None
    accepted, _ = listening.accept()
    listening.close()
    accepted.close()
    service = LeaseService()
    listener = listen(address, service)
    try:
        until(question.poll)
        question.check(0)
        assert len(service.renewed) == 1
    finally:
        listener.close()


def test_an_answer_for_other_claims_than_were_asked(address, clients):
    class Confused(LeaseService):
        def renew(self, claims):
            return [*super().renew(claims), LeaseState.HELD]

    listener = listen(address, Confused())
    try:
        with pytest.raises(LeaseUnknownError, match="1 claims, 2 answers"):
            ask(clients, claim(key_of("a"))).check(0)
    finally:
        listener.close()


def test_a_panic_while_p_is_asked_is_an_answer_too(clients, monkeypatch):
    """Formerly an exception in a thread that asked reached no load: its loads would have waited for ever (S8)."""

    def panics(*_, **__):
        raise Panic("no")

    monkeypatch.setattr(peers, "Client", panics)
    with pytest.raises(LeaseUnknownError, match="no"):
        ask(clients, claim(key_of("a"))).check(0)
