# SPDX-License-Identifier: Apache-2.0
"""KvhmaWorker with real agents and a real listener, but no engine: what it reads, reports and waits for."""

import contextlib
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvhma.errors import PeerLostError
from kvhma.oracle import cases
from kvhma.vllm.failures import Failure
from kvhma.vllm.metadata import StepMetadata, WorkerReport
from kvhma.vllm.peers import lease_question as lease
from kvhma.vllm.peers import preconnect
from kvhma.vllm.peers.client import Client
from kvhma.vllm.reads import lease_checks, read_parts, read_pump, read_steps, results
from kvhma.vllm.reads.active_read import ReadState
from kvhma.vllm.reads.read_parts import ReadPart
from kvhma.vllm.reads.results import LoadResults
from kvhma.vllm.telemetry import stats
from kvhma.vllm.telemetry.stats import TransferStats
from kvhma.vllm.wire.messages import Renew
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams
from support.engines.engine import free_port
from support.flat import flat_geometry
from support.leases import ended
from support.waiting import until
from support.workers import (
    PAGE,
    PAGES,
    Decode,
    HeldRead,
    Panic,
    Prefill,
    counted,
    hold_reads,
    load,
    params,
)


@pytest.fixture
def silent():
    """Parameters of an engine that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield params(Address("127.0.0.1", listening.getsockname()[1]), LeaseKey("s", 1), [1])


@pytest.fixture
def p():
    with contextlib.closing(Prefill()) as made:
        yield made


@pytest.fixture
def decode():
    """Make Ds."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(contextlib.closing(Decode(**settings)))


@pytest.fixture
def d(decode):
    return decode()


@pytest.fixture
def met(p, d):
    """D has made its handshake with P, and read one load."""
    d.reads(p, met=[1])


@pytest.fixture
def held_reads(monkeypatch):
    """Keep reads from ending."""
    return hold_reads(monkeypatch)


@pytest.fixture
def renewed(monkeypatch):
    """How many leases each question of D is about, after its reads."""
    found, send = [], Client.send

    def sends(self, question, **more):
        if isinstance(question, Renew):
            found.append(len(question.claims))
        send(self, question, **more)

    monkeypatch.setattr(Client, "send", sends)
    return found


def test_loads_of_a_step_are_read_and_reported_once(p, d, renewed):
    moves = {"a": ([1, 2, 3], [7, 6, 5]), "b": ([9], [20]), "c": ([30, 40, 50, 60], [10, 11, 12, 13])}
    for step in range(2):
        d.memory[:] = 0
        d.start(**{name: (p.remote(name, theirs), ours) for name, (theirs, ours) in moves.items()})
        assert d.ended(*moves) == {}
        expected = np.zeros((PAGES, PAGE), np.uint8)
        for theirs, ours in moves.values():
            expected[ours] = p.pages(theirs)
        assert np.array_equal(d.pages(list(range(PAGES))), expected), step
    assert d.worker.collect(idle=True) == (set(), WorkerReport())
    assert sum(renewed) == 6
    stats = counted(d, "load_seconds", 6)
    assert stats.data["group_bytes"] == {"0 opaque": 2 * 8 * PAGE} == {"0 opaque": sum(stats.data["bytes"])}
    assert stats.data["group_descriptors"] == {"0 opaque": sum(stats.data["selected_descriptors"])}
    assert stats.data["posted_descriptors"] == stats.data["selected_descriptors"]
    assert stats.data["handshakes"] == 1


def test_without_nixls_telemetry_its_descriptors_are_unknown(p, decode, monkeypatch):
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "n")
    d = decode()
    d.start(a=(p.remote("a", [1, 2, 3]), [7, 6, 5]))
    assert d.ended("a") == {}
    stats = counted(d, "load_seconds", 1)
    assert "posted_descriptors" not in stats.data
    assert stats.data["selected_descriptors"] == [3]
    assert "Avg descriptors" in stats.reduce()
    assert "Avg descriptors posted" not in stats.reduce()


def test_one_load_of_a_step_fails_alone(p, decode, silent):
    d = decode(handshake_timeout=2)
    d.start(
        held=(p.remote("held", [1, 2]), [1, 2]),
        unknown=(p.remote("unknown", [3], held=False), [3]),
        outside=(p.remote("outside", [PAGES]), [4]),
        other=(p.remote("other", [7])._replace(digest=b"x" * 16), [7]),  # than P handed out
        silent=(silent, [8]),
        last=(p.remote("last", [5]), [5]),
    )
    failed = {"unknown": "expired", "outside": "request", "other": "request", "silent": "handshake"}
    assert d.ended("held", "last", *failed) == failed
    assert np.array_equal(d.pages([1, 2, 5]), p.pages([1, 2, 5]))
    assert not d.pages([4]).any()
    # A failure keeps no connection busy, and D can read from the engine again.
    d.reads(p, again=[6])


def test_a_load_that_failed_is_kept_as_a_case(p, decode, tmp_path):
    """A load of a block that P does not have: the case shows why, without an engine."""
    d = decode(case_folder=str(tmp_path))
    d.reads(p, good=[1])
    d.start(outside=(p.remote("outside", [PAGES]), [4]))
    assert d.ended("outside") == {"outside": "request"}
    (path,) = until(lambda: list(tmp_path.glob("*.json")))
    d.close()  # which waits for the file
    case = cases.load(path)
    assert (case.local, case.remotes) == (flat_geometry(d.memory), (p.geometry,))
    verdict = cases.check(case)
    assert (verdict.outcome, verdict.text.split(":")[0]) == ("refused", "BlockIdError")


def test_a_lease_that_nobody_speaks_of_may_be_tried_again(p, decode):
    d = decode(handshake_timeout=0.3)
    d.reads(p, first=[1])
    second = p.loads(second=[2])
    p.listener.close()
    d.start(**second)
    failures = until(lambda: d.worker.collect(idle=True)[1].failures)
    assert (failures["second"].cause, failures["second"].transient) == ("expired", True)


def test_engines_of_the_setting_are_known_in_each_of_their_incarnations(p, decode, monkeypatch):
    monkeypatch.setattr(preconnect, "_INTERVAL_SECONDS", 0.05)
    absent = Address("127.0.0.1", free_port())
    d = decode(prefill_engines=[str(absent), str(p.address)], handshake_timeout=0.3)
    wait_for_handshake(d)
    p.listener.close()
    with contextlib.closing(Prefill(p.address)) as second:
        wait_for_handshake(d)
        d.reads(second, a=[3])
        assert "handshakes" not in counted(d, "load_seconds", 1).data, "both were made before"
        # By another of its addresses it is the same engine.
        d.start(b=(second.remote("b", [5])._replace(address=Address("localhost", p.address.port)), [6]))
        assert d.ended("b") == {}
        assert "handshakes" not in counted(d, "load_seconds", 1).data


def wait_for_handshake(d: Decode) -> None:
    """Wait until one handshake has been made since the last call, and no other one."""
    stats = until(d.worker.take_stats)
    assert (stats.data["handshakes"], len(stats.data["handshake_seconds"])) == (1, 1)


def test_who_claims_to_be_another_engine_is_read_only_by_those_who_name_its_address(p, d):
    with contextlib.closing(Prefill(instance=p.instance)) as impostor:
        d.reads(impostor, theirs=[1])
        d.reads(p, ours=[2])


# --- who waits, and who reads ------------------------------------------------------------------------------------


@pytest.fixture
def waits(d, monkeypatch):
    """How long the worker's steps waited for the next load, each time."""
    found = []
    wait_for = d.worker._results._has_ended.wait_for
    monkeypatch.setattr(d.worker._results._has_ended, "wait_for", lambda *a: (found.append(a[1]), wait_for(*a)))
    return found


def test_an_idle_step_waits_for_all_loads(d, silent, waits):
    assert d.worker.collect(idle=True) == (set(), WorkerReport())
    assert not waits, "there is nothing to wait for"
    d.start(silent=(silent, [1]))
    assert d.worker.collect(idle=True) == (set(), WorkerReport())
    assert len(waits) == 1, "nothing was read meanwhile"
    assert d.ended("silent") == {"silent": "handshake"}
    d.worker.start_loads(StepMetadata(refusals={"r": Failure("refused", "no", transient=False)}))
    waits.clear()
    assert d.ended("r") == {"r": "refused"}
    assert not waits


def test_a_busy_step_waits_for_no_load(p, d, met, waits, held_reads):
    waits.clear()
    d.start(**p.loads(a=[2]))
    assert d.worker.collect(idle=False) == (set(), WorkerReport())
    assert not waits
    held_reads.set()
    assert d.ended("a") == {}


PIECE, WHOLE = (
    SimpleNamespace(request_id=name, piece=name == "piece", remote=SimpleNamespace(lease=30.0))
    for name in ("piece", "whole")
)


@pytest.mark.parametrize(
    ("expected", "ends", "wait"),
    [
        ([WHOLE], WHOLE, {}),
        ([PIECE], PIECE, {"for_pieces": True}),
        ([PIECE, WHOLE], WHOLE, {"for_pieces": True}),
    ],
    ids=["a load", "a piece", "a load, while a piece is read"],
)
def test_a_step_waits_for_one_end_and_for_nothing_after_it(monkeypatch, expected, ends, wait):
    for limit in ("_NEXT_READ_SECONDS", "_MAX_WAIT_SECONDS"):
        monkeypatch.setattr(results, limit, 60.0)
    found = LoadResults()
    found.expect(expected)

    def waited(**given):
        began = time.monotonic()
        found.wait(**given)
        return time.monotonic() - began

    end = (found.end_piece, (PIECE.request_id, None)) if ends is PIECE else (found.succeed_load, (ends.request_id, {}))
    threading.Timer(0.1, *end).start()
    assert 0.09 <= waited(**wait) < 30
    assert waited(**wait) < 30, "it is to be reported first"
    ended, report = found.take_results()
    assert (ended, report.pieces) == ((set(), {"piece": 1}) if ends is PIECE else ({"whole"}, {}))
    if ends is PIECE:
        assert waited(**wait) < 30, "nothing is left"


# --- what is asked after the read ----------------------------------------------------------------------------


def test_a_read_during_which_d_stood_still_is_not_believed(p, d, held_reads, monkeypatch):
    """D's clock stops in a suspended machine: by it a read of 8 s may end before a lease of 3 s."""
    p.lease_for(0.3)
    now = time.monotonic()
    for module in (lease, lease_checks, read_pump, read_steps):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    d.start(**p.loads(a=[1]))
    until(lambda: ["a"] in ended(p.leases).values())  # P frees the blocks
    p.pages(slice(1, 2))[:] = 0  # and another request writes there
    held_reads.set()
    assert d.ended("a") == {"a": "expired"}


def test_a_read_that_p_kept_the_blocks_for_is_right_however_long_it_took(p, d, held_reads):
    p.lease_for(0.3)
    loads = p.loads(a=[1])
    d.start(**loads)
    for _ in range(8):
        time.sleep(0.1)
        p.leases.renew([loads["a"][0].claim(1)])  # as the renewer does
    held_reads.set()
    d.has_read(p, a=[1])


def test_nothing_is_asked_before_the_read_and_loads_of_a_step_are_one_question(p, d, held_reads, renewed):
    loads = {name: [number] for number, name in enumerate("abcde", 1)}
    d.start(**p.loads(**loads))
    time.sleep(0.3)
    assert not renewed
    d.worker._pump._arrived.put(held_reads.set)  # in its thread, so that all reads end in one turn
    d.has_read(p, **loads)
    assert renewed == [5]


# --- exceptions --------------------------------------------------------------------------------------------------


class PanicText(Panic):
    """Formatting it raises, too."""

    def __str__(self) -> str:
        raise Panic


def raises_once(monkeypatch, owner, name: str, error: BaseException, *, after: bool = False) -> list[object]:
    """Make a function raise in its next call, before or after its work; return the calls that did."""
    function = getattr(owner, name)
    calls: list[object] = []

    def wrapped(*args, **more):
        if calls:
            return function(*args, **more)
        calls.append(args)
        if after:
            function(*args, **more)
        raise error

    monkeypatch.setattr(owner, name, wrapped)
    return calls


IN_A_LOAD = {
    "find the engine": lambda worker: (worker._engines, "_find"),
    "find room": lambda worker: (worker._pump._steps._memory, "take_places"),
    "zero": lambda worker: (worker._pump._steps._memory, "zero"),
    "post": lambda worker: (worker._agent, "read"),
    "poll": lambda worker: (HeldRead, "poll"),
    "claim": lambda worker: (PrefillParams, "claim"),
    "ask": lambda worker: (lease_checks, "LeaseQuestion"),
    "poll the answer": lambda worker: (lease.LeaseQuestion, "poll"),
    "check the answer": lambda worker: (lease.LeaseQuestion, "check"),
    "copy": lambda worker: (worker._pump._steps._memory, "copy_in"),
    "leave room": lambda worker: (worker._pump._steps._memory, "release_places"),
    "release of the engine": lambda worker: (worker._engines, "release_engine"),
    "note": lambda worker: (worker._results, "note_load_read"),
    "report": lambda worker: (worker._results, "succeed_load"),
}
"""The calls of a load."""


@pytest.mark.parametrize(
    ("what", "kind"),
    [*((what, Panic) for what in IN_A_LOAD), ("post", PanicText), ("post", SystemExit), ("post", RuntimeError)],
)
def test_whatever_is_raised_in_a_load_ends_that_load(p, d, met, held_reads, monkeypatch, what, kind):
    """A panic of Rust is no `Exception`. Calls of the loader are covered too."""
    held_reads.set()
    calls = raises_once(monkeypatch, *IN_A_LOAD[what](d.worker), kind())
    d.start(**p.loads(hit=[2]))
    assert d.ended("hit") == {"hit": "internal"}
    assert calls
    d.reads(p, after=[3], too=[4])
    assert "thread_restarts" not in counted(d, "load_seconds", 3).data, "the threads were not even touched"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "what",
    ["_wait", "_drive_own", "_connect", "_drive", "_measure_reported", "measure"],
)
def test_a_thread_that_meets_an_error_of_its_own_begins_again(p, d, met, held_reads, monkeypatch, what, after):
    owner = d.worker._pump._metrics if what == "measure" else d.worker._pump
    total = TransferStats()
    calls = raises_once(monkeypatch, owner, what, Panic("p"), after=after)
    for step in range(3):
        names = [f"{name}{step}" for name in "ab"]
        held_reads.clear()
        d.start(**p.loads(**{name: [step + 2] for name in names}))
        time.sleep(0.05)  # so that the pump gets them
        held_reads.set()
        assert set(d.ended(*names).values()) <= {"internal"}
    assert calls
    assert np.array_equal(d.pages([4]), p.pages([4]))
    until(lambda: total.aggregate(d.worker.take_stats() or TransferStats()).data.get("thread_restarts"))
    assert sum(total.data["thread_restarts"].values()) == 1


def test_a_report_that_fails_again_and_again_is_logged_and_tried_again(p, d, met, caplog):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("succeed_load", "fail_load"):
            patch.setattr(d.worker._results, name, lambda *_, **__: 1 // 0)
        d.start(**p.loads(a=[2]))
        until(lambda: caplog.text.count("kvhma-reads crashed and was restarted") == 2)
    assert d.ended("a") == {"a": "internal"}
    assert counted(d, "load_seconds", 1).data["thread_restarts"]["kvhma-reads"] >= 2


def test_a_read_that_is_in_flight_when_its_load_fails_is_waited_for(p, d, met, held_reads, monkeypatch):
    """vLLM gives the blocks to another request as soon as a load has failed: the read would write into them."""
    read, calls = d.worker._agent.read, []

    def second_fails(*args, **more):
        calls.append(args)
        handle = read(*args, **more)
        (active,) = d.worker._pump._reads
        active.parts.append(ReadPart(0, args[1], args[2], handle))
        raise Panic("after the post")

    monkeypatch.setattr(d.worker._agent, "read", second_fails)
    d.start(**p.loads(a=[1]))
    until(lambda: calls)
    time.sleep(0.2)
    assert d.worker.collect(idle=True)[0] == set()
    held_reads.set()
    assert d.ended("a") == {"a": "internal"}


# --- turns ---------------------------------------------------------------------------------------------------


def waits_in(d, state):
    return until(lambda: [read for read in d.worker._pump._reads if read.state is state])


def test_places_go_to_the_read_that_has_waited_longest(p, decode, held_reads, monkeypatch):
    """There is room for one read. Another one comes whenever one has ended."""
    d, order = decode(slots=(0, 1)), []
    loads = p.loads(first=[1], waits=[2], a=[3], b=[4], c=[5], d=[6])
    succeed, newcomers = d.worker._results.succeed_load, iter("abcd")

    def succeeds(request_id, *given, **more):
        order.append(request_id)
        succeed(request_id, *given, **more)
        if (name := next(newcomers, None)) is not None:
            d.worker.start_loads(StepMetadata([load(name, *loads[name])]))

    monkeypatch.setattr(d.worker._results, "succeed_load", succeeds)
    for name, state in (("first", ReadState.READING), ("waits", ReadState.PLACING)):
        d.start(**{name: loads[name]})
        waits_in(d, state)
    held_reads.set()
    assert d.ended(*loads) == {}
    assert order == ["first", "waits", *"abcd"]


def test_a_read_that_takes_long_to_post_does_so_in_turns(p, d, held_reads, monkeypatch):
    """A transport may copy the bytes within the post. Each part here takes as long as its turn."""
    monkeypatch.setattr(read_parts, "PART_BYTES", PAGE)
    monkeypatch.setattr(read_steps, "_POST_SECONDS", 0.0)
    d.start(**p.loads(small=[1]))
    waits_in(d, ReadState.READING)
    handle, reported = d.worker._pump._steps._handle, []

    def posts(engine, part):
        reported.append(d.worker._results.take_results()[0])
        held_reads.set()
        if {"small"} not in reported:
            time.sleep(0.05)  # P's answer about the small one needs another thread
        return handle(engine, part)

    monkeypatch.setattr(d.worker._pump._steps, "_handle", posts)
    blocks = list(range(2, 62, 2))
    d.start(**p.loads(big=blocks))
    until(lambda: len(reported) == len(blocks))
    assert {"small"} in reported, "the small one has ended while the other one was posted"
    d.has_read(p, big=blocks)


def test_a_handshake_that_lasts_does_not_shorten_pythons_turns(p, decode, silent, monkeypatch):
    d = decode(handshake_timeout=60)
    d.reads(p, met=[1])
    d.start(silent=(silent, [2]))
    waits_in(d, ReadState.CONNECTING)
    intervals, poll = [], read_steps._poll
    monkeypatch.setattr(read_steps, "_poll", lambda read: (intervals.append(sys.getswitchinterval()), poll(read)))
    go_on = hold_reads(monkeypatch)
    d.start(**p.loads(a=[3]))
    until(lambda: len(intervals) > 9)
    assert intervals[9] > 1e-3, "only the pass that starts a read has short turns"
    go_on.set()
    assert d.ended("a") == {}


def test_a_worker_that_is_closed_does_not_connect(p, held_reads, monkeypatch):
    """A read in flight that loses its connection is dropped: no engine waits for it any more."""
    d = Decode()
    d.start(**p.loads(a=[1]))
    waits_in(d, ReadState.READING)
    monkeypatch.setattr(d.worker._engines, "acquire_engine", lambda *_: pytest.fail("it connects"))

    def loses(self):
        self._handle.poll()
        raise PeerLostError("cut off")

    close = d.worker._pump.join
    monkeypatch.setattr(HeldRead, "poll", lambda self: loses(self) if d.worker._pump._closing else "running")
    monkeypatch.setattr(d.worker._pump, "join", lambda timeout: close(60))
    d.close()
    assert not d.worker._pump._thread.is_alive()


# --- what lasts ----------------------------------------------------------------------------------------------


def test_a_load_that_lasts_longer_than_its_lease_is_said_once(p, d, held_reads, caplog, monkeypatch):
    """While a network was cut for 45 s requests hung for 72 s, without a line of the log or a count (S9)."""
    monkeypatch.setattr(stats, "_GAUGE_SECONDS", 0.1)
    d.start(slow=(p.remote("at p", [1, 2, 3], lease=0.2), [4, 5, 6]), quick=(p.remote("b", [7]), [7]))
    assert d.worker.take_stats() is None
    until(lambda: d.worker.collect(idle=True) and "has taken" in caplog.text)
    for _ in range(20):
        assert d.worker.collect(idle=True) == (set(), WorkerReport())
    (said,) = (record.getMessage() for record in caplog.records if "has taken" in record.getMessage())
    for part in ("the load of slow", str(p.address), "it holds 3 blocks here and 'at p' at P"):
        assert part in said
    data = d.worker.take_stats().data
    assert (data["slow_loads"], data["loads_in_flight"]) == (1, 2)
    assert data["oldest_load_seconds"] > 0.2
    held_reads.set()
    assert d.ended("slow", "quick") == {}
    data = d.worker.take_stats().data
    assert (data["loads_in_flight"], data["oldest_load_seconds"]) == (0, 0.0)
    assert "slow_loads" not in data


def test_a_result_is_reported_once_whoever_says_it_again():
    results = LoadResults()
    results.expect([], ["r"])
    results.fail_load("r", Failure("refused", "no", transient=False))
    results.fail_load("r", Failure("internal", "again", transient=False))
    results.succeed_load("r", {0: 1})
    results.succeed_load("unknown", {})
    ended, report = results.take_results()
    assert ended == {"r"}
    assert (report.failures["r"].cause, report.first_tokens) == ("refused", {})
    assert results.stats.take().data["failed_loads"] == {"refused": 1}
