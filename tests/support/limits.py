# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a new process and measures what it needs there."""

from __future__ import annotations

import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Cost:
    """What a function returned, and what it needed.

    Attributes:
        result: what it returned.
        seconds: processor time, so that a busy machine does not count.
        megabytes: how much the process' peak memory grew.
    """

    result: object
    seconds: float
    megabytes: float


def cost_of(function: Callable[..., object], *arguments: object) -> Cost:
    """Run a function of a module in a process that has done no other work, and raise what it raises as text."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvhma", "support.limits"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, function, *arguments))
    process.start()
    theirs.close()
    with ours:  # a caller may keep an error, and its traceback this frame
        try:
            answer = ours.recv()
        except EOFError:
            answer = "the process ended by itself"
    process.join()
    code = process.exitcode
    process.close()
    assert isinstance(answer, Cost), f"{answer} (exit code {code})"
    return answer


def _run(pipe: Connection, function: Callable[..., object], *arguments: object) -> None:
    before, start = _peak(), time.process_time()
    try:
        result = function(*arguments)
        pipe.send(Cost(result, time.process_time() - start, _peak() - before))
    except BaseException:
        pipe.send(traceback.format_exc())


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
