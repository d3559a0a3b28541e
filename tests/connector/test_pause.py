# SPDX-License-Identifier: Apache-2.0
"""Engines that pause, hang or get other weights, while they hold blocks for readers or others hold blocks for them."""

import contextlib
import json
import logging

import pytest

from connector.test_answers import Chat, turns_of
from connector.test_following import Prefill
from connector.test_following import added as followed
from connector.test_scheduler import added, failure_of, finished_at
from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.engine_loop import EngineLoop
from kvhma.vllm.holds.lease_table import OVERDUE_SECONDS
from kvhma.vllm.loads import load_claims
from kvhma.vllm.peers.client import Client
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo
from kvhma.vllm.wire.secrets import Secrets
from support.leases import Clock
from support.params import text_of
from support.schedulers import BUSY, STEP, kept, scheduler, tickets_of
from support.waiting import until


@pytest.fixture
def chat():
    """P and D with vLLM's schedulers; the state of D's groups is written by one more step than the answer needs."""
    logging.disable(logging.ERROR)
    made = Chat("full+state", d={"overlapped": True})
    with contextlib.closing(made.p.kvhma), contextlib.closing(made.d.kvhma):
        yield made
    logging.disable(logging.NOTSET)


# --- caches are reset -------------------------------------------------------------------------------------------------


def reset(engine, *, reset_connector=True):
    """What vLLM does in a pause with cleared caches."""
    return engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=reset_connector)


def instance(params):
    return f"{text_of(json.loads(json.dumps(params)))['instance']:016x}"


def test_a_reset_with_the_connector_ends_leases_first(chat):
    """vLLM resets its blocks before the connector, and raises an error if the connector still holds some."""
    _, before = chat.prefill(chat.words(100))
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        reset(chat.p, reset_connector=False)
    assert len(chat.p.kvhma.context.leases) == 1, "P still owes it to its readers"
    assert reset(chat.p)
    assert chat.p.kvhma.context.leases.is_empty
    assert not kept(chat.p.kvhma)
    assert not chat.p.kvhma.needs_step()
    _, after = chat.prefill(chat.words(100))
    assert chat.p.counted("expired") == {"reset": 1}
    assert instance(after) != instance(before)
    assert chat.p.kvhma.prefill._incarnation_id.to_bytes(8, "big").hex() == instance(after)
    assert reset(chat.p), "again, with another lease"


def test_the_listener_answers_for_the_new_incarnation():
    with contextlib.closing(scheduler()) as p:
        p.reset_cache()
        with Client(p.context.engine.address, 10, Secrets()) as client:
            found = client.ask(AskEngineInfo(PROTOCOL), EngineInfo).incarnation_id
        assert found.hex() == instance(finished_at(p))


def test_a_kept_answer_ends_with_the_caches(chat):
    """Also one whose last step has not ended: no lease holds its blocks yet."""
    chat.turn(chat.words(100))
    chat.stop_early()
    assert turns_of(chat.d).needs_step()
    assert len(chat.d.kvhma.context.leases) == 1
    while chat.d._in_flight:
        chat.d._settle(*chat.d._in_flight.popleft())
    assert reset(chat.d)
    assert not turns_of(chat.d).needs_step()
    assert not kept(chat.d.kvhma)
    chat.turn(chat.words(100))
    assert list(chat.d.counted("answers").values()) == [2]


@pytest.mark.parametrize("state", ["computing", "handed off"])
def test_a_followed_ticket_ends_with_the_caches(state):
    """D's policy decides. P does not hold what no follower reads any more, if it computes the request again."""
    with contextlib.closing(scheduler(ranks=1, recompute=False)) as d:
        p = Prefill()
        with contextlib.closing(p.scheduler):
            computing, asked = p.add(), followed(d, p)
            p.compute(at_p=160)
            until(lambda: tickets_of(d).followed["r"].follower.source)
            if state == "handed off":
                params = p.finish(computing)
                assert params is not None
            p.scheduler.reset_cache()
            assert not kept(p.scheduler)
            if state == "computing":
                assert "P has reset its caches" in failure_of(d, asked).text
                assert p.finish(computing) is None
                assert not kept(p.scheduler)


# --- D stops ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch):
    """What D has found each time it was about to renew, and how often it renews: 120 times in a lease."""
    found, makes_progress = [], EngineLoop.makes_progress

    def watched(self, seconds):
        found.append(makes_progress(self, seconds))
        return found[-1]

    monkeypatch.setattr(EngineLoop, "makes_progress", watched)
    monkeypatch.setattr(load_claims, "_MIN_RENEWAL_SECONDS", 0.0)
    monkeypatch.setattr(load_claims, "_RENEWALS", 120)
    return found


@pytest.fixture
def clock(monkeypatch):
    """P's clock."""
    made = Clock()
    monkeypatch.setattr(lease_table, "time", made)
    return made


@pytest.fixture
def pair(looks, clock):
    """P, and a D at which a request waits that it has claimed."""
    with contextlib.closing(scheduler()) as p, contextlib.closing(scheduler()) as d:
        asked = added(d, finished_at(p))
        until(lambda: d.matched_tokens(asked, 0) == (40, True))
        d.on_step(STEP)
        until(lambda: all(held.readers for held in p.context.leases._held.values()))
        yield p, d


def wait_until_p_has_its_blocks(p, looks, clock):
    """After D has seen twice that it makes no progress, no renewal is under way."""
    until(lambda: looks[-2:] == [False, False])
    clock.pass_by(30.1)
    p.on_step(STEP)
    clock.pass_by(OVERDUE_SECONDS)
    p.on_step(STEP)
    assert not kept(p)
    assert p.take_stats().data["expired"] == {"not_renewed": 1}


def test_a_d_that_makes_no_steps_lets_p_have_its_blocks(pair, looks, clock):
    """A paused engine would hold the blocks of a P, which pauses next, for ever."""
    wait_until_p_has_its_blocks(pair[0], looks, clock)


def test_a_d_that_pauses_after_work_lets_p_have_its_blocks(pair, looks, clock):
    """Between two steps its loop asks whether it may sleep: then no step runs."""
    p, d = pair
    d.on_step(BUSY)
    assert not d.needs_step()
    wait_until_p_has_its_blocks(p, looks, clock)


def test_a_device_that_hangs_or_a_rank_alone_keeps_the_claims_for_the_time_of_a_step(pair, looks, clock):
    """The scheduler's part sees a step that does not end, in both cases. VLLM waits as long for it."""
    p, d = pair
    d._loop._step_timeout = 1.0
    d.on_step(BUSY)
    wait_until_p_has_its_blocks(p, looks, clock)


def test_a_step_longer_than_a_lease_keeps_the_claims(pair, looks):
    """A long prompt, or compilation."""
    pair[1].on_step(BUSY)
    looks.clear()
    until(lambda: len(looks) > 5)
    assert all(looks)


def test_a_d_that_waits_for_room_keeps_its_claims(pair, looks):
    """Its loop steps all the time, and computes nothing. A busy machine may delay a step."""
    until(lambda: sum(looks) > 5, step=lambda: pair[1].on_step(STEP))
