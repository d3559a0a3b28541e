# SPDX-License-Identifier: Apache-2.0
"""Failed loads as case files: the setting ``case_folder``. docs/cases.md has the format."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import Plan
from kvhma.geometry import Span
from kvhma.vllm.threads import in_thread

if TYPE_CHECKING:  # it needs vLLM
    from kvhma.vllm.metadata import ReadCommand

logger = logging.getLogger("vllm.kvhma")

_CASE_VERSION = 1
_MAX_BYTES = 1 << 24
"""No command reads longer files."""

_MAX_CASES = 64
"""Most cases of a worker process. The first cases show what is wrong."""


class CaseFolder:
    """Writes cases to a folder, each in a separate thread, one at a time. Safe to use from several threads."""

    def __init__(self, folder: str | None = None) -> None:
        """Write to a folder, which is created when needed; None to write nothing."""
        self._folder = None if folder is None else Path(folder)
        self._lock = threading.Lock()
        self._written = 0
        self._writing: Future[None] | None = None

    def save_failed_load(self, load: ReadCommand, plan: Plan | None, local_spans: Sequence[Span] | None) -> None:
        """Write a failed load, unless another case is being written; returns at once.

        Args:
            load: that failed.
            plan: of the load; None if it was not planned, so that there is nothing to write.
            local_spans: blocks that it was read into; None as for `plan`.
        """
        if self._folder is None or plan is None or local_spans is None:
            return
        with self._lock:
            if self._written >= _MAX_CASES or (self._writing is not None and not self._writing.done()):
                return
            self._written += 1
            path = self._folder / _name(load.request_id, self._written)
            self._writing = in_thread("kvhma-case", lambda: _write(path, load, plan, tuple(local_spans)))

    def wait(self, timeout: float) -> None:
        """Wait for the case that is being written."""
        with self._lock:
            writing = self._writing
        if writing is not None:
            writing.exception(timeout)


def _name(request_id: str, number: int) -> str:
    """Return a unique file name, with the part of the request's name that every file system accepts."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", request_id)[:80]
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}-{number:02}-{plain}.json"


def _write(path: Path, load: ReadCommand, plan: Plan, local_spans: Sequence[Span]) -> None:
    try:
        data = json.dumps(_form(load, plan, local_spans)).encode()
        if len(data) > _MAX_BYTES:
            logger.warning(
                "kvhma: did not save failed load %s as a case file: it would have %d bytes", load.request_id, len(data)
            )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        try:
            # Only for the owner: it has addresses of both engines' memory.
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            beside.rename(path)
        finally:  # on a full disk it would stay, and take the room that is left
            beside.unlink(missing_ok=True)
        logger.warning("kvhma: saved failed load %s as a case file: %s", load.request_id, path)
    except OSError as error:
        logger.warning("kvhma: did not save failed load %s as a case file: %s", load.request_id, error)


def _form(load: ReadCommand, plan: Plan, local_spans: Sequence[Span]) -> dict[str, Any]:
    # These recreate a plan, so it depends on nothing else.
    (local, remotes), options = plan.__getnewargs_ex__()
    return {
        "kvhma_case": _CASE_VERSION,
        "local": json.loads(local.to_json()),
        "remote": [json.loads(remote.to_json()) for remote in remotes],
        "num_tokens": load.num_tokens,
        "local_spans": [_span(span) for span in local_spans],
        "remote_spans": [_span(span) for span in load.remote.spans],
        "descriptor_bytes": options["descriptor_bytes"],
    }


def _span(span: Span) -> dict[str, Any]:
    return {"first": int(span.first), "ids": [int(block) for block in span.ids]}
