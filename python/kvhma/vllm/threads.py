# SPDX-License-Identifier: Apache-2.0
"""The connector's threads: they go on whatever is raised in them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvhma.vllm.counters import Counters

logger = logging.getLogger("vllm.kvhma")

_PAUSE_SECONDS = 0.1
"""Pause before work begins again that was raised out of twice in this time."""

_TURN_SECONDS = 1e-4
"""How long Python's lock is waited for in short turns."""

_ROUNDING = 5e-7
"""Python keeps whole microseconds and drops the rest: without it what was read and set again is one less each time."""

ResultT = TypeVar("ResultT")


class SupervisedThread:
    """A daemon thread whose work begins again when anything is raised out of it, a panic of Rust included.

    So the work has to keep what it is doing in attributes, not in local variables.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        counters: Counters,
        *,
        recover: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Start.

        Args:
            name: of the thread.
            work: what it does; the thread ends when this returns.
            counters: count, by the name, how often the work began again.
            recover: called before that with what was raised, in this thread.
        """
        self._name = name
        self._work = work
        self._counters = counters
        self._recover = recover
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Return whether it has not ended yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        raised: BaseException | None = None
        begun = 0.0
        while True:
            try:
                if raised is not None:
                    error, raised = raised, None
                    self._note(error)
                    if time.monotonic() - begun < _PAUSE_SECONDS:
                        time.sleep(_PAUSE_SECONDS)
                begun = time.monotonic()
                self._work()
                return
            except BaseException as error:  # there is nobody above who could do more
                raised = error

    def _note(self, error: BaseException) -> None:
        logger.error(
            "kvhma: thread %s met an error of the connector's own and begins again", self._name, exc_info=error
        )
        self._counters.count("thread_restarts", label=self._name)
        if self._recover is not None:
            self._recover(error)


class _ShortTurns:
    """While any thread is in it, none of the process waits long for Python's lock.

    A thread that computes lets go of the lock again and again, but for moments that are too short for another one to
    wake up in; it gives way only when that has waited for the switch interval, which is 5 ms.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._before = sys.getswitchinterval() + _ROUNDING
                sys.setswitchinterval(min(self._before, _TURN_SECONDS + _ROUNDING))
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                sys.setswitchinterval(self._before)


short_turns = _ShortTurns()
"""To be in while many things are done that each take Python's lock for a moment."""


def in_thread(name: str, function: Callable[[], ResultT]) -> Future[ResultT]:
    """Call a function in a daemon thread of its own; the future has what it returns, or whatever it raises.

    Raises:
        RuntimeError: there can be no more threads.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
