# SPDX-License-Identifier: Apache-2.0
"""Threads that continue after any exception."""

import gc
import threading
import time
import weakref

import pytest

from kvhma.vllm import threads
from kvhma.vllm.threads import SupervisedThread, in_thread
from support.counted import Counted
from support.waiting import until


class Panic(BaseException):
    """As PyO3 raises one: not an Exception."""


@pytest.mark.parametrize("kind", [ValueError, Panic, SystemExit])
def test_work_begins_again_whatever_is_raised(kind, caplog):
    left, counted = [kind("a"), kind("b")], Counted()

    def work():
        if left:
            raise left.pop(0)

    thread = SupervisedThread("kvhma-test", work, counted)
    thread.join(5)
    assert not thread.is_alive()
    assert counted.by_label("thread_restarts") == {"kvhma-test": 2}
    assert caplog.text.count("thread kvhma-test crashed and was restarted") == 2


def test_a_thread_that_begins_again_lets_go_of_what_ended_it(monkeypatch):
    monkeypatch.setattr(threads.logger, "error", lambda *_, **__: None)  # pytest keeps what is logged, with its frames
    opened, closed = [], threading.Event()

    def work():
        if not opened:
            held = Counted()
            opened.append(weakref.ref(held))
            raise Panic
        closed.wait(10)

    def is_gone():
        gc.collect()
        return bool(opened) and opened[0]() is None

    thread = SupervisedThread("kvhma-test", work, Counted())
    until(is_gone)
    assert thread.is_alive()
    closed.set()
    thread.join(5)


def test_work_that_fails_at_once_does_not_spin(monkeypatch):
    monkeypatch.setattr(threads, "_PAUSE_SECONDS", 0.05)
    closed, calls = threading.Event(), []

    def work():
        calls.append(time.monotonic())
        if not closed.is_set():
            raise Panic

    thread = SupervisedThread("kvhma-test", work, Counted())
    time.sleep(0.5)
    closed.set()
    thread.join(5)
    assert 3 <= len(calls) <= 12


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_a_function_in_a_thread(kind):
    def fails():
        raise kind("no")

    assert in_thread("kvhma-test", lambda: 7).result(5) == 7
    with pytest.raises(kind, match="no"):
        in_thread("kvhma-test", fails).result(5)
