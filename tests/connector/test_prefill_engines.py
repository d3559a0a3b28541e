# SPDX-License-Identifier: Apache-2.0
"""Prefill engines: connected, lost in part, named twice, and impersonated."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from kvhma.errors import HandshakeError, HandshakeTimeoutError, KvhmaError, TransferError, UnsupportedPairError
from kvhma.nixl import Agent, decode_handshake, encode_handshake, key_hash
from kvhma.vllm.config.identity import ModelIdentity, encode_extra
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.peers import idle_engines, names, prefill_engines
from kvhma.vllm.peers import server as server_module
from kvhma.vllm.peers.client import Client
from kvhma.vllm.peers.prefill_engines import PrefillEngine, PrefillEngines
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.built_layers import BuiltLayer, BuiltLayers
from kvhma.vllm.wire.lease_board import LeaseBoard
from kvhma.vllm.wire.params import Address, Incarnation
from kvhma.vllm.wire.proofs import new_agent_key, sign_identity
from kvhma.vllm.wire.secrets import Secrets
from support.boards import board_of, names_place
from support.counted import Counted
from support.engines.engine import free_port
from support.fake_nixl import FakeNet, FakeNixl
from support.flat import flat_geometry, labelled
from support.identity import EXTRA, IDENTITY
from support.waiting import until

NOBODY = LeaseTable(30)
NO_SECRET = Secrets()


class World:
    """A decode worker with two layers, and prefill engines whose workers have one layer each; NIXL is a fake."""

    def __init__(self, identity: ModelIdentity = IDENTITY, secrets: Secrets = NO_SECRET, **settings: object) -> None:
        self.net = FakeNet()
        self.memory = labelled(4), labelled(4)
        self.geometry = flat_geometry(*self.memory)
        self.agent = self.make_agent("D")
        self.counted = Counted()
        read = Settings.read({"handshake_timeout": 10, **settings})
        context = WorkerContext(read, secrets, "d", identity, self.geometry, self.agent)
        self.engines = PrefillEngines(context, self.counted)
        self.listeners: list[Listener] = []
        self.boards: list[LeaseBoard] = []

    def close(self) -> None:
        self.engines.close()
        for listener in self.listeners:
            listener.close()
        for board in self.boards:
            board.close()

    def make_agent(self, name: str, public_key: bytes = b"") -> Agent:
        agent = Agent(name, nixl=FakeNixl(name, self.net), public_key=public_key)
        agent.register(self.geometry)
        return agent

    def worker(self, name: str, layers: slice, extra: bytes = EXTRA, metadata: int = 0) -> tuple[bytes, bytes]:
        """Start a prefill worker, of some bytes of metadata more; return its identity, and the key that signs it."""
        private, public = new_agent_key()
        agent = self.make_agent(f"{name}-{key_hash(public)}", public)
        fake = self.net.agents[agent.name]
        data = fake.get_agent_metadata() + bytes(metadata)
        fake.get_agent_metadata = lambda: data
        board, extra = board_of(agent, public, extra)
        self.boards.append(board)
        return agent.handshake_payload(replace(self.geometry, layers=self.geometry.layers[layers]), extra), private

    def workers(self, name: str = "P", *extras: bytes) -> list[tuple[bytes, bytes]]:
        ranks = enumerate(extras or (EXTRA, EXTRA))
        return [self.worker(f"{name}{rank}", slice(rank, rank + 1), extra) for rank, extra in ranks]

    def prefill(
        self,
        *hellos: tuple[bytes, bytes],
        instance: int = 1,
        at: Address | None = None,
        secrets: Secrets = NO_SECRET,
    ) -> Incarnation:
        """Start to listen for an engine whose workers have these identities; by default it is a usual one."""
        address = at or Address("127.0.0.1", free_port())
        said = {(0, rank): hello for rank, hello in enumerate(hellos or self.workers())}
        engine = LocalEngine("p", instance, said)
        listener = Listener(address, engine, leases=NOBODY, secrets=secrets, counters=Counted())
        self.listeners.append(listener)
        return Incarnation(address, "p", instance, None)

    def acquire(self, remote: Incarnation) -> PrefillEngine:
        """Acquire an engine, after a handshake if it needs one."""
        for _ in range(2):
            done: Future[KvhmaError | None] = Future()
            engine = self.engines.acquire_engine(remote, done.set_result)
            if engine is not None:
                return engine
            if (error := done.result(10)) is not None:
                raise error
        raise AssertionError("not known after its handshake")

    def connect(self, name: str, instance: int) -> PrefillEngine:
        """Acquire another engine."""
        return self.acquire(self.prefill(*self.workers(name), instance=instance))

    def begin(self, remote: Incarnation) -> None:
        """Begin a handshake with an engine."""
        assert self.engines.acquire_engine(remote, lambda error: None) is None


@pytest.fixture
def worlds():
    """Make worlds."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(contextlib.closing(World(*given, **more)))


@pytest.fixture
def world(worlds):
    return worlds()


@pytest.fixture
def silent():
    """The address of an engine that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield Address("127.0.0.1", listening.getsockname()[1])


def test_what_was_lost_is_connected_again_and_the_rest_kept(world):
    remote = world.prefill()
    first = world.acquire(remote)
    first.peers[0].gone = "its endpoint was lost"
    second = world.acquire(remote)
    assert second is not first
    assert second.gone is None
    assert second.peers[1] is first.peers[1], "it was not lost"
    world.engines.release_engine(first)
    world.engines.release_engine(second)
    assert world.acquire(remote) is second
    assert world.counted.numbers["handshakes"] == len(world.counted.values) == 2


def test_an_address_that_leads_back(world):
    own = LocalEngine("d", 7, {(0, rank): hello for rank, hello in enumerate(world.workers("D"))})
    at = Address("127.0.0.1", free_port())
    with contextlib.closing(Listener(at, own, leases=NOBODY, secrets=NO_SECRET, counters=Counted())):
        with pytest.raises(HandshakeError, match=rf"{at} lead to this engine itself.*engine 'p': set its advertised_h"):
            world.acquire(Incarnation(at, "p", 1, None))
        # A request that this very engine has prefilled, before it was restarted.
        with pytest.raises(HandshakeError, match=r"kvhma.instance is .* the blocks are gone"):
            world.acquire(Incarnation(at, "d", 1, None))


def changed(hello: bytes, *, public_key: bytes | None = None, extra: bytes | None = None) -> bytes:
    """Return a changed worker identity, as an untrusted client makes one from a reply."""
    said = decode_handshake(hello)
    return encode_handshake(
        said.metadata,
        said.geometry,
        name=said.name,
        incarnation=said.incarnation,
        extra=said.extra + b" " if extra is None else extra,
        public_key=said.public_key if public_key is None else public_key,
    )


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("has_key", [False, True])
def test_a_hello_that_is_repeated_and_changed_locks_nobody_out(world, met, has_key):
    """S7: a fake engine repeated P's identity with another `extra` before D had connected to P. From then on D took the
    real P for the fake one, and could not read from it any more."""
    workers = world.workers()
    other_key, _ = new_agent_key()
    remote = world.prefill(*workers)
    if met:
        assert world.acquire(remote)
    key = None if has_key else b""
    fake = world.prefill(*[(changed(hello, public_key=key), other_key) for hello, _ in workers], instance=2)
    with pytest.raises(HandshakeError, match="was not signed by that agent" if has_key else "has no key"):
        world.acquire(fake)
    engine = world.acquire(remote)
    assert engine.gone is None
    assert [peer.payload.extra for peer in engine.peers] == [names_place(EXTRA, board.place) for board in world.boards]


def test_a_signature_that_was_seen_is_worth_nothing(world, monkeypatch):
    """An untrusted client may ask P, too. P signs that client's nonce then, not D's."""
    workers = world.workers()
    seen = [sign_identity(private, bytes(16), bytes(32), hello) for hello, private in workers]
    fake = world.prefill(*[(hello, signature) for (hello, _), signature in zip(workers, seen, strict=True)])
    monkeypatch.setattr(server_module, "sign_identity", lambda signature, nonce, engine_key, hello: signature)
    with pytest.raises(HandshakeError, match="was not signed by that agent"):
        world.acquire(fake)


class Panic(BaseException):
    """As PyO3 raises one: not an Exception."""


INTERNAL = "internal error during the handshake"


@pytest.mark.parametrize(
    ("owner", "name", "error", "expected"),
    [
        (Agent, "connect", TransferError("not P1"), TransferError("not P1")),
        (threading.Thread, "start", RuntimeError("no new thread"), HandshakeTimeoutError("no new thread")),
        (Client, "ask", HandshakeTimeoutError("no answer"), HandshakeTimeoutError("no answer")),
        (PrefillEngines, "_plan", ValueError("outside"), HandshakeError(f"{INTERNAL}: ValueError: outside")),
        (PrefillEngines, "_plan", Panic("outside"), HandshakeError(f"{INTERNAL}: Panic: outside")),
    ],
    ids=str,
)
def test_a_handshake_that_fails_reaches_those_who_wait_and_leaves_nothing(
    world, monkeypatch, owner, name, error, expected
):
    """S8: a panic in Rust is not an Exception. It ended the thread of the handshake, and its loads waited for ever.

    After an error that may pass, the next load does the handshake again.
    """
    remote = world.prefill()
    function = getattr(owner, name)

    def fails(*given, **more):
        if name == "connect" and decode_handshake(given[1]).name.startswith("P0"):
            return function(*given, **more)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(type(expected), match=str(expected)):
            world.acquire(remote)
    assert not remotes(world)
    if type(expected) is HandshakeError:
        monkeypatch.setattr(prefill_engines, "_FAILURE_SECONDS", 0)
    assert world.acquire(remote).gone is None


def test_a_handshake_uses_no_connection_with_an_earlier_engine(world):
    """A service's address may lead to a new engine, while the old one still answers over open connections."""
    remote = world.prefill()
    engine = world.acquire(remote)
    old = world.engines.side_channel.idle.take_client(engine.numeric)
    world.engines.side_channel.idle.release_client(engine.numeric, old)
    world.engines.release_engine(engine)
    assert world.engines.evict_engine(engine, time.monotonic())
    again = world.acquire(remote)
    idle = world.engines.side_channel.idle.take_client(again.numeric)
    assert idle is not None, "the handshake's, for the first question about a lease"
    assert idle is not old
    idle.close()


def test_a_lasting_failure_stands_for_the_next_ones(world, monkeypatch):
    clients = []
    monkeypatch.setattr(prefill_engines, "Client", lambda *of: clients.append(1) or Client(*of))
    remote = world.prefill((b"garbage!", new_agent_key()[0]))
    for _ in range(2):
        with pytest.raises(HandshakeError, match="a handshake payload of 8 bytes is cut off"):
            world.acquire(remote)
    assert len(clients) == 1, "one handshake for both"


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("wrong", [{"engine_id": "q"}, {"tp_size": 3}])
def test_wrong_parameters_fail_no_right_ones_of_the_same_engine(world, wrong, under_way):
    """No digest covers `engine_id` and `tp_size`: a client may name an engine with wrong ones."""
    remote = world.prefill()
    named = remote._replace(**wrong)
    if under_way:
        world.begin(named)
    for _ in range(0 if under_way else 2):
        with pytest.raises(HandshakeError, match="in kv_transfer_params"):
            world.acquire(named)
    assert world.acquire(remote).gone is None


def test_handshakes_with_an_engine_of_the_operator_are_bounded(worlds, silent):
    world = worlds(max_peers=2, prefill_engines=[str(silent)])
    for at in range(4):
        world.begin(Incarnation(silent, "p", at, None))
    with pytest.raises(HandshakeTimeoutError, match="4 handshakes with it are under way"):
        world.begin(Incarnation(silent, "p", 9, None))
    assert world.counted.numbers["refused_engines"] == 1


def test_an_engine_has_no_more_time_the_more_ranks_it_says_it_has(worlds, monkeypatch):
    world = worlds(handshake_timeout=1)
    clock = [1000.0]
    monkeypatch.setattr(prefill_engines.time, "monotonic", lambda: clock[0])
    asked = []
    ask = Client.ask

    def slowly(self, question, kind, **more):
        clock[0] += 0.9
        asked.append(more.get("deadline", 0.0) - clock[0])
        if more and asked[-1] <= 0:
            raise HandshakeTimeoutError("no time left")
        return ask(self, question, kind)

    monkeypatch.setattr(Client, "ask", slowly)
    with pytest.raises(HandshakeTimeoutError, match="no time left"):
        world.acquire(world.prefill(*[world.worker(f"P{rank}", slice(1)) for rank in range(40)]))
    assert len(asked) <= 6


@pytest.mark.parametrize(
    "host", ["::ffff:127.0.0.1%1]:0;[localhost", "127.0.0.1;127.0.0.1", "localhost", "*", "", "[::1]", "::1%a b"]
)
def test_clients_are_given_no_names(host):
    address = Address(host, 5600)
    with pytest.raises(HandshakeError, match="is not numeric"):
        Client(address, 1, NO_SECRET)
    if host not in ("localhost", "*"):
        with pytest.raises(HandshakeTimeoutError):
            names.resolve(address, 10)


def test_a_name_stands_for_its_first_address_of_ipv4(monkeypatch):
    places = {socket.AF_INET: ("192.0.2.7", 5600), socket.AF_INET6: ("::1", 5600, 0, 0)}

    def getaddrinfo(host, port, family, kind):
        if family not in places:
            raise socket.gaierror("no address of this family")
        return [(family, kind, 6, "", places[family])]

    monkeypatch.setattr(names, "getaddrinfo", getaddrinfo)
    assert names.resolve(Address("both", 5600), 10).host == "192.0.2.7"
    del places[socket.AF_INET]
    assert names.resolve(Address("six", 5600), 10).host == "::1"
    del places[socket.AF_INET6]
    with pytest.raises(HandshakeTimeoutError, match="'none': the name is not known"):
        names.resolve(Address("none", 5600), 10)


@pytest.fixture
def slow_names(monkeypatch):
    """Names of other machines are not found before the end of the test; their lookups."""
    go_on, asked = threading.Event(), []

    def slowly(host, *more):
        asked.append(host)
        go_on.wait(20)
        raise socket.gaierror("at last")

    monkeypatch.setattr(names, "getaddrinfo", slowly)
    yield asked
    go_on.set()
    until(lambda: not names._lookups)


def test_names_that_nobody_answers_for_have_a_bound_in_time_and_number(slow_names):
    for _ in range(2):
        with pytest.raises(HandshakeTimeoutError, match=r"was not looked up in 0\.01 s"):
            names.resolve(Address("silent", 1), 0.01)
    for index in range(63):
        names.look_up(Address(f"silent-{index}", 1))
    with pytest.raises(HandshakeTimeoutError, match="64 other names"):
        names.look_up(Address("one more", 1))
    assert names.resolve(Address("127.0.0.1", 1), 0.01).host == "127.0.0.1"
    assert slow_names.count("silent") == 1


def test_one_who_waits_and_fails_takes_nothing_from_the_others(world):
    remote = world.prefill()
    go_on, told = threading.Event(), Future()

    def fails(error):
        raise Panic

    connect = world.engines._connect
    world.engines._connect = lambda remote: (go_on.wait(5), connect(remote))[1]
    assert world.engines.acquire_engine(remote, fails) is None
    assert world.engines.acquire_engine(remote, told.set_result) is None
    go_on.set()
    assert told.result(10) is None
    assert world.acquire(remote)


def test_more_engines_than_there_is_room_for(worlds):
    world = worlds(max_peers=2)
    busy = [world.prefill(*world.workers(name), instance=at) for at, name in enumerate("PQ")]
    held = [world.acquire(remote) for remote in busy]
    third = world.prefill(*world.workers("R"), instance=7)
    with pytest.raises(HandshakeTimeoutError, match=r"max_peers is 2, and 2 other engines are .* and 0"):
        world.acquire(third)
    assert world.counted.numbers["refused_engines"] == 1
    assert [world.acquire(remote) for remote in busy] == held, "those that are known are served"
    for engine in held * 2:
        world.engines.release_engine(engine)
    assert world.acquire(third).gone is None, "an idle one went"


def test_handshakes_that_nobody_answers_leave_the_operators_engines_their_room(worlds, silent):
    named = Address("127.0.0.1", free_port())
    world = worlds(max_peers=2, prefill_engines=[str(named)])
    for at in range(2):
        world.begin(Incarnation(silent, "x", at, None))
    with pytest.raises(HandshakeTimeoutError, match=r"max_peers is 2, and 0 other.*and 2 are in a handshake"):
        world.begin(Incarnation(Address("127.0.0.1", 9), "x", 1, None))
    assert world.acquire(world.prefill(at=named)).gone is None


def test_engines_of_the_operator_are_not_forgotten_for_strangers(worlds):
    named = Address("127.0.0.1", free_port())
    world = worlds(max_peers=1, prefill_engines=[str(named)])
    known = world.acquire(world.prefill(at=named))
    world.engines.release_engine(known)
    for at, name in enumerate("QRS"):
        world.engines.release_engine(world.connect(name, 10 + at))
    assert len(world.engines._engines) == 2
    assert known.gone is None


def test_worker_identities_of_all_handshakes_together_are_bounded(world, monkeypatch):
    """256 MiB were allowed for each engine that a request names, and 64 of them at a time."""
    monkeypatch.setattr(prefill_engines, "_MAX_IDENTITIES_BYTES", 1000)
    one, other = (Incarnation(Address("127.0.0.1", port), "p", port, None) for port in (1, 2))
    world.engines._note_received(one, 400)
    world.engines._note_received(one, 600)
    world.engines._note_received(other, 400)
    with pytest.raises(HandshakeTimeoutError, match=r"worker identities of 401 bytes.*more than 1000"):
        world.engines._note_received(other, 401)


def test_worker_identities_of_all_known_engines_together_are_bounded(world, monkeypatch):
    monkeypatch.setattr(prefill_engines, "_MAX_IDENTITIES_BYTES", 150_000)  # room for one that is large
    small = world.connect("S", 1)
    large = [world.worker(name, slice(None), metadata=100_000) for name in "LM"]
    first, second = (world.prefill(hello, instance=at) for at, hello in enumerate(large, 2))
    first = world.acquire(first)
    with pytest.raises(HandshakeTimeoutError, match="with other engines' they would be more than 150000"):
        world.acquire(second)
    assert world.counted.numbers["refused_engines"] == 1
    until(lambda: len(world.agent._session.peers) <= 3)
    for engine in (small, first):
        world.engines.release_engine(engine)
    assert world.acquire(second).gone is None
    assert list(world.engines._engines) == [second.address], "idle ones went"


def test_a_worker_identity_that_is_too_large_is_not_stored(world, monkeypatch):
    long = world.worker("P", slice(None), metadata=4 << 20)
    seen, note = [], world.engines._note_received
    monkeypatch.setattr(
        world.engines, "_note_received", lambda remote, nbytes: (seen.append(nbytes), note(remote, nbytes))
    )
    monkeypatch.setattr(prefill_engines, "_MAX_IDENTITIES_BYTES", 2 << 20)
    with pytest.raises(HandshakeTimeoutError, match="with other engines' they would be more than 2097152"):
        world.acquire(world.prefill(long))
    assert 2 << 20 < max(seen) < 3 << 20
    assert not world.engines._received


ELSEWHERE = {"model": "/mnt/elsewhere", "revision": None}
MODELS = {
    "another": ({}, [{"model": "org/tuned"}] * 2, "model of .* is 'org/tiny' here, 'org/tuned' at .*set model_id"),
    "one rank of another": ({}, [{}, {"model": "org/tuned"}], "tuned"),
    "revision": ({}, [{"revision": None}] * 2, "revision of the model is '0123abc' here, not set at"),
    "dtype": ({}, [{"dtype": "float16"}] * 2, "dtype of the model is 'bfloat16' here, 'float16' at"),
    "quantization": ({}, [{"quantization": "fp8"}] * 2, "quantization of the model is not set here, 'fp8' at"),
    "cache": ({}, [{"cache_dtype": "fp8"}] * 2, "cache_dtype of the model is 'bfloat16' here, 'fp8' at"),
    "overrides": ({}, [{"overrides": '{"a": 1}'}] * 2, "overrides of the model is '{}' here"),
    "configuration": (
        {"config": {"hidden_act": '"silu"'}},
        [{"config": {"hidden_act": '"gelu"'}}] * 2,
        "^hidden_act in the model's configuration is .*silu.* here, .*gelu.* at",
    ),
    "one rank with another scale": (
        {"layers": BuiltLayers([BuiltLayer({"scale": 0.5}, {})], {"a": 0, "b": 0})},
        [{}, {"layers": BuiltLayers([BuiltLayer({"scale": 0.25}, {})], {"b": 0})}],
        "^b: scale is 0.5 here, 0.25 at the prefill engine: its caches hold other values",
    ),
    "a name to break lines": ({}, [{"model": "evil\n" * 800}] * 2, r"'evil\?evil"),
    "the operators say it is one": ({"model_id": "m"}, [{**ELSEWHERE, "model_id": "m"}] * 2, None),
    "only D's operator says": ({"model_id": "m"}, [ELSEWHERE] * 2, "^model of"),
    "only P's operator says": ({}, [{**ELSEWHERE, "model_id": "m"}] * 2, "^model of"),
    "the operators differ": ({"model_id": "m"}, [{**ELSEWHERE, "model_id": "other"}] * 2, "^model_id of"),
    "a draft at D": ({"draft": "draft"}, [{}] * 2, None),
    "a draft at P": ({}, [{"draft": "draft"}] * 2, None),
    "one draft": ({"draft": "draft"}, [{"draft": "draft"}] * 2, None),
    "two drafts": ({"draft": "draft"}, [{"draft": "other"}] * 2, "draft of .* is 'draft' here, 'other' at"),
}


@pytest.mark.parametrize(("here", "there", "text"), MODELS.values(), ids=MODELS)
def test_caches_of_another_model_are_refused(worlds, monkeypatch, caplog, here, there, text):
    monkeypatch.setattr(peer_log, "_SECONDS", 1e-9)  # all lines, not only ten at once
    world = worlds(msgspec.structs.replace(IDENTITY, **here))
    extras = [encode_extra(msgspec.structs.replace(IDENTITY, **changes), vllm="0.31.0") for changes in there]
    remote = world.prefill(*world.workers("P", *extras))
    if text is None:
        assert world.acquire(remote)
        return
    with pytest.raises(UnsupportedPairError, match=text) as raised:
        world.acquire(remote)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000
    until(lambda: "engine d cannot read the caches of this engine" in caplog.text)
    assert str(raised.value)[:200] in caplog.text, "P's log says it too"


BAD = [
    b"",
    b"null",
    b"{}",
    b"\xff\xfe",
    b"[" * 60_000,
    json.dumps({"model": "org/tiny", "vllm": "0.32.0", "kvhma": "0.1.0"}).encode(),  # as version 1 wrote it
    EXTRA.replace(b'"org/tiny"', b"7"),
    EXTRA.replace(b"org/tiny", b"x" * 5000),
    EXTRA.replace(b'"revision"', b'"revise"'),
]


@pytest.mark.parametrize("extra", BAD, ids=range(len(BAD)))
def test_an_engine_that_does_not_say_which_model_it_runs(world, extra):
    with pytest.raises(HandshakeError, match="the worker identity does not say which model") as raised:
        world.acquire(world.prefill(*world.workers("P", extra, EXTRA)))
    assert str(raised.value).isprintable()
    assert world.acquire(world.prefill(*world.workers("Q"))), "the worker continues"


# --- engine_ttl -------------------------------------------------------------------------------------------------------


def watched(world: World, **settings: object) -> idle_engines.IdleEngineWatch:
    """Watch a world's engines for idle ones, as its worker does."""
    context = replace(world.engines._context, settings=Settings.read(settings))
    return idle_engines.IdleEngineWatch(context, world.engines, world.counted)


def remotes(world: World) -> set[str]:
    """Agents whose memory the worker's NIXL knows."""
    return set(world.net.agents[world.agent.name].remotes)


def test_an_engine_that_is_not_used_is_let_go_and_connected_anew(world):
    first_remote, other_remote = world.prefill(), world.prefill(*world.workers("Q"), instance=2)
    first, other = world.acquire(first_remote), world.acquire(other_remote)
    world.engines.release_engine(first)
    assert len(remotes(world)) == 4
    watched(world, engine_ttl=0.2)
    until(lambda: len(remotes(world)) == 2 and world.counted.numbers["idle_engines"] == 1)
    assert first.gone is not None
    assert world.engines.side_channel.idle.take_client(first.numeric) is None
    time.sleep(0.5)
    assert other.gone is None, "a load has acquired it"
    assert world.acquire(other_remote) is other
    again = world.acquire(first_remote)
    assert again is not first
    assert again.gone is None
    assert world.counted.numbers["handshakes"] == 3
    for engine in (again, other, other):
        world.engines.release_engine(engine)
    until(lambda: not remotes(world))


def test_one_that_is_acquired_while_it_is_looked_at_stays(world):
    remote = world.prefill()
    engine = world.acquire(remote)
    world.engines.release_engine(engine)
    since = time.monotonic()
    assert world.engines.unused_engines(since) == [engine]
    assert world.acquire(remote) is engine
    assert not world.engines.evict_engine(engine, since)
    world.engines.release_engine(engine)
    assert not world.engines.evict_engine(engine, since), "it was used since"
    assert world.engines.evict_engine(engine, time.monotonic())
    assert not world.engines.evict_engine(engine, time.monotonic())


@pytest.mark.parametrize("why", ["idle", "no room"])
def test_workers_of_an_engine_that_is_known_by_another_address_stay_connected(worlds, why):
    """Or a relay, which forwards D's question to P and P's answer: the same bytes are the same agent."""
    world = worlds(max_peers=2)
    hellos = world.workers()
    one, other = world.prefill(*hellos), world.prefill(*hellos)
    first, second = world.acquire(one), world.acquire(other)
    assert first.peers == second.peers
    world.engines.release_engine(first)
    if why == "idle":
        assert world.engines.evict_engine(first, time.monotonic())
        assert len(remotes(world)) == 2
    else:
        world.engines.release_engine(world.connect("Q", 2))
    assert world.acquire(one) is not first
    assert (first.gone, second.gone) == (None, None)


def test_without_the_setting_only_an_engine_that_does_not_answer_is_let_go(worlds, monkeypatch):
    """Each new connection to an agent that lives would add one: NIXL 1.5.1 does not close the previous one."""
    monkeypatch.setattr(idle_engines, "_GONE_SECONDS", 0.2)
    world = worlds(handshake_timeout=30)
    living, ended = world.acquire(world.prefill()), world.connect("Q", 2)
    restarted = world.acquire(at := world.prefill(*world.workers("R"), instance=3))
    for engine in (living, ended, restarted):
        world.engines.release_engine(engine)
    for _ in range(2):
        world.listeners.pop().close()
    world.prefill(*world.workers("R2"), instance=4, at=at.address)
    watched(world)
    until(lambda: len(remotes(world)) == 2)
    time.sleep(0.6)
    assert living.gone is None
    assert (ended.gone, restarted.gone) == ("disconnected", "disconnected")
    assert world.counted.numbers["idle_engines"] == 2


# --- whose memory it is; tests/attacks/test_memory_binding.py has attacks ---------------------------------------------


def test_one_worker_whose_memory_is_another_workers_is_enough(world):
    remote = world.prefill(*world.workers())
    world.boards[1]._bytes[5] ^= 1
    with pytest.raises(
        HandshakeError,
        match=r"memory that 'P1-.*its lease board begins with [0-9a-f]{64}, .*it would begin with [0-9a-f]{64}$",
    ):
        world.acquire(remote)
    assert world.net.agents["D"].calls["transfer"] == 2, "no cache of any worker"
    assert not remotes(world)
    assert len(world.engines._boards._free) == 16
    world.boards[1]._bytes[5] ^= 1
    assert len(world.acquire(remote._replace(tp_size=2)).peers) == 2


@pytest.mark.parametrize("secret", [False, True])
def test_an_engine_without_boards_is_read_from_with_a_secret_only(caplog, secret):
    """Its machine cannot map a board that shows whose memory it is. With a secret, TLS shows which engine it is."""
    secrets = Secrets([b"sixteen bytes or more"] if secret else [])
    world = World(secrets=secrets)
    with_board, (hello, private) = world.workers()
    remote = world.prefill(with_board, (changed(hello, extra=EXTRA), private), secrets=secrets)
    if secret:
        engine = world.acquire(remote)
        assert (len(engine.peers), engine.boards) == (2, ()), "P is asked for its leases"
        assert len(world.engines._boards._free) == 16
        assert caplog.text.count("has no lease board that shows whose memory it is; D reads from it") == 1
    else:
        with pytest.raises(HandshakeError, match=r"worker 'P1-.*no lease board.*or set secret_file at both"):
            world.acquire(remote)
    world.close()
