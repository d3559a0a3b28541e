# SPDX-License-Identifier: Apache-2.0
"""The trace of a request, which D's scheduler passes to its workers with each read.

vLLM stores trace headers only if its ``otlp_traces_endpoint`` is set. Without headers there are no traces.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvhma.vllm.options.doors import SchedulerDoor

if TYPE_CHECKING:  # it needs vLLM
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvhma.vllm.metadata import StepMetadata
    from kvhma.vllm.scheduler import KvhmaScheduler

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""The format of W3C's Trace Context. Clients write it, so it is untrusted."""


class Trace(NamedTuple):
    """The trace of a request.

    Attributes:
        parent: its ``traceparent`` header.
        waited: seconds between the scheduler's first look at the request and its order of the first read.
    """

    parent: str
    waited: float


class Room(SchedulerDoor):
    """Adds the trace of its request to each read command."""

    def __init__(self, core: KvhmaScheduler) -> None:
        """Start without requests."""
        self._traced: dict[str, tuple[str, float | None]] = {}
        """The header of each traced request, and when it was added; None once it was read."""

    def on_request_added(self, request: Request, params: dict[str, Any]) -> bool:
        """Note a request that has a trace."""
        if (parent := traceparent_of(request)) is not None:
            self._traced[request.request_id] = parent, time.monotonic()
        return False

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Add the traces."""
        for index, command in enumerate(metadata.loads if self._traced else ()):
            if command.request_id in self._traced:
                parent, added_at = self._traced[command.request_id]
                trace = Trace(parent, 0.0 if added_at is None else time.monotonic() - added_at)
                metadata.loads[index] = command.with_extra("spans", trace)
                self._traced[command.request_id] = parent, None
        return False

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> None:
        """Drop the trace of a request."""
        self._traced.pop(request.request_id, None)


def traceparent_of(request: Request) -> str | None:
    """Return the ``traceparent`` of a request; None if it is missing or malformed."""
    headers = getattr(request, "trace_headers", None)
    parent = headers.get("traceparent") if headers else None
    return parent if isinstance(parent, str) and _TRACEPARENT.fullmatch(parent) else None
