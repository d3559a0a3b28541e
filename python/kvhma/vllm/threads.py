# SPDX-License-Identifier: Apache-2.0
"""The connector's threads, which continue after any error."""

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
"""Pause before a restart, if the work crashed within this time."""

_TURN_SECONDS = 1e-4
"""Longest wait for Python's lock in short turns."""

_ROUNDING = 5e-7
"""Python rounds the interval down to microseconds: without this, reading and setting it loses one each time."""

ResultT = TypeVar("ResultT")


class SupervisedThread:
    """A daemon thread that restarts its work after any error, a panic of Rust included.

    So the work has to store its state in attributes, not in local variables.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        counters: Counters,
    ) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            work: the thread ends when this returns.
            counters: count the restarts by the thread's name.
        """
        self._name = name
        self._work = work
        self._counters = counters
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Return whether the thread has not ended yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        raised: BaseException | None = None
        begun = 0.0
        while True:
            try:
                if raised is not None:
                    self._note_crash(raised)
                    raised = None  # its frames hold what they had opened
                    if time.monotonic() - begun < _PAUSE_SECONDS:
                        time.sleep(_PAUSE_SECONDS)
                begun = time.monotonic()
                self._work()
                return
            except BaseException as error:  # no caller could handle it
                raised = error

    def _note_crash(self, error: BaseException) -> None:
        logger.error("kvhma: thread %s crashed and was restarted", self._name, exc_info=error)
        self._counters.count("thread_restarts", label=self._name)


class _ShortTurns:
    """While any thread is inside, no thread of the process waits long for Python's lock.

    A computing thread releases the lock often, but too briefly for another thread to wake up. It yields only after the
    switch interval, which is 5 ms.
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
"""For code that takes Python's lock many times, each time for a moment."""


def in_thread(name: str, function: Callable[[], ResultT]) -> Future[ResultT]:
    """Call a function in a new daemon thread; the future gets its result or its error.

    Raises:
        RuntimeError: the system allows no more threads.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
