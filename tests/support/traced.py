# SPDX-License-Identifier: Apache-2.0
"""Traces made by hand: what was done, and a request small enough to count by hand."""

from __future__ import annotations

import numpy as np

import kvhma
from kvhma.geometry import Group, Span
from kvhma.oracle.cases import Case
from kvhma.oracle.moves import byte_moves
from kvhma.oracle.traced_memory import RankTrace
from kvhma.oracle.traces import Step
from support.pairs import HERE, THERE, latent, rank, state


def rows_of(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.uint64).reshape(len(rows), -1)


def traced(case: Case, steps: list[Step], **more: object) -> RankTrace:
    return RankTrace("r", 0, case, **{"remote_tokens": case.num_tokens, "cached": (), "steps": tuple(steps)} | more)


def steps_of(case: Case) -> list[Step]:
    """What has to move, found byte by byte without a planner."""
    moves = byte_moves(case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans)
    zeros = [*moves.zero, *((copy.local, copy.length) for copy in moves.either)]
    steps = [Step("zero", 0, rows_of(*zeros))] if zeros else []
    for copy in moves.copies:
        steps.append(Step("transfer", copy.source, rows_of((copy.remote, copy.local, copy.length))))
    return steps


def small(tokens: int = 6) -> Case:
    """Two layers of blocks of four one-byte tokens, and a state."""
    groups = (Group("full", 4), Group("ssm", 4))

    def side(base: int) -> kvhma.Geometry:
        return rank(base, groups, [("fa", 0, latent(4, 1)), ("ssm", 1, state(2, content=2))], blocks=8)

    return Case(side(HERE), (side(THERE),), tokens, (Span(0, [3, 5]), Span(0, [2])), (Span(0, [1, 2]), Span(0, [4])), 0)


SSM = HERE + 8 * 4 + 64, THERE + 8 * 4 + 64
RUNS = [(THERE + 4, HERE + 12, 4), (THERE + 8, HERE + 20, 2), (SSM[1] + 16, SSM[0] + 8, 4)]
