# SPDX-License-Identifier: Apache-2.0
"""Policies of a router on a trace: when each hands off, and how long requests wait for their first token.

docs/replay.md defines the queues and the policies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import first_tokens
from kvhma.costs import Costs

THRESHOLDS = tuple(1 << power for power in range(7, 15))
"""Missing tokens from which a prompt is handed off; the best of these is reported."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What requests take on either way, without the read. Arrays have a value for each request, in order of arrival.

    Attributes:
        seconds: float64, arrivals.
        at_prefill: uint32, the prefill engine of each request.
        at_decode: uint32, its decode engine.
        prefill: float64, seconds in which P computes what it lacks.
        missing: int64, tokens that D lacks if it has read all earlier prompts.
        decode: float64, seconds in which D computes these.
        decode_alone: float64, the same for a D that has computed all earlier prompts.
        fixed_seconds: time of a hand-off besides its read.
    """

    seconds: NDArray[np.float64]
    at_prefill: NDArray[np.uint32]
    at_decode: NDArray[np.uint32]
    prefill: NDArray[np.float64]
    missing: NDArray[np.int64]
    decode: NDArray[np.float64]
    decode_alone: NDArray[np.float64]
    fixed_seconds: float = 0.0


def simulate(ways: Ways, read: NDArray[np.float64], expected: NDArray[np.float64]) -> dict[str, float]:
    """Let requests queue for their first token.

    Args:
        ways: what the requests take.
        read: float64 of shape (n,), seconds in which D reads each request.
        expected: float64 of shape (n,), seconds of a whole hand-off after P's computing, as the router expects them.
            Minus infinity hands off, and infinity does not.

    Returns:
        Seconds to the first token (`mean`, `median`, `p99`), and the share that is `handed_off`.
    """
    waits, handed_off = first_tokens(
        ways.seconds, ways.at_prefill, ways.at_decode, ways.prefill, read, ways.decode, expected
    )
    waits += ways.fixed_seconds * handed_off
    median, p99 = np.percentile(waits, (50, 99))
    found = {"mean": waits.mean(), "median": median, "p99": p99, "handed_off": handed_off.mean()}
    return {name: float(value) for name, value in found.items()}


def compare(ways: Ways, costs: Costs) -> dict[str, Any]:
    """Return what each policy does to the time to first token.

    Args:
        ways: what the requests take.
        costs: of the hand-offs, with what D has read before and the fixed seconds.

    Returns:
        `always`, `never`, `threshold` and `cost`, as of :func:`simulate`, with the `tokens` of the best threshold, and
        `best`, the name of the policy with the shortest mean.
    """
    read = costs.most_seconds - ways.fixed_seconds
    never = np.full(len(read), np.inf)
    found: dict[str, Any] = {
        "always": simulate(ways, read, -never),
        "never": simulate(replace(ways, decode=ways.decode_alone), read, never),
    }
    by_threshold = [
        simulate(ways, read, np.where(ways.missing >= tokens, -np.inf, np.inf)) | {"tokens": tokens}
        for tokens in THRESHOLDS
    ]
    found["threshold"] = min(by_threshold, key=lambda outcome: outcome["mean"])
    found["cost"] = simulate(ways, read, costs.most_seconds)
    return found | {"best": min(found, key=lambda name: found[name]["mean"])}
