# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives at the listener, the next good question is answered."""

import random
import socket
import struct
import threading
import time

import msgspec
import pytest
import zmq

from kvhma.errors import HandshakeError, HandshakeTimeoutError
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.wire.client import Client
from kvhma.vllm.wire.messages import (
    PROTOCOL,
    AskEngineInfo,
    AskHello,
    EngineInfo,
    Leases,
    Outcome,
    RankHello,
    Refused,
    Release,
    Renew,
    read_answer,
)
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.server import Listener
from support.engines.engine import free_port


@pytest.fixture
def address():
    address = Address("127.0.0.1", free_port())
    listener = Listener(
        address, engine_id="p", incarnation_id=258, hellos={(0, 0): b"zero", (0, 1): b"one"}, leases=LeaseTable(9)
    )
    yield address
    answers(address)
    listener.close()


def answers(address):
    with Client(address, 5) as client:
        info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        assert (info.engine_id, int.from_bytes(info.incarnation_id, "big"), info.ranks) == ("p", 258, [(0, 0), (0, 1)])
        assert client.ask(AskHello(0, 1), RankHello).data == b"one"


def dealer(address):
    found = zmq.Context.instance().socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.connect(f"tcp://{address}")
    return found


def test_another_protocol(address):
    with (
        Client(address, 5) as client,
        pytest.raises(HandshakeError, match="protocol is 7 on your side, 2 on this side"),
    ):
        client.ask(AskEngineInfo(7), EngineInfo)


def test_a_rank_that_is_not_there(address):
    with Client(address, 5) as client, pytest.raises(HandshakeError, match="pipeline 0, tensor 3"):
        client.ask(AskHello(0, 3), RankHello)


def test_an_answer_of_another_kind(address):
    with Client(address, 5) as client, pytest.raises(HandshakeError, match="AskEngineInfo with EngineInfo"):
        client.ask(AskEngineInfo(PROTOCOL), RankHello)


def test_a_peers_text_brings_no_line_breaks_into_the_log(address, caplog):
    with Client(address, 5) as client:
        client.ask(Refused("evil\nname", "a\x1b[31mb\n" * 400), object)
    until = time.monotonic() + 5
    while not caplog.records and time.monotonic() < until:
        time.sleep(0.01)
    assert "\n" not in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.records[0].getMessage()


JUNK = [
    b"",
    b"\xc1",
    b"\x00",
    random.Random(7).randbytes(100),
    msgspec.msgpack.encode({"type": "hello"}),
    msgspec.msgpack.encode({"type": "hello", "pp_rank": -1, "tp_rank": 0}),
    msgspec.msgpack.encode({"type": "hello", "pp_rank": "0", "tp_rank": None}),
    msgspec.msgpack.encode({"type": "hello", "pp_rank": 2**60, "tp_rank": 0}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", b"1234567"]]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", 1]]}),
    msgspec.msgpack.encode({"type": "renew", "claims": [["a", b"12345678", b"12345678"]] * 5000}),
    msgspec.msgpack.encode({"type": "release", "claims": 7}),
    msgspec.msgpack.encode({"type": "refused", "engine_id": "x", "text": "y" * 100_000}),
    msgspec.msgpack.encode({"type": "roster", "protocol": 1} | {str(i): i for i in range(1000)}),
    msgspec.msgpack.encode(["get_meta_msg", 0, 0]),
    b"\x91" * 100_000,
    b"\x81\xa4type" * 20_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xd9\xff" + b"\xff" * 255,
]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:20]))
def test_junk_is_answered_with_a_problem_or_not_at_all(address, junk):
    with dealer(address) as socket_:
        socket_.send_multipart([b"", junk])
        assert socket_.poll(5000)
        assert b"problem" in socket_.recv_multipart()[1] or b"roster" in junk


@pytest.mark.parametrize("frames", [[b""], [b"x"], [b"", b"", b""], [b"x", b"y"], [b""] * 50], ids=str)
def test_other_envelopes_are_dropped(address, frames):
    with dealer(address) as socket_:
        socket_.send_multipart(frames)
        assert not socket_.poll(100) or len(frames) == 2


def test_mutations_of_good_questions(address):
    rng = random.Random(1)
    good = [
        msgspec.msgpack.encode(question)
        for question in (
            AskEngineInfo(PROTOCOL),
            AskHello(0, 0),
            Renew([("a", b"12345678", b"87654321")]),
            Release([("b", b"12345678", b"87654321")], Outcome.READ),
        )
    ]
    with dealer(address) as socket_:
        for _ in range(2000):
            data = bytearray(rng.choice(good))
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            socket_.send_multipart([b"", bytes(data[: rng.randint(1, len(data))])])
            assert socket_.poll(5000)
            socket_.recv_multipart()


def test_a_huge_message_only_costs_its_own_connection(address):
    with dealer(address) as socket_:
        socket_.send_multipart([b"", b"x" * (64 << 20)])
        assert not socket_.poll(500)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + b"\x00" * 8 + b"\x7f",
        random.Random(8).randbytes(1000),
        b"\xff",
        struct.pack(">Q", 2**63),
    ],
    ids=lambda data: repr(data[:10]),
)
def test_bytes_that_are_no_zeromq(address, data):
    with socket.create_connection((address.host, address.port)) as raw:
        raw.sendall(data)
        answers(address)


def test_many_slow_peers(address):
    raws = [socket.create_connection((address.host, address.port)) for _ in range(200)]
    try:
        for raw in raws:
            raw.sendall(b"\xff\x00")
        answers(address)
    finally:
        for raw in raws:
            raw.close()


def test_a_peer_that_never_reads(address):
    with dealer(address) as socket_:
        question = msgspec.msgpack.encode(AskHello(0, 0))
        for _ in range(5000):
            socket_.send_multipart([b"", question])
        answers(address)


def test_many_at_once(address):
    failures = []

    def ask():
        try:
            for _ in range(20):
                answers(address)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nobody_there():
    with (
        Client(Address("127.0.0.1", free_port()), 0.2) as client,
        pytest.raises(HandshakeTimeoutError, match="no answer"),
    ):
        client.ask(AskEngineInfo(PROTOCOL), EngineInfo)


@pytest.mark.parametrize(
    "data",
    [*JUNK, msgspec.msgpack.encode({"type": "leases", "clock": "x", "expires": []})],
    ids=lambda junk: repr(junk[:20]),
)
def test_answers_are_not_trusted_either(data):
    with pytest.raises(HandshakeError, match="not one of protocol"):
        read_answer(data)


@pytest.mark.parametrize("frames", [[b"x"], [b""], [b"x", b"y"], [b"", b""], [b"", b"x", b"y"]], ids=str)
def test_answers_in_other_envelopes_keep_no_client_waiting(frames):
    address = Address("127.0.0.1", free_port())
    with zmq.Context.instance().socket(zmq.ROUTER) as hostile, Client(address, 5) as client:
        hostile.setsockopt(zmq.LINGER, 0)
        hostile.bind(f"tcp://{address}")
        client.send(Renew([]))
        peer, *_ = hostile.recv_multipart()
        hostile.send_multipart([peer, *frames])
        began = time.monotonic()
        with pytest.raises(HandshakeError, match=r"no answer from|not one of protocol"):
            client.receive(Leases, "Renew", 0.3)
        assert time.monotonic() - began < 2


def test_a_port_that_is_taken(address):
    with pytest.raises(HandshakeError, match=r"cannot listen at.*side_channel_port"):
        Listener(address, engine_id="q", incarnation_id=1, hellos={}, leases=LeaseTable(1))


def test_leases_are_asked_for(address):
    with Client(address, 5) as client:
        assert client.ask(Renew([("a", b"12345678", b"87654321")]), Leases).expires == [None]
