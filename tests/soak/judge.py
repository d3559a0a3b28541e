# SPDX-License-Identifier: Apache-2.0
"""Decides what counts as right, wrong, refused, lost, aborted, hung or leaked. Knows only results, no engines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median

from soak.journal import Line
from support.engines.compare import difference
from support.engines.engine import Answer, EngineFailed


class Outcome(Enum):
    """How a request ended. WRONG and HUNG must never happen; LOST, if its engine or the proxy ended before the answer,
    only after an event."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    LOST = "lost"
    ABORTED = "aborted"
    HUNG = "hung"


FATAL = (Outcome.WRONG, Outcome.HUNG)


@dataclass(frozen=True)
class Verdict:
    """An outcome and its reason, in words that many requests share."""

    outcome: Outcome
    cause: str = ""


def judge(future: Future[Answer], plain: Answer, noise: float, *, limit: float, aborted: bool = False) -> Verdict:
    """Wait for an answer, `limit` seconds at most, and return its verdict.

    Args:
        future: of the answer.
        plain: answer of an engine without connector to the same prompt.
        noise: by how much log-probabilities of two right answers may differ, in nats.
        limit: seconds after which a request that has not ended is hung.
        aborted: whether its client aborted it, so that it may have fewer tokens.
    """
    try:
        got = future.result(limit)
    except (FutureTimeoutError, TimeoutError):
        return Verdict(Outcome.HUNG, f"no end after {limit:g} s")
    except (EngineFailed, OSError) as error:
        return Verdict(Outcome.LOST, shorten(str(error)))
    except Exception as error:
        return Verdict(outcome_of_error(str(error)), shorten(str(error)))
    verdicts = [judge_sample(sample, plain, noise, aborted=aborted) for sample in (got, *got.others)]
    return next((one for one in verdicts if one.outcome in FATAL), verdicts[0])


def judge_sample(got: Answer, plain: Answer, noise: float, *, aborted: bool) -> Verdict:
    if got.error is not None:
        return Verdict(outcome_of_error(got.error), shorten(got.error))
    if got.finish_reason == "error":
        return Verdict(Outcome.REFUSED, "the load failed")
    if got.finish_reason == "abort":
        count = len(got.token_ids)
        begun = replace(plain, token_ids=plain.token_ids[:count], finish_reason="abort")
        found = difference(got, begun, noise)
        if found is not None:
            return Verdict(Outcome.WRONG, found)
        return Verdict(Outcome.ABORTED) if aborted else Verdict(Outcome.REFUSED, "aborted without a client's abort")
    found = difference(got, plain, noise)
    return Verdict(Outcome.RIGHT) if found is None else Verdict(Outcome.WRONG, found)


def outcome_of_error(error: str) -> Outcome:
    """What the text of an error means; this one is vLLM's for all requests of an engine that has ended."""
    return Outcome.LOST if "EngineCore encountered an issue" in error else Outcome.REFUSED


def shorten(error: str) -> str:
    """The text of an error without what differs from one request to the next."""
    line = error.strip().splitlines()[0] if error.strip() else "no text"
    line = re.sub(r", see .*", "", line)
    return re.sub(r"[0-9a-f]{8,}(-[0-9a-f]+)*|\d+(\.\d+)?", "N", line)[:160]


MORE = {"files": 48, "threads": 12}
"""By how much a process that has served for a while may hold more than when it was ready."""


def leaks_of_process(name: str, ready: Mapping[str, int], end: Mapping[str, int]) -> list[str]:
    """Resources that one process holds at the end beyond what it held when it was ready, and a margin."""
    return [
        f"{name}: {end[what]} {what} at the end, {ready[what]} when it was ready"
        for what, more in MORE.items()
        if end[what] > ready[what] + more
    ]


@dataclass(frozen=True)
class Bound:
    """By how much a process may grow: a constant and a rate, after its first seconds."""

    what: str
    unit: str
    constant: float
    per_hour: float


# Seen without a leak: 36 MiB of a worker's heap until oneDNN has met all shapes, 16 MiB that malloc retains of scrypt.
MEMORY = Bound("resident memory", "MiB", 48, 24)
FILES = Bound("open files", "", 24, 24)
WARM_UP_SECONDS = 60.0
"""In this time caches of the libraries fill and each path runs for the first time."""

MIN_SAMPLES = 40


def growth_beyond(bound: Bound, samples: Sequence[tuple[float, float]]) -> str | None:
    """Return by how much a process has grown, if that is more than the bound allows.

    The growth is that of the median from the first quarter of the samples after the warm-up to the last quarter. So
    peaks do not count, and three quarters of a steady leak do.

    Args:
        bound: what it may grow by.
        samples: seconds, in order, and the value then.
    """
    warm = [(at, value) for at, value in samples if at - samples[0][0] >= WARM_UP_SECONDS]
    if len(warm) < MIN_SAMPLES:
        return None
    quarter = len(warm) // 4
    before, after = (median(value for _, value in part) for part in (warm[:quarter], warm[-quarter:]))
    hours = (warm[-1][0] - warm[0][0]) / 3600
    allowed = bound.constant + bound.per_hour * hours
    if after - before <= allowed:
        return None
    return (
        f"{bound.what} grew by {after - before:.0f} {bound.unit} in {60 * hours:.0f} minutes after its first "
        f"{WARM_UP_SECONDS:.0f} s, from {before:.0f} to {after:.0f}; {allowed:.0f} are allowed"
    )


def leaks_of_pool(name: str, state: Mapping[str, object]) -> list[str]:
    """Requests and blocks that a scheduler still holds; one block, the null block, is never free."""
    requests, free, blocks = state["requests"], state["free_blocks"], state["all_blocks"]
    assert isinstance(requests, dict)
    assert isinstance(free, int)
    assert isinstance(blocks, int)
    leaks = [f"{name}: {len(requests)} requests are held: {sorted(requests)[:5]}"] if requests else []
    if free != blocks - 1:
        leaks.append(f"{name}: {blocks - 1 - free} of {blocks - 1} blocks are not free")
    return leaks


@dataclass
class Tally:
    """The verdicts of a journal, and what else went wrong."""

    counts: Counter[tuple[Outcome, str, str, bool]] = field(default_factory=Counter)
    """Requests by outcome, kind, cause, and whether an event or a change of the request explains it."""
    crashes: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Tally:
        tally = cls()
        outcomes = {outcome.value for outcome in Outcome}
        for line in lines:
            if line["what"] in outcomes:
                tally.add(line["kind"], Verdict(Outcome(line["what"]), line["cause"]), explained=line["explained"])
            elif line["what"] == "crash":
                tally.crashes.append(line["text"])
            elif line["what"] == "leak":
                tally.leaks.append(line["text"])
        return tally

    def add(self, kind: str, verdict: Verdict, *, explained: bool) -> None:
        self.counts[verdict.outcome, kind, verdict.cause, explained] += 1

    def total(self, outcome: Outcome) -> int:
        return sum(count for (what, *_), count in self.counts.items() if what is outcome)

    def unexplained(self, outcome: Outcome) -> int:
        """Requests that ended so, and no event was near."""
        return sum(n for (what, *_, explained), n in self.counts.items() if what is outcome and not explained)

    @property
    def failed(self) -> bool:
        return bool(self.crashes or self.leaks or any(map(self.total, FATAL)) or self.unexplained(Outcome.LOST))

    def lines(self) -> list[str]:
        """The result as text: totals, then all errors by cause."""
        totals = [f"{outcome.value} {self.total(outcome)}" for outcome in Outcome]
        text = [", ".join([*totals, f"refused without a reason {self.unexplained(Outcome.REFUSED)}"])]
        counts = sorted(self.counts.items(), key=lambda item: (item[0][0].value, -item[1]))
        for (outcome, kind, cause, explained), count in counts:
            if outcome is not Outcome.RIGHT:
                mark = " (UNEXPLAINED)" if outcome in (Outcome.REFUSED, Outcome.LOST) and not explained else ""
                text.append(f"  {count:6} {outcome.value} {kind}: {cause or 'as asked'}{mark}")
        text += [f"  crashed: {crash}" for crash in self.crashes]
        text += [f"  leaked: {leak}" for leak in self.leaks]
        return text
