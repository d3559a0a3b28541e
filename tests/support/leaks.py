# SPDX-License-Identifier: Apache-2.0
"""A test leaves no file, socket, thread or child process: Python would collect it during another test, which fails."""

from __future__ import annotations

import contextlib
import gc
import io
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from support.waiting import until

_SELF = Path("/proc/self")
_OWNERS = (io.FileIO, selectors.BaseSelector, socket.socket)
_STARTED_ONCE = (
    (resource_tracker._resource_tracker, "_pid", "_fd"),
    (forkserver._forkserver, "_forkserver_pid", "_forkserver_alive_fd"),
)
"""Python's own processes, with the pipes to them. It ends them when this process ends."""


def nothing_left() -> Iterator[None]:
    """A fixture's function: fail if something is left open that was not open before. What is closing may close."""
    before = _opened()
    yield
    left: list[str] = []

    def all_closed() -> bool:
        left[:] = _leaks(_opened() - before)
        return not left

    with contextlib.suppress(AssertionError):
        until(all_closed)
    assert not left, f"left open: {', '.join(left)}"


def _opened() -> set[tuple[str, int, str]]:
    """Return kind, number and name of each thread, file and child process of this process."""
    found = {("thread", thread.native_id or 0, thread.name) for thread in threading.enumerate()}
    for kind, folder in (("file", "fd"), ("process", "task")) if _SELF.exists() else ():
        for path in (_SELF / folder).iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has ended since
                if kind == "file":
                    found.add((kind, int(path.name), str(path.readlink())))
                else:
                    found |= {(kind, int(child), "") for child in (path / "children").read_text().split()}
    return found


def _leaks(left: set[tuple[str, int, str]]) -> list[str]:
    """Return a line for each of these that a test must close.

    UCX closes its files when it likes: with NIXL, only files of Python's objects count.
    """
    if not left:
        return []
    once = {getattr(owner, name, None) for owner, *names in _STARTED_ONCE for name in names}
    owners = {}
    for each in gc.get_objects():
        if issubclass(type(each), _OWNERS):
            with contextlib.suppress(AttributeError, ValueError):  # it is closed, or another thread makes it
                owners[each.fileno()] = repr(each)
    return [
        f"{kind} {number} {owners.get(number, name) if kind == 'file' else name}"
        for kind, number, name in sorted(left)
        if number not in once and (kind != "file" or number in owners or not _has_nixl())
    ]


def _has_nixl() -> bool:
    return any(name.partition(".")[0] in ("nixl", "nixl_cu12") for name in sys.modules)
