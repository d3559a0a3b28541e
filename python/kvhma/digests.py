# SPDX-License-Identifier: Apache-2.0
"""Sums over the content of a request's blocks that do not depend on ranks, blocks or strides.

Every four bytes of a row are a number. It is multiplied by keys of its coordinates: layer and part, token, index of
each axis, place in the row. The sums of an engine's ranks are added. Copies that several ranks hold count once in
total, with a share from each rank. So engines with one rank and with eight ranks get the same sums if they hold the
same bytes at the same coordinates. docs/digests.md has the definition, and what the sums find and miss.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Plan, content_keys, content_sums
from kvhma.errors import RequestError, UnsupportedPairError
from kvhma.geometry import Geometry, Span

Layers: TypeAlias = tuple[str, int]
"""The layers of one sum: the kind of their group, and its window or chunk (0 without a limit). Latent attention counts
as ``full`` because it may share a group with full attention."""

_BY_TOKEN = ("full", "sliding", "chunked")
_WRAP = (1 << 64) - 1
_RANGE_TOKENS = 1024
_MAX_RANGES = 64
"""As in rust/core/src/content/pieces.rs."""

_HEADER = struct.Struct("<8sQQQHII")
"""Kind, window or chunk, first token, first counted token, number of sums, places, number of places with sums."""


@dataclass(frozen=True)
class Counting:
    """Which bytes are summed, and where they are.

    Attributes:
        first_tokens: for each group the first token that counts; None for all tokens that the next step needs.
        cp_tp_size: number of neighbouring tensor-parallel ranks that share the tokens of context-parallel groups.
        memory: the regions, each uint8 ``(bytes,)``; None to read host memory at the regions' addresses. It must be
            mapped then, and nothing may write to the request's blocks during the call.
    """

    first_tokens: Sequence[int] | None = None
    cp_tp_size: int = 1
    memory: Sequence[NDArray[np.uint8]] | None = None


@dataclass(frozen=True)
class LayerSums:
    """Sums over some layers, of one or several ranks, modulo 2**64.

    Attributes:
        first_token: the first token that the next step needs; the first range of tokens contains it.
        from_token: the first token that counts. For a state: the end of the request if a state is missing, else 0.
        sums: first the sum over coordinates alone, equal if both sides count the same items; then one sum per token
            range.
        places: number of ranks that may each hold a different head, for heads that may repeat an unknown number of
            times; 0 without such heads.
        repeated: sums over these heads by rank number, with a head key of 1.
        heads: extents of the heads axes with known indices.
    """

    first_token: int
    from_token: int
    sums: tuple[int, ...]
    places: int = 0
    repeated: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()

    def __add__(self, added: LayerSums) -> LayerSums:
        """Add the sums of another rank."""
        if (self.first_token, len(self.sums)) != (added.first_token, len(added.sums)):
            raise RequestError("sums over different tokens cannot be added")
        if self.places and added.places and self.places != added.places:
            raise UnsupportedPairError(f"heads of {self.places} places and of {added.places} cannot be added")
        repeated = dict(self.repeated)
        for place, sums in added.repeated.items():
            repeated[place] = _added(repeated[place], sums) if place in repeated else sums
        return LayerSums(
            self.first_token,
            max(self.from_token, added.from_token),
            _added(self.sums, added.sums),
            self.places or added.places,
            repeated,
            self.heads | added.heads,
        )


class Difference(NamedTuple):
    """A range of tokens of some layers that differs between the sides; a state has no range."""

    layers: Layers
    first: int
    end: int

    def __str__(self) -> str:
        kind, limit = self.layers
        name = f"{kind} {limit}" if limit else kind
        tokens = f", tokens {self.first}..{self.end - 1}" if self.end else ""
        return f"{name} layers{tokens}"


@dataclass(frozen=True)
class ContentDigest:
    """The sums of one or several ranks for a request.

    Attributes:
        num_tokens: number of tokens that the ranks hold.
        layers: the sums, by layers.
    """

    num_tokens: int
    layers: Mapping[Layers, LayerSums]

    def __add__(self, added: ContentDigest) -> ContentDigest:
        """Add the sums of another rank of the same engine.

        Raises:
            RequestError: the other digest is for a different number of tokens.
            UnsupportedPairError: the ranks do not agree on how often heads are repeated.
        """
        if self.num_tokens != added.num_tokens:
            raise RequestError(f"digests of {self.num_tokens} and of {added.num_tokens} tokens cannot be added")
        layers = dict(self.layers)
        for name, sums in added.layers.items():
            layers[name] = layers[name] + sums if name in layers else sums
        return ContentDigest(self.num_tokens, layers)

    def to_bytes(self) -> bytes:
        """Return the wire format, which :meth:`from_bytes` reads."""
        parts = [self.num_tokens.to_bytes(8, "little")]
        for (kind, limit), sums in self.layers.items():
            head = (limit, sums.first_token, sums.from_token, len(sums.sums), sums.places, len(sums.repeated))
            parts += [_HEADER.pack(kind.encode(), *head), _packed(sums.sums)]
            for place, repeated in sums.repeated.items():
                parts += [place.to_bytes(4, "little"), _packed(repeated)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> ContentDigest:
        """Read a digest. Safe on any bytes. The wire format does not have the extents of heads.

        Args:
            data: the result of `to_bytes`.

        Returns:
            The digest.

        Raises:
            RequestError: the bytes are not a digest.
        """
        try:
            return _read(data)
        except (struct.error, ValueError) as error:
            raise RequestError(f"digest: {len(data)} bytes cannot be read: {error}") from error


def content_digest(
    of: Geometry | Plan, num_tokens: int, spans: Sequence[Span], seed: int, counting: Counting = Counting()
) -> ContentDigest:
    """Sum the blocks of a request on one rank.

    Args:
        of: the rank's geometry. D passes the plan that it reads with, so that D and P mean the same by each axis;
            layers that no source has do not count then.
        num_tokens: tokens that the blocks hold.
        spans: live blocks of each group. Tokens that the next step no longer needs may be missing.
        seed: a number of 64 bits from which the keys are made, equal on both sides.
        counting: which bytes count, and where they are.

    Returns:
        The rank's sums. Add the sums of all ranks of an engine before you compare them.

    Raises:
        GeometryError: a shard is not its rank's equal share, or the caches are not host memory.
        RequestError: a span or a number does not fit the geometry.
    """
    found = content_sums(
        of,
        num_tokens,
        spans,
        seed,
        first_tokens=counting.first_tokens,
        cp_tp_size=counting.cp_tp_size,
        memory=None if counting.memory is None else list(counting.memory),
    )
    layers = {}
    for kind, limit, first, begin, sums, repeated, heads in found:
        place, places, of_place = repeated or (0, 0, [])
        by_place = {place: tuple(of_place)} if places else {}
        layers[kind, limit] = LayerSums(first, begin, tuple(sums), places, by_place, frozenset(heads))
    return ContentDigest(num_tokens, layers)


def range_tokens(num_tokens: int) -> int:
    """Return the number of tokens of each sum of a request; ranges begin at its multiples.

    Args:
        num_tokens: tokens of the request.
    """
    fewest = -(-num_tokens // _MAX_RANGES)
    return max(_RANGE_TOKENS, 1 << (fewest - 1).bit_length())


def differences(prefill: ContentDigest, decode: ContentDigest, seed: int) -> tuple[list[Difference], int]:
    """Compare the sums of P's ranks with the sums of D's ranks.

    A range of tokens counts if D has moved all of it. So the range in which D's own prefix hit ends does not count, nor
    the last range if D loaded fewer tokens than P has. If D has so few tokens that its ranges have another length, no
    range counts.

    Args:
        prefill: the added sums of P's ranks.
        decode: the added sums of D's ranks, computed with the plans that read from P.
        seed: the seed of both sums.

    Returns:
        The differences, and the number of compared tokens, counted separately for each kind of layers.

    Raises:
        UnsupportedPairError: the two sides sum different items, so they cannot be compared.
    """
    if prefill.layers.keys() != decode.layers.keys():
        raise _incomparable("layers", _names(decode.layers), _names(prefill.layers))
    found, compared = list[Difference](), 0
    for layers, local in decode.layers.items():
        remote = _comparable(layers, prefill.layers[layers], local, seed)
        if layers[0] in _BY_TOKEN:
            moved = _moved_ranges(layers, local, prefill.num_tokens, decode.num_tokens)
            compared += sum(tokens.end - tokens.first for tokens in moved.values())
            found += [tokens for index, tokens in moved.items() if remote[index] != local.sums[index]]
        elif decode.num_tokens == prefill.num_tokens and not local.from_token and remote != local.sums:
            found.append(Difference(layers, 0, 0))
    return found, compared


def _comparable(layers: Layers, remote: LayerSums, local: LayerSums, seed: int) -> tuple[int, ...]:
    """Return P's sums of some layers, after a check that D sums the same items in the same ranges."""
    sums = _numbered(layers, remote, local, seed)
    if sums[0] != local.sums[0]:
        raise _incomparable(f"{Difference(layers, 0, 0)}", "these items", "different items or ranks")
    if remote.first_token != local.first_token or len(sums) < len(local.sums):
        first = f"from token {local.first_token}", f"from {remote.first_token}"
        raise _incomparable(f"{Difference(layers, 0, 0)}", *first)
    return sums


def _moved_ranges(layers: Layers, local: LayerSums, prefill_tokens: int, decode_tokens: int) -> dict[int, Difference]:
    """Return the ranges of tokens that D has moved whole, by the index of their sum."""
    step = range_tokens(prefill_tokens)
    if step != range_tokens(decode_tokens):
        return {}
    moved = {}
    for index in range(1, len(local.sums)):
        end = (local.first_token // step + index) * step
        tokens = Difference(layers, max(local.first_token, end - step), min(prefill_tokens, end))
        if local.from_token <= tokens.first and tokens.end <= decode_tokens:
            moved[index] = tokens
    return moved


def _numbered(layers: Layers, remote: LayerSums, local: LayerSums, seed: int) -> tuple[int, ...]:
    """Return P's sums, with its repeated heads under the indices that D has for them."""
    if local.repeated:
        raise _incomparable(f"{Difference(layers, 0, 0)}", f"{local.places} places of heads", "another number")
    if not remote.repeated:
        return remote.sums
    if len(local.heads) != 1:
        raise _incomparable(f"{Difference(layers, 0, 0)}", f"heads of extents {sorted(local.heads)}", "repeated heads")
    (count,) = local.heads
    places = [index * remote.places // count for index in range(count)]
    if remote.places % count or any(place not in remote.repeated for place in places):
        raise _incomparable(f"{Difference(layers, 0, 0)}", f"{count} heads", f"{remote.places} places")
    total = remote.sums
    for key, place in zip(content_keys(seed, "heads", count), places, strict=True):
        total = _added(total, [key * value & _WRAP for value in remote.repeated[place]])
    return total


def _incomparable(field_name: str, local: str, remote: str) -> UnsupportedPairError:
    text = f"content_digests: {field_name}: D sums {local}, P {remote}; the two cannot be compared"
    return UnsupportedPairError(text, field="content_digests", local=local, remote=remote)


def _names(layers: Iterable[Layers]) -> str:
    return ", ".join(str(Difference(name, 0, 0)) for name in sorted(layers)) or "nothing"


def _added(sums: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple((a + b) & _WRAP for a, b in zip(sums, more, strict=True))


def _packed(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def _read(data: bytes) -> ContentDigest:
    """Read the result of :meth:`ContentDigest.to_bytes`.

    | tokens: 8 bytes | for each kind of layers: header, sums | for each place: place: 4 bytes, sums |
    """
    at = 8
    layers: dict[Layers, LayerSums] = {}
    while at < len(data):
        kind, limit, first, begin, count, places, given = _HEADER.unpack_from(data, at)
        at += _HEADER.size

        def sums(start: int, count: int = count) -> tuple[int, ...]:
            return struct.unpack_from(f"<{count}Q", data, start)

        total, at = sums(at), at + 8 * count
        repeated = {}
        for _ in range(given):
            repeated[int.from_bytes(data[at : at + 4], "little")] = sums(at + 4)
            at += 4 + 8 * count
        if not count or len(repeated) != given or any(place >= places for place in repeated):
            raise ValueError(f"{count} sums, {given} of {places} places")
        layers[kind.rstrip(b"\0").decode("ascii"), limit] = LayerSums(first, begin, total, places, repeated)
    if len(data) < 8:
        raise ValueError("it ends too early")
    return ContentDigest(int.from_bytes(data[:8], "little"), layers)
