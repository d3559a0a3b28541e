# SPDX-License-Identifier: Apache-2.0
"""What an engine may meet when it reads its secrets again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

Meeting = Callable[[Path], contextlib.AbstractContextManager[object]]


def replace(file: Path, *lines: bytes) -> None:
    """Replace a file as a whole: no reader sees half of it."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(b"".join(line + b"\n" for line in lines))
    new.replace(file)


def _content(data: bytes) -> Meeting:
    return lambda file: contextlib.nullcontext(file.write_bytes(data))


def _instead(make: Callable[[Path], object]) -> Meeting:
    """Put something in the file's place."""

    @contextlib.contextmanager
    def meet(file: Path) -> Iterator[None]:
        file.unlink()
        make(file)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()

    return meet


def _failing(what: str, error: BaseException) -> Meeting:
    """Let the reader's call fail, after the file got a new secret; what the system says depends on no permission."""

    @contextlib.contextmanager
    def meet(file: Path) -> Iterator[None]:
        replace(file, b"never seen before: " + hashlib.sha256(repr((what, error)).encode()).hexdigest().encode())
        with mock.patch(what, side_effect=error):
            yield

    return meet


def _descriptors(left: int) -> Meeting:
    """Leave the process so many descriptors."""

    @contextlib.contextmanager
    def meet(file: Path) -> Iterator[None]:
        replace(file, b"never seen before, and no descriptors: %d" % left)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return meet


_MODULE = "kvhma.vllm.wire.secrets"

MEETINGS: dict[str, tuple[Meeting, str]] = {
    "gone": (_instead(lambda file: None), "cannot be read: No such file"),
    "empty": (_content(b""), "has 0 secrets"),
    "blank": (_content(b"\n \r\n\n"), "has 0 secrets"),
    "a short line": (_content(b"s" * 32 + b"\nshort\n"), "secret 2 has 5 bytes"),
    "many lines": (_content(b"\n".join([b"s" * 20] * 17)), "has 17 secrets"),
    "huge": (_content(b"x" * 100_000), "more than 65536 bytes"),
    "without an end": (_instead(lambda file: file.symlink_to("/dev/zero")), "not a regular file"),
    "a directory": (_instead(Path.mkdir), "cannot be read: Is a directory"),
    "a FIFO": (_instead(os.mkfifo), "not a regular file"),
    "a link to itself": (_instead(lambda file: file.symlink_to(file)), "Too many levels of symbolic links"),
    "a broken link": (_instead(lambda file: file.symlink_to("..data/secret")), "cannot be read: No such file"),
    "no descriptors": (_descriptors(0), "cannot be read: Too many open files"),
    "one descriptor": (_descriptors(1), "cannot be used: OSError: .*Too many open files"),
    **{
        f"{code} {call}": (_failing(f"{_MODULE}.os.{call}", OSError(getattr(errno, code), code.lower())), code.lower())
        for call, codes in {
            "open": ("EACCES", "EIO", "ENOMEM", "ESTALE"),
            "memfd_create": ("ENFILE", "ENOMEM", "ENOSPC", "ENOSYS"),
        }.items()
        for code in codes
    },
    "no memory for the file": (_failing(f"{_MODULE}.os.fstat", MemoryError()), "cannot be used: MemoryError"),
    "no memory": (_failing(f"{_MODULE}.hashlib.scrypt", MemoryError()), "cannot be used: MemoryError"),
    "OpenSSL's memory": (_failing(f"{_MODULE}.hashlib.scrypt", ValueError("memory limit exceeded")), "memory limit"),
    "OpenSSL": (_failing(f"{_MODULE}.ssl.SSLContext", ssl.SSLError(1, "bad key")), "SSLError: .*bad key"),
}
"""By name: what happens to the file or the process while it lasts, and what the log says of it."""


@contextlib.contextmanager
def no_temporary_files() -> Iterator[None]:
    """A process that can write no temporary file: the disk is full, or read-only."""
    with mock.patch.object(tempfile, "tempdir", "/nonexistent"):
        yield


class Clock:
    """The time of :mod:`kvhma.vllm.wire.secrets`: it changes only if a test moves it."""

    def __init__(self, patch: Any) -> None:
        """Begin where files that are written now are old enough."""
        self.now = time.time() + 3600
        self._module = mock.Mock(time=lambda: self.now, monotonic=lambda: self.now)
        patch.setattr(f"{_MODULE}.time", self._module)

    def pass_by(self) -> None:
        """Let so much time pass that the file is read again."""
        self.now += 60

    def read_time(self, file: Path, seconds: float) -> None:
        """Let the file be read again so many seconds after it changed."""
        self.pass_by()
        self._module.time = lambda: file.stat().st_ctime + seconds
