# SPDX-License-Identifier: Apache-2.0
"""Decides what counts as right, wrong, refused, aborted, hung or leaked. Knows only results, no engines."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from enum import Enum

from support.engines.compare import difference
from support.engines.engine import Answer


class Outcome(Enum):
    """How a request ended. WRONG and HUNG, and CRASHED of an engine, must never happen."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
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
    except Exception as error:
        return Verdict(Outcome.REFUSED, shorten(str(error)))
    verdicts = [judge_sample(sample, plain, noise, aborted=aborted) for sample in (got, *got.others)]
    return next((one for one in verdicts if one.outcome in FATAL), verdicts[0])


def judge_sample(got: Answer, plain: Answer, noise: float, *, aborted: bool) -> Verdict:
    if got.error is not None:
        return Verdict(Outcome.REFUSED, shorten(got.error))
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


def shorten(error: str) -> str:
    """The text of an error without what differs from one request to the next."""
    line = error.strip().splitlines()[0] if error.strip() else "no text"
    line = re.sub(r", see .*", "", line)
    return re.sub(r"[0-9a-f]{8,}(-[0-9a-f]+)*|\d+(\.\d+)?", "N", line)[:160]


@dataclass(frozen=True)
class Census:
    """Resources that one process holds."""

    files: int
    threads: int


@dataclass(frozen=True)
class Allowance:
    """By how much a process that has served for a while may hold more than when it was ready."""

    files: int = 48
    threads: int = 12


def leaks_of_process(name: str, ready: Census, end: Census, allowed: Allowance) -> list[str]:
    """Resources that one process holds at the end beyond what it held when it was ready, and a margin."""
    return [
        f"{name}: {after} {what} at the end, {before} when it was ready"
        for what, before, after, more in (
            ("files", ready.files, end.files, allowed.files),
            ("threads", ready.threads, end.threads, allowed.threads),
        )
        if after > before + more
    ]


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
    """Verdicts so far, and other errors. Safe to use from several threads."""

    counts: Counter[tuple[Outcome, str, str, bool]] = field(default_factory=Counter)
    """Requests by outcome, kind, cause, and whether an event or a change of the request explains it."""
    crashes: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: str, verdict: Verdict, *, explained: bool) -> None:
        with self._lock:
            self.counts[verdict.outcome, kind, verdict.cause, explained] += 1

    def total(self, outcome: Outcome) -> int:
        with self._lock:
            return sum(count for (what, *_), count in self.counts.items() if what is outcome)

    @property
    def failed(self) -> bool:
        return bool(self.crashes or self.leaks or any(self.total(outcome) for outcome in FATAL))

    @property
    def unexplained(self) -> int:
        """Refusals for which there was no reason."""
        with self._lock:
            return sum(
                count
                for (what, *_, explained), count in self.counts.items()
                if what is Outcome.REFUSED and not explained
            )

    def lines(self) -> list[str]:
        """The result as text: totals, then all errors by cause."""
        totals = [f"{outcome.value} {self.total(outcome)}" for outcome in Outcome]
        text = [", ".join([*totals, f"refused without a reason {self.unexplained}"])]
        with self._lock:
            counts = sorted(self.counts.items(), key=lambda item: (item[0][0].value, -item[1]))
        for (outcome, kind, cause, explained), count in counts:
            if outcome is not Outcome.RIGHT:
                mark = " (UNEXPLAINED)" if outcome is Outcome.REFUSED and not explained else ""
                text.append(f"  {count:6} {outcome.value} {kind}: {cause or 'as asked'}{mark}")
        text += [f"  crashed: {crash}" for crash in self.crashes]
        text += [f"  leaked: {leak}" for leak in self.leaks]
        return text
