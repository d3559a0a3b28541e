# SPDX-License-Identifier: Apache-2.0
"""Content digests on the wire: P's lease table has one as bytes, for the answer to D's question."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from kvhma.digests import ContentDigest, Layers
from kvhma.errors import RequestError

_Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Form: TypeAlias = tuple[int, _Ranks, list[tuple[Layers, int, tuple[int, ...]]], list[tuple[Layers, int]]]
"""Tokens, ranks, sums by layers and heads, and from which token on they count."""

_FORM = msgspec.msgpack.Decoder(_Form)


def write_digest(digest: ContentDigest) -> bytes:
    """Return the wire format, which :func:`read_digest` reads."""
    layers = [(*name, sums) for name, sums in digest.layers.items()]
    return msgspec.msgpack.encode((digest.num_tokens, digest.ranks, layers, list(digest.from_tokens.items())))


def read_digest(data: bytes) -> ContentDigest:
    """Read a digest. Safe on any bytes.

    Raises:
        RequestError: the bytes are not a digest.
    """
    try:
        num_tokens, ranks, sums, from_tokens = _FORM.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"digest: {len(data)} bytes cannot be read: {error}") from error
    digest = ContentDigest(num_tokens, ranks, {(layers, heads): of for layers, heads, of in sums}, dict(from_tokens))
    lengths = {layers: len(digest.layers.get((layers, 0), ())) for layers in digest.from_tokens}
    if 0 in lengths.values() or any(lengths.get(layers) != len(of) for (layers, _), of in digest.layers.items()):
        raise RequestError(f"digest: {len(data)} bytes cannot be read: a number of sums that does not fit the others")
    return digest
