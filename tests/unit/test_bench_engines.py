# SPDX-License-Identifier: Apache-2.0
"""What benches/connectors.py makes of its measurements: processor times, ratios, tables, the picture."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benches"))

import connectors
import harness
from handoffs import pairs
from handoffs.tables import EVEN, OURS, THEIRS, Row
from support.engines import Answer


def test_ratios_are_of_the_same_round() -> None:
    row = Row("load")
    for ours, theirs in ((0.001, 0.002), (0.010, 0.010), (0.002, 0.006), (0.004, 0.020), (0.001, 0.004)):
        row.add(OURS, ours)
        row.add(THEIRS, theirs)
    # 2, 1, 3, 5, 4: the quartiles of five are the second and the fourth.
    assert row.cells() == {OURS: "2.00 ms", THEIRS: "6.00 ms", f"{THEIRS} / kvhma": "3.00× (2.00 to 4.00) better"}
    assert row.medians(THEIRS) == "2.00 ms; 6.00 ms"


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
    assert Row("x", "", {OURS: ours, EVEN: theirs}).ratio(EVEN) == expected


@pytest.mark.parametrize("count", [3, 4])
def test_everyone_comes_first_and_last_equally_often(count: int) -> None:
    columns = "abcd"[:count]
    orders = [harness.rotated(columns, number) for number in range(2 * count)]
    assert all(sorted(order) == list(columns) for order in orders)
    for place in (0, -1):
        assert sorted(order[place] for order in orders) == sorted(columns * 2)


def test_summary_of_a_turn() -> None:
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
    assert (turn.quiet_calls, turn.gaps) == ([0.5], [2.0, 1.0, 4.0])
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
def test_rounds_and_starts_of_a_row(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int, starts: int) -> None:
    now = [0.0]
    posted = [0.0]

    class Pairs(dict):
        def __missing__(self, _: str) -> SimpleNamespace:
            return SimpleNamespace(d=SimpleNamespace(engine=None))

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
