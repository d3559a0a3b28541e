# SPDX-License-Identifier: Apache-2.0
"""Writes the requests of an engine or a proxy as a trace, for ``kvhma replay``. No text and no token is in it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import secrets
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvhma.errors import SettingsError
from kvhma.replay.columns import BLOCK_TOKENS

_MAX_WAITING = 1024
"""Most requests that wait to be written. Further ones are left out."""
_MIN_SALT_BYTES = 16
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Prefixes = Callable[[Sequence[int]], Sequence[bytes]]
"""Returns what identifies the beginnings of a prompt with these numbers of tokens."""


class TraceFile:
    """A file to which a thread adds requests. Nothing waits for it, and no error of it reaches a request.

    Beginnings and sessions are written as hashes with a salt, which is in no file of this class.
    """

    def __init__(self, path: str, salt_file: str | None, logger: logging.Logger) -> None:
        """Open the file, which only its owner may read, and add a header.

        Args:
            path: a file that exists is continued.
            salt_file: a file with a salt of at least 16 bytes; None to draw one.
            logger: for what stops the trace.

        Raises:
            SettingsError: a file cannot be opened, or the salt is too short.
        """
        self._logger, self._path = logger, path
        self._queue: queue.Queue[tuple[float, int, int | None, str | None, Prefixes | None] | None]
        self._queue = queue.Queue(_MAX_WAITING)
        try:
            salt = secrets.token_bytes(32) if salt_file is None else Path(salt_file).read_bytes().strip()
            if len(salt) < _MIN_SALT_BYTES:
                raise OSError(f"the salt has {len(salt)} bytes, expected at least {_MIN_SALT_BYTES}")
            self._file = os.open(path, _FLAGS, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(self._file).st_mode):
                    raise OSError("not a file")
                os.fchmod(self._file, 0o600)
            except OSError:
                os.close(self._file)
                raise
        except OSError as error:
            raise SettingsError(f"trace file {path}, salt file {salt_file}: {error.strerror or error}") from error
        self._key = hashlib.sha256(salt).digest()
        self._is_open = self._write({"kvhma_requests": 1, "block_tokens": BLOCK_TOKENS})
        self._thread = threading.Thread(target=self._run, name="kvhma-trace-out", daemon=True)
        self._thread.start()

    def add_request(
        self,
        seconds: float,
        prompt: int,
        answer: int | None,
        session: str | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Add a request that has ended; returns at once.

        Args:
            seconds: when it came, since 1970.
            prompt: tokens.
            answer: tokens; None if they are not known.
            session: name of its session.
            prefixes: identifies beginnings of the prompt; None if its tokens are not known.
        """
        try:
            self._queue.put_nowait((seconds, prompt, answer, session, prefixes))
        except queue.Full:
            self._logger.debug("kvhma: more than %d requests wait for the trace; leaving some out", _MAX_WAITING)

    def close(self, timeout: float) -> None:
        """Write what waits, and stop."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                self._is_open = self._is_open and self._write(self._form(*request))
            except Exception as error:  # its trace is not worth a request
                self._logger.warning("kvhma: a request is not in the trace %s: %s", self._path, error)
        os.close(self._file)

    def _form(
        self, seconds: float, prompt: int, answer: int | None, session: str | None, prefixes: Prefixes | None
    ) -> dict[str, object]:
        form: dict[str, object] = {
            "timestamp": round(seconds * 1e3),
            "input_length": prompt,
            "output_length": answer,
        }
        if session is not None:
            form["session"] = self._hash(b"session" + session.encode("utf-8", "replace"))
        if prefixes is not None:
            form["hash_ids"] = [self._hash(each) for each in prefixes(range(BLOCK_TOKENS, prompt + 1, BLOCK_TOKENS))]
        return form

    def _hash(self, data: bytes) -> int:
        digest = hashlib.blake2b(data, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") >> 1

    def _write(self, form: dict[str, object]) -> bool:
        """Add a line with one write; return whether it is there."""
        line = json.dumps(form, separators=(",", ":")).encode() + b"\n"
        try:
            if (written := os.write(self._file, line)) == len(line):
                return True
            reason = f"wrote {written} of {len(line)} bytes"
        except OSError as error:
            reason = error.strerror or str(error)
        self._logger.error("kvhma: the trace %s ends here: %s", self._path, reason)
        return False
