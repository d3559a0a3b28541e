# SPDX-License-Identifier: Apache-2.0
"""Followed requests under attack or bad luck: blocks that are read too early, and answers that never come."""

import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from connector.test_following import (  # noqa: F401
    TICKET,
    N,
    Prefill,
    d,
    entries,
    followed,
    follower_of,
    nothing_comes,
    p,
    piece_of,
    read,
    small_pieces,
)
from kvhma.vllm.metadata import LocalWorkerIdentity
from kvhma.vllm.options.tickets import ticket_follower
from kvhma.vllm.options.tickets.offers import OfferState
from kvhma.vllm.scheduler import KvhmaScheduler
from support.schedulers import STEP, kept, output, request, tables, tickets_of
from support.waiting import until

STEP_OF_P = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    preempted_req_ids=set(),
    has_sync_kv_loads=False,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
)


def test_a_hit_of_the_first_ticket_waits_for_steps_that_had_no_number(p, d):  # noqa: F811
    """A step that was built before the first ticket may still run, and fill a hit of the next step."""
    assert p.build() is None, "no request needs its results"
    p.add()
    followed(d, p)
    number = p.build(at_p=16, hits={"at p": 96})
    nothing_comes(d)
    p.results(number)
    assert piece_of(d).num_tokens == 112


def test_a_hit_of_another_connector_waits_for_the_step_that_loads_it(p, d):  # noqa: F811
    """Under MultiConnector another one may fill blocks within the step, which vLLM counts as computed before it."""
    p.add()
    followed(d, p)
    p.results(p.build())
    number = p.build(at_p=16, hits={"at p": 96}, sync_loads=True)
    nothing_comes(d)
    p.results(number)
    assert piece_of(d).num_tokens == 112


def test_what_another_connector_could_not_load_is_read_again(p, d):  # noqa: F811
    """VLLM retracts tokens that it counted as computed, and computes them into the same blocks without a preemption."""
    at_p = p.add()
    followed(d, p)
    p.results(p.build())
    p.results(p.build(at_p=16, hits={"at p": 96}, sync_loads=True))
    assert entries(piece_of(d))[0] == range(7)
    read(d)
    p.computed["at p"] = 32  # the third block was invalid
    p.results(p.build(at_p=128))
    again = []
    while len(again) < 10:  # all of it, or first what was left before
        again += entries(piece_of(d))[0]
        read(d)
    assert again == [*range(10)]
    p.finish(at_p)
    assert not piece_of(d).piece


def test_accepted_drafts_are_no_way_back(p, d):  # noqa: F811
    """Decoding with drafts retracts tokens, but never of the prompt: nothing is read twice."""
    at_p = p.add()
    followed(d, p)
    p.results(p.build(at_p=160))
    piece_of(d)
    read(d)
    p.results(p.build(at_p=5))
    p.computed["at p"] = 162
    p.results(p.build(at_p=5))
    p.finish(at_p)
    load = piece_of(d)
    assert (load.piece, entries(load)[0]) == (False, range(10, 10))


def test_drafts_of_a_step_are_there_when_the_next_one_is(d):  # noqa: F811
    """The results of a step come before its draft model has written the caches of its layers."""
    p = Prefill(drafts=True)  # noqa: F811
    try:
        p.add()
        followed(d, p)
        first, empty, second = p.build(at_p=64), p.build(), p.build(at_p=64)
        p.results(first)
        nothing_comes(d)
        p.results(empty)  # it needs no work of a device
        nothing_comes(d)
        p.results(second)
        assert piece_of(d).num_tokens == 64
        read(d)
        for _ in range(3):
            p.results(p.build())
        nothing_comes(d)
        p.results(p.build(at_p=16))
        assert piece_of(d).num_tokens == 128
    finally:
        p.scheduler.close()


def test_the_share_of_followers_is_given_back(p, d):  # noqa: F811
    """After any end of a followed request the next one has as many blocks."""
    d.context.manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=1000))
    for end in ("finished", "aborted", "cancelled"):
        at_p, asked = p.add(ticket=TICKET), followed(d, p, name="r")
        assert tickets_of(d)._blocks_taken == 21
        if end == "cancelled":
            asked.status.name = "FINISHED_ABORTED"
            d.on_request_finished(asked, tables(d))
            d.on_step(STEP)
        elif end == "aborted":
            at_p.status.name = "FINISHED_ABORTED"
        p.finish(at_p)
        until(lambda: d.on_step(STEP) and not tickets_of(d).with_blocks)
        assert tickets_of(d)._blocks_taken == 0
        d.on_worker_results(output(["r"]))
        tickets_of(p.scheduler).tickets._evict_oldest()


def test_p_that_answers_for_ever_does_not_keep_blocks(p, d, monkeypatch):  # noqa: F811
    """P's engine hangs, and its listener replies: D ends the load as one whose ticket is lost."""
    d.context.manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=1000))
    p.add()
    followed(d, p)
    p.results(p.build(at_p=32))
    piece_of(d)
    monkeypatch.setattr(ticket_follower, "_STALL_SECONDS", 0.2)
    until(lambda: follower_of(d).error)
    assert not d.on_step(STEP).refusals, "a piece is being read"
    read(d)
    assert "has computed no more of the prompt" in d.on_step(STEP).refusals["r"].text
    assert tickets_of(d)._blocks_taken == 0
    assert d.take_stats().data["followed"] == {"lost": 1}
    d.on_worker_results(output(["r"]))
    assert d.decode.pending == {}
    (offer,) = tickets_of(p.scheduler).tickets._offers.values()
    until(lambda: offer.state is OfferState.ENDED)
    assert offer.ended == "its follower has cancelled it"


@pytest.mark.parametrize("why", ["another prompt", "aborted"])
def test_what_p_had_finished_by_then_is_let_go(p, d, why):  # noqa: F811
    """D cancels a request, and P finishes it before P is notified: its blocks are not held for a lease."""
    at_p = p.add()
    asked = request("r", N, params=p.params_of_d())
    if why == "another prompt":
        asked._all_token_ids[3] = 99
    d.on_request_added(asked)
    told = follower_of(d)
    until(lambda: told.source is not None)
    drop, waits_for = tickets_of(p.scheduler).tickets.cancel_ticket, []
    tickets_of(p.scheduler).tickets.cancel_ticket = waits_for.append
    if why == "another prompt":
        assert d.matched_tokens(asked, 0) == (0, False)
        until(lambda: waits_for)
        assert p.finish(at_p) is not None
    else:
        assert p.finish(at_p) is not None
        until(lambda: told.is_over)
        asked.status.name = "FINISHED_ABORTED"
        d.on_request_finished(asked, tables(d))
        until(lambda: waits_for)
    assert len(p.scheduler.context.leases) == 1
    drop(waits_for[0])
    until(lambda: p.scheduler.on_step(STEP_OF_P) and not kept(p.scheduler))


def test_p_that_has_begun_anew_ends_what_it_had_said(p, d):  # noqa: F811
    """A P that was restarted at the same address knows none of its tickets: D learns that, and stops asking."""
    p.add()
    followed(d, p)
    p.results(p.build(at_p=32))
    piece_of(d)
    read(d)
    old = p.scheduler
    hellos = old.prefill._hellos
    old.close()
    facts = dataclasses.replace(old.context.engine)
    again = KvhmaScheduler(old.context.settings, old.context.secrets, facts)
    try:
        again.serve({rank: LocalWorkerIdentity(*hello) for rank, hello in hellos.items()})
        refusals = {}

        def ended():
            refusals.update(d.on_step(STEP).refusals)
            return refusals

        until(ended)
        assert "no longer knows the ticket" in refusals["r"].text
    finally:
        again.close()
