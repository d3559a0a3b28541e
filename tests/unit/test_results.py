# SPDX-License-Identifier: Apache-2.0
"""Figures of README and the pages of benchmarks are those of the last runs in benches/*.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVEN = "NixlConnector, even terms"
WARM = r"^\w+ \([^)]*\): \d+ at a time[^:]*$"
SEPARATE = r"P and D on separate cores: \d+ at a time[^:]*$"
LARGE = r"16 loads of"
KINDS = ("FA", "FA + SWA", "FA + Mamba2", "FA + GDN", "MLA")


@dataclass(frozen=True)
class Table:
    """A table with the heading above it."""

    heading: str
    columns: list[str]
    rows: list[list[str]]

    def cell(self, row: str, column: str) -> str:
        """The cell of a named row in a named column. `/` is the last column of ratios, that on even terms."""
        names = [name.removesuffix(" kvhma") for name in self.columns[::-1]]
        at = len(names) - 1 - names.index(column)
        (found,) = (cells[at] for cells in self.rows if cells[0] == row)
        return found


@cache
def tables(name: str) -> list[Table]:
    """The tables of a page or a file of results."""
    found, heading, lines = [], "", []
    for line in [*(ROOT / name).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split("|")])
        elif lines:
            found.append(Table(heading, lines[0], lines[2:]))
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def engines(heading: str) -> list[Table]:
    return [table for table in tables("benches/RESULTS_E2E.md") if re.search(heading, table.heading)]


def number(cell: str) -> float:
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    assert found is not None, cell
    return float(found[0].replace(",", ""))


def numbers(of: Iterable[Table], row: str, column: str) -> list[float]:
    return [number(table.cell(row, column)) for table in of]


def ties(of: Iterable[Table], row: str) -> int:
    return sum(table.cell(row, "/").endswith(" tie") for table in of)


def span(found: Iterable[float], digits: int = 0, unit: str = " ms") -> str:
    many = sorted(found)
    least, most = f"{many[0]:.{digits}f}", f"{many[-1]:.{digits}f}"
    return least + unit if least == most else f"{least} to {most}{unit}"


def short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.2f}"


def longest_steps() -> list[tuple[float, float, float]]:
    """The ratio, kvhma's and vLLM's milliseconds of each run with large loads."""
    row = "longest time of the connector in a step"
    columns = (numbers(engines(LARGE), row, column) for column in ("/", "kvhma", EVEN))
    return list(zip(*columns, strict=True))


def scheduler(caches: str, tokens: str) -> list[float]:
    """The ratio, kvhma's and vLLM's milliseconds of a request, P and D together."""
    (table,) = (table for table in tables("benches/RESULTS_SCHEDULER.md") if "NixlConnector / kvhma" in table.columns)
    (cells,) = (cells for cells in table.rows if cells[:2] == [caches, tokens])
    ours, theirs = (number(cells[at]) / 1000 for at in (4, 7))
    return [number(cells[8]), ours, theirs]


def following(row: str, rate: str) -> list[tuple[float, float]]:
    """Milliseconds with a ticket, and of one request after the other, in each table that has the rate."""
    found = [table for table in tables("benches/RESULTS_FOLLOWING.md") if table.columns[0] == "rate"]
    at = found[0].columns.index("followed"), found[0].columns.index("one after the other")
    return [
        (number(cells[at[0]]), number(cells[at[1]]))
        for table in found
        for cells in table.rows
        if cells[:2] == [rate, row]
    ]


def serving(row: str, column: str) -> dict[str, tuple[float, str]]:
    """The ratio to a column, and whether it is a tie, by the heading of each table of vLLM's own client."""
    found = {}
    for table in tables("benches/RESULTS_SERVE.md"):
        if column not in table.columns:
            continue
        ratio = re.search(r"([\d.]+)× \(.*\) (\w+)$", table.cell(row, column))
        assert ratio is not None, table
        found[table.heading] = float(ratio[1]), ratio[2]
    return found


def planning() -> tuple[float, float]:
    """The best ratios to vLLM's functions: from arrays, and from lists."""
    (table,) = (table for table in tables("benches/RESULTS_VLLM.md") if "vLLM's whole path" in table.columns)
    of: dict[bool, list[float]] = {True: [], False: []}
    arrays = False
    for cells in table.rows:
        # The row of the caller's memory continues the one of arrays above it.
        arrays = cells[1].startswith("int32 arrays") or cells[1].startswith("the same")
        of[arrays].append(number(cells[4]))
    return max(of[True]), max(of[False])


def fewer_bytes() -> tuple[float, int, int]:
    """The largest share of bytes that vLLM moves more, rows that tie, and all rows."""
    found = [
        cells[-1]
        for table in engines("descriptors and bytes of a request")
        for cells in table.rows
        if cells[0].endswith(": bytes")
    ]
    return 1 - 1 / max(map(number, found)), sum(cell.endswith(" tie") for cell in found), len(found)


def claims() -> dict[str, tuple[str, str, str]]:
    """The first table of docs/benchmarks.md: best, tie and worst of each claim that has figures."""
    steps = sorted(longest_steps())
    first, load = (numbers(engines(WARM), row, "/") for row in ("first token", "load"))
    worst_load = min(numbers(engines(LARGE), "load, slowest of 16", "/"))
    apart = min(engines(SEPARATE), key=lambda table: number(table.cell("first token", "/")))
    while_read = numbers(engines(f"{WARM[:-1]}: processor time"), "P, hand-off: all processes", "/")
    arrays, lists = planning()
    digest = next(table for table in tables("benches/RESULTS.md") if "floor: Python adds them up" in table.columns)
    full, sliding = scheduler("full attention", "1,000"), scheduler("full and sliding", "131,000")
    ticket, after = max(following("after P's end", "1gbit"), key=lambda pair: pair[1] - pair[0])
    slow, fast = min(following("first token", "unlimited"), key=lambda pair: pair[1] / pair[0])
    torch = [number(cells[-1]) for table in tables("benches/RESULTS_TORCH.md") for cells in table.rows]
    sums = [number(cells[-1]) for cells in tables("benches/RESULTS_DIGESTS.md")[0].rows]
    share, equal, rows = fewer_bytes()
    rates = sorted(serving("requests", EVEN).values())
    (slowest, of_slowest), (fastest, of_fastest) = rates[0], rates[-1]
    assert (of_slowest, of_fastest) == ("tie", "better"), "the row below names both"
    return {
        "longest delay of a step while 16 large caches arrive": (
            f"{short(steps[-1][1])} ms; `NixlConnector` {short(steps[-1][2])} ms",
            "",
            f"{short(steps[0][1])} ms; {short(steps[0][2])} ms",
        ),
        "first token of a warm hand-off, NIXL on even terms": (
            f"{max(first):.2f} ×",
            f"{ties(engines(WARM), 'first token')} of {len(first)} rows",
            f"{min(first):.2f} ×; with a core each {number(apart.cell('first token', '/')):.2f} ×, a tie",
        ),
        "requests a second, 1 to 32 at a time, on even terms": (
            f"{fastest:.2f} ×",
            f"{sum(verdict == 'tie' for _, verdict in rates)} of {len(rates)} rows",
            f"{slowest:.2f} ×, a tie; **{min(ratio for ratio, verdict in rates if verdict == 'worse'):.2f} ×**",
        ),
        "a warm load, on even terms": (
            f"{max(load):.2f} ×",
            f"{ties(engines(WARM), 'load')} of {len(load)} rows",
            f"slowest of 16 large loads: **{worst_load:.2f} ×**",
        ),
        "processor time of P while D reads": (f"{max(while_read):.0f} × less", "", f"{min(while_read):.0f} × less"),
        "bytes": (f"{share:.0%} fewer".replace("%", " %"), f"{equal} of {rows} rows", "the same"),
        "planning, compared with numpy or vLLM's functions": (
            f"{arrays:.0f} × from arrays, {lists:.0f} × from lists",
            "sorting random lists",
            f"a prompt's digest takes **{1 / min(number(cells[-1]) for cells in digest.rows):.1f} ×** as long as "
            "adding its ids",
        ),
        "scheduler time for a request": (
            f"{sliding[0]:.1f} ×",
            f"{scheduler('full attention', '131,000')[0]:.2f} ×",
            f"**{full[0]:.1f} ×**: {full[1]:.1f} ms, not {full[2]:.1f} ms, for 1,000 tokens",
        ),
        "first token after P's end, reading while P computes": (
            f"{ticket:.0f} ms, not {after:.0f} ms, at 1 Gb/s",
            "no rate limit",
            f"from its start: {slow / 1000:.2f} s, not {fast / 1000:.2f} s, no rate limit",
        ),
        "one buffer for all layers": (f"{max(torch):.1f} ×", "most rows", f"**{min(torch):.1f} ×**"),
        "a digest, compared with XXH3": ("", "", f"**takes {span(sums, 0, ' ×')}** as long"),
    }


CLAIMS = claims()


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_first_table_has_the_figures_of_the_last_run(claim: str) -> None:
    (cells,) = (cells for cells in tables("docs/benchmarks.md")[0].rows if cells[0] == claim)
    assert tuple(cells[1:4]) == CLAIMS[claim], "benches/ has a new run: the page has to follow"


def test_each_row_with_figures_is_compared() -> None:
    rows = tables("docs/benchmarks.md")[0].rows
    others = {cells[0] for cells in rows} - CLAIMS.keys()
    assert others == {"descriptors", "engines on GPUs; two hosts"}
    (cells,) = (cells for cells in rows if cells[0] == "descriptors")
    assert "P block 16 to D block 64, heads outside" in cells[3]
    counts = tables("benches/COUNTS.md")[0]
    more = {row[0]: number(row[4]) for row in counts.rows}
    assert more["P block 16 → D block 64, heads outside of tokens"] == max(more.values()) > more["equal ranks"] == 0


def test_the_readme_has_the_figures_of_the_last_run() -> None:
    steps, separate = longest_steps(), engines(SEPARATE)
    extra = "its time to first token, less that of a warm one"
    first = numbers(engines(WARM), "first token", "/")
    (long,) = (table for table in separate if "16 at a time, 2,001" in table.heading)
    assert ties((table for table in separate if table is not long), "first token") == len(separate) - 1
    small = scheduler("full attention", "1,000")
    row = "load, slowest of 16"
    (spins,) = engines(r"nemotron_h.*spin for 1 ms")
    expected = {
        "longest delay of a step while 16 large caches arrive": (
            span((ours for _, ours, _ in steps), 1),
            span(theirs for _, _, theirs in steps),
        ),
        "extra wait of the first hand-off between two engines": tuple(
            span(numbers(engines("first request"), extra, column)) for column in ("kvhma", EVEN)
        ),
        "first token, P and D share two cores": (f"{span(first, 1, ' ×')} as early", ""),
        "first token, a core each (full + sliding)": (
            f"as early; {number(long.cell('first token', '/')):.1f} × for 16 long prompts",
            "",
        ),
        "requests a second, 1 to 32 at a time, P and D share two cores": (
            f"{span((ratio for ratio, _ in serving('requests', EVEN).values()), 2, ' ×')} as many",
            "",
        ),
        "bytes": (f"the same, or up to {fewer_bytes()[0]:.0%} fewer".replace("%", " %"), ""),
        "slowest of 16 large loads (full + Mamba2, short spins)": (
            f"{number(spins.cell(row, '/')):.2f} × as early",
            "",
        ),
        "scheduler time of a small prompt, P and D": (f"{small[1]:.1f} ms", f"{small[2]:.1f} ms"),
    }
    shown = {cells[0]: tuple(cells[1:3]) for cells in tables("README.md")[0].rows}
    assert {claim: shown.get(claim) for claim in expected} == expected
    others = " ".join(cells[0] + cells[1] for cells in tables("README.md")[0].rows if cells[0] not in expected)
    assert not re.search(r"\d", re.sub(r"\(http[^)]*\)", "", others)), "figures that no test compares"


SERVED = (
    ("requests", EVEN),
    ("the same, p99", EVEN),
    ("processor time of the engines, a request", EVEN),
    ("requests", "NixlConnector"),
    ("requests", "kvhma, tickets"),
)


def test_the_page_of_serving_has_the_figures_of_the_last_run() -> None:
    expected = []
    for heading in serving(*SERVED[0]):
        found = [serving(*asked).get(heading) for asked in SERVED]
        cells = [f"{cell[0]:.2f}×" + " (tie)" * (cell[1] == "tie") if cell else "" for cell in found]
        expected.append([heading, *cells])
    (shown,) = tables("docs/benchmarks-serving.md")
    assert shown.rows == expected


def test_the_page_of_engines_has_the_figures_of_the_last_run() -> None:
    _, warm, counted, separate, large, *_ = tables("docs/benchmarks-engines.md")
    expected = []
    for at_once in (1, 16):
        for kind in KINDS:
            pair = engines(rf"\({re.escape(kind)}\): {at_once} at a time, [^:]*$")
            assert len(pair) == 2
            even = [[f"{value:.2f}×" for value in numbers(pair, row, "/")] for row in ("first token", "load")]
            unchanged = [
                f"{number(cells[3]):.2f}×" for table in pair for cells in table.rows if cells[0] == "first token"
            ]
            expected.append(["; ".join(values) for values in (*even, unchanged)])
    assert [cells[1:] for cells in warm.rows] == expected
    rows = {"first tokens": "first token", "loads": "load", "the rest of the answer": "second token, after the first"}
    for name, first, second in counted.rows:
        verdicts = [table.cell(rows[name], "/").split()[-1] for table in engines(WARM)]
        assert (int(first), int(second)) == (verdicts.count("better"), verdicts.count("tie")), name
    assert [cell for cells in separate.rows for cell in cells[1:]] == [
        f"{number(table.cell('first token', '/')):.2f}×" + " (tie)" * table.cell("first token", "/").endswith(" tie")
        for table in engines(SEPARATE)
    ]
    assert [cells[1:] for cells in large.rows[:2]] == [
        [f"{short(run[at])} ms" for run in longest_steps()] for at in (1, 2)
    ]
    names = {"longest gap in the answer": "longest gap between two tokens of the other answer"}
    for name, *cells in large.rows[2:]:
        found = numbers(engines(LARGE), names.get(name, name), "/")
        assert [number(cell) for cell in cells] == [
            float(f"{value:.{len(cell.split('×')[0].split('.')[1])}f}")
            for value, cell in zip(found, cells, strict=True)
        ], name
