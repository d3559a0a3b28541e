# SPDX-License-Identifier: Apache-2.0
"""D's side of leases over the real side channel: D renews claims, and asks P after a read."""

import contextlib
import itertools
import socket
import threading
import time
from typing import NamedTuple

import pytest

from kvhma.errors import HandshakeError, LeaseEndedError, LeaseUnknownError
from kvhma.vllm.holds import engine_loop
from kvhma.vllm.holds.engine_loop import EngineLoop
from kvhma.vllm.holds.lease_table import LeaseEnd, LeaseTable
from kvhma.vllm.loads import lease_renewer
from kvhma.vllm.loads.lease_renewer import LeaseRenewer
from kvhma.vllm.peers import peers
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.lease_question import LeaseQuestion
from kvhma.vllm.peers.peers import Peers
from kvhma.vllm.wire.messages import (
    MAX_CLAIMS,
    QUESTIONS,
    AskWorkerIdentity,
    Finish,
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
from kvhma.vllm.wire.params import Address, Incarnation, LeaseClaim, LeaseKey
from kvhma.vllm.wire.proofs import ProofKey, Proving
from kvhma.vllm.wire.secrets import Secrets
from support.counted import Counted
from support.engines.engine import free_port
from support.leases import Clock, ended
from support.listening import hostile, listening
from support.waiting import HANG_SECONDS, until

DIGEST = b"d" * 16
P = Incarnation(Address("127.0.0.1", 1), "p", 258, None)
"""What `listening` answers for."""
GENERATIONS = itertools.count(1)


class Panic(BaseException):
    """As PyO3 raises one: not an Exception."""


def claim(key, reader=1, digest=DIGEST):
    """A claim of a request; of one that P does not hold, if `key` is a name."""
    return LeaseClaim(LeaseKey(key, 1) if isinstance(key, str) else key, reader, digest)


def add(table, name):
    key = LeaseKey(name, next(GENERATIONS))
    table.hold(key, DIGEST, [])
    return key


@pytest.fixture
def address():
    return Address("127.0.0.1", free_port())


@contextlib.contextmanager
def renewing(*, timeout=0.3, secrets=None, counted=None, makes_progress=lambda seconds: True):
    """A renewer, and what asks for it."""
    counted = counted or Counted()
    with contextlib.closing(Peers(timeout, secrets or Secrets(), counted)) as asking:
        yield LeaseRenewer(asking, counted, makes_progress)


@pytest.fixture
def renewer():
    with renewing() as made:
        yield made


@pytest.fixture
def listen(address):
    """Have P answer at `address`, or another one, until the test ends or closes the listener."""
    with contextlib.ExitStack() as stack:
        yield lambda leases, at=address, **more: stack.enter_context(listening(leases=leases, at=at, **more))


class LeaseService:
    """Answers every claim with one state, and `extra` claims more; remembers what it received."""

    def __init__(self, state=LeaseState.HELD, extra=0):
        self.state = state
        self.extra = extra
        self.renewed = []
        self.released = []

    def renew(self, claims):
        self.renewed.append(claims)
        return [self.state] * (len(claims) + self.extra)

    def release(self, claims, outcome):
        self.released += [(one, outcome) for one in claims]


@pytest.fixture
def service(listen):
    made = LeaseService()
    listen(made)
    return made


# --- the renewer ---------------------------------------------------------------------------------------------


def test_the_renewer_survives_a_listener_that_comes_late(address, renewer, listen):
    renewer.track_claim(address, claim("a"), every=0.05)
    time.sleep(0.8)
    service = LeaseService()
    listen(service)
    until(lambda: service.renewed)


@pytest.mark.parametrize("host", ["", "no such host!", "256.1.1.1", "::zz", "a b", "*", "x" * 300])
def test_the_renewer_survives_any_address(renewer, host, address, service):
    lost = claim("lost")
    renewer.track_claim(Address(host, 1), lost, every=0.05)
    renewer.release_claim(Address(host, 1), lost, Outcome.READ)
    renewer.track_claim(address, claim("a"), every=0.05)
    until(lambda: service.renewed)


def test_addresses_of_a_strangers_choosing_are_bounded(address, service, caplog):
    with renewing() as renewer:
        good = claim("good")
        renewer.track_claim(address, good, every=0.1)
        until(lambda: renewer.is_held(address, good))
        for number in range(3000):
            bogus, one = Address(f"127.0.{number % 250}.1", 1 + number // 250), claim(LeaseKey("bogus", number))
            renewer.track_claim(bogus, one, every=0.1)
            renewer.release_claim(bogus, one, Outcome.UNREAD)
        assert len(renewer._sessions) <= 1024
        service.renewed = []
        until(lambda: any(good in claims for claims in service.renewed))
        assert renewer.is_held(address, good)
    assert len(caplog.records) <= 100, "after the first ones a line every six seconds"


def test_the_renewer_begins_again_whatever_is_raised(address, service, monkeypatch, caplog):
    """A panic ended the one thread of the renewer, and with it all leases of the engine (S8)."""
    counted = Counted()
    take_message, left = lease_renewer._Session.take_message, [Panic("p"), Panic("q")]

    def panics(self, *args):
        if left:
            raise left.pop()
        return take_message(self, *args)

    monkeypatch.setattr(lease_renewer._Session, "take_message", panics)
    with renewing(counted=counted) as renewer:
        one = claim("a")
        renewer.track_claim(address, one, every=0.05)
        until(lambda: renewer.is_held(address, one))
    assert counted.by_label("thread_restarts") == {"kvhma-peers": 2}
    assert "thread kvhma-peers crashed" in caplog.text


def test_many_claims_are_all_renewed_and_each_new_one_alone(address, service, renewer):
    claims = [claim("n" * 500 + str(number)) for number in range(MAX_CLAIMS + 10)]
    for one in claims:
        renewer.track_claim(address, one, every=60)  # none is due again while the new one is claimed
    until(lambda: all(renewer.is_held(address, one) for one in claims))
    assert max(map(len, service.renewed)) <= MAX_CLAIMS
    service.renewed = []
    another = claim("another")
    renewer.track_claim(address, another, every=60)
    until(lambda: renewer.is_held(address, another))
    assert [another] in service.renewed


def test_releases_do_not_keep_renewals_from_being_said(address, renewer, service):
    release = service.release

    def release_another(claims, outcome):
        """While P answers, another request is released."""
        release(claims, outcome)
        renewer.release_claim(address, claim(f"{len(service.released)}"), Outcome.READ)

    service.release = release_another
    renewer.track_claim(address, claim("a"), every=0.05)
    renewer.release_claim(address, claim("0"), Outcome.READ)
    until(lambda: len(service.released) > 50 and len(service.renewed) > 5)


def test_an_engine_without_progress_renews_nothing_until_it_goes_on(address, service):
    """A paused engine would hold the blocks of P for ever. A release needs no progress."""
    asked, progress = [], threading.Event()

    def makes_progress(seconds):
        asked.append(seconds)
        return progress.is_set()

    with renewing(makes_progress=makes_progress) as renewer:
        renewer.track_claim(address, claim("a"), every=0.01)
        until(lambda: len(asked) > 5)
        assert service.renewed == [[claim("a")]], "only at once, by the step that claims it"
        assert set(asked) == {0.01}
        renewer.release_claim(address, claim("b"), Outcome.READ)
        until(lambda: service.released)
        progress.set()
        until(lambda: len(service.renewed) > 1)


@pytest.fixture
def progress(monkeypatch):
    """A loop of which steps are reported by hand: a step may take 300 s. With its clock."""
    clock = Clock()
    monkeypatch.setattr(engine_loop, "time", clock)
    return EngineLoop(LeaseTable(30), None, lambda: False, 300.0, pp_size=1), clock


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ("", 0),
        ("idle", 5),
        ("computes", 300),
        ("computes idle", 300),  # with async scheduling, the step before may still run
        ("computes idle idle", 5),
        ("computes sleeps", 5),
        ("computes sleeps idle", 5),
    ],
)
def test_how_long_an_engine_makes_progress_after_its_last_step(progress, events, seconds):
    """For claims that are renewed every 5 s."""
    loop, clock = progress
    for event in events.split():
        if event == "sleeps":
            loop.must_step()
        else:
            loop.on_step(computes=event == "computes")
    if seconds:
        clock.pass_by(seconds)
        assert loop.makes_progress(5)
        clock.pass_by(0.1)
    assert not loop.makes_progress(5)


@pytest.mark.parametrize("pp_size", [2, 3])
def test_each_stage_has_a_step_that_may_compute(progress, pp_size):
    """VLLM builds a step for each stage, and one more with async scheduling, before it waits for the first one."""
    _, clock = progress
    loop = EngineLoop(LeaseTable(30), None, lambda: False, 300.0, pp_size)
    for computes in (True, *[False] * pp_size):
        loop.on_step(computes=computes)
    clock.pass_by(300)
    assert loop.makes_progress(5)
    loop.on_step(computes=False)
    clock.pass_by(5.1)
    assert not loop.makes_progress(5)


def test_a_claim_that_is_released_while_p_answers_is_not_renewed_again(address, renewer, service):
    one, renew = claim("a"), service.renew
    service.renew = lambda claims: (renewer.release_claim(address, one, Outcome.READ), renew(claims))[1]
    renewer.track_claim(address, one, every=0.05)
    until(lambda: service.released)
    assert renewer.is_held(address, one) is None
    assert service.renewed == [[one]]


def test_the_renewer_knows_what_p_holds(address, renewer, listen):
    table = LeaseTable(5)
    key = add(table, "a")
    here, gone, forged = claim(key, 1), claim("b", 1), claim(key, 2, b"x" * 16)
    assert renewer.is_held(address, here) is None
    listen(table)
    for one in (here, gone, forged):
        renewer.track_claim(address, one, every=1)
    until(lambda: None not in {renewer.is_held(address, one) for one in (here, gone, forged)})
    assert [renewer.is_held(address, one) for one in (here, gone, forged)] == [True, False, False]
    renewer.release_claim(address, here, Outcome.READ)
    assert renewer.is_held(address, here) is None
    until(lambda: len(table) == 0)
    assert ended(table) == {LeaseEnd.READ: ["a"]}


def test_every_outcome_reaches_p(address, service):
    said = [(claim(str(number)), outcome) for number, outcome in enumerate([*Outcome, *Outcome, Outcome.UNREAD])]
    with renewing(timeout=HANG_SECONDS) as renewer:  # a release whose answer is late is said once more
        for one, outcome in said:
            renewer.release_claim(address, one, outcome)
        until(lambda: len(service.released) == len(said))
    assert service.released == said


def test_answers_to_other_claims_say_nothing_of_what_is_held(address, renewer, listen):
    service = LeaseService(extra=1)
    listen(service)
    one = claim("a")
    renewer.track_claim(address, one, every=0.05)
    until(lambda: service.renewed.count([one]) > 3)
    assert renewer.is_held(address, one) is None
    renewer.release_claim(address, one, Outcome.READ)
    until(lambda: service.released)


def test_a_session_without_anything_to_say_ends_and_so_does_its_connection(address, service, monkeypatch):
    monkeypatch.setattr(lease_renewer, "_KEPT_SECONDS", 0.3)
    monkeypatch.setattr(peers, "_IDLE_SECONDS", 0.3)
    with renewing() as renewer:
        for name in ("no-such-host.invalid", address.host):
            renewer.release_claim(Address(name, address.port), claim("a"), Outcome.READ)
        until(lambda: service.released)
        until(lambda: not renewer._sessions and not renewer._peers.idle._idle)
        renewer.release_claim(address, claim("b"), Outcome.READ)
        until(lambda: len(service.released) == 2)


def test_a_release_that_p_has_not_heard_is_said_once_more(address, renewer, listen, monkeypatch):
    """Otherwise P would hold blocks that were read long ago for a whole lease."""
    one, service, begun, ask = claim("a"), LeaseService(), [], Peers.ask

    def asks(*what):
        call = ask(*what)
        call.add_done_callback(lambda _: begun or begun.append(listen(service)))  # P begins to listen too late
        return call

    monkeypatch.setattr(Peers, "ask", asks)
    renewer.release_claim(address, one, Outcome.READ)
    until(lambda: service.released == [(one, Outcome.READ)])


def test_a_release_is_said_twice_at_most(address, renewer, monkeypatch):
    calls, ask = [], Peers.ask
    monkeypatch.setattr(Peers, "ask", lambda *what: calls.append(ask(*what)) or calls[-1])
    renewer.release_claim(address, claim("a"), Outcome.READ)
    until(lambda: len(calls) == 2 and calls[1].done())
    renewer.close()  # waits for a third time
    assert len(calls) == 2


# --- the question after a read -------------------------------------------------------------------------------


class Asking(NamedTuple):
    """How a worker reaches P."""

    peers: Peers
    address: Address

    def connect(self):
        return Client(self.address, self.peers.timeout, Secrets())

    def release(self, client):
        self.peers.idle.release_client(self.address, client)


@contextlib.contextmanager
def asking(address, timeout=2):
    with contextlib.closing(Peers(timeout, Secrets(), Counted())) as made:
        yield Asking(made, address)


@pytest.fixture
def clients(address):
    with asking(address) as made:
        yield made


@pytest.fixture
def table(listen):
    table = LeaseTable(0.3)
    listen(table)
    return table


def ask(clients, *claims, timeout=2.0, proving=None, outcomes=()):
    """Ask, and wait for the answer as the poller does."""
    question = LeaseQuestion(*clients, claims, timeout, proving, outcomes)
    until(question.poll)
    assert not question.open
    return question


@pytest.mark.parametrize(
    ("kind", "outcomes", "left"), [(Renew, [], 2), (Finish, [Outcome.READ, Outcome.READ, Outcome.READ_SHARED], 1)]
)
def test_claims_of_a_step_are_one_question(clients, table, monkeypatch, kind, outcomes, left):
    """A reader that has read releases with the same question."""
    questions, send = [], Client.send
    monkeypatch.setattr(Client, "send", lambda self, what, **more: (questions.append(what), send(self, what, **more)))
    question = ask(clients, claim(add(table, "a")), claim("c"), claim(add(table, "b")), outcomes=outcomes)
    question.check(0, P)
    with pytest.raises(LeaseEndedError, match="P does not hold 'c' for this reader"):
        question.check(1, P)
    question.check(2, P)
    assert [type(asked) for asked in questions] == [kind]
    assert ended(table) == ({LeaseEnd.READ: ["a"]} if outcomes else {})
    assert len(table) == left, "one of several readers keeps it a little longer"


def test_each_claim_has_an_outcome(clients, table):
    """A list that is too short would leave it to chance which blocks are freed."""
    claims = [claim(add(table, "a")), claim(add(table, "b"))]
    with pytest.raises(LeaseUnknownError, match="2 claims, 1 outcomes"):
        ask(clients, *claims, outcomes=[Outcome.READ]).check(0, P)
    assert len(table) == 2


def test_what_is_not_held_after_the_read_may_have_been_lost(clients, table):
    key = add(table, "a")
    until(lambda: ended(table).get(LeaseEnd.UNCLAIMED))
    with pytest.raises(LeaseEndedError, match="P does not hold 'a' for this reader: its lease has ended") as caught:
        ask(clients, claim(key)).check(0, P)
    assert not isinstance(caught.value, LeaseUnknownError)


def test_what_p_held_before_it_reset_its_caches_is_refused_with_both_values(clients, listen):
    """A proof covers the new value too: D's log names it."""
    table, before = LeaseTable(30), P._replace(incarnation_id=257)
    listener, key = listen(table), add(table, "a")
    listener.begin_incarnation(257)
    proving = proving_with(clients)
    ask(clients, claim(key), proving=proving).check(0, before)
    listener.begin_incarnation(258)
    ask(clients, claim(key), proving=proving).check(0, before)  # P still holds it
    table.end_all()
    with pytest.raises(HandshakeError, match=r"kvhma\.instance is '0{13}101' in kv_transfer_params, '0{13}102' at"):
        ask(clients, claim(key), proving=proving).check(0, before)
    with pytest.raises(LeaseEndedError, match="its lease has ended"):
        ask(clients, claim(key), proving=proving).check(0, P)


def proving_with(clients):
    """The result of a handshake with the engine, for a worker that no peer reads from."""
    own = ProofKey()
    with clients.connect() as client:
        engine_key = client.ask(AskWorkerIdentity(0, 0, bytes(16)), SignedWorkerIdentity).engine_key
    return Proving(own.public, own.shared(engine_key))


def test_an_answer_is_of_the_engine_that_was_read(clients, table):
    """An untrusted listener may repeat P's identity, so that D reads from P, and answer about leases in P's place."""
    key = add(table, "a")
    proving = proving_with(clients)
    ask(clients, claim(key), proving=proving).check(0, P)

    said = []

    def answer_for_p(raw):
        """Ask P about the attacker's own request with D's nonce, and return P's reply as the answer."""
        length = frame_length(raw.recv(4, socket.MSG_WAITALL))
        question = read_question(raw.recv(length, socket.MSG_WAITALL), QUESTIONS)
        own = Renew([write_claim(claim(key))], question.reader_key, question.nonce)
        with clients.connect() as relay:
            states, proof = [LeaseState.HELD], relay.ask(own, Leases).proof
        said.append(proof)
        raw.sendall(frame(Leases(states, proof if len(said) > 1 else None)))

    with hostile(answer_for_p, connections=2) as imitator:
        for _ in range(2):
            with asking(imitator) as theirs, pytest.raises(LeaseUnknownError, match="not of the engine that was read"):
                ask(theirs, claim("victim"), proving=proving).check(0, P)
    assert len(said) == 2


def test_too_many_readers(clients, listen):
    listen(LeaseService(LeaseState.FULL))
    with pytest.raises(LeaseEndedError, match="too many readers"):
        ask(clients, claim("a")).check(0, P)


def test_nobody_answers(address):
    with socket.create_server(address), asking(address, 0.2) as clients:
        question = LeaseQuestion(*clients, [claim("a")], 0.2, None)
        until(question.poll)
        with pytest.raises(LeaseUnknownError, match="P has not confirmed that the blocks were held"):
            question.check(0, P)


def test_a_connection_that_p_ends_while_it_is_asked_costs_no_load(clients, address, listen):
    """The same a moment later: D had sent the question already."""
    listener = socket.create_server(address)
    clients.release(clients.connect())
    question = LeaseQuestion(*clients, [claim("a")], 2.0, None)
    accepted, _ = listener.accept()
    accepted.recv(1)
    listener.close()
    service = LeaseService()
    listen(service)
    accepted.close()
    until(question.poll)
    question.check(0, P)
    assert len(service.renewed) == 1


def test_an_answer_for_other_claims_than_were_asked(clients, listen):
    listen(LeaseService(extra=1))
    with pytest.raises(LeaseUnknownError, match="1 claims, 2 answers"):
        ask(clients, claim("a")).check(0, P)


def test_a_panic_while_p_is_asked_is_an_answer_too(clients, monkeypatch):

    def panics(*_, **__):
        raise Panic("no")

    monkeypatch.setattr(peers, "Client", panics)
    with pytest.raises(LeaseUnknownError, match="no"):
        ask(clients, claim("a")).check(0, P)
