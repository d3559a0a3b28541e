# SPDX-License-Identifier: Apache-2.0
"""Tickets: D follows a request while P computes it. Both schedulers, their side channel, and steps in every order."""

import contextlib
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from kvhma._kvhma import text_to_ids
from kvhma.vllm.metadata import StepMetadata, WorkerReport
from kvhma.vllm.options.tickets import following
from kvhma.vllm.options.tickets.offers import OfferState
from kvhma.vllm.options.tickets.ticket_follower import TicketQuestion
from kvhma.vllm.options.tickets.worker import Room, Step
from support.params import text_of
from support.schedulers import (
    BUSY,
    STEP,
    blocks,
    manager,
    number_of,
    output,
    report_of,
    request,
    scheduler,
    tables,
    tickets_of,
)
from support.waiting import until

TICKET = "0123456789abcdef" * 2
N = 10 * 16


class Manager:
    """P's block tables, which the test chooses."""

    def __init__(self):
        self.tables = {}
        self.block_pool = manager().block_pool

    def get_blocks(self, request_id):
        tables = self.tables[request_id]
        return SimpleNamespace(blocks=tuple([SimpleNamespace(block_id=one) for one in row] for row in tables))


class Prefill:
    """P's scheduler, and the steps that vLLM would show it."""

    def __init__(self, **more):
        self.scheduler = scheduler(**more)
        self.manager = self.scheduler.context.manager = Manager()
        self.computed = {}

    def add(self, name="at p", ticket=TICKET, tokens=N):
        asked = request(name, tokens, params={"do_remote_decode": True, "kvhma_ticket": ticket})
        self.scheduler.on_request_added(asked)
        self.manager.tables[name] = tables(self.scheduler)
        self.computed[name] = 0
        return asked

    def build(self, preempted=(), hits=None, sync_loads=False, **tokens):
        """Build a step that computes this many tokens of requests; return its number."""
        before = {name.replace("_", " "): count for name, count in tokens.items()}
        for name in preempted:
            self.computed[name] = 0
        for name, count in (hits or {}).items():
            self.computed[name] = count
        found = SimpleNamespace(
            num_scheduled_tokens=before,
            total_num_scheduled_tokens=sum(before.values()),
            preempted_req_ids=set(preempted),
            has_sync_kv_loads=sync_loads,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(before), num_computed_tokens=[self.computed[name] for name in before]
            ),
        )
        number = number_of(self.scheduler.on_step(found))
        for name, count in before.items():
            self.computed[name] += count
        return number

    def compute(self, **tokens):
        """Build a step, and have its results reported."""
        self.results(self.build(**tokens))

    def results(self, number):
        self.scheduler.on_worker_results(
            SimpleNamespace(finished_recving=set(), failed_recving=set(), kv_connector_worker_meta=report_of(number))
        )

    def finish(self, asked, **more):
        return self.scheduler.on_request_finished(asked, self.manager.tables[asked.request_id])

    def params_of_d(self, ticket=TICKET):
        address = self.scheduler.context.engine.address
        return {
            "do_remote_prefill": True,
            "kvhma_ticket": ticket,
            "remote_host": address.host,
            "remote_port": address.port,
        }


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(following, "PIECE_TOKENS", 16)


@pytest.fixture
def p():
    made = Prefill()
    yield made
    made.scheduler.close()


@pytest.fixture
def d():
    made = scheduler(ranks=1)
    yield made
    made.close()


def waits(d, asked):
    return d.matched_tokens(asked, 0) == (None, False)


def added(d, p, name="r"):
    """Have D add a request with P's ticket; return it."""
    asked = request(name, N, params=p.params_of_d())
    d.on_request_added(asked)
    return asked


def followed(d, p, name="r"):
    """Have D follow P's request; return D's request, which has blocks."""
    asked = added(d, p, name)
    until(lambda: not waits(d, asked))
    assert d.matched_tokens(asked, 0) == (N, True)
    d.on_blocks_allocated(asked, blocks(d), N)
    return asked


def piece_of(d):
    """Wait for the next load that D requests."""
    found = []

    def ordered():
        found.extend(d.on_step(STEP).loads)
        return found

    until(ordered)
    (load,) = found
    return load


def read(d, name="r", lost=""):
    report = WorkerReport(pieces={name: 1}, lost_pieces={name: lost} if lost else {})
    d.on_worker_results(SimpleNamespace(finished_recving=set(), failed_recving=set(), kv_connector_worker_meta=report))


def read_piece(d, lost=""):
    """Have the workers read the next piece; return it."""
    load = piece_of(d)
    assert load.piece
    read(d, lost=lost)
    return load


def read_to_the_end(d):
    """Have the workers read all that D orders; return the last load, and which entries each piece before it filled."""
    pieces = []
    while (load := piece_of(d)).piece:  # D may receive the last step before the end
        pieces.append(entries(load)[0])
        read(d)
    return load, pieces


def follower_of(d, name="r"):
    return tickets_of(d).followed[name].follower


def entries(load):
    """Which positions of D's first group a load fills, and whether it fills other groups too."""
    full, *others = load.spans
    return range(full.first, full.first + len(full.ids)), any(len(span.ids) for span in others)


def nothing_comes(d):
    for _ in range(20):
        assert d.on_step(STEP).loads == []
        time.sleep(0.005)


def test_pieces_come_as_steps_are_settled_and_the_rest_at_the_end(p, d):
    at_p = p.add()
    followed(d, p)
    first = p.build(at_p=64)
    nothing_comes(d)
    second = p.build(at_p=64)  # built before the results of the first
    p.results(first)
    load = piece_of(d)
    assert (load.piece, load.num_tokens, entries(load)) == (True, 64, (range(4), False))
    assert [list(span.ids) for span in load.remote.spans] == [tables(d)[0][:4], [], []]
    p.results(second)
    nothing_comes(d)  # one read at a time
    read(d)
    load = piece_of(d)
    assert (load.num_tokens, entries(load)) == (128, (range(4, 8), False))
    read(d)
    p.compute(at_p=32)
    params = p.finish(at_p)
    load, _ = read_to_the_end(d)
    assert entries(load)[0].stop == 10
    assert entries(load)[1]
    assert load.remote.lease_key.request_id == "at p"
    assert load.remote.digest.hex() == params["kvhma"]["digest"]
    d.on_worker_results(output(["r"]))
    assert d.decode.pending == {}


def test_without_a_ticket_the_parameters_are_what_they_were(p):
    asked = request("plain", N, params={"do_remote_decode": True})
    p.scheduler.on_request_added(asked)
    p.manager.tables["plain"] = tables(p.scheduler)
    assert "epoch" not in text_of(p.finish(asked))
    assert number_of(p.scheduler.on_step(STEP)) is None


@pytest.mark.parametrize("when", ["while it reads", "after it has read", "after the last announcement"])
def test_a_preemption_has_all_read_again(p, d, when):
    at_p = p.add()
    followed(d, p)
    p.compute(at_p=96)
    piece_of(d)
    if when != "while it reads":
        read(d)
    p.build(preempted=["at p"])
    p.manager.tables["at p"] = tables(p.scheduler, start=300)
    if when == "while it reads":
        read(d)
    p.compute(at_p=160)
    if when != "after the last announcement":
        load = read_piece(d)
        assert (entries(load)[0], load.remote.spans[0].ids[0]) == (range(10), 300)
    p.finish(at_p)
    load, pieces = read_to_the_end(d)
    assert pieces in ([], [range(10)])
    if pieces:
        assert entries(load)[0] == range(10, 10)


def test_what_a_preemption_was_not_told_of_is_read_again(p, d):
    """D may miss every answer between a preemption and the end: the parameters have the epoch."""
    at_p = p.add()
    followed(d, p)
    p.compute(at_p=96)
    piece_of(d)
    p.build(preempted=["at p"])  # the same blocks again; D has read the overwritten bytes
    p.compute(at_p=160)
    p.finish(at_p)
    until(lambda: follower_of(d).is_over)
    read(d)
    load = piece_of(d)
    assert not load.piece
    assert entries(load)[0] == range(10)


def test_a_block_that_was_copied_elsewhere_begins_an_epoch(p, d):
    p.add()
    followed(d, p)
    p.compute(at_p=64)
    read_piece(d)
    p.manager.tables["at p"][0][2] = 77
    p.compute(at_p=64)
    load = piece_of(d)
    assert entries(load)[0] == range(8)
    assert list(load.remote.spans[0].ids)[2] == 77


def test_a_hit_goes_at_once_but_for_what_the_same_step_computes(p, d):
    """Blocks are hits as soon as they are allocated; another request of this step, or the last one, may fill them."""
    p.add()
    followed(d, p)
    p.compute()
    p.build(at_p=16, hits={"at p": 96})
    load = piece_of(d)
    assert (load.num_tokens, entries(load)[0]) == (96, range(6))


def test_a_hit_on_blocks_of_the_same_step_waits_for_it(p, d):
    p.add()
    followed(d, p)
    p.add("other", ticket="f" * 32)
    p.manager.tables["other"] = [list(row) for row in p.manager.tables["at p"]]
    p.compute(other=32)
    number = p.build(at_p=16, other=16, hits={"at p": 96})
    assert read_piece(d).num_tokens == 32, "what the other request computes now is not there yet"
    p.results(number)
    assert piece_of(d).num_tokens == 112


def test_a_hit_on_blocks_of_the_step_before_waits_for_that(p, d):
    p.add()
    followed(d, p)
    p.add("other", ticket="f" * 32)
    number = p.build(other=32)
    p.build(at_p=16, hits={"at p": 96})
    nothing_comes(d)
    p.results(number)
    assert piece_of(d).num_tokens == 96


def test_d_may_come_first(p, d):
    """A ticket that P does not know yet is waited for."""
    asked = added(d, p)
    assert waits(d, asked)
    until(lambda: follower_of(d).question)
    assert waits(d, asked)
    p.add()
    until(lambda: not waits(d, asked))


def test_d_may_come_when_p_has_finished(p, d):
    at_p = p.add()
    p.compute(at_p=160)
    p.finish(at_p)
    asked = added(d, p)
    until(lambda: not waits(d, asked))
    d.on_blocks_allocated(asked, blocks(d), N)
    load = piece_of(d)
    assert not load.piece
    assert entries(load) == (range(10), True)


def test_p_that_gives_up_fails_the_load(p, d):
    at_p = p.add()
    followed(d, p)
    at_p.status.name = "FINISHED_ABORTED"
    assert p.finish(at_p) is None
    until(lambda: d.on_step(STEP).refusals)


def test_d_that_gives_up_is_told_of_to_p(p, d):
    at_p = p.add()
    asked = followed(d, p)
    asked.status.name = "FINISHED_ABORTED"
    p.compute(at_p=96)
    piece_of(d)
    d.on_request_finished(asked, tables(d))
    nothing_comes(d)
    assert d.on_step(STEP).cancelled == [], "a read is under way"
    read(d)
    assert d.on_step(STEP).cancelled == ["r"]
    d.on_worker_results(output(["r"]))
    assert d.decode.pending == {}
    until(lambda: tickets_of(p.scheduler).tickets.offer(bytes.fromhex(TICKET)).state is OfferState.ENDED)
    assert p.finish(at_p) is None, "no engine reads it, so P holds nothing"


def test_a_lost_piece_is_read_at_the_end(p, d):
    at_p = p.add()
    followed(d, p)
    p.compute(at_p=64)
    read_piece(d)
    p.compute(at_p=64)
    read_piece(d, lost="the connection broke")
    p.compute(at_p=32)
    nothing_comes(d)
    p.finish(at_p)
    load = piece_of(d)
    assert (load.piece, entries(load)[0]) == (False, range(4, 10))


@pytest.mark.parametrize("recompute", [True, False])
def test_another_prompt_is_computed_or_fails(p, d, recompute):
    d.context.engine = replace(d.context.engine, recompute=recompute)
    p.add()
    asked = request("r", N, params=p.params_of_d())
    asked._all_token_ids[3] = 99
    d.on_request_added(asked)
    until(lambda: not waits(d, asked))
    assert d.matched_tokens(asked, 0) == ((0, False) if recompute else (1, True))
    d.on_blocks_allocated(asked, blocks(d), 0 if recompute else 1)
    assert [failure.cause for failure in d.on_step(STEP).refusals.values()] == ["other_prompt"] * (not recompute)


@pytest.mark.parametrize("first", ["p", "d"])
@pytest.mark.parametrize("why", ["rejected", "computed", "too short"])
def test_a_followed_request_that_is_not_read_is_given_up(p, d, why, first):
    """VLLM has rejected it, and sends a request of one token; or its prompt's log-probabilities are asked for; or D
    computes all of it in any case."""
    if why == "too short":
        d.context.engine = replace(d.context.engine, backoff=N, recompute=False)
    table = tickets_of(p.scheduler).tickets
    at_p = p.add() if first == "p" else None
    asked = request("r", 1 if why == "rejected" else N, params=p.params_of_d())
    asked.abort_immediately = why == "rejected"
    asked.get_skip_reading_prefix_cache = lambda: why == "computed"
    d.on_request_added(asked)
    assert d.decode.pending == {}
    assert d.matched_tokens(asked, 0) == (0, False)
    assert d.take_stats().data.get("local_prefills", {}) == (
        {"skip_reading_prefix_cache": 1} if why == "computed" else {}
    )
    ticket = bytes.fromhex(TICKET)
    until(
        lambda: table.offer(ticket).state is OfferState.ENDED if at_p is not None else ticket in table._cancelled_early
    )
    p.finish(at_p or p.add())
    assert len(p.scheduler.context.leases) == 0, "it was kept for the whole lease"


def test_followers_take_a_share_of_the_blocks_only(p, d):
    d.context.manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=21))
    at_p = p.add()
    asked = added(d, p)
    assert waits(d, asked)
    until(lambda: follower_of(d).source)
    assert waits(d, asked), "it would take 21 blocks of 20"
    p.compute(at_p=160)
    p.finish(at_p)
    until(lambda: not waits(d, asked))
    d.on_blocks_allocated(asked, blocks(d), N)
    assert not piece_of(d).piece


def test_samples_read_at_the_end(p, d):
    at_p = p.add()
    both = [added(d, p, name) for name in ("0_r", "1_r")]
    assert all(waits(d, asked) for asked in both)
    until(lambda: all(follower_of(d, name).source for name in ("0_r", "1_r")))
    assert all(waits(d, asked) for asked in both)
    p.finish(at_p)
    for asked in both:
        until(lambda asked=asked: not waits(d, asked))


@pytest.mark.parametrize("ticket", ["", "0" * 31, "G" * 32, 7, ["0" * 32], "0" * 33, "٠" * 32])
def test_a_ticket_that_is_none(p, d, ticket):
    asked = request("r", N, params=p.params_of_d() | {"kvhma_ticket": ticket})
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (1, True)
    d.on_blocks_allocated(asked, blocks(d), 1)
    assert "kvhma_ticket" in d.on_step(STEP).refusals["r"].text
    p.add("odd", ticket=ticket)
    assert p.finish(request("odd", N, params={"do_remote_decode": True, "kvhma_ticket": ticket})) is not None


def test_a_ticket_is_of_one_request(p):
    p.add()
    p.add("again")
    assert len(tickets_of(p.scheduler).tickets) == 1
    assert json.dumps(p.finish(request("again", N, params={"do_remote_decode": True})))


def test_names_of_blocks_are_those_that_were_not_told(p, d):
    p.add()
    followed(d, p)
    table = tickets_of(p.scheduler).tickets
    p.compute(at_p=64)
    piece_of(d)
    question = TicketQuestion([follower_of(d)]).message(5.0)
    p.compute(at_p=64)
    (told,) = table.progress(*question.tickets).blocks
    assert (told.first, text_to_ids(told.ids, 99).tolist()) == (4, tables(d)[0][4:8])


def test_with_nothing_to_compute_d_waits_for_news(p, d, monkeypatch):
    """An engine that only schedules again takes two cores, which may be those P computes with."""
    event, waits = tickets_of(d)._followers.progressed, []
    wait = event.wait
    monkeypatch.setattr(event, "wait", lambda seconds: (waits.append(seconds), wait(seconds))[1])

    def waited_in(*steps):
        waits.clear()
        for step in steps:
            d.on_step(step)
        return bool(waits)

    assert not waited_in(STEP, STEP, STEP, BUSY)
    at_p = p.add()
    followed(d, p)
    # With asynchronous scheduling the results of a busy step may not be back before the third step after it.
    assert not waited_in(STEP, STEP, BUSY, STEP, STEP)
    assert waited_in(STEP)
    p.compute(at_p=64)
    waits.clear()
    assert piece_of(d).piece  # the progress event wakes it up
    assert waits
    assert max(waits) < 0.01
    assert not waited_in(*[STEP] * 5), "the worker waits for the piece"
    read(d)
    d.on_request_added(request("another", N, params="refused, which is reported with the next step"))
    assert not waited_in(*[STEP] * 5)
    p.finish(at_p)
    assert not piece_of(d).piece


@pytest.mark.parametrize("waits", [False, True])
def test_data_parallel_engines_do_not_wait_for_news(p, waits):
    with contextlib.closing(scheduler(ranks=1, may_wait=waits)) as d:
        p.add()
        followed(d, p)
        news = tickets_of(d)._followers.progressed
        news.set()
        for _ in range(5):
            d.on_step(STEP)
        assert news.is_set() is not waits


def test_workers_return_the_number_of_a_step():
    first, second = Room(None, None, None), Room(None, None, None)
    reports = [WorkerReport(), WorkerReport()]
    for room, report in zip((first, second), reports, strict=True):
        room.on_step(StepMetadata(extras={"tickets": Step(7)}))
        room.add_to_report(report)
        assert not report.is_empty
    assert reports[0].aggregate(reports[1]).extras == {"tickets": 7}
    first.on_step(StepMetadata())
    first.add_to_report(report := WorkerReport())
    assert report.is_empty, "it is the number of an earlier step"
