# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler alone: its messages to vLLM, its workers and other engines, in any order of events."""

import contextlib
import json
import socket
import time
from types import SimpleNamespace

import pytest

# With its parts, since torch warns while they are imported, and a warning is an error here.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from vllm import envs

from kvhma.vllm.config.allow_list import AllowedEngines
from kvhma.vllm.failures import Failure
from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_table import OVERDUE_SECONDS
from kvhma.vllm.metadata import WorkerReport
from kvhma.vllm.peers.client import Client
from kvhma.vllm.telemetry import stats
from kvhma.vllm.wire.messages import Leases, LeaseState, Outcome, Renew, write_claim
from kvhma.vllm.wire.params import PrefillParams
from kvhma.vllm.wire.secrets import Secrets
from support.engines.engine import free_port
from support.leases import Clock
from support.params import text_of, with_fields
from support.schedulers import (
    BUSY,
    STEP,
    bind,
    blocks,
    end_read,
    finished_at,
    frees,
    kept,
    load,
    output,
    request,
    scheduler,
    tables,
)
from support.waiting import until

FAILS = (1, True)
"""What D answers to vLLM for a request that is loaded only to fail: it asks for one token, and reads nothing."""
TRANSIENT, PERMANENT = (Failure("transfer", "no", transient) for transient in (True, False))


@pytest.fixture
def make():
    """Make schedulers, which are closed when the test has ended."""
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(contextlib.closing(scheduler(**more)))


@pytest.fixture
def p(make):
    return make()


@pytest.fixture
def d(make):
    return make()


@pytest.fixture
def clock(monkeypatch):
    """The clock of the lease tables, and of the gauges."""
    made = Clock()
    for module in (lease_table, stats):
        monkeypatch.setattr(module, "time", made)
    return made


def added(d, params, name="r", **more):
    asked = request(name, params=params, **more)
    d.on_request_added(asked)
    return asked


def rejected_by_vllm(d, params):
    """Have vLLM reject a request: it sends one of one token with the same parameters, and aborts it."""
    asked = request("rejected", tokens=1, params=params, status="FINISHED_ABORTED")
    asked.abort_immediately = True
    d.on_request_added(asked)
    assert d.on_request_finished(asked, [[] for _ in tables(d)]) is None
    assert d.decode.pending == {}


def failure_of(d, asked):
    """Have a request fail that cannot be loaded; return why."""
    until(lambda: d.matched_tokens(asked, 0) == FAILS)
    d.on_blocks_allocated(asked, blocks(d), 1)
    metadata = d.on_step(STEP)
    assert (metadata.loads, [*metadata.refusals]) == ([], [asked.request_id])
    failure = metadata.refusals[asked.request_id]
    assert not failure.transient
    end_read(d, asked, failure)
    assert d.decode.pending == {}
    assert "local_prefills" not in getattr(d.take_stats(), "data", {}), "no prompt was computed here"
    return failure


def computed_by(d, asked):
    """Have D compute a request that it does not load; return the counts of why."""
    until(lambda: d.matched_tokens(asked, 0) == (0, False))
    d.on_blocks_allocated(asked, blocks(d), 0)
    metadata = d.on_step(STEP)
    assert (metadata.loads, metadata.refusals) == ([], {})
    assert d.on_request_finished(asked, tables(d)) is None
    assert d.decode.pending == {}
    counted = d.take_stats()
    return {} if counted is None else counted.data["local_prefills"]


def reason_of(d, asked):
    """Have D compute or fail a request, as its policy says; return the one cause."""
    if not d.context.engine.recompute:
        return failure_of(d, asked).cause
    ((cause, count),) = computed_by(d, asked).items()
    assert count == 1
    return cause


def wait_until_freed(p):
    until(lambda: frees(p, tables(p)))


def is_claimed(p):
    """Whether all requests that P holds have a reader, or were read."""
    return p.context.leases.usage().oldest_unread_seconds == 0


def messages_of(d, monkeypatch):
    """Record the messages of D to P from now on: which call, the claim, and the seconds or the outcome."""
    said = []

    def note(name):
        real = getattr(d.decode.claims.renewer, name)

        def noted(address, claim, *outcome, **more):
            said.append((name, claim, *outcome, *more.values()))
            real(address, claim, *outcome, **more)

        monkeypatch.setattr(d.decode.claims.renewer, name, noted)

    note("track_claim")
    note("release_claim")
    return said


def test_a_request_is_held_until_its_reader_lets_go(p, d):
    asked = added(d, finished_at(p))
    assert d.matched_tokens(asked, 0) == (40, True)
    assert d.matched_tokens(asked, 16) == (24, True)  # asked again: nothing has changed
    order = load(d, asked)
    assert (order.num_tokens, order.cached) == (40, 0)
    assert d.on_step(STEP).loads == []
    assert frees(p, [])
    end_read(d, asked)
    until(lambda: len(p.context.leases) == 0)
    assert frees(p, tables(p))
    assert kept(p) == set()
    assert d.matched_tokens(asked, 0) == (0, False)
    assert d.on_request_finished(asked, tables(d)) is None


@pytest.mark.parametrize(
    ("held", "step", "engines", "waits"), [(1, STEP, 1, 4), (0, STEP, 1, 0), (1, BUSY, 1, 0), (1, STEP, 2, 0)]
)
def test_an_engine_that_only_keeps_blocks_waits_for_their_readers(make, monkeypatch, held, step, engines, waits):
    one = make(may_wait=engines == 1)
    asked = []
    monkeypatch.setattr(one.context.leases, "wait_for_end", asked.append)
    for _ in range(held):
        finished_at(one)
    for _ in range(6):  # two of them may be followed by results of steps before
        one.on_step(step)
    assert len(asked) == waits
    assert all(0 < seconds < 1e-3 for seconds in asked), "a new request may come meanwhile"


def test_a_rank_that_is_alone_tells_p_itself(p, make, monkeypatch):
    """One question of its worker is all that an ordinary hand-off costs P: no claim before it, no release after it."""
    d = make(ranks=1)
    said = messages_of(d, monkeypatch)
    first = added(d, finished_at(p))
    assert load(d, first).outcome is Outcome.READ
    d.on_step(STEP)
    end_read(d, first)
    sibling = added(d, first.kv_transfer_params, "1_r")
    assert load(d, sibling).outcome is Outcome.READ_SHARED
    assert [name for name, *_ in said] == ["track_claim"], "one of several samples is claimed at once"
    end_read(d, sibling)
    failed = added(d, finished_at(p), "s")
    load(d, failed)
    assert [name for name, *_ in said] == ["track_claim", "release_claim"]
    end_read(d, failed, PERMANENT)
    assert [name for name, *_ in said[2:]] == ["release_claim"], "what failed was not released by the worker"


def test_p_is_told_of_what_its_board_has_shown(p, make, monkeypatch):
    """A worker that has not asked P has not notified P either."""
    d = make(ranks=1)
    said = messages_of(d, monkeypatch)
    order = load(d, added(d, finished_at(p)))
    ended = output(["r"])
    ended.kv_connector_worker_meta = WorkerReport(verified_by_board={"r", "unknown"})
    d.on_worker_results(ended)
    assert said == [("release_claim", order.remote.claim(order.reader), Outcome.READ)]


def test_a_renewal_that_comes_after_the_last_question_keeps_nothing(p, make):
    """It may overtake the question."""
    d = make(ranks=1)
    asked = added(d, finished_at(p), "0_r")
    order = load(d, asked)
    claim, leases = order.remote.claim(order.reader), p.context.leases
    assert leases.check_and_release([claim], [order.outcome]) == [LeaseState.HELD]
    assert leases.renew([claim]) == [LeaseState.HELD], "kept for other samples"
    end_read(d, asked)
    wait_until_freed(p)


def test_what_waits_or_lasts_is_claimed(p, d, monkeypatch):
    """P frees unclaimed blocks when their lease ends, or when newer requests need the room."""
    said = messages_of(d, monkeypatch)
    added(d, finished_at(p), "waits")
    assert said == []
    d.on_step(STEP)
    assert len(said) == 1, "it was not scheduled when it came"
    load(d, added(d, finished_at(p), "lasts"))
    assert len(said) == 1
    until(lambda: d.on_step(STEP) and len(said) == 2)
    d.on_step(STEP)
    assert [name for name, *_ in said] == ["track_claim"] * 2


@pytest.mark.parametrize("after", ["nothing to load", "cancelled before", "cancelled while it loads"])
def test_p_is_told_whatever_happens(p, d, after):
    asked = added(d, finished_at(p), status="FINISHED_ABORTED")
    if after == "nothing to load":
        d.on_blocks_allocated(asked, blocks(d), 0)
    elif after == "cancelled before":
        d.on_request_finished(asked, tables(d))
    else:
        load(d, asked)
        d.on_request_finished(asked, tables(d))
        assert len(p.context.leases) == 1
        end_read(d, asked)
    until(lambda: len(p.context.leases) == 0)
    assert d.decode.pending == {}


@pytest.mark.parametrize("failures", [[TRANSIENT, TRANSIENT], [PERMANENT]])
def test_a_transient_failure_is_tried_again_and_a_permanent_one_is_not(p, d, failures):
    asked = added(d, finished_at(p))
    for left, failure in enumerate(failures, 1 - len(failures)):
        load(d, asked)
        end_read(d, asked, failure)
        assert d.matched_tokens(asked, 0) == (None, False), "those that hold blocks go first"
        assert d.matched_tokens(asked, 0) == ((40, True) if left else (0, False))


@pytest.mark.parametrize(
    ("params", "text"),
    [({"do_remote_prefill": True}, "kvhma is None"), *((odd, "expected a dictionary") for odd in ([], "x", 7, [1]))],
)
def test_parameters_that_cannot_be_read_fail_the_load(d, params, text):
    asked = added(d, params)
    assert (asked.kv_transfer_params is None) is not isinstance(params, dict), "vLLM takes it for a dictionary"
    assert text in failure_of(d, asked).text


@pytest.mark.parametrize("key", ["do_remote_decode", "do_remote_prefill", "x"])
@pytest.mark.parametrize(
    "value", [None, "", "x", 7, -1, [], {}, [[1]] * 1000, {"a": None}, 10**30, float("nan")], ids=repr
)
def test_p_goes_on_whatever_a_client_says_of_its_role(p, d, key, value):
    odd = added(p, {"do_remote_decode": key == "x"} | {key: value})
    p.matched_tokens(odd, 0)
    p.on_step(STEP)
    p.on_request_finished(odd, tables(p))
    load(d, added(d, finished_at(p)))


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


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("what", ["tokens", "fewer tokens", "adapter", "salt"])
def test_another_prompt_changes_nothing_for_the_right_one(p, make, monkeypatch, what, recompute):
    """Its end must not free the right blocks."""
    d = make(recompute=recompute)
    said, params = messages_of(d, monkeypatch), finished_at(p)
    other = changed(what, request("other", params=params))
    d.on_request_added(other)
    assert reason_of(d, other) == "other_prompt"
    assert d.on_request_finished(other, tables(d)) is None
    assert said == [], "P has not heard of it"
    right = added(d, params)
    load(d, right)
    end_read(d, right)
    wait_until_freed(p)
    assert p.take_stats() is None, "no lease ended unread"


@pytest.mark.parametrize("what", ["tokens", "fewer tokens"])
def test_why_a_prompt_is_another_one_is_said(p, make, what):
    """A template that writes the date makes another prompt at midnight, or in another time zone."""
    d = make(recompute=False)
    other = changed(what, request("other", params=finished_at(p)))
    d.on_request_added(other)
    failure = failure_of(d, other)
    assert all(cure in failure.text for cure in ("prompt_token_ids", "TZ", "VLLM_SYSTEM_START_DATE"))
    assert "VLLM_SYSTEM_START_DATE" in envs.environment_variables, "vLLM reads it"


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("names", [("0_parent", "1_parent"), ("first", "repeated")])
def test_a_sample_or_a_repeated_request_that_comes_too_late(p, make, names, recompute):
    """The pages of leases and routers say what becomes of it: docs/routers.md."""
    d = make(recompute=recompute)
    params = finished_at(p)
    first, late = names
    asked = added(d, params, first)
    load(d, asked)
    end_read(d, asked)
    wait_until_freed(p)
    assert reason_of(d, added(d, params, late)) == "late_reader"


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("ahead", ["has_state", "has_windows"])
def test_a_state_or_a_window_that_is_ahead(p, make, ahead, recompute):
    """P may also have freed the block in which a window of an earlier token begins."""
    d = make(backoff=3, recompute=recompute, **{ahead: True})
    asked = added(d, finished_at(p))
    assert reason_of(d, asked) == "state_ahead"
    if recompute:
        wait_until_freed(p)
    else:  # another engine may have the same parameters
        other = make(**{ahead: True})
        assert load(other, added(other, asked.kv_transfer_params)).num_tokens == 40


@pytest.mark.parametrize("recompute", [True, False])
def test_a_prompt_that_is_too_short_to_be_handed_over_is_nobodys_fault(make, recompute, caplog):
    p, d = (make(backoff=1, has_state=True, recompute=recompute) for _ in range(2))
    assert computed_by(d, added(d, finished_at(p, tokens=1), tokens=1)) == {}
    wait_until_freed(p)
    assert caplog.records == []


def must_not_read_the_cache(params, tokens=40):
    """A request of which log-probabilities of the prompt are asked for: vLLM computes all of it."""
    asked = request(params=params, tokens=tokens)
    asked.get_skip_reading_prefix_cache = lambda: True
    return asked


@pytest.mark.parametrize("recompute", [True, False])
def test_a_prompt_that_must_not_read_the_cache_is_computed(p, make, recompute):
    d = make(recompute=recompute)
    asked = must_not_read_the_cache(finished_at(p))
    d.on_request_added(asked)
    assert computed_by(d, asked) == {"skip_reading_prefix_cache": 1}
    wait_until_freed(p)


@pytest.mark.parametrize(("change", "tokens", "cause"), [({"kvhma": None}, 40, "refused"), ({}, 39, "other_prompt")])
def test_what_is_computed_instead_of_failing_is_counted(p, make, change, tokens, cause):
    """VLLM computes a prompt that must not read the cache."""
    d = make(recompute=False)
    asked = must_not_read_the_cache(finished_at(p) | change, tokens)
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == FAILS
    d.on_blocks_allocated(asked, blocks(d), 0)
    assert d.decode.pending == {}
    assert d.take_stats().data["local_prefills"] == {cause: 1}


@pytest.mark.parametrize("secrets", [(), [b"a secret of the two of them"]])
def test_what_vllm_rejected_lets_p_go(make, secrets):
    p, d = make(secrets=secrets), make(secrets=secrets, recompute=False)
    rejected_by_vllm(d, finished_at(p))
    wait_until_freed(p)
    assert (p.take_stats(), d.take_stats()) == (None, None), "nothing has failed or expired"


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
def test_what_vllm_rejected_for_its_parameters_reaches_nobody(p, d, monkeypatch, change):
    said = messages_of(d, monkeypatch)
    rejected_by_vllm(d, finished_at(p) | change)
    assert said == []
    assert len(p.context.leases) == 1


def test_parameters_that_were_changed_are_refused_and_p_does_not_hear_of_it(p, d, monkeypatch):
    said, params = messages_of(d, monkeypatch), finished_at(p)
    params["kvhma"]["text"] = with_fields(params, spans=[[0, "77"]])["kvhma"]["text"]
    assert "kvhma.digest" in failure_of(d, added(d, params)).text
    assert said == []
    assert len(p.context.leases) == 1


def test_samples_of_one_prompt(p, d):
    params = finished_at(p)
    samples = [added(d, params, f"{index}_parent") for index in range(3)]
    assert len({load(d, asked).reader for asked in samples}) == 3
    for number, asked in enumerate(samples):
        assert len(p.context.leases) == 1, number
        end_read(d, asked)
    wait_until_freed(p)


def test_samples_on_two_engines(p, d, make):
    other, params = make(), finished_at(p)
    here = added(d, params, "0_parent")
    load(d, here)
    end_read(d, here)
    there = added(other, params, "1_parent")  # after the first has been read
    load(other, there)
    time.sleep(0.2)
    assert frees(p, [])
    end_read(other, there)
    wait_until_freed(p)


def test_a_sample_does_not_wait_forever_for_an_answer(p, d):
    asked = added(d, finished_at(p) | {"remote_port": free_port()}, "0_parent")
    assert d.matched_tokens(asked, 0) == (None, False)
    # Its load finds that P is gone, and the policy decides.
    until(lambda: d.matched_tokens(asked, 0) == (40, True))


def test_parameters_that_come_twice(p, d):
    params = finished_at(p)
    first = added(d, params, "a")
    assert d.matched_tokens(first, 0) == (40, True), "P need not confirm an ordinary request first"
    second = added(d, params, "b")
    load(d, second)
    d.on_blocks_allocated(first, blocks(d), 40)
    end_read(d, second)
    end_read(d, first)
    wait_until_freed(p)


@pytest.mark.parametrize(("status", "recompute"), [("ERROR", False), ("", True), ("ABORTED", False)])
def test_after_a_failed_load_another_engine_may_read(p, make, status, recompute):
    first = make(recompute=recompute)
    asked = added(first, finished_at(p), status=f"FINISHED_{status}")
    load(first, asked)
    if status:
        first.on_request_finished(asked, tables(first))
    end_read(first, asked, PERMANENT)
    if status == "ERROR":
        until(lambda: not is_claimed(p))
        assert frees(p, [])
        second = make()
        again = added(second, asked.kv_transfer_params)
        load(second, again)
        end_read(second, again)
    wait_until_freed(p)  # answered, or not wanted any more


@pytest.mark.parametrize("has_state", [False, True])
def test_p_that_went_one_token_too_far(make, has_state):
    """With `prompt_logprobs` P computes all of the prompt."""
    p, d = (make(backoff=1, has_state=has_state) for _ in range(2))
    asked = must_not_read_the_cache({"do_remote_decode": True})
    p.on_request_added(asked)
    assert asked.num_prompt_tokens == 40
    params = json.loads(json.dumps(p.on_request_finished(asked, tables(p))))
    assert text_of(params)["tokens"] == (40 if has_state else 39)
    at_d = added(d, params)
    if has_state:
        assert reason_of(d, at_d) == "state_ahead"
    else:
        assert load(d, at_d, 39).num_tokens == 39
        end_read(d, at_d)
    wait_until_freed(p)


def test_a_window_that_p_has_passed_is_not_handed_on(p):
    """D needs a window that begins one token earlier than the window of a P which computed all of the prompt."""
    asked = request("at p", tokens=80, params={"do_remote_decode": True})
    p.on_request_added(asked)
    full, sliding, state = tables(p)
    for passed, held in ((1, True), (2, False)):
        params = p.on_request_finished(asked, [full, [0] * passed + sliding[passed:], state])
        assert (params is not None) is held


def test_fewer_tokens_than_p_has(p, make):
    """A draft module of D needs tokens that P's engine need not leave to it."""
    d = make(backoff=3)
    assert load(d, added(d, finished_at(p)), 37).num_tokens == 37


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_what_did_not_end_well_is_not_held(p, status):
    asked = request(params={"do_remote_decode": True}, status=status)
    p.on_request_added(asked)
    assert p.on_request_finished(asked, tables(p)) is None


def test_a_state_that_drafts_have_moved_is_not_handed_on(make, caplog):
    wanted = {"do_remote_decode": True}
    for drafted in (False, True):
        made = make(has_state=True, drafted_state=drafted)
        decoded = request("decoded", tokens=43, params=wanted)
        decoded.num_prompt_tokens = 40
        assert made.on_request_finished(request("prompt", params=wanted), tables(made)) is not None
        assert (made.on_request_finished(decoded, tables(made)) is None) is drafted
    assert "it decoded 3 tokens with speculative_config" in caplog.text


def test_the_last_token_is_left_to_d(make):
    """Engine and front end may be one process."""
    p, params = make(backoff=1), {"do_remote_decode": True}
    for index in range(2):
        asked = added(p, params, f"{index}_parent")
        p.on_request_added(asked)  # a request that is preempted is not cut twice
        assert (asked.num_prompt_tokens, len(asked.prompt_token_ids), asked.max_tokens) == (39, 39, 1)
    assert added(p, params, "one", tokens=1).num_prompt_tokens == 1


def test_a_lease_that_ends_is_reported_once(p, clock, caplog):
    finished_at(p)
    assert p.take_stats() is None
    clock.pass_by(30.1)
    assert frees(p, []), "a renewal may be waiting"
    assert p.take_stats().data["held_leases"] == 1
    clock.pass_by(OVERDUE_SECONDS)
    assert frees(p, tables(p))
    assert frees(p, [])
    data = p.take_stats().data
    assert (data["expired"], data["held_leases"]) == ({"unclaimed": 1}, 0)
    assert p.take_stats() is None
    assert "no decode engine has asked for it (1 requests: at p)" in caplog.text


def test_the_reason_of_a_lease_that_ends_is_logged(p, d, clock, caplog):
    """A run on an overloaded machine had 153 loads that ended as `expired`, and no log named the cause."""
    added(d, finished_at(p))
    clock.pass_by(1)
    d.on_step(STEP)  # it was not scheduled, so it is claimed
    until(lambda: is_claimed(p))
    d.close()  # it is killed
    for seconds in (30, OVERDUE_SECONDS):
        clock.pass_by(seconds)
        p.on_step(STEP)
    assert kept(p) == set()
    assert p.take_stats().data["expired"] == {"not_renewed": 1}
    assert "its decode engine has not renewed it in time (1 requests: at p)" in caplog.text


def test_names_of_clients_do_not_fill_the_log(p, clock, caplog):
    for at in range(100):
        finished_at(p, f"at p {at}\n\x1b[2J")
    clock.pass_by(30)
    p.on_step(STEP)
    clock.pass_by(OVERDUE_SECONDS)
    assert frees(p, tables(p)), "all 100 have the same"
    (line,) = [record.getMessage() for record in caplog.records if "the lease ended" in record.getMessage()]
    assert "100 requests" in line
    assert line.isprintable()
    assert len(line) < 500


@pytest.mark.parametrize(("share", "count"), [(0.5, 5), (0.25, 2), (1.0, 10)])
def test_unread_requests_keep_a_share_of_the_blocks_only(make, caplog, share, count):
    """20 requests that no peer reads held 95 % of P's blocks until their leases ended."""
    p = make(max_held_share=share)
    groups = len(p.context.geometry.groups)
    bind(p, 1 + 10 * 10 * groups)
    every = [tables(p, 1 + 100 * at) for at in range(20)]
    for at in range(20):
        finished_at(p, f"at p {at}", start=1 + 100 * at)
        assert len(p.context.leases) <= count
    evicted = [table for tables_of_one in every[: 20 - count] for table in tables_of_one]
    assert frees(p, evicted), "the oldest go first"
    assert p.take_stats().data["held_dropped"] == 20 - count
    usage = p.context.leases.usage()
    assert (usage.requests, usage.blocks) == (count, 10 * groups * count)
    assert f"({20 - count} requests: at p 0, at p 1" in caplog.text


def test_requests_that_are_claimed_stay_however_many_there_are(p, d):
    bind(p, 1 + 4 * 10 * len(p.context.geometry.groups))
    first = added(d, finished_at(p), "first")
    d.on_step(STEP)
    until(lambda: is_claimed(p))
    for at in range(8):
        finished_at(p, f"more {at}", start=100 * at + 100)
    p.on_step(STEP)
    assert set(tables(p)[0]) <= kept(p)
    load(d, first)
    end_read(d, first)
    wait_until_freed(p)
    assert "expired" not in p.take_stats().data


def forged(own, victim):
    """Parameters of an attacker's request with another request's blocks, and a digest that is right for them."""
    return with_fields(own, spans=text_of(victim)["spans"])


def test_blocks_of_another_request_are_not_read_with_the_parameters_of_ones_own(p, d, caplog):
    """An attacker with a prefilled prompt put another held request's blocks into its parameters, and recomputed the
    digest. P holds the attacker's request too."""
    theirs = finished_at(p, "victim", start=300)
    mine = finished_at(p)
    params = forged(mine, theirs)
    assert text_of(params)["spans"] == text_of(theirs)["spans"]
    claim = PrefillParams.from_params(params, Secrets(), num_prompt_tokens=40).claim(reader=7)
    with contextlib.closing(Client(p.context.engine.address, 2.0, Secrets())) as client:
        assert client.ask(Renew([write_claim(claim)]), Leases).states == [LeaseState.OTHER]
        right = PrefillParams.from_params(mine, Secrets(), num_prompt_tokens=40).claim(reader=7)
        assert client.ask(Renew([write_claim(right)]), Leases).states == [LeaseState.HELD]
    p.on_step(STEP)
    assert p.take_stats().data["digest_refused"] == 1
    assert "does not match the parameters that P returned" in caplog.text


def test_engines_that_share_a_secret(make):
    p, d = (make(secrets=[b"a secret of the two of them"]) for _ in range(2))
    other, without = make(secrets=[b"a secret of somebody else's"]), make()
    params = finished_at(p)
    assert "P's secret does not match any of ours" in failure_of(other, added(other, params)).text
    assert "this engine has none" in failure_of(without, added(without, params)).text
    assert "this engine has a secret, P has none" in failure_of(d, added(d, finished_at(without))).text
    asked = added(d, params)
    load(d, asked)
    end_read(d, asked)
    wait_until_freed(p)


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
def test_a_lease_of_a_strangers_choosing_has_a_floor_and_a_ceiling(d, make, monkeypatch, lease, every):
    said = messages_of(d, monkeypatch)
    asked = added(d, finished_at(make(lease=lease)))
    d.on_step(STEP)
    ((name, _, seconds),) = said
    assert (name, seconds) == ("track_claim", pytest.approx(every))
    assert 1 <= load(d, asked).remote.lease <= 3600


@pytest.mark.parametrize("allowed", [True, False])
def test_parameters_from_where_they_may_not_come(p, make, monkeypatch, allowed):
    at = p.context.engine.address
    entry = AllowedEngines.read(f"{at.host}:{at.port if allowed else 1}")
    d = make(allowed_prefill_engines=(entry,))
    said, asked = messages_of(d, monkeypatch), added(d, finished_at(p))
    if allowed:
        load(d, asked)
        return
    d.matched_tokens(asked, 0)
    assert d.take_stats().data["refused_sources"] == {"not_allowed": 1}
    assert "allowed_prefill_engines" in failure_of(d, asked).text
    assert said == [], "no peer was asked"


def test_the_allowed_sources_are_made_once(make):
    one = make()
    assert one.context.sources is one.context.sources
    assert one.context.sources == one.context.settings.sources(has_secret=one.context.secrets.enabled)


def test_the_handshake_of_another_connector_is_answered_by_nobody_and_said(p, caplog):
    p.serve({})
    assert not caplog.records
    p.serve({(0, 0): SimpleNamespace()})
    assert "answers no other engine. Under MultiConnector list kvhma first" in caplog.text
