# SPDX-License-Identifier: Apache-2.0
"""The report of a run, made only of what its folder holds; so it is the same for a run that was cut and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak.journal import Line, Past, read_lines
from soak.judge import FILES, MEMORY, Allowance, Outcome, Tally, growth_beyond, leaks_of_process
from soak.plot import plot
from soak.samples import Sample, growth, heap_growth, read_samples
from soak.schedule import Event


def report(folder: Path) -> tuple[list[str], bool]:
    """Write the picture and return the report, and whether the run failed."""
    lines = read_lines(folder / "journal.jsonl")
    processes = read_samples(folder / "samples.csv")
    tally = Tally.of(lines)
    tally.leaks += leaks_in(lines, list(processes.values()))
    marks = [(line["t"], "resumed") for line in lines[1:] if line["what"] == "part"]
    marks += [(line["t"], line["model"]) for line in lines if line["what"] == "load"]
    (folder / "memory.svg").write_text(plot(processes.values(), events_in(lines), lines[-1]["t"], marks))
    text = [
        *facts_in(lines, tally),
        "",
        *tally.lines(),
        "",
        *counters_in(lines),
        "",
        *(growth(samples) for samples in processes.values()),
        "",
        *heaps_in(lines),
    ]
    return text, tally.failed


def leaks_in(lines: Sequence[Line], processes: Sequence[Sequence[Sample]]) -> list[str]:
    """What processes hold that they did not hold when they were ready, or after their first minute.

    Only load counts for growth: the questions afterwards are of another kind.
    """
    load = loads_in(lines)
    quiet = {(line["engine"], line["life"]) for line in lines if line["what"] == "quiet"}
    found = []
    for samples in processes:
        first, last = samples[0], samples[-1]
        name = f"{first.slot}-{first.life} {first.process} {first.pid}"
        if (first.slot, first.life) in quiet:  # then no client is connected, not even a hostile one
            found += leaks_of_process(name, first.census, last.census, Allowance())
        under_load = [one for one in samples if any(begun <= one.seconds <= ended for begun, ended in load)]
        grown = (
            growth_beyond(MEMORY, [(one.seconds, one.rss / 1024) for one in under_load]),
            growth_beyond(FILES, [(one.seconds, one.files) for one in under_load]),
        )
        found += [f"{name}: {text}" for text in grown if text is not None]
    return found


def loads_in(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """Begin and end of each load; one that was cut ends with its part."""
    found = []
    for number, line in enumerate(lines):
        if line["what"] == "load":
            rest = (later["t"] for later in lines[number:] if later["what"] in ("load over", "part"))
            found.append((line["t"], next(rest, lines[-1]["t"])))
    return found


def events_in(lines: Sequence[Line]) -> list[Event]:
    """Events as they happened, in seconds of the run."""
    found = []
    begun: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line["what"] == "event":
            begun[line["kind"], line["engine"]] = line
        elif line["what"] == "event over" and (at := begun.pop((line["kind"], line["engine"]), None)):
            found.append(Event(at["t"], line["kind"], line["engine"], line["t"] - at["t"], 0.0))
    return found


def facts_in(lines: Sequence[Line], tally: Tally) -> list[str]:
    """What was done, as far as it is no verdict."""
    past = Past.of(lines)
    seconds = sum(past.loaded.values())
    right = tally.total(Outcome.RIGHT)
    events = Counter(line["kind"] for line in lines if line["what"] == "event")
    left_out = sum(line["what"] == "event left out" for line in lines)
    rotations = Counter(line["step"] for line in lines if line["what"] == "rotated")
    troubles = Counter(trouble_of(line) for line in lines if line["what"] == "rotated" and line["step"] == 2)
    alone = [line for line in lines if line["what"] == "right" and "cached" in line]
    hits = [line["cached"] for line in alone if line["cached"]]
    loads = ", ".join(f"{model} {of:.0f} s" for model, of in past.loaded.items())
    attacks: Counter[str] = sum(
        (Counter(line["of"]) for line in lines if line["what"] == "untrusted clients"), Counter()
    )
    return [
        *(line["text"] for line in lines if line["what"] == "fact"),
        f"under load: {loads}; {past.parts} part{'s' * (past.parts > 1)}",
        f"{right} right answers, {right / max(seconds, 1):.1f} a second",
        f"events: {', '.join(f'{kind} {n}' for kind, n in sorted(events.items()))}; {left_out} left out",
        f"rotations that removed the old secret: {rotations[2]}, of them {dict(troubles)}",
        f"asked D alone: {len(alone)} right answers, {len(hits)} of them hit {sum(hits)} tokens",
        f"hostile clients: {dict(attacks)}",
        *(f"{one['model']}: blocks back {one['back']}" for one in lines if one["what"] == "model over"),
    ]


def trouble_of(line: Line) -> str:
    trouble = line["trouble"]
    return "with a broken file" if trouble < 3 else "on a full disk" if trouble < 6 else "without trouble"


def counters_in(lines: Sequence[Line]) -> list[str]:
    """Counters of kvhma of each engine, over all its lives, as they were last read."""
    latest = {(line["engine"], line["life"]): line["counters"] for line in lines if line["what"] == "counters"}
    by_engine: dict[str, Counter[str]] = {}
    for (engine, _), counters in latest.items():
        by_engine.setdefault(engine, Counter()).update(counters)
    return [f"{engine}: {', '.join(f'{key} {n}' for key, n in sorted(of.items()))}" for engine, of in by_engine.items()]


def heaps_in(lines: Sequence[Line]) -> list[str]:
    heaps: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["what"] == "counters":
            heaps.setdefault(f"{line['engine']}-{line['life']} worker", []).append(line["heap"])
    return [heap_growth(name, of) for name, of in heaps.items()]
