# SPDX-License-Identifier: Apache-2.0
"""Functions over geometries: pair them, find a request's live blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvhma._kvhma import Plan, live_spans
from kvhma.geometry import Geometry

__all__ = ["DEFAULT_DESCRIPTOR_BYTES", "DEFAULT_MAX_DESCRIPTORS", "live_spans", "plan"]

DEFAULT_DESCRIPTOR_BYTES = 131_072
"""Number of bytes that take about as long to move as posting another descriptor: 3 µs at 40 GB/s. On one host with
cross-memory attach (7 GB/s) the value is nearer to 16 KiB."""

DEFAULT_MAX_DESCRIPTORS = 1 << 22
"""Limit of a request's descriptors: 192 MiB, and at best 4 seconds in NIXL, which posts one in a microsecond."""


def plan(
    local: Geometry,
    remote: Geometry | Sequence[Geometry],
    *,
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES,
    max_descriptors: int = DEFAULT_MAX_DESCRIPTORS,
) -> Plan:
    """Pair a local (decode) rank with its sources, once for all requests.

    Args:
        local: the rank that reads.
        remote: the rank or ranks that it may read from: all tensor-parallel ranks and pipeline stages of the other
            engine.
        descriptor_bytes: how many additional bytes of a partial last block may be moved to save one descriptor; with 0
            no unrequested token is moved.
        max_descriptors: limit of a request's descriptors before neighbours are joined, including its ranges to zero. A
            larger request is refused before its descriptors are made. Each descriptor takes 48 bytes, and about 80
            while it is made.

    Returns:
        The plan of this rank, for any number of requests.

    Raises:
        UnsupportedPairError: a source cannot be paired, or no source holds a needed item; the text names the field and
            both values.
        RequestError: an argument has the wrong type.
    """
    return Plan(local, remote, descriptor_bytes=descriptor_bytes, max_descriptors=max_descriptors)
