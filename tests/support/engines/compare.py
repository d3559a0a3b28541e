# SPDX-License-Identifier: Apache-2.0
"""Whether two answers are the same computation."""

from __future__ import annotations

from support.engines.engine import Answer


def distance(one: Answer, other: Answer) -> float:
    """Return a lower bound of the difference of log-probabilities, in nats; infinity if an answer failed.

    Tokens are compared up to the first that differs: after it the two answers have different prompts. At that token
    each answer puts its own choice in front, by its margin. So the gap between the two choices moved by the sum of the
    margins, and one of the log-probabilities moved by half of that or more.
    """
    if one.error or other.error or len(one.token_ids) != len(other.token_ids):
        return float("inf")
    worst = 0.0
    for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if a != b:
            return max(worst, (one.margins[at] + other.margins[at]) / 2)
        worst = max(worst, abs(one.logprobs[at] - other.logprobs[at]))
    return worst


def difference(got: Answer, plain: Answer, noise: float) -> str | None:
    """Return why `got` differs from the plain engine's answer; None if it does not.

    Tokens must be equal, with one exception: where the plain engine had two candidates closer together than twice the
    noise, `got` may have the second. The comparison ends there.

    Args:
        got: answer to judge.
        plain: answer of an engine without connector.
        noise: largest difference of log-probabilities between two plain engines.
    """
    if got.error is not None or plain.error is not None:
        return f"errors: {got.error!r}, plain {plain.error!r}"
    if (got.finish_reason, len(got.token_ids)) != (plain.finish_reason, len(plain.token_ids)):
        return (
            f"{got.finish_reason} after {len(got.token_ids)}, plain {plain.finish_reason} after {len(plain.token_ids)}"
        )
    for at, (a, b) in enumerate(zip(got.token_ids, plain.token_ids, strict=True)):
        if a != b:
            if plain.margins[at] <= 2 * noise:
                return None
            return (
                f"token {at} is {a}, plain {b} (ahead by {plain.margins[at]:.3f}): {got.token_ids}, {plain.token_ids}"
            )
        if abs(got.logprobs[at] - plain.logprobs[at]) > noise:
            return f"log-probability of token {at} is {got.logprobs[at]:.4f}, plain {plain.logprobs[at]:.4f}"
    return None
