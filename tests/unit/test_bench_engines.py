# SPDX-License-Identifier: Apache-2.0
"""What benches/connectors.py makes of its measurements: processor times, ratios, tables, the picture."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benches"))

import connectors
from handoffs import cpu, pairs, tables
from handoffs.tables import EVEN, OURS, THEIRS, Row
from support.engines import Answer


def proc(folder: Path, of: dict[int, dict[int, int]]) -> Path:
    """A /proc with some threads, by process, and the nanoseconds they ran."""
    for pid, threads in of.items():
        for thread, ran in threads.items():
            task = folder / str(pid) / "task" / str(thread)
            task.mkdir(parents=True)
            (task / "schedstat").write_text(f"{ran} 123 7\n")
        (folder / str(pid) / "stat").write_text(f"{pid} (a) name) S 1) S {pid - 1} 1 1 0\n")
    return folder


def test_processor_time_is_read_by_thread(tmp_path: Path) -> None:
    folder = proc(tmp_path, {7: {7: 2_000_000_000, 8: 500_000}, 9: {9: 1}})
    (folder / "7" / "task" / "10").mkdir()  # it ended meanwhile
    assert cpu.read([7, 11], folder) == {(7, 7): 2.0, (7, 8): 0.0005}
    assert cpu.parent(7, folder) == 6


def test_threads_are_added_up_by_purpose() -> None:
    before = {(1, 1): 5.0, (1, 2): 1.0, (2, 2): 3.0, (1, 99): 4.0}
    after = {(1, 1): 6.0, (1, 2): 1.5, (1, 3): 0.25, (1, 4): 0.125, (2, 2): 3.5, (2, 5): 0.5, (3, 3): 0.75}
    names = {1: {1: "MainThread", 2: "kvhma-load", 3: "NIXL", 4: "kvhma-load"}, 2: {2: "MainThread", 5: "x"}}
    found = cpu.by_group(cpu.spent(before, after), {1: "worker", 2: "scheduler"}, names)
    assert found == {
        "worker: the worker's own thread": 1.0,
        "worker: kvhma-load": 0.625,
        "worker: NIXL": 0.25,
        "scheduler: the scheduler's own thread": 0.5,
        "scheduler: others of vLLM": 0.5,
        "front end: all threads": 0.75,
    }


def test_a_request_s_processor_time_counts_calls_inside_of_the_engine_s_thread_once() -> None:
    threads = {"worker: the worker's own thread": 4.0, "worker: kvhma-load": 1.0, "front end: all threads": 2.0}
    calls = {"worker: in calls of the connector": 0.5, "scheduler: in calls of the connector": 0.25}
    assert pairs.processor_times({"D": threads | calls}, 2) == {
        "D: all processes": 3.5,
        "D: the connector's calls and threads, and NIXL's": 0.875,
        "D, front end: all threads": 1.0,
        "D, scheduler: all threads": 0.0,
        "D, scheduler: in calls of the connector": 0.125,
        "D, worker: all threads": 2.5,
        "D, worker: in calls of the connector": 0.25,
        "D, worker: kvhma-load": 0.5,
        "D, worker: the worker's own thread": 2.0,
    }
    plain = pairs.processor_times({"P, prefill": threads}, 1)
    assert not [label for label in plain if "connector" in label]


def test_ratios_are_of_the_same_round() -> None:
    row = Row("load")
    for ours, theirs in ((0.001, 0.002), (0.010, 0.010), (0.002, 0.006), (0.004, 0.020), (0.001, 0.004)):
        row.add(OURS, ours)
        row.add(THEIRS, theirs)
    # 2, 1, 3, 5, 4: the quartiles of five are the second and the fourth.
    assert row.cells((OURS, THEIRS)) == ["2.00 ms", "6.00 ms", "3.00× (2.00 to 4.00) better"]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 1.0, 1.0], [0.5, 0.6, 0.7], "0.60× (0.55 to 0.65) worse"),
        ([1.0, 1.0, 1.0], [0.5, 1.0, 2.0], "1.00× (0.75 to 1.50) tie"),
        ([2.0], [4.0], "2.00×"),
        ([1.0, -1.0], [1.0, 1.0], "no ratio"),
        ([1.0, 1.0], [1.0], "–"),
        ([1.0], [], "–"),
    ],
)
def test_ratios(ours: list[float], theirs: list[float], expected: str) -> None:
    row = Row("x", "", {OURS: ours, EVEN: theirs})
    assert row.cells((OURS, EVEN))[2] == expected


@pytest.mark.parametrize("count", [3, 4])
def test_everyone_comes_first_and_last_equally_often(count: int) -> None:
    columns = "abcd"[:count]
    orders = [tables.rotated(columns, number) for number in range(2 * count)]
    assert all(sorted(order) == list(columns) for order in orders)
    for place in (0, -1):
        assert sorted(order[place] for order in orders) == sorted(columns * 2)


def test_a_turn_is_made_of_what_d_s_worker_and_scheduler_recorded() -> None:
    def step(begun: float, calls: float, **more: object) -> dict[str, object]:
        return {"begun": begun, "calls": calls, "ordered": {}, "loaded": {}, "failed": []} | more

    steps = [
        step(1.0, 0.5),
        step(2.0, 0.25, ordered={"a": 2.5, "b": 2.5}),
        step(4.0, 0.125, loaded={"a": 4.5}),
        step(5.0, 0.0625, loaded={"b": 5.5}),
        step(9.0, 1.0),
    ]
    answers = [
        Answer([1, 2], [], [], "length", None, None, None, first_seconds=6.0 + i, seconds=7.5 + i, begun=1.5)
        for i in (0, 1)
    ]
    turn = pairs.summary([{"steps": steps, "events": []}, {"steps": [], "events": []}], answers, [0.5], {})
    assert turn.loads == [2.0, 3.0]
    assert turn.first_tokens == [6.0, 7.0]
    assert turn.after == [1.5, 1.5]
    assert turn.calls == [0.25, 0.125, 0.0625]
    assert (turn.quiet, turn.gaps) == ([1.0], [2.0, 1.0, 4.0])
    assert turn.stages == {}


@pytest.mark.parametrize(
    ("more", "error"),
    [({"failed": ["a"]}, "loads failed"), ({"loaded": {}}, "1 requests, but 1 loads were ordered and 0 reported")],
)
def test_a_turn_with_failed_loads_does_not_count(more: dict[str, object], error: str) -> None:
    step = {"begun": 1.0, "calls": 0.0, "ordered": {"a": 1.0}, "loaded": {"a": 2.0}, "failed": []} | more
    answer = Answer([1], [], [], "length", None, None, None, first_seconds=1.0, seconds=1.0)
    with pytest.raises(RuntimeError, match=error):
        pairs.summary([{"steps": [step], "events": []}], [answer], [], {})


@pytest.mark.parametrize(
    ("seconds", "rounds", "starts"),
    [(1.0, connectors.ROUNDS * connectors.STARTS, connectors.STARTS), (1000.0, connectors.LEAST_ROUNDS, 2)],
)
def test_a_row_has_rounds_of_several_starts_however_long_one_takes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int, starts: int
) -> None:
    now = [0.0]
    posted = [0.0]

    class Pairs(dict):
        def __missing__(self, _: str) -> SimpleNamespace:
            return SimpleNamespace(hit_tokens=lambda _: 0, d=SimpleNamespace(engine=None))

    class Warm(connectors.Warm):
        def _round(self, *_: object) -> None:
            now[0] += seconds
            posted[0] += 3 * 16

    monkeypatch.setattr(connectors.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(connectors, "counted", lambda *_: (posted[0], posted[0] * 2**20))
    warm = Warm(connectors.CONNECTORS, 16, 301)
    for _ in range(connectors.STARTS):
        warm.measure(Pairs())
    assert (warm.rounds, warm.starts) == (rounds, starts)
    for row in warm.counts:
        assert [len(values) for values in row.values.values()] == [starts] * 3
    assert warm.counts[0].values[OURS] == [3.0] * starts
