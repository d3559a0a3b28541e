# SPDX-License-Identifier: Apache-2.0
"""Whether P held the blocks of completed reads: D looks at P's lease board, or else asks P."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvhma.vllm.peers.lease_question import LeaseQuestion
from kvhma.vllm.peers.prefill_engines import PrefillEngine
from kvhma.vllm.reads.active_read import ActiveRead, required
from kvhma.vllm.reads.read_steps import errors_fail
from kvhma.vllm.wire.lease_board import mark_of
from kvhma.vllm.wire.messages import MAX_CLAIMS

_ASK_SECONDS = 2e-3
"""How long a completed read waits for other reads of its step, so that one question covers all."""


def check_leases(reads: Sequence[ActiveRead], timeout: float, *, more_to_come: bool) -> None:
    """Find out if P held the blocks of reads in the state CHECKING.

    There is one question to an engine at a time, about all reads that are ready by then. Those whose blocks P must hold
    for longer have a separate question, which releases nothing.

    Args:
        reads: get `verified_by_board` or a `question`, or neither as long as D can do neither.
        timeout: seconds to wait for an answer.
        more_to_come: whether more reads will be ready in a moment.
    """
    ready: dict[tuple[PrefillEngine, bool], list[ActiveRead]] = {}
    for read in reads:
        ready.setdefault((required(read.engine), read.command.outcome is None), []).append(read)
    for (engine, _), of_engine in ready.items():
        if more_to_come and time.monotonic() - min(read.read_at for read in of_engine) <= _ASK_SECONDS:
            continue
        unverified: list[ActiveRead] = []
        with errors_fail(*of_engine):
            unverified = _unverified(engine, of_engine)
        to_ask = unverified[:MAX_CLAIMS]
        if to_ask and (engine.question is None or not engine.question.open):
            with errors_fail(*to_ask):
                _ask(engine, to_ask, timeout)


def _unverified(engine: PrefillEngine, reads: list[ActiveRead]) -> list[ActiveRead]:
    """Look at P's boards; return the reads that D has to ask P about. Other reads may still wait for the boards."""
    if not engine.boards:
        return reads
    new = [read for read in reads if read.verified_by_board is None]
    if new:
        since = max(read.read_at for read in new)
        board_times, boards = zip(*(board.look(since) for board in engine.boards), strict=True)
        for read in new:
            if read.read_at < min(board_times):
                remote = read.command.remote
                mark = mark_of(remote.lease_key, remote.digest)
                read.verified_by_board = all(mark in board for board in boards)
    return [read for read in reads if read.verified_by_board is False]


def _ask(engine: PrefillEngine, reads: Sequence[ActiveRead], timeout: float) -> None:
    claims = [read.command.remote.claim(read.command.reader) for read in reads]
    outcomes = [read.command.outcome for read in reads if read.command.outcome is not None]
    engine.question = LeaseQuestion(engine.side_channel, engine.numeric, claims, timeout, engine.proving, outcomes)
    for index, read in enumerate(reads):
        read.question = engine.question, index
