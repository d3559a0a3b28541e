# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half by itself: what it says to vLLM, its workers and other engines, in any order of events."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

# With its parts, since torch warns while they are imported, which is no error here.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make e2e runs it")

from kvhma import Geometry
from kvhma.nixl import encode_hello
from kvhma.vllm.metadata import Failure, WorkerHello, WorkerReport
from kvhma.vllm.params import Address
from kvhma.vllm.scheduler import EngineFacts, SchedulerHalf
from kvhma.vllm.settings import Settings
from support.engines.engine import free_port
from support.tiny import tiny_hybrid

STEP = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)


def half(*, recompute=True, backoff=0, lease=30.0, facts=None, **more):
    geometry = tiny_hybrid(100)
    assert isinstance(geometry, Geometry)
    engine = EngineFacts(
        engine_id="engine",
        address=Address("127.0.0.1", free_port()),
        tp_size=1,
        pp_size=1,
        has_state=False,
        backoff=backoff,
        recompute=recompute,
        host_staged=False,
        transfer_groups=tuple(range(len(geometry.groups))),
    )
    engine = replace(engine, **facts or {})
    made = SchedulerHalf(Settings(kv_lease_duration=lease, handshake_timeout=0.5, **more), engine)
    hello = encode_hello(b"x", geometry, name="a", generation=1)
    made.serve({(0, 0): WorkerHello(hello)})
    return made


@pytest.fixture
def p():
    made = half()
    yield made
    made.close()


@pytest.fixture
def d():
    made = half()
    yield made
    made.close()


def request(name="r", tokens=40, params=None, status="FINISHED_LENGTH_CAPPED"):
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=list(ids),
        prompt_embeds=None,
        all_token_ids=ids,
        _all_token_ids=ids,
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        max_tokens=16,
        status=SimpleNamespace(name=status),
        get_skip_reading_prefix_cache=lambda: False,
    )


def tables(half_, start=1):
    return [list(range(start + 20 * index, start + 20 * index + 10)) for index in range(len(half_._geometry.groups))]


def blocks(half_):
    groups = [
        [SimpleNamespace(block_id=block, is_null=False, block_hash=None) for block in table] for table in tables(half_)
    ]
    return SimpleNamespace(blocks=tuple(groups))


def finished_at(p, **more):
    asked = request("at p", params={"do_remote_decode": True}, **more)
    p.add(asked)
    held, params = p.finish(asked, tables(p))
    assert held
    return json.loads(json.dumps(params))


def output(received=(), failed=(), failures=None):
    return SimpleNamespace(
        finished_recving=set(received),
        failed_recving=set(failed),
        kv_connector_worker_meta=WorkerReport(failures or {}),
    )


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_request_is_held_until_its_reader_lets_go(p, d):
    asked = request(params=finished_at(p))
    d.add(asked)
    assert d.matched_tokens(asked, 0) == (40, True)
    assert d.matched_tokens(asked, 16) == (24, True)  # asked again: nothing has changed
    d.allocated(asked, blocks(d), 40)
    (load,) = d.step(STEP).loads
    assert (load.num_tokens, load.cached) == (40, 0)
    assert d.step(STEP).loads == []
    assert p.step(STEP).sent == []
    d.results(output(["r"]))
    until(lambda: len(p._ledger) == 0)
    assert p.step(STEP).sent == ["at p"]
    assert p.step(STEP).sent == []
    assert d.matched_tokens(asked, 0) == (0, False)
    assert d.finish(asked, tables(d)) == (False, None)


@pytest.mark.parametrize("after", ["nothing to load", "given up before", "given up while it loads"])
def test_p_is_told_whatever_happens(p, d, after):
    asked = request(params=finished_at(p))
    d.add(asked)
    if after == "nothing to load":
        d.allocated(asked, blocks(d), 0)
    elif after == "given up before":
        d.finish(asked, tables(d))
    else:
        d.allocated(asked, blocks(d), 40)
        d.finish(asked, tables(d))
        assert len(p._ledger) == 1
        d.results(output(["r"]))
    until(lambda: len(p._ledger) == 0)
    assert d._pulls == {}


def test_a_passing_failure_is_tried_again_and_a_lasting_one_is_not(p, d):
    asked = request(params=finished_at(p))
    d.add(asked)
    for passing, again in ((True, True), (True, False)):
        d.allocated(asked, blocks(d), 40)
        failure = Failure("peer_lost", "gone", passing)
        d.results(output(["r"], ["r"], {"r": failure}))
        assert d.matched_tokens(asked, 0) == ((40, True) if again else (0, False))
    other = request("s", params=finished_at(p))
    d.add(other)
    d.allocated(other, blocks(d), 40)
    d.results(output(["s"], ["s"], {"s": Failure("unsupported", "no", passing=False)}))
    assert d.matched_tokens(other, 0) == (0, False)


def test_a_refusal_goes_the_way_of_a_failed_load(d):
    asked = request(params={"do_remote_prefill": True})
    d.add(asked)
    assert d.matched_tokens(asked, 0) == (40, True)
    d.allocated(asked, blocks(d), 40)
    metadata = d.step(STEP)
    assert metadata.loads == []
    assert "kvhma is None" in metadata.refusals["r"]


@pytest.mark.parametrize("params", [[], "x", 7, [1]])
def test_parameters_that_are_no_dictionary_never_reach_vllm(d, params):
    asked = request(params=params)
    d.add(asked)
    assert asked.kv_transfer_params is None
    assert d.matched_tokens(asked, 0) == (40, True)


def test_another_prompt_is_refused(p, d):
    params = finished_at(p)
    asked = request(params=params)
    asked.all_token_ids[3] = 99
    d.add(asked)
    d.allocated(asked, blocks(d), 40)
    assert "another prompt" in d.step(STEP).refusals["r"]


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_what_did_not_end_well_is_not_held(p, status):
    asked = request(params={"do_remote_decode": True}, status=status)
    p.add(asked)
    assert p.finish(asked, tables(p)) == (False, None)


def test_a_state_that_drafts_have_moved_is_not_handed_on(caplog):
    wanted = {"do_remote_decode": True}
    for drafted in (False, True):
        made = half(facts={"has_state": True, "drafted_state": drafted})
        decoded = request("decoded", tokens=43, params=wanted)
        decoded.num_prompt_tokens = 40
        assert made.finish(request("prompt", params=wanted), tables(made))[0]
        assert made.finish(decoded, tables(made))[0] is not drafted
        made.close()
    assert "it decoded 3 tokens with speculative_config" in caplog.text


def test_the_last_token_is_left_to_d():
    p = half(backoff=1)
    try:
        asked = request(params={"do_remote_decode": True})
        p.add(asked)
        p.add(asked)  # a request that is preempted is not cut twice
        assert (asked.num_prompt_tokens, len(asked.prompt_token_ids), asked.max_tokens) == (39, 39, 1)
        alone = request("one", tokens=1, params={"do_remote_decode": True})
        p.add(alone)
        assert alone.num_prompt_tokens == 1
    finally:
        p.close()


def test_a_lease_that_ends_is_reported_once():
    p = half(lease=1.0)
    try:
        finished_at(p)
        time.sleep(1.1)
        assert p.step(STEP).sent == ["at p"]
        assert p.step(STEP).sent == []
        assert p.take_stats().data["expired"] == 1
        assert p.take_stats() is None
    finally:
        p.close()
