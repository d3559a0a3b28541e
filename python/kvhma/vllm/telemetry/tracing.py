# SPDX-License-Identifier: Apache-2.0
"""The trace of a load, which D's scheduler passes to its workers.

vLLM stores trace headers only if its ``otlp_traces_endpoint`` is set. Without headers there are no traces.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it needs vLLM
    from vllm.v1.request import Request

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""The format of W3C's Trace Context. Clients write it, so it is untrusted."""


class Trace(NamedTuple):
    """The trace of a request.

    Attributes:
        parent: its ``traceparent`` header.
        waited: seconds between the scheduler's first look at the request and its order of the load.
    """

    parent: str
    waited: float


def traceparent_of(request: Request) -> str | None:
    """Return the ``traceparent`` of a request; None if it is missing or malformed."""
    headers = getattr(request, "trace_headers", None)
    parent = headers.get("traceparent") if headers else None
    return parent if isinstance(parent, str) and _TRACEPARENT.fullmatch(parent) else None
