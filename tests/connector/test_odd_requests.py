# SPDX-License-Identifier: Apache-2.0
"""Unusual requests and engines: prompts with embeddings, host copies, engines short of blocks."""

import contextlib
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from connector.test_scheduler import request, scheduler, tables
from kvhma._kvhma import ids_to_text
from kvhma.vllm.options.staging.scheduler import Room as Staging
from kvhma.vllm.options.staging.slots import NAME, SlotRanges
from support.cache.engine import Engine, EngineShape
from support.cache.labels import GroupShape
from support.params import text_of
from support.schedulers import blocks
from support.waiting import until

REMOTE = {"do_remote_decode": True}


@pytest.fixture
def start():
    """Start schedulers, and close them at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(contextlib.closing(scheduler(**more)))


def test_a_prompt_of_tokens_and_embeddings_stays_in_step(start):
    """vLLM's worker compares the lengths of both."""
    p = start(backoff=1, has_state=True)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": REMOTE})
    asked = Request(
        "r",
        list(range(10)),
        sampling,
        None,
        prompt_embeds=torch.zeros(10, 8),
        prompt_is_token_ids=[True] * 5 + [False] * 5,
    )
    p.on_request_added(asked)
    told = NewRequestData.from_request(asked, ([1],))
    assert length_from_prompt_token_ids_or_embeds(told.prompt_token_ids, told.prompt_embeds) == 9
    assert len(told.prompt_is_token_ids) == asked.num_prompt_tokens == 9


@pytest.mark.parametrize(
    "change", [{"kvhma": None}, {"remote_host": "a\nb"}, {"tp_size": "\x1b[2J"}, "no dictionary\n"]
)
def test_a_client_cannot_forge_lines_of_the_log(start, change, caplog):
    """A client chooses the id of its request, and with a lax proxy the parameters."""
    name = "r\nERROR 01-01 00:00:00 [core.py:1] \x1b[31mforged"
    p, d = start(), start()
    prefilled = request(name, params=dict(REMOTE))
    p.on_request_added(prefilled)
    params = p.on_request_finished(prefilled, tables(p))
    asked = request(name, params=params | change if isinstance(change, dict) else change)
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (1, True)
    d.on_blocks_allocated(asked, blocks(d), 1)
    lines = [record.getMessage() for record in caplog.records]
    assert any("forged" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def staged_request(tokens=40):
    asked = request(params=dict(REMOTE), tokens=tokens)
    asked.num_preemptions = 0
    return asked


@pytest.fixture
def stage(start):
    """Start engines whose blocks go through host memory."""
    return lambda slots=1000, **more: start(staging=SlotRanges.of(slots, 0), **more)


def scheduled(p, name, count, held):
    p.context.manager.get_block_ids = lambda _: held
    step = SimpleNamespace(num_scheduled_tokens={name: count}, total_num_scheduled_tokens=count)
    return p.on_step(step).extras.get(NAME, [])


def staging_of(p):
    (room,) = (room for room in p.context.rooms if isinstance(room, Staging))
    return room


def test_blocks_of_a_request_that_was_preempted_are_copied_again(stage):
    """P's parameters then name other blocks."""
    p = stage()
    asked = staged_request()
    p.on_request_added(asked)
    asked.num_computed_tokens = 0
    before, after = tables(p, 1), tables(p, 61)
    assert len(scheduled(p, "r", 40, before)) == 1
    asked.num_preemptions = 1
    ((copied, slots),) = scheduled(p, "r", 40, after)
    assert [len(span.ids) for span in copied] == [len(span.ids) for span in slots]
    assert copied[0].ids[0] == after[0][0]
    asked.num_computed_tokens = 40
    params = p.on_request_finished(asked, after)
    named = [text for _, text in text_of(params)["spans"]]
    assert [ids_to_text(span.ids) for span in slots] == named


def handed_over(p, name):
    """Compute a prompt and finish its request; return the parameters for a decode engine, and the slots."""
    asked = staged_request()
    asked.request_id = name
    p.on_request_added(asked)
    asked.num_computed_tokens = 0
    copied = scheduled(p, name, 40, tables(p))
    asked.num_computed_tokens = 40
    params = p.on_request_finished(asked, tables(p))
    return params, {slot for _, slots in copied for span in slots for slot in span.ids}


def test_slots_are_of_one_request_until_others_have_read_it_or_its_lease_ended(stage):
    p = stage(lease=1.0)
    _, first = handed_over(p, "a")
    _, second = handed_over(p, "b")
    assert first
    assert not first & second
    assert 0 not in first | second
    empty = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    until(lambda: not staging_of(p)._held, lambda: p.on_step(empty))
    assert handed_over(p, "c")[1] == first


def test_without_a_slot_a_request_is_not_handed_over(stage, caplog):
    p = stage()
    needed = len(handed_over(p, "a")[1])
    p = stage(slots=needed + 1)
    assert handed_over(p, "a")[0] is not None
    assert handed_over(p, "b") == (None, set())
    assert "cannot hand off request b" in caplog.text
    assert p.context.stats.take().data["staging_full"] == 1
    p = stage(slots=needed - 1)
    assert handed_over(p, "a") == (None, set())
    assert f"{needed} blocks go through host memory, staging_blocks has room for {needed - 1}" in caplog.text


def test_slots_of_a_lease_that_has_ended_are_used_in_the_same_step(stage):
    needed = len(handed_over(stage(), "a")[1])
    p = stage(slots=needed)
    _, first = handed_over(p, "a")
    p.context.leases.end_all()
    assert handed_over(p, "b")[1] == first


def test_a_request_that_nobody_reads_gives_its_slots_back(stage):
    p = stage()
    asked = staged_request()
    p.on_request_added(asked)
    asked.num_computed_tokens = 0
    scheduled(p, "r", 40, tables(p))
    asked.status = SimpleNamespace(name="FINISHED_ABORTED")
    assert p.on_request_finished(asked, tables(p)) is None
    assert len(staging_of(p)._slots._free) == 1000


def test_a_prompt_is_copied_once(stage):
    p = stage()
    asked = staged_request()
    p.on_request_added(asked)
    for computed, count, copies in ((0, 30, 0), (30, 10, 1), (40, 1, 0), (41, 1, 0)):
        asked.num_computed_tokens = computed
        assert len(scheduled(p, "r", count, tables(p))) == copies
    asked.num_computed_tokens = 42
    assert p.on_request_finished(asked, tables(p)) is not None
    assert staging_of(p)._prompts == {}


def test_a_state_that_went_on_behind_its_copy_is_not_handed_on(stage):
    p = stage()
    p.context.engine = dataclasses.replace(p.context.engine, has_state=True)
    asked = staged_request(tokens=1)
    p.on_request_added(asked)
    asked.num_computed_tokens = 0
    assert len(scheduled(p, "r", 1, tables(p))) == 1
    asked._all_token_ids.extend(range(4))
    asked.num_computed_tokens = 4
    assert p.on_request_finished(asked, tables(p)) is None


@pytest.mark.parametrize("recompute", [True, False])
def test_two_engines_that_wait_for_each_others_blocks_end(recompute):
    """Each holds blocks for the other and has no room to read."""
    groups = (GroupShape("0.full", "full", 4),)
    one, other = (
        Engine(EngineShape(name, groups, 9, batch=64, caching=False, recompute=recompute), random.Random(1))
        for name in "pd"
    )
    one.read_from(other)
    other.read_from(one)
    engines = (one, other)
    for engine in engines:
        engine.kvhma.context.leases._lease = 0.3
        context = engine.kvhma.context
        context.settings = dataclasses.replace(context.settings, kv_lease_duration=0.3)
    prompts = {"x": [1] * 20, "y": [2] * 20}
    one.add("x", prompts["x"], 1, dict(REMOTE))
    other.add("y", prompts["y"], 1, dict(REMOTE))
    while "x" not in one.finished or "y" not in other.finished:
        one.step()
        other.step()
    other.add("x", prompts["x"], 2, one.finished.pop("x").kv_transfer_params)
    one.add("y", prompts["y"], 2, other.finished.pop("y").kv_transfer_params)

    def step():
        for engine in engines:
            engine.step()
            # What the thread that notifies P does.
            for load in filter(lambda one: one.remote, engine.kvhma.decode.pending.values()):
                engine.source.kvhma.context.leases.renew([load.remote.claim(load.reader)])

    until(lambda: "y" in one.finished and "x" in other.finished, step)
    ends = {str(one.finished["y"].finish_reason), str(other.finished["x"].finish_reason)}
    # Once one of them has failed, the other may find room.
    assert ends == {"length"} if recompute else "error" in ends


@pytest.mark.parametrize("recompute", [True, False])
def test_a_window_that_p_has_passed_is_the_policys_to_decide(recompute):
    """P's last chunk is one token, D leaves more tokens to itself than P does; the planner would refuse it."""
    groups = (GroupShape("0.full", "full", 4), GroupShape("1.sliding", "sliding", 4, 5))
    p, d = (
        Engine(EngineShape(name, groups, 60, batch=16, caching=False, recompute=recompute), random.Random(1))
        for name in "pd"
    )
    d.read_from(p)
    d.kvhma.context.engine = dataclasses.replace(d.kvhma.context.engine, backoff=3)
    tokens = [1] * 18
    p.add("x", tokens, 1, dict(REMOTE))
    while "x" not in p.finished:
        p.step()
    d.add("x", tokens, 2, p.finished["x"].kv_transfer_params)
    for _ in range(20):
        d.step()
    assert (d.refused, str(d.finished["x"].finish_reason)) == ([], "length" if recompute else "error")


@pytest.mark.parametrize("hit", [31, 32, 40])
def test_what_fails_does_so_behind_a_hit_that_ends_inside_of_a_block(hit):
    """VLLM accepts no load that is shorter than such a hit's last block."""
    groups = (GroupShape("0.full", "full", 16), GroupShape("1.state", "state", 16))
    p, d = (
        Engine(
            EngineShape(name, groups, 60, batch=64, recompute=False, hash_unit=4, checkpoint=4),
            random.Random(1),
        )
        for name in "pd"
    )
    d.read_from(p)
    tokens = list(range(1, 60))
    d.add("before", tokens[:hit], 2)
    p.add("x", [9] * 59, 1, dict(REMOTE))
    while "x" not in p.finished or "before" not in d.finished:
        p.step()
        d.step()
    d.add("x", tokens, 2, p.finished["x"].kv_transfer_params)
    for _ in range(20):
        d.step()
    assert str(d.finished["x"].finish_reason) == "error"


def prefill_request(name, tokens):
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": REMOTE})
    return Request(name, tokens, sampling, None)


@pytest.mark.parametrize("why", ["it continues", "its log-probabilities are asked for"])
def test_a_prompt_that_is_computed_to_its_end(start, why):
    """More of a session's prompt may come, and would follow the tokens that P has cut off."""
    p = start(backoff=3)
    sampling = SamplingParams(prompt_logprobs=None if why == "it continues" else 1)
    sampling.extra_args = {"kv_transfer_params": REMOTE}
    asked = Request("r", list(range(10)), sampling, None, resumable=why == "it continues")
    p.on_request_added(asked)
    assert asked.num_prompt_tokens == 10


def test_a_client_cannot_say_that_a_request_was_stopped_early(start):
    p = start(backoff=1, has_state=True)
    asked = prefill_request("r", list(range(10)))
    asked.kv_transfer_params = REMOTE | {"_kvhma_stopped_early": True}
    p.on_request_added(asked)
    assert asked.num_prompt_tokens == 9
