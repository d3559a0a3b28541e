# SPDX-License-Identifier: Apache-2.0
"""The report of a run, made only of what its folder holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from soak.journal import Line, read_lines
from soak.judge import FILES, MEMORY, Outcome, Tally, growth_beyond, leaks_of_process
from soak.samples import Sample, growth, read_samples


def report(folder: Path) -> tuple[list[str], bool]:
    """Return the report, and whether the run failed."""
    lines = read_lines(folder / "journal.jsonl")
    processes = read_samples(folder / "samples.csv")
    tally = Tally.of(lines)
    tally.leaks += leaks_in(lines, list(processes.values()))
    text = [
        *facts_in(lines, tally),
        "",
        *tally.lines(),
        "",
        *counters_in(lines),
        "",
        *(growth(samples) for samples in processes.values()),
    ]
    return text, tally.failed


def leaks_in(lines: Sequence[Line], processes: Sequence[Sequence[Sample]]) -> list[str]:
    """What processes hold that they did not hold when they were ready, or after their first minute.

    Only load counts for growth: the questions afterwards are of another kind.
    """
    load = loads_in(lines).values()
    quiet = {(line["engine"], line["life"]) for line in lines if line["what"] == "quiet"}
    found = []
    for samples in processes:
        first, last = samples[0], samples[-1]
        name = f"{first.slot}-{first.life} {first.process} {first.pid}"
        if (first.slot, first.life) in quiet:  # then no client is connected, not even a hostile one
            found += leaks_of_process(name, vars(first), vars(last))
        under_load = [one for one in samples if any(begun <= one.seconds <= ended for begun, ended in load)]
        grown = (
            growth_beyond(MEMORY, [(one.seconds, one.rss / 1024) for one in under_load]),
            growth_beyond(FILES, [(one.seconds, one.files) for one in under_load]),
        )
        found += [f"{name}: {text}" for text in grown if text is not None]
    return found


def loads_in(lines: Sequence[Line]) -> dict[str, tuple[float, float]]:
    """Begin and end of the load of each model."""
    over = {line["model"]: line["t"] for line in lines if line["what"] == "load over"}
    return {
        line["model"]: (line["t"], over.get(line["model"], lines[-1]["t"])) for line in lines if line["what"] == "load"
    }


def facts_in(lines: Sequence[Line], tally: Tally) -> list[str]:
    """What was done, as far as it is no verdict."""
    loaded = {model: ended - begun for model, (begun, ended) in loads_in(lines).items()}
    seconds = sum(loaded.values())
    right = tally.total(Outcome.RIGHT)
    events = Counter(line["kind"] for line in lines if line["what"] == "event")
    left_out = sum(line["what"] == "event left out" for line in lines)
    rotations = Counter(line["step"] for line in lines if line["what"] == "rotated")
    troubles = Counter(trouble_of(line) for line in lines if line["what"] == "rotated" and line["step"] == 2)
    alone = [line for line in lines if line["what"] == "right" and "cached" in line]
    hits = [line["cached"] for line in alone if line["cached"]]
    loads = ", ".join(f"{model} {of:.0f} s" for model, of in loaded.items())
    attacks: Counter[str] = sum(
        (Counter(line["of"]) for line in lines if line["what"] == "untrusted clients"), Counter()
    )
    return [
        *(line["text"] for line in lines if line["what"] == "fact"),
        f"under load: {loads}",
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
