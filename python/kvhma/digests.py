# SPDX-License-Identifier: Apache-2.0
"""Sums over what a request's blocks hold, the same however ranks, blocks and strides cut it.

Every four bytes of a row count as a number, multiplied by keys of their coordinates: layer and part, token, index of
each axis, place in the row. What the ranks of an engine sum is added; copies that several ranks hold count as one
together, and each of them for something. So an engine with one rank and one with eight come to the same numbers if they
hold the same bytes at the same coordinates. docs/digests.md has the definition, and what it finds and what it does not.
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
"""Which layers are summed together: kind of their group, and its window or chunk, 0 without one. Those of latent
attention are among the ``full`` ones, since they may share a group."""

_BY_TOKEN = ("full", "sliding", "chunked")
_WRAP = (1 << 64) - 1
_RANGE_TOKENS = 1024
_MAX_RANGES = 64
"""As in rust/core/src/content/pieces.rs."""

_HEADER = struct.Struct("<8sQQQHII")
"""Kind, window or chunk, first token, first that counts, sums, places, places that have sums."""


@dataclass(frozen=True)
class Counting:
    """Which bytes are summed, and where they are.

    Attributes:
        first_tokens: for each group the first token that counts; None for all that the next step needs.
        cp_tp_size: how many neighbouring tensor-parallel ranks share the tokens of context-parallel groups.
        memory: the regions, each uint8 ``(bytes,)``; None to read host memory at the regions' addresses. They have to
            be mapped then, and nothing may write to the request's blocks meanwhile.
    """

    first_tokens: Sequence[int] | None = None
    cp_tp_size: int = 1
    memory: Sequence[NDArray[np.uint8]] | None = None


@dataclass(frozen=True)
class LayerSums:
    """Sums over some layers, of one rank or of several, modulo 2**64.

    Attributes:
        first_token: the first one that the next step needs; the ranges of tokens begin with that of it.
        from_token: the first one that counts; of states the request's end if one is missing, else 0.
        sums: over coordinates alone, which are equal if the same items count, then over each range of tokens.
        places: of heads that ranks may repeat, not knowing how often: the ranks that may each hold another one; 0
            without such.
        repeated: sums over these heads, as if their key were 1, by place.
        heads: extents of the heads that have numbers.
    """

    first_token: int
    from_token: int
    sums: tuple[int, ...]
    places: int = 0
    repeated: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()

    def __add__(self, other: LayerSums) -> LayerSums:
        """Add what another rank has summed."""
        if (self.first_token, len(self.sums)) != (other.first_token, len(other.sums)):
            raise RequestError("sums of other tokens cannot be added")
        if self.places and other.places and self.places != other.places:
            raise UnsupportedPairError(f"heads of {self.places} places and of {other.places} cannot be added")
        repeated = dict(self.repeated)
        for place, sums in other.repeated.items():
            repeated[place] = _added(repeated[place], sums) if place in repeated else sums
        return LayerSums(
            self.first_token,
            max(self.from_token, other.from_token),
            _added(self.sums, other.sums),
            self.places or other.places,
            repeated,
            self.heads | other.heads,
        )


class Difference(NamedTuple):
    """Tokens of some layers that are not the same on both sides; a state has none."""

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
    """What a rank holds of a request, or several ranks together.

    Attributes:
        num_tokens: tokens that it holds.
        layers: the sums.
    """

    num_tokens: int
    layers: Mapping[Layers, LayerSums]

    def __add__(self, other: ContentDigest) -> ContentDigest:
        """Add what another rank of the same engine holds.

        Raises:
            RequestError: of another number of tokens.
            UnsupportedPairError: the ranks do not agree on how often heads are repeated.
        """
        if self.num_tokens != other.num_tokens:
            raise RequestError(f"digests of {self.num_tokens} and of {other.num_tokens} tokens cannot be added")
        layers = dict(self.layers)
        for name, sums in other.layers.items():
            layers[name] = layers[name] + sums if name in layers else sums
        return ContentDigest(self.num_tokens, layers)

    def to_bytes(self) -> bytes:
        """Return it as it is sent; :meth:`from_bytes` reads it."""
        parts = [self.num_tokens.to_bytes(8, "little")]
        for (kind, limit), one in self.layers.items():
            head = (limit, one.first_token, one.from_token, len(one.sums), one.places, len(one.repeated))
            parts += [_HEADER.pack(kind.encode(), *head), _packed(one.sums)]
            for place, sums in one.repeated.items():
                parts += [place.to_bytes(4, "little"), _packed(sums)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> ContentDigest:
        """Read a digest. Safe on any bytes. Which extents its heads have is not sent.

        Args:
            data: of `to_bytes`.

        Returns:
            The digest.

        Raises:
            RequestError: it is none.
        """
        try:
            return _read(data)
        except (struct.error, ValueError) as error:
            raise RequestError(f"digest: {len(data)} bytes are none: {error}") from error


def content_digest(
    of: Geometry | Plan, num_tokens: int, spans: Sequence[Span], seed: int, counting: Counting = Counting()
) -> ContentDigest:
    """Sum what one rank holds of a request.

    Args:
        of: the rank's geometry; at D the plan it reads with, so that P and it mean the same by each axis. Then layers
            that no source has do not count.
        num_tokens: tokens that the blocks hold.
        spans: live blocks of each group. Tokens that the next step does not need any more may be missing.
        seed: number of 64 bits that the keys are made from, equal on both sides.
        counting: which bytes count, and where they are.

    Returns:
        The rank's sums. Those of all ranks of an engine have to be added before they are compared.

    Raises:
        GeometryError: a shard is not the equal share of its rank; or the caches are not host memory.
        RequestError: a span or a number that the geometry does not fit.
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
    """Return over how many tokens each sum of a request is; ranges begin at multiples of it.

    Args:
        num_tokens: tokens of the request.
    """
    least = -(-num_tokens // _MAX_RANGES)
    return max(_RANGE_TOKENS, 1 << (least - 1).bit_length())


def differences(prefill: ContentDigest, decode: ContentDigest, seed: int) -> tuple[list[Difference], int]:
    """Compare what P's ranks hold with what D's ranks have.

    A range of tokens counts if D has moved all of it: not the one in which D's own prefix hit ends, nor the last one
    if D has taken fewer tokens, nor any if it has so few that its ranges are other ones.

    Args:
        prefill: the sum of P's ranks.
        decode: the sum of D's ranks, of plans with P's.
        seed: that both were summed with.

    Returns:
        What differs, and how many tokens were compared, those of each kind of layers apart.

    Raises:
        UnsupportedPairError: the two sides do not sum the same items, so that nothing can be said.
    """
    if prefill.layers.keys() != decode.layers.keys():
        raise _incomparable("layers", _names(decode.layers), _names(prefill.layers))
    found, compared = [], 0
    step = range_tokens(prefill.num_tokens)
    same_ranges = step == range_tokens(decode.num_tokens)
    for layers, local in decode.layers.items():
        remote = _numbered(layers, prefill.layers[layers], local, seed)
        if remote[0] != local.sums[0]:
            raise _incomparable(f"{Difference(layers, 0, 0)}", "these items", "others, or in another number of ranks")
        first = prefill.layers[layers].first_token
        if first != local.first_token or len(remote) < len(local.sums):
            raise _incomparable(f"{Difference(layers, 0, 0)}", f"from token {local.first_token}", f"from {first}")
        if layers[0] not in _BY_TOKEN:
            if decode.num_tokens == prefill.num_tokens and not local.from_token and remote != local.sums:
                found.append(Difference(layers, 0, 0))
            continue
        if not same_ranges:
            continue
        for index, (one, other) in enumerate(zip(remote[1:], local.sums[1:], strict=False)):
            low = max(first, (first // step + index) * step)
            end = min(prefill.num_tokens, (first // step + index + 1) * step)
            if local.from_token <= low and end <= decode.num_tokens:
                compared += end - low
                if one != other:
                    found.append(Difference(layers, low, end))
    return found, compared


def _numbered(layers: Layers, remote: LayerSums, local: LayerSums, seed: int) -> tuple[int, ...]:
    """Return P's sums with its repeated heads under the numbers that D has for them."""
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
        total = _added(total, [key * one & _WRAP for one in remote.repeated[place]])
    return total


def _incomparable(field_name: str, local: str, remote: str) -> UnsupportedPairError:
    text = f"content_digests: {field_name}: D sums {local}, P {remote}; the two cannot be compared"
    return UnsupportedPairError(text, field="content_digests", local=local, remote=remote)


def _names(layers: Iterable[Layers]) -> str:
    return ", ".join(str(Difference(one, 0, 0)) for one in sorted(layers)) or "nothing"


def _added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple((a + b) & _WRAP for a, b in zip(one, other, strict=True))


def _packed(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def _read(data: bytes) -> ContentDigest:
    """Read what :meth:`ContentDigest.to_bytes` writes.

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
