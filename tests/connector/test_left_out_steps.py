# SPDX-License-Identifier: Apache-2.0
"""A step in which kvhma looks for nothing would have found nothing, and whatever comes is seen by the next step."""

import contextlib
import copy
import logging
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from kvhma.vllm.failures import Failure
from kvhma.vllm.holds import lease_table
from kvhma.vllm.loads import decode
from kvhma.vllm.loads.load_machine import LoadState
from kvhma.vllm.metadata import NOTHING, NOTHING_IDLE, StepMetadata
from kvhma.vllm.options.staging.slots import SlotRanges
from kvhma.vllm.scheduler import KvhmaScheduler
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import PrefillParams
from kvhma.vllm.wire.secrets import Secrets
from support.cache.sequences import Run, case_of, turns_of
from support.schedulers import BUSY, STEP, end_read, finished_at, kept, load, request, scheduler, tables
from support.waiting import until

RUNS = 150


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(contextlib.closing(scheduler(**more)))
    assert (StepMetadata(), StepMetadata(idle=True)) == (NOTHING, NOTHING_IDLE), "all steps share these"


def quiet(one, step=BUSY):
    """Have an engine make steps until it looks for nothing."""
    until(lambda: one.on_step(step) in (NOTHING, NOTHING_IDLE) and not one._is_due)
    assert one.on_step(step) is (NOTHING_IDLE if step is STEP else NOTHING)


def state(one):
    pool = one.context.manager.block_pool
    loads = {name: known.state for name, known in one.decode.pending.items()}
    return (
        pool.get_num_free_blocks(),
        loads,
        list(one.context.leases.held),
        copy.deepcopy(one.context.stats._stats.data),
    )


def test_a_step_that_is_left_out_had_nothing_to_do(monkeypatch):
    """vLLM's schedulers lead loads through the table; each step that could be left out is made, and finds nothing."""
    on_step, left_out = KvhmaScheduler.on_step, []

    def look_anyway(self, scheduler_output):
        leaves_out, self._is_due, before = not self._is_due, True, state(self)
        found = on_step(self, scheduler_output)
        if leaves_out:
            assert found == StepMetadata(idle=scheduler_output.total_num_scheduled_tokens == 0)
            assert state(self) == before
            assert not self._is_due
            left_out.append(self)
        return found

    monkeypatch.setattr(KvhmaScheduler, "on_step", look_anyway)
    logging.disable(logging.ERROR)  # loads fail here, and each of them is a warning
    try:
        for seed in range(RUNS):
            Run(case_of(seed) if seed % 3 else turns_of(seed)).play()
    finally:
        logging.disable(logging.NOTSET)
    assert len(left_out) > RUNS


@pytest.mark.parametrize("step", [BUSY, STEP])
@pytest.mark.parametrize("shared", [False, True])
def test_a_lease_that_ends_in_another_thread(make, monkeypatch, step, shared):
    monkeypatch.setattr(lease_table, "LATE_READER_SECONDS", 0.05)
    p = make()
    quiet(p, step)
    remote = PrefillParams.from_params(finished_at(p), Secrets(()), num_prompt_tokens=40)
    for _ in range(3):
        p.on_step(step)
        assert kept(p)
    p.context.leases.release([remote.claim(1)], Outcome.READ_SHARED if shared else Outcome.READ)
    if shared:
        time.sleep(0.06)
    p.on_step(step)
    assert not kept(p)
    quiet(p, step)


def test_a_lease_whose_time_is_up(make, monkeypatch):
    monkeypatch.setattr(lease_table, "OVERDUE_SECONDS", 0.05)
    p = make(lease=0.1)
    quiet(p)
    finished_at(p)
    until(lambda: p.on_step(BUSY) and not kept(p))
    assert p.take_stats().data["expired"] == {"unclaimed": 1}
    quiet(p)


def test_a_lease_that_ends_while_the_engine_sleeps(make):
    p = make()
    quiet(p)
    remote = PrefillParams.from_params(finished_at(p), Secrets(()), num_prompt_tokens=40)
    other = remote.claim(1)._replace(digest=bytes(len(remote.claim(1).digest)))
    p.context.leases.renew([other])
    p.context.leases.release([remote.claim(1)], Outcome.READ)
    assert p.make_room()
    p.on_step(STEP)
    assert p.take_stats().data["digest_refused"] == 1
    quiet(p)


def test_a_load_until_it_ends(make, monkeypatch):
    monkeypatch.setattr(decode, "_CLAIM_AFTER_SECONDS", 0.05)
    p, d = make(), make()
    asked = request("r", params=finished_at(p))
    quiet(d)
    d.on_request_added(asked)
    load(d, asked)
    loading = d.decode.pending["r"]
    time.sleep(0.06)
    d.on_step(BUSY)
    assert loading.claim is not None
    end_read(d, asked, Failure("transfer", "no", transient=True))
    d.on_step(BUSY)
    load(d, asked)
    end_read(d, asked)
    assert d.decode.pending == {}
    quiet(d)


def test_a_load_that_fails_is_reported_by_the_next_step(make):
    d = make(recompute=False)
    quiet(d)
    asked = request("r", params={"do_remote_prefill": True})
    d.on_request_added(asked)
    assert d.decode.pending["r"].state is LoadState.REFUSED
    for _ in range(3):
        assert d.on_step(BUSY).refusals == {}
    assert d.matched_tokens(asked, 0) == (1, True)
    d.on_blocks_allocated(asked, SimpleNamespace(blocks=()), 1)
    assert list(d.on_step(BUSY).refusals) == ["r"]


def test_a_ticket_numbers_all_steps_from_then_on(make):
    p = make()
    quiet(p)
    asked = request("r", params={"do_remote_decode": True, "kvhma_ticket": "0" * 32})
    p.on_request_added(asked)
    steps = SimpleNamespace(**vars(BUSY), preempted_req_ids=None, scheduled_new_reqs=[])
    steps.scheduled_cached_reqs = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    numbers = [p.on_step(steps).extras["tickets"] for _ in range(4)]
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_a_prompt_is_copied_to_its_slots_however_many_steps_it_takes(make):
    p = make(staging=SlotRanges.of(1000, 0))
    quiet(p)
    asked = request("r", params={"do_remote_decode": True})
    asked.num_computed_tokens = asked.num_preemptions = 0
    p.on_request_added(asked)
    p.context.manager.get_block_ids = lambda _: tables(p)
    for _ in range(3):
        assert p.on_step(BUSY).extras == {}
    assert p.on_step(SimpleNamespace(num_scheduled_tokens={"r": 40}, total_num_scheduled_tokens=40)).extras["staging"]


def test_sums_are_ordered_in_the_next_step(make):
    p = make(content_digests=1.0)
    asked = request("r", params={"do_remote_decode": True})
    p.on_request_added(asked)
    quiet(p)
    p.on_request_finished(asked, tables(p))
    (order,) = p.on_step(BUSY).extras["digests"].orders
    assert order.num_tokens == 40
