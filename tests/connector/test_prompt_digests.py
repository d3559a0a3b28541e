# SPDX-License-Identifier: Apache-2.0
"""Digests of long prompts: a thread makes them, and D sends nothing to P before they are compared."""

import json
import threading

import pytest

from kvhma.vllm.prompts import prompt_digests
from kvhma.vllm.prompts.prompt import prompt_digest
from kvhma.vllm.prompts.prompt_digests import PromptDigests
from kvhma.vllm.wire.messages import Outcome
from support.params import text_of
from support.schedulers import BUSY, blocks, request, scheduler, tables
from support.waiting import until


@pytest.fixture
def p():
    made = scheduler()
    yield made
    made.close()


@pytest.fixture
def d():
    made = scheduler(ranks=1)
    yield made
    made.close()


@pytest.fixture
def go_on(monkeypatch):
    """With this setting prompts of 40 tokens are long, so a thread makes their digests."""
    event = threading.Event()

    def digest(*given, **more):
        if threading.current_thread().name.startswith("kvhma-digests"):
            event.wait(30)
        return prompt_digest(*given, **more)

    monkeypatch.setattr(prompt_digests, "prompt_digest", digest)
    monkeypatch.setattr(prompt_digests, "_LONG_TOKENS", 40)
    yield event
    event.set()


@pytest.fixture
def params(p):
    asked = request("at p", params={"do_remote_decode": True})
    p.on_request_added(asked)
    params = p.on_request_finished(asked, tables(p))
    assert params is not None
    return json.loads(json.dumps(params))


@pytest.fixture(autouse=True)
def told(d, monkeypatch):
    found = []
    release = d.decode.claims.renewer.release_claim

    def noted(address, claim, outcome):
        found.append(outcome)
        release(address, claim, outcome)

    monkeypatch.setattr(d.decode.claims.renewer, "release_claim", noted)
    return found


def test_a_request_waits_for_its_digest_and_no_step_does(params, d, go_on):
    asked = request(params=params)
    d.on_request_added(asked)
    for _ in range(3):
        assert d.matched_tokens(asked, 0) == (None, False)
        d.on_step(BUSY)
    go_on.set()
    until(lambda: d.matched_tokens(asked, 0) == (40, True))
    d.on_blocks_allocated(asked, blocks(d), 40)
    (order,) = d.on_step(BUSY).loads
    assert order.outcome is Outcome.READ


def test_a_request_that_nobody_asks_for_is_claimed_once_it_is_compared(params, p, d, go_on):
    """It may wait for blocks for longer than P keeps what was never claimed."""
    d.on_request_added(request(params=params))
    d.on_step(BUSY)
    assert d.decode.claims.renewer._sessions == {}
    go_on.set()
    until(lambda: not d.on_step(BUSY) or d.decode.claims.renewer._sessions)
    until(lambda: any(held.readers for held in p.context.leases._held.values()))


@pytest.mark.parametrize("end", ["asked", "stepped", "aborted", "allocated"])
def test_of_another_prompt_p_never_hears(params, p, d, go_on, told, end):
    asked = request(params=params)
    asked._all_token_ids[3] = 99
    d.on_request_added(asked)
    go_on.set()
    if end == "asked":
        until(lambda: d.matched_tokens(asked, 0) == (0, False))
    elif end == "stepped":
        until(lambda: not d.on_step(BUSY) or not d.decode.pending)
    elif end == "allocated":
        d.on_blocks_allocated(asked, blocks(d), 0)
    else:
        asked.status.name = "FINISHED_ABORTED"
    assert d.on_request_finished(asked, tables(d)) is None
    assert d.decode.pending == {}
    assert (told, d.decode.claims.renewer._sessions) == ([], {})
    assert d.take_stats().data["local_prefills"]["other_prompt"] == 1
    assert len(p.context.leases) == 1


def test_one_that_ends_before_it_is_compared_lets_p_go(params, p, d, go_on, told):
    asked = request(params=params, status="FINISHED_ABORTED")
    d.on_request_added(asked)
    go_on.set()
    assert d.on_request_finished(asked, tables(d)) is None
    assert told == [Outcome.READ]
    until(lambda: len(p.context.leases) == 0)


def test_another_one_may_still_turn_out_to_read_the_same(params, p, d, go_on, told, monkeypatch):
    """The first would have released the blocks before the second was compared."""
    monkeypatch.setattr(prompt_digests, "_LONG_TOKENS", 1 << 20)
    first, second = request("a", params=params), request("b", params=params)
    d.on_request_added(first)
    monkeypatch.setattr(prompt_digests, "_LONG_TOKENS", 1)
    d.on_request_added(second)
    assert d.matched_tokens(first, 0) == (40, True)
    d.on_blocks_allocated(first, blocks(d), 40)
    (order,) = d.on_step(BUSY).loads
    assert order.outcome is Outcome.READ_SHARED


def test_what_cannot_be_summed_is_refused(params, d, go_on):
    asked = request(params=params)
    asked._all_token_ids[3] = 1 << 40
    d.on_request_added(asked)
    go_on.set()
    until(lambda: d.matched_tokens(asked, 0) == (1, True))
    d.on_blocks_allocated(asked, blocks(d), 40)
    metadata = d.on_step(BUSY)
    assert metadata.loads == []
    assert "does not fit 32 bits" in metadata.refusals["r"].text


@pytest.mark.parametrize("end", ["in time", "late", "other", "aborted"])
def test_p_begins_when_a_request_comes(p, go_on, end):
    asked = request("at p", 64, params={"do_remote_decode": True})
    p.on_request_added(asked)
    assert not p.context.prompts.is_ready("at p")
    if end == "in time":
        go_on.set()
        until(lambda: p.context.prompts.is_ready("at p"))
    elif end == "late":
        threading.Timer(0.1, go_on.set).start()
    elif end == "other":
        asked.num_computed_tokens = 50  # the hand-off differs from what was expected
    else:
        asked.status.name = "FINISHED_ABORTED"
    params = p.on_request_finished(asked, tables(p))
    if end == "aborted":
        assert params is None
    else:
        tokens = asked.num_computed_tokens
        assert text_of(params)["prompt"] == prompt_digest(asked, tokens)
    assert p.context.prompts.begun == {}


def test_what_was_not_begun_does_not_wait_for_others(go_on):
    prompts = PromptDigests()
    first, second = request("a", 64), request("b", 64)
    assert prompts.begin_digest(first, 64)
    assert prompts.begin_digest(second, 64)
    assert prompts.take_digest(second, 64) == prompt_digest(second, 64)
    assert not prompts.is_ready("a")
    go_on.set()
    assert prompts.take_digest(first, 64) == prompt_digest(first, 64)
    prompts.close()


@pytest.mark.parametrize("why", ["there can be no more threads", "the engine stops"])
def test_without_a_thread_a_digest_is_made_at_once(params, d, go_on, monkeypatch, why):
    prompts = d.context.prompts
    if why == "the engine stops":
        prompts.begin_digest(request("before", 64), 64)
        prompts.begin_digest(request("cancelled", 64), 64)
        prompts.close()
        assert prompts.is_ready("cancelled")
        assert prompts.take_digest(request("cancelled", 64), 64) == prompt_digest(request(tokens=64), 64)
    else:

        def fail(*_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(prompts._thread, "submit", fail)
    asked = request(params=params)
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (40, True)


def test_a_state_is_never_read_into_the_null_block(params, d):
    asked = request(params=params)
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (40, True)
    given = blocks(d)
    (state,) = (at for at, group in enumerate(d.context.geometry.groups) if group.kind == "ssm")
    for block in given.blocks[state]:
        block.block_id, block.is_null = 0, True
    d.on_blocks_allocated(asked, given, 40)
    metadata = d.on_step(BUSY)
    assert metadata.loads == []
    assert metadata.refusals["r"].text == "the block of its state is the null block"
