# SPDX-License-Identifier: Apache-2.0
"""The side channel counts refused connections by their reason, and does not count those that end normally."""

import pytest

from kvhma.errors import HandshakeError
from kvhma.vllm.peers import connection, connections
from kvhma.vllm.peers.client import Client
from kvhma.vllm.wire.messages import MAX_QUESTION_BYTES, PROTOCOL, AskEngineInfo, EngineInfo, frame
from kvhma.vllm.wire.secrets import Secrets
from support.listening import answers, close_all, connect, has_ended, listening
from support.waiting import until

SECRET = Secrets([b"a secret of the two of them"])
OTHER = Secrets([b"a secret of somebody else's"])


def refused(found):
    return found.counted.by_label("side_channel_refused")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)
    for name in ("HANDSHAKE_SECONDS", "QUESTION_SECONDS", "ANSWER_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(connection, name, 0.3)


@pytest.mark.parametrize(
    ("here", "there"), [(SECRET, OTHER), (SECRET, Secrets()), (Secrets(), SECRET)], ids=["another", "only P", "only D"]
)
def test_another_secret(here, there):
    with listening(secrets=here) as found:
        with pytest.raises(HandshakeError), Client(found.at, 5, there) as client:
            client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        until(lambda: refused(found) == {"secret": 1})


def test_a_message_that_is_too_long_and_one_too_many():
    with listening() as found:
        for number, data in enumerate(((MAX_QUESTION_BYTES + 1).to_bytes(4, "little"), 2 * frame(AskEngineInfo(3))), 1):
            with connect(found.at) as raw:
                raw.sendall(data)
                assert has_ended(raw, 5)
            until(lambda number=number: refused(found) == {"message": number})


def test_half_a_question(quick):
    with listening() as found, connect(found.at) as raw:
        raw.sendall(frame(AskEngineInfo(PROTOCOL))[:-1])
        assert has_ended(raw, 5)
        until(lambda: refused(found) == {"time": 1})


def test_too_many(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    raws = []
    with listening() as found:
        try:
            raws = [connect(found.at) for _ in range(6)]
            until(lambda: refused(found) == {"room": 2})
        finally:
            close_all(raws)


def test_who_is_served_and_goes_or_has_no_more_questions_was_not_refused(quick):
    with listening() as found:
        for _ in range(3):
            answers(found.at)
        with Client(found.at, 5, Secrets()) as client:
            client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
            until(client.poll)  # it is closed after a long idle time
        with connect(found.at):
            pass
        assert refused(found) == {}
