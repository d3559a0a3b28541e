# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler alone: its messages to vLLM, its workers and other engines, in any order of events."""

import contextlib
import hashlib
import json
import socket
import time
from types import SimpleNamespace

import pytest

# With its parts, since torch warns while they are imported, and a warning is an error here.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from kvhma.vllm.config.allow_list import AllowedEngines
from kvhma.vllm.failures import Failure
from kvhma.vllm.holds.lease_table import OVERDUE_SECONDS
from kvhma.vllm.metadata import WorkerReport
from kvhma.vllm.peers.client import Client
from kvhma.vllm.wire.messages import Leases, LeaseState, Outcome, Renew, write_claim
from kvhma.vllm.wire.params import PrefillParams
from kvhma.vllm.wire.secrets import Secrets
from support.engines.engine import free_port
from support.schedulers import BUSY, STEP, blocks, frees, kept, manager, output, request, scheduler, tables
from support.waiting import until


@pytest.fixture
def p():
    made = scheduler()
    yield made
    made.close()


@pytest.fixture
def d():
    made = scheduler()
    yield made
    made.close()


def finished_at(p, **more):
    asked = request("at p", params={"do_remote_decode": True}, **more)
    p.on_request_added(asked)
    params = p.on_request_finished(asked, tables(p))
    assert params is not None
    return json.loads(json.dumps(params))


def test_a_request_is_held_until_its_reader_lets_go(p, d):
    asked = request(params=finished_at(p))
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (40, True)
    assert d.matched_tokens(asked, 16) == (24, True)  # asked again: nothing has changed
    d.on_blocks_allocated(asked, blocks(d), 40)
    (load,) = d.on_step(STEP).loads
    assert (load.num_tokens, load.cached) == (40, 0)
    assert d.on_step(STEP).loads == []
    assert frees(p, [])
    d.on_worker_results(output(["r"]))
    until(lambda: len(p.context.leases) == 0)
    assert frees(p, tables(p))
    assert kept(p) == set()
    assert d.matched_tokens(asked, 0) == (0, False)
    assert d.on_request_finished(asked, tables(d)) is None


@pytest.mark.parametrize(
    ("held", "step", "engines", "waits"), [(1, STEP, 1, 4), (0, STEP, 1, 4), (1, BUSY, 1, 0), (1, STEP, 2, 0)]
)
def test_an_engine_that_only_keeps_blocks_waits_for_their_readers(monkeypatch, held, step, engines, waits):
    """Formerly it scheduled again and again, and its listener and the readers had to share the cores with that."""
    one = scheduler(may_wait=engines == 1)
    asked = []
    monkeypatch.setattr(one.context.leases, "wait_for_end", asked.append)
    for _ in range(held):
        finished_at(one)
    for _ in range(6):  # two of them may be followed by results of steps before
        one.on_step(step)
    assert len(asked) == waits
    assert all(0 < seconds < 1e-3 for seconds in asked), "a new request may come meanwhile"
    one.close()


def test_a_rank_that_is_alone_tells_p_itself(p, monkeypatch):
    """One question of its worker is all that an ordinary hand-off costs P: no claim before it, no release after it."""
    d = scheduler(ranks=1)
    said = []
    for name in ("track_claim", "release_claim"):
        monkeypatch.setattr(d.decode.renewer, name, lambda *_, name=name, **__: said.append(name))
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        assert load(d, asked).outcome is Outcome.READ
        d.on_step(STEP)
        d.on_worker_results(output(["r"]))
        sibling = request("1_r", params=asked.kv_transfer_params)
        d.on_request_added(sibling)
        monkeypatch.setattr(d.decode.renewer, "is_held", lambda *_: True)
        assert load(d, sibling).outcome is Outcome.READ_SHARED
        assert said == ["track_claim"], "one of several samples is claimed at once"
        d.on_worker_results(output(["1_r"]))
        assert said == ["track_claim", "release_claim"]
        failed = request("s", params=finished_at(p))
        d.on_request_added(failed)
        load(d, failed)
        d.on_worker_results(output(["s"], ["s"], {"s": Failure("unsupported", "no", transient=False)}))
        assert said == ["track_claim", "release_claim", "release_claim"], "what failed was not released by the worker"
    finally:
        d.close()


def test_p_is_told_of_what_its_board_has_shown(p, monkeypatch):
    """A worker that has not asked P has not notified P either."""
    d = scheduler(ranks=1)
    told = []
    monkeypatch.setattr(d.decode.renewer, "release_claim", lambda _, claim, outcome: told.append((claim, outcome)))
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        order = load(d, asked)
        ended = output(["r"])
        ended.kv_connector_worker_meta = WorkerReport(verified_by_board={"r", "unknown"})
        d.on_worker_results(ended)
        assert told == [(order.remote.claim(order.reader), Outcome.READ)]
    finally:
        d.close()


def test_workers_know_the_trace_of_a_request(p, d):
    """They also learn how long the scheduler had it; a second try has not waited. Without a header they get nothing."""
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    plain, traced = (request(name, params=finished_at(p)) for name in ("plain", "traced"))
    traced.trace_headers = {"traceparent": parent, "tracestate": "x" * 10_000}
    for asked in (plain, traced):
        d.on_request_added(asked)
    assert load(d, plain).trace is None
    time.sleep(0.05)
    order = load(d, traced)
    assert order.trace.parent == parent
    assert 0.05 <= order.trace.waited < 5
    d.on_worker_results(output(["traced"], ["traced"], {"traced": Failure("transfer", "no", transient=True)}))
    assert load(d, traced).trace == (parent, 0.0)


def test_a_renewal_that_comes_after_the_last_question_keeps_nothing(p):
    """It may overtake the question. Formerly it made a reader of one that had finished, for a whole lease."""
    d = scheduler(ranks=1)
    try:
        asked = request("0_r", params=finished_at(p))
        d.on_request_added(asked)
        order = load(d, asked)
        claim, leases = order.remote.claim(order.reader), p.context.leases
        assert leases.check_and_release([claim], [order.outcome]) == [LeaseState.HELD]
        assert leases.renew([claim]) == [LeaseState.HELD], "kept for other samples"
        d.on_worker_results(output(["0_r"]))
        until(lambda: frees(p, tables(p)))
    finally:
        d.close()


def test_what_waits_or_lasts_is_claimed(p, d, monkeypatch):
    """P frees unclaimed blocks when their lease ends, or when newer requests need the room."""
    claimed = []
    monkeypatch.setattr(d.decode.renewer, "track_claim", lambda _, claim, **__: claimed.append(claim.key.request_id))
    waiting, lasting = (request(name, params=finished_at(p)) for name in ("waits", "lasts"))
    d.on_request_added(waiting)
    assert claimed == []
    d.on_step(STEP)
    assert len(claimed) == 1, "it was not scheduled when it came"
    d.on_request_added(lasting)
    load(d, lasting)
    assert len(claimed) == 1
    until(lambda: d.on_step(STEP) and len(claimed) == 2)
    d.on_step(STEP)
    assert len(claimed) == 2


@pytest.mark.parametrize("after", ["nothing to load", "cancelled before", "cancelled while it loads"])
def test_p_is_told_whatever_happens(p, d, after):
    asked = request(params=finished_at(p), status="FINISHED_ABORTED")
    d.on_request_added(asked)
    if after == "nothing to load":
        d.on_blocks_allocated(asked, blocks(d), 0)
    elif after == "given up before":
        d.on_request_finished(asked, tables(d))
    else:
        d.on_blocks_allocated(asked, blocks(d), 40)
        d.on_request_finished(asked, tables(d))
        assert len(p.context.leases) == 1
        d.on_worker_results(output(["r"]))
    until(lambda: len(p.context.leases) == 0)
    assert d.decode.pending == {}


def test_a_passing_failure_is_tried_again_and_a_lasting_one_is_not(p, d):
    asked = request(params=finished_at(p))
    d.on_request_added(asked)
    for transient, again in ((True, True), (True, False)):
        d.on_blocks_allocated(asked, blocks(d), 40)
        failure = Failure("peer_lost", "gone", transient)
        d.on_worker_results(output(["r"], ["r"], {"r": failure}))
        assert d.matched_tokens(asked, 0) == (None, False), "those that hold blocks go first"
        assert d.matched_tokens(asked, 0) == ((40, True) if again else (0, False))
    other = request("s", params=finished_at(p))
    d.on_request_added(other)
    d.on_blocks_allocated(other, blocks(d), 40)
    d.on_worker_results(output(["s"], ["s"], {"s": Failure("unsupported", "no", transient=False)}))
    assert d.matched_tokens(other, 0) == (None, False)
    assert d.matched_tokens(other, 0) == (0, False)


def test_a_refusal_goes_the_way_of_a_failed_load(d):
    asked = request(params={"do_remote_prefill": True})
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == FAILS
    d.on_blocks_allocated(asked, blocks(d), 40)
    metadata = d.on_step(STEP)
    assert metadata.loads == []
    assert "kvhma is None" in metadata.refusals["r"].text


@pytest.mark.parametrize("params", [[], "x", 7, [1]])
def test_parameters_that_are_no_dictionary_never_reach_vllm(d, params):
    asked = request(params=params)
    d.on_request_added(asked)
    assert asked.kv_transfer_params is None
    assert d.matched_tokens(asked, 0) == FAILS


def changed(what, asked):
    """Make another prompt of a request."""
    if what == "tokens":
        asked._all_token_ids[3] = 99
    elif what == "fewer tokens":
        del asked._all_token_ids[30:]
        asked.num_prompt_tokens = 30
    elif what == "adapter":
        asked.lora_request = SimpleNamespace(lora_name="fine", lora_path="/fine")
    elif what == "salt":
        asked.cache_salt = "tenant"
    return asked


@pytest.mark.parametrize("what", ["tokens", "fewer tokens", "adapter", "salt"])
def test_another_prompt_is_computed_and_changes_nothing_for_the_right_one(p, d, what):
    """Formerly it was a failed load (with another adapter or salt, a good one), and its end freed the right blocks."""
    params = finished_at(p)
    other = changed(what, request("other", params=params))
    d.on_request_added(other)
    assert d.matched_tokens(other, 0) == (0, False)
    d.on_blocks_allocated(other, blocks(d), 0)
    metadata = d.on_step(STEP)
    assert (metadata.loads, metadata.refusals) == ([], {})
    assert d.on_request_finished(other, tables(d)) is None
    assert d.take_stats().data["local_prefills"]["other_prompt"] == 1
    assert d.decode.renewer._sessions == {}, "P has not heard of it"
    right = request(params=params)
    d.on_request_added(right)
    load(d, right)
    d.on_worker_results(output(["r"]))
    until(lambda: len(p.context.leases) == 0)
    assert frees(p, tables(p))
    assert p.take_stats() is None, "no lease ended unread"


FAILS = (1, True)


def fails(d, asked, cause):
    """Whether a request is loaded only to fail: its load asks for one token, and reads nothing."""
    until(lambda: d.matched_tokens(asked, 0) == FAILS)
    d.on_blocks_allocated(asked, blocks(d), 1)
    metadata = d.on_step(STEP)
    assert (metadata.loads, [*metadata.refusals]) == ([], [asked.request_id])
    failure = metadata.refusals[asked.request_id]
    assert (failure.cause, failure.transient) == (cause, False)
    d.on_worker_results(output([asked.request_id], [asked.request_id], {asked.request_id: failure}))
    assert d.decode.pending == {}
    return d.take_stats() is None


@pytest.mark.parametrize("what", ["tokens", "fewer tokens", "adapter", "salt"])
def test_another_prompt_fails_where_policy_says_so(p, what):
    """Formerly D computed it, with any `kv_load_failure_policy`."""
    d = scheduler(recompute=False)
    try:
        params = finished_at(p)
        other = changed(what, request("other", params=params))
        d.on_request_added(other)
        assert fails(d, other, "other_prompt"), "no prompt was computed here"
        assert d.on_request_finished(other, tables(d)) is None
        assert d.decode.renewer._sessions == {}, "P has not heard of it"
        right = request(params=params)
        d.on_request_added(right)
        load(d, right)
        d.on_worker_results(output(["r"]))
        until(lambda: frees(p, tables(p)))
    finally:
        d.close()


def test_a_sample_that_comes_too_late_fails_where_policy_says_so(p):
    d = scheduler(recompute=False)
    try:
        params = finished_at(p)
        first, late = (request(f"{index}_parent", params=params) for index in range(2))
        d.on_request_added(first)
        load(d, first)
        d.on_worker_results(output([first.request_id]))
        until(lambda: frees(p, tables(p)))
        d.on_request_added(late)
        assert fails(d, late, "late_reader")
    finally:
        d.close()


def test_a_state_that_is_ahead_fails_where_policy_says_so():
    p, d = scheduler(has_state=True), scheduler(backoff=3, has_state=True, recompute=False)
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        assert fails(d, asked, "state_ahead")
        until(lambda: not d.decode.renewer._sessions or len(p.context.leases) == 1)
        other = scheduler(has_state=True)
        again = request(params=asked.kv_transfer_params)
        other.on_request_added(again)
        assert load(other, again).num_tokens == 40, "another engine may have the same parameters"
        other.close()
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_prompt_that_is_too_short_to_be_handed_over_is_nobodys_fault(recompute, caplog):
    p, d = (scheduler(backoff=1, has_state=True, recompute=recompute) for _ in range(2))
    try:
        asked = request(tokens=1, params=finished_at(p, tokens=1))
        d.on_request_added(asked)
        assert d.matched_tokens(asked, 0) == (0, False)
        until(lambda: frees(p, tables(p)))
        assert (d.take_stats(), d.decode.pending, caplog.records) == (None, {}, [])
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_prompt_that_must_not_read_the_cache_is_computed(p, recompute):
    """VLLM computes all of a prompt whose log-probabilities are asked for. Formerly D sent nothing, and P held it."""
    d = scheduler(recompute=recompute)
    try:
        asked = request(params=finished_at(p))
        asked.get_skip_reading_prefix_cache = lambda: True
        d.on_request_added(asked)
        assert d.matched_tokens(asked, 0) == (0, False)
        until(lambda: frees(p, tables(p)))
        assert d.take_stats().data["local_prefills"] == {"skip_reading_prefix_cache": 1}
    finally:
        d.close()


@pytest.mark.parametrize("change", [{"kvhma": None}, {}])
def test_what_is_computed_instead_of_failing_is_counted(p, change):
    """VLLM computes a prompt that must not read the cache. Formerly nothing was logged or counted."""
    d = scheduler(recompute=False)
    try:
        asked = request(params=finished_at(p) | change, tokens=40 if change else 39)
        asked.get_skip_reading_prefix_cache = lambda: True
        d.on_request_added(asked)
        assert d.matched_tokens(asked, 0) == (1, True)
        d.on_blocks_allocated(asked, blocks(d), 0)
        assert d.decode.pending == {}
        assert d.take_stats().data["local_prefills"] == {"refused" if change else "other_prompt": 1}
    finally:
        d.close()


@pytest.mark.parametrize("secrets", [(), [b"a secret of the two of them"]])
def test_what_vllm_rejected_lets_p_go(secrets):
    """For each request that its front end rejects vLLM sends one of one token with the same parameters, and aborts it.

    Formerly D compared the prompts, and P held the blocks for all of its lease.
    """
    p, d = scheduler(secrets=secrets), scheduler(secrets=secrets, recompute=False)
    try:
        params = finished_at(p)
        rejected = request("rejected", tokens=1, params=params, status="FINISHED_ABORTED")
        rejected.abort_immediately = True
        d.on_request_added(rejected)
        assert d.decode.pending == {}
        assert d.on_request_finished(rejected, [[] for _ in tables(d)]) is None
        until(lambda: frees(p, tables(p)))
        assert (p.take_stats(), d.take_stats()) == (None, None), "nothing has failed or expired"
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize(
    "change",
    [
        {"remote_port": 0},
        {"kvhma": {}},
        {"kvhma": None},
        {"remote_request_id": "another's"},
        {"do_remote_prefill": 0},
    ],
)
def test_what_vllm_rejected_for_its_parameters_reaches_nobody(p, d, change):
    params = finished_at(p) | change
    rejected = request("rejected", tokens=1, params=params, status="FINISHED_ABORTED")
    rejected.abort_immediately = True
    d.on_request_added(rejected)
    assert d.on_request_finished(rejected, [[] for _ in tables(d)]) is None
    assert (d.decode.pending, d.decode.renewer._sessions) == ({}, {})
    assert len(p.context.leases) == 1


def load(d, asked, tokens=40):
    """Have a request loaded; return its load."""
    matched = until(lambda: answer if (answer := d.matched_tokens(asked, 0))[0] is not None else None)
    assert matched == (tokens, True)
    d.on_blocks_allocated(asked, blocks(d), tokens)
    (order,) = d.on_step(STEP).loads
    return order


def test_parameters_that_were_changed_are_refused_and_p_does_not_hear_of_it(p, d):
    params = finished_at(p)
    params["kvhma"]["spans"][0][1] = "77"
    asked = request(params=params)
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == FAILS
    d.on_blocks_allocated(asked, blocks(d), 40)
    assert "kvhma.digest" in d.on_step(STEP).refusals["r"].text
    d.on_worker_results(output(["r"], ["r"], {"r": Failure("refused", "no", transient=False)}))
    assert d.decode.renewer._sessions == {}
    assert len(p.context.leases) == 1


def test_samples_of_one_prompt(p, d):
    """Formerly, with n = 3, the first reader had the blocks alone, and with policy `fail` two samples were lost."""
    params = finished_at(p)
    samples = [request(f"{index}_parent", params=params) for index in range(3)]
    for asked in samples:
        d.on_request_added(asked)
    readers = {load(d, asked).reader for asked in samples}
    assert len(readers) == 3
    for number, asked in enumerate(samples):
        assert len(p.context.leases) == 1, number
        d.on_worker_results(output([asked.request_id]))
    until(lambda: frees(p, tables(p)))


def test_samples_on_two_engines(p, d):
    other = scheduler()
    try:
        params = finished_at(p)
        here, there = (request(f"{index}_parent", params=params) for index in range(2))
        d.on_request_added(here)
        load(d, here)
        d.on_worker_results(output([here.request_id]))
        other.on_request_added(there)  # after the first has been read
        load(other, there)
        time.sleep(0.2)
        assert frees(p, [])
        other.on_worker_results(output([there.request_id]))
        until(lambda: frees(p, tables(p)))
    finally:
        other.close()


def test_a_sample_that_comes_too_late_is_computed(p, d):
    params = finished_at(p)
    first, late = (request(f"{index}_parent", params=params) for index in range(2))
    d.on_request_added(first)
    load(d, first)
    d.on_worker_results(output([first.request_id]))
    until(lambda: frees(p, tables(p)))
    d.on_request_added(late)
    until(lambda: d.matched_tokens(late, 0) == (0, False))
    d.on_blocks_allocated(late, blocks(d), 0)
    assert d.on_request_finished(late, tables(d)) is None
    assert d.decode.pending == {}
    assert d.take_stats().data["local_prefills"]["late_reader"] == 1


def test_a_sample_does_not_wait_forever_for_an_answer(p, d):
    params = finished_at(p) | {"remote_port": free_port()}
    asked = request("0_parent", params=params)
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (None, False)
    # Its load finds that P is gone, and the policy decides.
    until(lambda: d.matched_tokens(asked, 0) == (40, True))


def test_parameters_that_come_twice(p, d):
    """Formerly the second request with the same parameters failed."""
    params = finished_at(p)
    first, second = request("a", params=params), request("b", params=params)
    d.on_request_added(first)
    assert d.matched_tokens(first, 0) == (40, True), "P need not confirm an ordinary request first"
    d.on_request_added(second)
    load(d, second)
    d.on_blocks_allocated(first, blocks(d), 40)
    d.on_worker_results(output(["b"]))
    d.on_worker_results(output(["a"]))
    until(lambda: frees(p, tables(p)))


@pytest.mark.parametrize("what", ["fail", "recompute", "aborted"])
def test_after_a_failed_load_another_engine_may_read(p, what):
    """Formerly P freed the blocks when the first engine had failed."""
    params = finished_at(p)
    first, second = scheduler(recompute=what == "recompute"), scheduler()
    try:
        asked = request(params=params)
        first.on_request_added(asked)
        load(first, asked)
        if what == "aborted":
            asked.status = SimpleNamespace(name="FINISHED_ABORTED")
            first.on_request_finished(asked, tables(first))
        elif what == "fail":
            asked.status = SimpleNamespace(name="FINISHED_ERROR")
            first.on_request_finished(asked, tables(first))
        first.on_worker_results(output(["r"], ["r"], {"r": Failure("unsupported", "no", transient=False)}))
        if what != "fail":  # answered, or not wanted any more
            until(lambda: frees(p, tables(p)))
            return
        until(lambda: not any(held.readers for held in p.context.leases._held.values()))
        assert frees(p, [])
        again = request(params=params)
        second.on_request_added(again)
        load(second, again)
        second.on_worker_results(output(["r"]))
        until(lambda: frees(p, tables(p)))
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("has_state", [False, True])
def test_p_that_went_one_token_too_far(has_state):
    """With `prompt_logprobs` P computes all of the prompt: formerly D refused the blocks that it named."""
    p, d = scheduler(backoff=1, has_state=has_state), scheduler(backoff=1, has_state=has_state)
    try:
        asked = request("at p", params={"do_remote_decode": True})
        asked.get_skip_reading_prefix_cache = lambda: True
        p.on_request_added(asked)
        assert asked.num_prompt_tokens == 40
        params = p.on_request_finished(asked, tables(p))
        assert params["kvhma"]["tokens"] == (40 if has_state else 39)
        at_d = request(params=json.loads(json.dumps(params)))
        d.on_request_added(at_d)
        if has_state:
            assert d.matched_tokens(at_d, 0) == (0, False)
            assert d.take_stats().data["local_prefills"]["state_ahead"] == 1
        else:
            assert load(d, at_d, 39).num_tokens == 39
            d.on_worker_results(output(["r"]))
        until(lambda: frees(p, tables(p)))
    finally:
        p.close()
        d.close()


def test_a_window_that_p_has_passed_is_not_handed_on(p):
    """D needs a window that begins one token earlier than the window of a P which computed all of the prompt."""
    asked = request("at p", tokens=80, params={"do_remote_decode": True})
    p.on_request_added(asked)
    full, sliding, state = tables(p)
    for passed, held in ((1, True), (2, False)):
        params = p.on_request_finished(asked, [full, [0] * passed + sliding[passed:], state])
        assert (params is not None) is held


def test_fewer_tokens_than_p_has():
    """A draft module of D needs tokens that P's engine need not leave to it."""
    p, d = scheduler(), scheduler(backoff=3)
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        assert load(d, asked, 37).num_tokens == 37
    finally:
        p.close()
        d.close()


def test_windows_that_are_ahead_are_computed_here(p):
    """P may have freed the block in which a window of that earlier token begins."""
    d = scheduler(backoff=3, has_windows=True)
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        assert d.matched_tokens(asked, 0) == (0, False)
        assert d.take_stats().data["local_prefills"]["state_ahead"] == 1
        until(lambda: frees(p, tables(p)))
    finally:
        d.close()


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_what_did_not_end_well_is_not_held(p, status):
    asked = request(params={"do_remote_decode": True}, status=status)
    p.on_request_added(asked)
    assert p.on_request_finished(asked, tables(p)) is None


def test_a_state_that_drafts_have_moved_is_not_handed_on(caplog):
    wanted = {"do_remote_decode": True}
    for drafted in (False, True):
        made = scheduler(has_state=True, drafted_state=drafted)
        decoded = request("decoded", tokens=43, params=wanted)
        decoded.num_prompt_tokens = 40
        assert made.on_request_finished(request("prompt", params=wanted), tables(made)) is not None
        assert (made.on_request_finished(decoded, tables(made)) is None) is drafted
        made.close()
    assert "it decoded 3 tokens with speculative_config" in caplog.text


def test_the_last_token_is_left_to_d():
    p = scheduler(backoff=1)
    try:
        asked = request(params={"do_remote_decode": True})
        p.on_request_added(asked)
        p.on_request_added(asked)  # a request that is preempted is not cut twice
        assert (asked.num_prompt_tokens, len(asked.prompt_token_ids), asked.max_tokens) == (39, 39, 1)
        alone = request("one", tokens=1, params={"do_remote_decode": True})
        p.on_request_added(alone)
        assert alone.num_prompt_tokens == 1
    finally:
        p.close()


def test_samples_that_share_a_dictionary_at_p_all_stop_early():
    """Engine and front end may be one process: formerly the first sample's mark affected the others."""
    p = scheduler(backoff=1)
    try:
        params = {"do_remote_decode": True}
        for index in range(2):
            asked = request(f"{index}_parent", params=params)
            p.on_request_added(asked)
            assert asked.num_prompt_tokens == 39
    finally:
        p.close()


def test_a_lease_that_ends_is_reported_once(caplog):
    p = scheduler(lease=1.0)
    try:
        finished_at(p)
        assert p.take_stats() is None
        time.sleep(1.1)
        assert frees(p, []), "a renewal may be waiting"
        assert p.take_stats().data["held_leases"] == 1
        time.sleep(OVERDUE_SECONDS)
        assert frees(p, tables(p))
        assert frees(p, [])
        data = p.take_stats().data
        assert (data["expired"], data["held_leases"]) == ({"unclaimed": 1}, 0)
        assert p.take_stats() is None
    finally:
        p.close()
    assert "no decode engine has asked for it (1 requests: at p)" in caplog.text


def test_the_reason_of_a_lease_that_ends_is_logged(d, caplog):
    """A run on an overloaded machine had 153 loads that ended as `expired`, and no log named the cause."""
    p = scheduler(lease=1.0)
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        d.on_step(STEP)  # it was not scheduled, so it is claimed
        until(lambda: any(held.readers for held in p.context.leases._held.values()))
        d.close()  # it is killed
        until(lambda: frees(p, tables(p)))
        assert p.take_stats().data["expired"] == {"not_renewed": 1}
    finally:
        p.close()
    assert "its decode engine has not renewed it in time (1 requests: at p)" in caplog.text


def test_names_of_clients_do_not_fill_the_log(p, caplog):
    """Formerly a line named all of the requests, as their clients had named them."""
    for at in range(100):
        asked = request(f"at p {at}\n\x1b[2J", params={"do_remote_decode": True})
        p.on_request_added(asked)
        p.on_request_finished(asked, tables(p))
    for held in p.context.leases._held.values():
        held.expires = 0
    p.on_step(STEP)
    time.sleep(OVERDUE_SECONDS)
    assert frees(p, tables(p)), "all 100 have the same"
    (line,) = [record.getMessage() for record in caplog.records if "the lease ended" in record.getMessage()]
    assert "100 requests" in line
    assert line.isprintable()
    assert len(line) < 500


def bind(p, num_gpu_blocks):
    """Bind a manager of this many blocks; in the tests there is room for all requests."""
    single = SimpleNamespace(num_cached_block={}, block_size=16)
    coordinator = SimpleNamespace(single_type_managers=[single], enable_partial_hash_hits=False)
    p.bind(manager(num_gpu_blocks, coordinator=coordinator))
    p.context.manager = manager()


@pytest.mark.parametrize(("share", "count"), [(0.5, 5), (0.25, 2), (1.0, 10)])
def test_unread_requests_keep_a_share_of_the_blocks_only(caplog, share, count):
    """20 requests that no peer reads held 95 % of P's blocks until their leases ended."""
    p = scheduler(max_held_share=share)
    groups = len(p.context.geometry.groups)
    try:
        bind(p, 1 + 10 * 10 * groups)
        every = []
        for at in range(20):
            asked = request(f"at p {at}", params={"do_remote_decode": True})
            p.on_request_added(asked)
            table = [
                [1 + block for block in range(10 * (at * groups + group), 10 * (at * groups + group + 1))]
                for group in range(groups)
            ]
            assert p.on_request_finished(asked, table) is not None
            every += table
            assert len(p.context.leases) <= count
        assert frees(p, every[: (20 - count) * groups]), "the oldest go first"
        assert p.take_stats().data["held_dropped"] == 20 - count
        usage = p.context.leases.usage()
        assert (usage.requests, usage.blocks) == (count, 10 * groups * count)
    finally:
        p.close()
    assert f"({20 - count} requests: at p 0, at p 1" in caplog.text


def test_requests_that_are_claimed_stay_however_many_there_are(d):
    p = scheduler()
    groups = len(p.context.geometry.groups)
    try:
        bind(p, 1 + 4 * 10 * groups)
        first = request("first", params=finished_at(p))
        d.on_request_added(first)
        d.on_step(STEP)
        until(lambda: any(held.readers for held in p.context.leases._held.values()))
        for at in range(8):
            asked = request(f"more {at}", params={"do_remote_decode": True})
            p.on_request_added(asked)
            assert p.on_request_finished(asked, tables(p, 100 * at + 100)) is not None
        p.on_step(STEP)
        assert set(tables(p)[0]) <= kept(p)
        load(d, first)
        d.on_worker_results(output(["first"]))
        until(lambda: frees(p, tables(p)))
        assert "expired" not in p.take_stats().data
    finally:
        p.close()


def forged(own, victim):
    """Parameters of an attacker's request with another request's blocks, and a digest that is right for them."""
    spans = [[first, text] for first, text in victim["kvhma"]["spans"]]
    mixed = own | {"kvhma": own["kvhma"] | {"spans": spans}}
    remote = PrefillParams.from_params(
        mixed | {"kvhma": mixed["kvhma"] | {"digest": digest_of(mixed)}}, Secrets(), num_prompt_tokens=40
    )
    return json.loads(json.dumps(remote.to_params(Secrets(), pp_size=1)[0]))


def digest_of(params):
    """The digest of parameters as they are: it has no key, so any client can compute it."""
    own = params["kvhma"]
    fields = [own["version"], params["remote_engine_id"], int(own["instance"], 16), params["remote_request_id"]]
    fields += [int(own["generation"], 16), own["lease"], own["tokens"], own["prompt"], own["spans"]]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


def test_blocks_of_another_request_are_not_read_with_the_parameters_of_ones_own(p, d, caplog):
    """An attacker with a prefilled prompt put another held request's blocks into its parameters, and recomputed the
    digest.

    Formerly the digest had no secret. P held the attacker's request, so D loaded the other tenant's cache and continued
    its prompt.
    """
    victim = request("victim", params={"do_remote_decode": True})
    p.on_request_added(victim)
    theirs = p.on_request_finished(victim, tables(p, start=300))
    mine = finished_at(p)
    params = forged(mine, theirs)
    assert params["kvhma"]["spans"] == json.loads(json.dumps(theirs["kvhma"]["spans"]))
    claim = PrefillParams.from_params(params, Secrets(), num_prompt_tokens=40).claim(reader=7)
    with contextlib.closing(Client(p.context.engine.address, 2.0, Secrets())) as client:
        assert client.ask(Renew([write_claim(claim)]), Leases).states == [LeaseState.OTHER]
        right = PrefillParams.from_params(mine, Secrets(), num_prompt_tokens=40).claim(reader=7)
        assert client.ask(Renew([write_claim(right)]), Leases).states == [LeaseState.HELD]
    p.on_step(STEP)
    assert p.take_stats().data["digest_refused"] == 1
    assert "does not match the parameters that P returned" in caplog.text


def test_engines_that_share_a_secret():
    p, d = (scheduler(secrets=[b"a secret of the two of them"]) for _ in range(2))
    other, without = scheduler(secrets=[b"a secret of somebody else's"]), scheduler()
    try:
        params = finished_at(p)
        for engine, text in ((other, "P's secret does not match any of ours"), (without, "this engine has none")):
            asked = request(params=params)
            engine.on_request_added(asked)
            assert engine.matched_tokens(asked, 0) == FAILS
            engine.on_blocks_allocated(asked, blocks(engine), 1)
            assert text in engine.on_step(STEP).refusals["r"].text
        asked = request(params=params)
        d.on_request_added(asked)
        load(d, asked)
        d.on_worker_results(output(["r"]))
        until(lambda: frees(p, tables(p)))
        own = request(params=finished_at(without))
        d.on_request_added(own)
        d.on_blocks_allocated(own, blocks(d), 40)
        assert "this engine has a secret, P has none" in d.on_step(STEP).refusals["r"].text
    finally:
        for engine in (p, d, other, without):
            engine.close()


def test_connections_that_are_refused_are_counted(p):
    for _ in range(2):
        with socket.create_connection((p.context.engine.address.host, p.context.engine.address.port)) as raw:
            raw.settimeout(5)
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while raw.recv(4096):
                    pass
        until(
            lambda: (
                p.on_step(STEP)
                and (taken := p.take_stats())
                and taken.data.get("side_channel_refused") == {"message": 1}
            )
        )


@pytest.mark.parametrize(("lease", "every"), [(0.1, 0.5), (1.0, 0.5), (30.0, 5.0), (1e9, 600.0)])
def test_a_lease_of_a_strangers_choosing_has_a_floor_and_a_ceiling(d, monkeypatch, lease, every):
    """Formerly `kvhma.lease: 0.1` in its parameters renewed a request 200 times as often as others (S10)."""
    tracked = []
    monkeypatch.setattr(d.decode.renewer, "track_claim", lambda address, claim, *, every: tracked.append(every))
    p = scheduler(lease=lease)
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        d.on_step(STEP)
        assert tracked == [pytest.approx(every)]
        assert 1 <= load(d, asked).remote.lease <= 3600
    finally:
        p.close()


@pytest.mark.parametrize("allowed", [True, False])
def test_parameters_from_where_they_may_not_come(p, allowed):
    """Formerly D read from any engine that parameters named; its bytes went into the prefix cache for all (S2)."""
    at = p.context.engine.address
    entry = AllowedEngines.read(f"{at.host}:{at.port if allowed else 1}")
    d = scheduler(allowed_prefill_engines=(entry,))
    try:
        asked = request(params=finished_at(p))
        d.on_request_added(asked)
        assert d.matched_tokens(asked, 0) == ((40, True) if allowed else FAILS)
        d.on_blocks_allocated(asked, blocks(d), 40)
        metadata = d.on_step(STEP)
        if allowed:
            assert len(metadata.loads) == 1
            return
        assert metadata.loads == []
        assert "allowed_prefill_engines" in metadata.refusals["r"].text
        assert d.decode.renewer._sessions == {}, "no peer was asked"
        assert d.take_stats().data["refused_sources"] == {"not_allowed": 1}
    finally:
        d.close()
