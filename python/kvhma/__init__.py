# SPDX-License-Identifier: Apache-2.0
"""What must move when a prefill engine hands a request's hybrid KV cache to a decode engine.

A :class:`Geometry` describes one rank's cache. :func:`plan` pairs a decode rank with its sources once;
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
    clip_blocks,
    descriptor_ids,
    expand_blocks,
    expand_views,
    fa_descriptors,
    fa_views,
    ssm_descriptors,
    ssm_views,
    validate,
    window_blocks,
)
from kvhma.errors import (
    AddressOverflowError,
    BlockIdError,
    GeometryError,
    HandshakeError,
    KvhmaError,
    PeerLostError,
    RequestError,
    TransferError,
    UnsupportedPairError,
)
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.planning import Readers, live_spans, plan, readers

__all__ = [
    "AddressOverflowError",
    "Axis",
    "BlockIdError",
    "Finding",
    "Geometry",
    "GeometryError",
    "Group",
    "HandshakeError",
    "KvhmaError",
    "Layer",
    "Loss",
    "Losses",
    "Page",
    "Part",
    "PeerLostError",
    "Plan",
    "Read",
    "Readers",
    "Region",
    "RequestError",
    "Span",
    "Transfer",
    "TransferError",
    "UnsupportedPairError",
    "__version__",
    "clip_blocks",
    "descriptor_ids",
    "expand_blocks",
    "expand_views",
    "fa_descriptors",
    "fa_views",
    "live_spans",
    "plan",
    "readers",
    "ssm_descriptors",
    "ssm_views",
    "validate",
    "window_blocks",
]
