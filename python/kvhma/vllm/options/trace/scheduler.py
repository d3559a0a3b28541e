# SPDX-License-Identifier: Apache-2.0
"""The scheduler's process adds each request that ends to the trace, at P and at D.

Beginnings of prompts are equal in the trace if their caches are: tokens, adapter, items and salt are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhma.replay.trace_file import TraceFile
from kvhma.vllm.options.doors import SchedulerDoor
from kvhma.vllm.wire.peer_log import logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvhma.vllm.scheduler import KvhmaScheduler

_CLOSE_SECONDS = 5.0


class Room(SchedulerDoor):
    """Traces all requests of an engine, also those without ``kv_transfer_params``."""

    def __init__(self, core: KvhmaScheduler) -> None:
        """Open the file.

        Raises:
            SettingsError: the file cannot be opened.
        """
        settings = core.context.settings
        self._prompts = core.context.prompts
        self._file = TraceFile(str(settings.trace_out), settings.trace_salt_file, logger)

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> None:
        """Add a request, except one that vLLM has only made to report a rejection."""
        if request.abort_immediately:
            return

        def prefixes(counts: Sequence[int]) -> list[bytes]:
            return [digest.encode() for digest in self._prompts.make_prefix_digests(request, counts)]

        answer = len(request._all_token_ids) - request.num_prompt_tokens
        self._file.add_request(request.arrival_time, request.num_prompt_tokens, answer, prefixes=prefixes)

    def close(self) -> None:
        """Write what waits."""
        self._file.close(_CLOSE_SECONDS)
