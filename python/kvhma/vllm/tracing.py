# SPDX-License-Identifier: Apache-2.0
"""Under which trace a load belongs: what D's scheduler tells its workers of a request's headers.

vLLM keeps trace headers only where its ``otlp_traces_endpoint`` is set; without them nothing here does anything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it needs vLLM
    from vllm.v1.request import Request

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""As W3C's Trace Context has it. A client writes it."""


class Trace(NamedTuple):
    """The trace of a request.

    Attributes:
        parent: its ``traceparent`` header.
        waited: seconds from when the scheduler took the request until it ordered the load.
    """

    parent: str
    waited: float


def traceparent_of(request: Request) -> str | None:
    """Return the ``traceparent`` of a request, None if it has none that is one."""
    headers = getattr(request, "trace_headers", None)
    parent = headers.get("traceparent") if headers else None
    return parent if isinstance(parent, str) and _TRACEPARENT.fullmatch(parent) else None
