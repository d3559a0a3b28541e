# SPDX-License-Identifier: Apache-2.0
"""Plans the copies when a prefill engine hands off a request's hybrid KV cache to a decode engine.

A :class:`Geometry` describes one rank's cache. :func:`plan` pairs a decode rank with its prefill ranks once;
:meth:`Plan.transfer` turns a request's :class:`Span` lists into the fewest contiguous copies.
"""

from __future__ import annotations

from kvhma._kvhma import (
    Finding,
    Loss,
    Losses,
    Plan,
    Read,
    Transfer,
    __version__,
    validate,
)
from kvhma.costs import Cost, Costs, HandOffCost, Link, cost
from kvhma.errors import (
    AddressOverflowError,
    BlockIdError,
    GeometryError,
    KvhmaError,
    RequestError,
    UnsupportedPairError,
)
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.planning import live_spans, plan

__all__ = [
    "AddressOverflowError",
    "Axis",
    "BlockIdError",
    "Cost",
    "Costs",
    "Finding",
    "Geometry",
    "GeometryError",
    "Group",
    "HandOffCost",
    "KvhmaError",
    "Layer",
    "Link",
    "Loss",
    "Losses",
    "Page",
    "Part",
    "Plan",
    "Read",
    "Region",
    "RequestError",
    "Span",
    "Transfer",
    "UnsupportedPairError",
    "__version__",
    "cost",
    "live_spans",
    "plan",
    "validate",
]
