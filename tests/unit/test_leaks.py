# SPDX-License-Identifier: Apache-2.0
"""The check after each test names what the test left open."""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from support import leaks


@contextmanager
def thread() -> Iterator[None]:
    end = threading.Event()
    running = threading.Thread(target=end.wait, name="left")
    running.start()
    yield
    end.set()
    running.join()


LEAKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    r"file \d+ <socket.socket fd=.*laddr=\('127.0.0.1'": lambda: socket.create_server(("127.0.0.1", 0)),
    rf"file \d+ <_io.FileIO name='{__file__}'": lambda: Path(__file__).open(encoding="utf-8"),  # noqa: SIM115
    r"file \d+ <selectors.EpollSelector": lambda: closing(selectors.EpollSelector()),
    r"thread \d+ left": thread,
    r"process \d+": lambda: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE),
}


@pytest.mark.parametrize("named", LEAKS)
def test_what_is_left_open_is_named(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "until", lambda condition: condition())
    with ExitStack() as stack:
        check = leaks.nothing_left()
        next(check)
        stack.enter_context(LEAKS[named]())
        with pytest.raises(AssertionError, match=named):
            next(check)


def test_what_ends_by_itself_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    with ExitStack() as stack:

        def until(condition: Callable[[], bool]) -> None:
            looks.append(condition())
            stack.close()
            looks.append(condition())

        monkeypatch.setattr(leaks, "until", until)
        check = leaks.nothing_left()
        next(check)
        stack.enter_context(thread())
        with pytest.raises(StopIteration):
            next(check)
    assert looks == [False, True]
