# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on P and on D, equal or not, without a forward pass: no engine with stages runs on a CPU.

`support.parallel` lists what comes from vLLM: everything but the bytes.
"""

import os
import threading

import pytest

from kvhma.errors import TransferError
from support.parallel import Model, ProcessWorker, Split, prefill, prompt, starting

FULL = Model(("full",) * 7)
GEMMA = Model(("sliding", "sliding", "full", "sliding", "sliding", "full", "sliding"))
NEMOTRON = Model(("state", "full", "state", "state", "full", "state"))
MLA = Model(("mla",) * 5)


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with starting() as make:
        yield make


def hand_over(p, d, name, tokens, *, answer=3):
    """Hand off a prompt. D checks every byte that it reads, so it is enough that it ends and computed no prompt."""
    d.add(name, tokens, answer, prefill(p, name, tokens))
    d.run(name)
    assert d.finished[name].finish_reason is not None
    # At most one token of the prompt, and all tokens of the answer but the last.
    assert d.computed[name] <= 1 + answer


def all_free(p, d):
    p.until(lambda: len(p.leases) == 0 and p.free == p.blocks - 1)
    d.until(lambda: d.free == d.blocks - 1)


PAIRS = {
    "1 to 2": (FULL, Split(), Split(pp=2)),
    "2 to 1": (FULL, Split(pp=2), Split()),
    "2 to 2, cut elsewhere": (FULL, Split(pp=2, layers=(2, 5)), Split(pp=2, layers=(4, 3), block=32)),
    "2 to 3": (FULL, Split(pp=2), Split(pp=3, layers=(1, 2, 4))),
    "2 of 1 to 1 of 2": (FULL, Split(pp=2), Split(tp=2)),
    "2 of 2 to 3 of 1": (FULL, Split(pp=2, tp=2, order="LBNHC"), Split(pp=3)),
    "latents, 3 to 2": (MLA, Split(pp=3), Split(pp=2, block=64, kernel=32)),
    # D's first stage has no layer of full attention, its second stage only layers of full attention.
    "windows, 2 to 3": (GEMMA, Split(pp=2), Split(pp=3, layers=(2, 1, 4))),
    "windows, 3 to 2": (GEMMA, Split(pp=3, layers=(2, 1, 4)), Split(pp=2, kernel=8)),
    # P's first stage has states only.
    "states, 2 to 2": (NEMOTRON, Split(pp=2, layers=(1, 5), block=32), Split(pp=2, layers=(4, 2), block=32)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_stages(start, pair):
    model, of_p, of_d = PAIRS[pair]
    p, d = start("p", model, of_p), start("d", model, of_d)
    for number, length in enumerate((1, 17, 230)):
        hand_over(p, d, f"r{number}", prompt(number, length))
    for worker in d.workers:
        own = set(worker.caches)
        assert worker.sources() == {at for at, other in enumerate(p.workers) if own & set(other.caches)} or of_p.tp > 1
    if "state" not in model.layers:
        # The second prompt begins with one that D has computed: those blocks are hits of its prefix cache.
        d.add("alone", prompt(3, 150), 1)
        d.run("alone")
        hand_over(p, d, "again", prompt(3, 150) + prompt(4, 70))
        assert d.loads[-1].cached >= 64
    all_free(p, d)


@pytest.mark.long
@pytest.mark.parametrize("pair", ["2 of 2 to 3 of 1", "windows, 2 to 3", "states, 2 to 2"])
def test_stages_in_processes_of_their_own(start, pair):
    model, of_p, of_d = PAIRS[pair]
    p, d = (start(name, model, split, worker=ProcessWorker) for name, split in (("p", of_p), ("d", of_d)))
    pids = {worker.pid for worker in (*p.workers, *d.workers)} | {os.getpid()}
    assert len(pids) == len(p.workers) + len(d.workers) + 1
    for number, length in enumerate((1, 17, 230)):
        hand_over(p, d, f"r{number}", prompt(number, length))
    all_free(p, d)


def test_blocks_are_held_until_every_stage_has_read(start, monkeypatch):
    p, d = start("p", FULL, Split()), start("d", FULL, Split(pp=2))
    hold(monkeypatch, d.workers[1], go := threading.Event())
    d.add("r", tokens := prompt(1, 100), 2, prefill(p, "r", tokens))
    results = d.workers[0].connector._worker._results
    d.until(lambda: d.loads and not results.unreported())
    for _ in range(5):
        p.step()
        d.step()
    assert len(p.leases) == 1
    assert "r" not in d.finished
    go.set()
    d.run("r")
    all_free(p, d)


def hold(monkeypatch, worker, go):
    """Let a worker read only after this event."""
    agent = worker.connector._worker._agent
    read = agent.read
    monkeypatch.setattr(agent, "read", lambda *of, **more: (go.wait(30), read(*of, **more))[1])


def fail(monkeypatch, worker, times):
    """Let some reads of a worker fail."""
    agent = worker.connector._worker._agent
    read, left = agent.read, [None] * times

    def fails(*of, **more):
        if left:
            left.pop()
            raise TransferError("the wire is cut")
        return read(*of, **more)

    monkeypatch.setattr(agent, "read", fails)


@pytest.mark.parametrize("model", [FULL, GEMMA], ids=["full", "windows"])
def test_a_stage_that_fails_once_fails_no_request(start, monkeypatch, model):
    p, d = start("p", model, Split(pp=2)), start("d", model, Split(pp=2))
    fail(monkeypatch, d.workers[1], 1)
    hand_over(p, d, "r", prompt(1, 100))
    assert len(d.loads) == 2
    all_free(p, d)


def test_a_stage_that_fails_ends_the_request_and_another_reads_the_same(start, monkeypatch):
    p, d = start("p", FULL, Split()), start("d", FULL, Split(pp=2), recompute=False)
    fail(monkeypatch, d.workers[0], 1)
    params = prefill(p, "r", tokens := prompt(1, 100))
    d.add("r", tokens, 2, params)
    d.run("r")
    assert d.finished["r"].finish_reason.name == "ERROR"
    d.until(lambda: d.free == d.blocks - 1)
    p.step()
    assert len(p.leases) == 1, "it is kept for another one"
    d.add("again", tokens, 2, params)
    d.run("again")
    assert d.finished["again"].finish_reason.name == "LENGTH"
    all_free(p, d)


def test_a_stage_of_p_that_says_no_hello_is_missed(start, caplog):
    p, d = start("p", FULL, Split(pp=2)), start("d", FULL, Split(), recompute=False)
    p.publish(p.workers[:1])
    d.add("r", tokens := prompt(1, 100), 2, prefill(p, "r", tokens))
    d.run("r")
    assert d.finished["r"].finish_reason.name == "ERROR"
    assert "pp_size is 2 in kv_transfer_params, 1 at" in caplog.text
    d.until(lambda: d.free == d.blocks - 1)


def test_a_wrong_byte_is_seen(start):
    """Checks the test itself: otherwise it proves nothing."""
    p, d = start("p", FULL, Split()), start("d", FULL, Split(pp=2))
    tokens = prompt(1, 100)
    params = prefill(p, "r", tokens)
    (cache,) = {cache.untyped_storage().data_ptr(): cache for cache in d.workers[1].caches.values()}.values()
    assert cache is not None
    d.add("r", tokens, 2, params)
    step = d.workers[1].step

    def spoiled(metadata, forward):
        if forward.work:
            cache.untyped_storage()[d._tables["r"][0][3] * cache.stride(0) * cache.element_size() + 5] ^= 1
        return step(metadata, forward)

    d.workers[1].step = spoiled
    with pytest.raises(AssertionError, match=r"reads other bytes of .* tokens \[48\] of"):
        d.run("r")
