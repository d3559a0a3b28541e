# SPDX-License-Identifier: Apache-2.0
"""Sums over the content of a request's blocks that do not depend on ranks, blocks or strides.

Every four bytes of a row are a number. It is multiplied by keys of its coordinates: layer and part, token, index of
each axis, place in the row. The sums of an engine's ranks are added. docs/digests.md has the definition, and what the
sums find and miss. They run where the memory is: over arrays of numpy, or over tensors of torch on any device.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import GeometryError, RequestError, UnsupportedPairError
from kvhma.geometry import Axis, Geometry, Group, Layer, Part, Span

Layers: TypeAlias = tuple[str, int]
"""A kind of groups, and their window or chunk, or 0. Latent attention is ``full``, with which it may share a group."""

U64s: TypeAlias = NDArray[np.uint64]
I64s: TypeAlias = NDArray[np.int64]

RANGE_TOKENS = 1024
"""Tokens of each sum of a request; ranges begin at its multiples."""

_WRAP = (1 << 64) - 1
_BATCH_BYTES = 4 << 20
"""Most bytes that are summed at a time: their products take up to eight times as many."""


class Difference(NamedTuple):
    """A range of tokens of some layers that differs between the sides; a state has no range."""

    layers: Layers
    first: int
    end: int

    def __str__(self) -> str:
        kind, limit = self.layers
        name = f"{kind} {limit} layers" if limit else f"{kind} layers"
        return f"{name}, tokens {self.first}..{self.end - 1}" if self.end else name


@dataclass(frozen=True)
class ContentDigest:
    """The sums of one or several ranks for a request.

    Attributes:
        num_tokens: number of tokens that the ranks hold.
        ranks: number of tensor-parallel ranks. All of them together count each item so often.
        layers: the sums modulo 2**64, by layers and heads. First the sum over coordinates alone, equal if both sides
            count the same items. Then one for each range of tokens, from the first token that the next step needs.
            Heads are 0 for parts without, -n if all ranks together have n, and 1 + r for those of rank r that other
            ranks may repeat. No rank knows how often, so their key is 1.
        from_tokens: the first token that counts. For a state: the end of the request if a state is missing, else 0.
    """

    num_tokens: int
    ranks: int
    layers: Mapping[tuple[Layers, int], tuple[int, ...]]
    from_tokens: Mapping[Layers, int]

    def __add__(self, added: ContentDigest) -> ContentDigest:
        """Add the sums of another rank of the same engine.

        Raises:
            RequestError: the other digest is for different tokens.
        """
        if (self.num_tokens, self.ranks) != (added.num_tokens, added.ranks):
            raise RequestError(f"digests of {self.num_tokens} and of {added.num_tokens} tokens cannot be added")
        layers, from_tokens = dict(self.layers), dict(self.from_tokens)
        for name, sums in added.layers.items():
            layers[name] = _added(layers.get(name, (0,) * len(sums)), sums)
        for kind, token in added.from_tokens.items():
            from_tokens[kind] = max(token, from_tokens.get(kind, 0))
        return ContentDigest(self.num_tokens, self.ranks, layers, from_tokens)


def content_digest(
    geometry: Geometry,
    memory: Callable[[int, int], Any],
    num_tokens: int,
    spans: Sequence[Span],
    seed: int,
    *,
    first_tokens: Sequence[int] = (),
    cp_tp_size: int = 1,
    names: Collection[str] | None = None,
) -> ContentDigest:
    """Return the sums of a request's blocks on one rank, to be added to those of all ranks of the engine.

    Args:
        geometry: of the rank.
        memory: returns the bytes of a region from an offset on: a uint8 array or tensor of one dimension.
        num_tokens: tokens that the blocks hold.
        spans: live blocks of each group. Tokens that the next step no longer needs may be missing.
        seed: a number of 64 bits from which the keys are made, equal on both sides.
        first_tokens: for each group the first token that counts; empty for all tokens that the next step needs.
        cp_tp_size: number of neighbouring tensor-parallel ranks that share the tokens of context-parallel groups.
        names: of the layers that count; None for all layers.

    Raises:
        GeometryError: an axis other than the heads may repeat.
        RequestError: a group has no block with such an id.
    """
    digest = ContentDigest(num_tokens, geometry.tp_size, {}, {})
    for index, (group, span) in enumerate(zip(geometry.groups, spans, strict=True)):
        if group.kind == "opaque":  # only its owner knows what its blocks mean for a request
            continue
        layers = "full" if group.kind == "mla" else group.kind, group.window or group.chunk or 0
        ids, tokens = _tokens(group, span)
        first, ranges = _needed(layers, num_tokens)
        first = max(first, first_tokens[index] if first_tokens else 0)
        if group.kind == "ssm":
            first = 0 if len(ids) else num_tokens
        shared = cp_tp_size if group.cp_size > 1 else 1
        digest += replace(digest, layers={(layers, 0): (0,) * (len(ranges) + 1)}, from_tokens={layers: first})
        for layer in geometry.layers:
            if layer.group == index and (names is None or layer.name in names):
                if len(ids) and not 0 <= ids.min() <= ids.max() < layer.num_blocks:
                    raise RequestError(f"blocks {ids.tolist()}, expected 0..{layer.num_blocks - 1}")
                for part in layer.page.parts:
                    content = memory(layer.region, layer.offset + part.offset)
                    heads, key, coverage, values = _part_sums(geometry, layer, part, ids, content, seed)
                    sums = coverage, *_by_range(values, tokens, range(first, num_tokens), ranges, seed)
                    of_part = tuple(shared * key * value & _WRAP for value in sums)
                    digest += replace(digest, layers={(layers, heads): of_part})
    return digest


def _needed(layers: Layers, num_tokens: int) -> tuple[int, range]:
    """Return the first token that the next step needs, and the numbers of the ranges of tokens from there on."""
    kind, limit = layers
    first = num_tokens // limit * limit if kind == "chunked" else 0
    first = min(num_tokens, max(0, num_tokens + 1 - limit)) if kind == "sliding" else first
    end = 1 if kind == "ssm" else -(-num_tokens // RANGE_TOKENS) if first < num_tokens else 0
    return first, range(first // RANGE_TOKENS, end)


def _tokens(group: Group, span: Span) -> tuple[I64s, I64s]:
    """Return ids of blocks, and the token of each place there: (n, kernel blocks, tokens of each). A state is one."""
    ids = np.asarray(span.ids, np.int64)
    if group.kind == "ssm":
        ids = ids[max(0, len(ids) - 1 - group.speculative) :][:1]
        return ids, np.zeros((len(ids), 1, 1), np.int64)
    #   cp_size 2, turns of 2 tokens, rank 0     place in the block   0 1 2 3
    #                                            token                0 1 4 5
    place = np.arange(group.block_size)
    place = (place // group.turn * group.cp_size + group.cp_rank) * group.turn + place % group.turn
    entries = span.first + np.arange(len(ids))
    return ids, entries[:, None, None] * group.tokens_per_entry + place.reshape(group.ratio, -1)


def _keys(seed: int, name: str, indices: I64s) -> U64s:
    """Return odd keys of 64 bits, by the last steps of splitmix64. The product of odd keys and a change is a change."""
    value = indices.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(_salt(seed, "axis", name))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return (value ^ (value >> np.uint64(31))) | np.uint64(1)


def _salt(seed: int, *names: str) -> int:
    text = seed.to_bytes(8, "little") + b"".join(len(name).to_bytes(8, "little") + name.encode() for name in names)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _by_range(values: U64s, tokens: I64s, held: range, ranges: range, seed: int) -> list[int]:
    """Return the sum over each range of tokens; `values` are of each token, or of each kernel block as a whole."""
    first, last = tokens[..., : values.shape[-1]], tokens[..., -values.shape[-1] :]
    counts = (first < held.stop) & (last >= held.start) & (held.start < held.stop)
    values = values[counts] * _keys(seed, "tokens", first[counts])
    numbers = np.maximum(first[counts] // RANGE_TOKENS, ranges.start)
    return [int(values[numbers == number].sum(dtype=np.uint64)) for number in ranges]


def _part_sums(
    geometry: Geometry, layer: Layer, part: Part, ids: I64s, content: Any, seed: int
) -> tuple[int, int, int, U64s]:
    """Return of a part: heads as in :class:`ContentDigest`, key, sum over coordinates, sums of tokens without keys."""
    group, item = geometry.groups[layer.group], part.item_bytes
    tokens = next((axis for axis in part.axes if axis.name == "tokens"), None)
    heads = next((axis for axis in part.axes if axis.name == "heads"), None)
    # A row is along the largest axis, independent of its stride, so that both sides number its words alike.
    rows = [axis for axis in part.axes if axis not in (tokens, heads)] or [Axis("", 1, item)]
    row = max(rows, key=lambda axis: (axis.extent - axis.spare, axis.name))
    outer = [axis for axis in part.axes if axis not in (tokens, row)]
    if any(axis.may_repeat and axis is not heads for axis in part.axes):
        raise GeometryError(f"layer {layer.name!r}: an axis of {part.name!r} may repeat, expected only the heads")
    # Spare indices are written before they are read.
    *of_outer, items = (np.arange(axis.start, axis.start + axis.shard.held - axis.spare) for axis in (*outer, row))
    pairs = zip(outer, of_outer, strict=True)
    weights = [_keys(seed, axis.name, of) ** np.uint64(not axis.may_repeat) for axis, of in pairs]
    dims = [(layer.num_blocks, layer.block_stride), (group.ratio, geometry.kernel_stride(layer))]
    dims += [(group.kernel_block_size, tokens.stride) if tokens else (1, 0)]
    dims += [(len(of), axis.stride) for axis, of in zip(outer, weights, strict=True)]
    start, first, nbytes = layer.offset + part.offset, row.start * item, len(items) * item
    to_align = geometry.regions[layer.region].base + start, first, nbytes, *(stride for _, stride in dims)
    # A dense row is one of words if all words are aligned, else one of bytes; other rows are items of bytes.
    is_dense = row.stride == item
    unit = 4 if is_dense and not any(value % 4 for value in to_align) else 1
    places = np.arange(first, first + nbytes, unit).reshape(-1, 1 if is_dense else item)
    dims += [(len(places), unit if is_dense else row.stride), (places.shape[1], unit)]
    words = _keys(seed, "words", places // 4) >> np.uint64(32) | np.uint64(1)
    weights.append(words << (8 * (places % 4)).astype(np.uint64))
    batch = max(1, _BATCH_BYTES // (unit * math.prod(length for length, _ in dims[1:])))
    batches = np.split(ids, range(batch, len(ids), batch))
    values = np.concatenate([_weighted(content, dims, unit, weights, of_batch) for of_batch in batches])
    # The copies of an item on all ranks count `ContentDigest.ranks` times, and each copy influences the sum.
    shards = math.prod(axis.extent // axis.shard.held for axis in (*outer, row) if not axis.may_repeat)
    key = (_salt(seed, "part", layer.name, part.name) | 1) * shards
    of_ones = math.prod(int(of.sum(dtype=np.uint64)) for of in weights) * (0x01010101 if unit == 4 else 1)
    coverage = 0 if group.cp_rank else of_ones  # context-parallel ranks hold the same items of other tokens
    place = (1 + heads.start if heads.may_repeat else -heads.extent) if heads else 0
    return place, key, coverage, values


def _weighted(content: Any, dims: Sequence[tuple[int, int]], unit: int, weights: Sequence[U64s], ids: I64s) -> U64s:
    """Return the sum of each token of some blocks, of shape (n, kernel blocks, tokens)."""
    shape, strides = zip(*dims, strict=True)
    arrays = [of.view(np.int64) for of in (ids, *weights, np.array([0xFFFF_FFFF]))]  # signed ones wrap to the same bits
    if isinstance(content, np.ndarray):
        view = np.ndarray(shape, np.uint32 if unit == 4 else np.uint8, content, 0, strides)
    else:
        torch = sys.modules["torch"]
        units = content[: len(content) // unit * unit].view(torch.int32 if unit == 4 else torch.uint8)
        view = units.as_strided(shape, [stride // unit for stride in strides], units.storage_offset())
        arrays = [torch.from_numpy(array).to(content.device) for array in arrays]
    at, *outer, words, mask = arrays
    sums = ((view[at] & mask) * words).sum((-2, -1))
    for of_axis in reversed(outer):
        sums = (sums * of_axis).sum(-1)
    return np.asarray(sums if isinstance(content, np.ndarray) else sums.cpu()).view(np.uint64)


def differences(prefill: ContentDigest, decode: ContentDigest, seed: int) -> tuple[list[Difference], int]:
    """Compare the sums of P's ranks with those of D's ranks, over the ranges of tokens that D has moved whole.

    Args:
        prefill: the sums of P's ranks, added up.
        decode: the sums of D's ranks, added up.
        seed: the seed of both.

    Returns:
        The differences, and the number of compared tokens, counted separately for each kind of layers.

    Raises:
        UnsupportedPairError: the two sides sum different items, so they cannot be compared.
    """
    found, compared = list[Difference](), 0
    remote_names, names = ([Difference(layers, 0, 0) for layers in sorted(of.from_tokens)] for of in (prefill, decode))
    if remote_names != names:
        raise _incomparable("layers", *(", ".join(map(str, of)) or "nothing" for of in (names, remote_names)))
    for name in names:
        layers = name.layers
        local, remote = _numbered(name, decode, prefill, seed), _numbered(name, prefill, decode, seed)
        first, ranges = _needed(layers, decode.num_tokens)
        if (first, local[0]) != (_needed(layers, prefill.num_tokens)[0], remote[0]):
            raise _incomparable(str(name), "these items", "different items or ranks")
        for index, of_decode, of_prefill in zip(ranges, local[1:], remote[1:], strict=False):
            begin, end = max(first, index * RANGE_TOKENS), min(prefill.num_tokens, (index + 1) * RANGE_TOKENS)
            tokens = name if layers[0] == "ssm" else Difference(layers, begin, end)
            end = prefill.num_tokens if layers[0] == "ssm" else end
            if decode.from_tokens[layers] <= begin and end <= decode.num_tokens:
                compared += tokens.end - tokens.first
                found += [tokens] if of_decode != of_prefill else []
    return found, compared


def _numbered(name: Difference, digest: ContentDigest, compared: ContentDigest, seed: int) -> tuple[int, ...]:
    """Return the sums over some layers as often as the ranks of both sides count; repeated heads have indices.

    A side that knows the number of heads decides. If none does, it divides the ranks of both.
    """
    by_heads = {heads: sums for (layers, heads), sums in digest.layers.items() if layers == name.layers}
    compared_heads = [heads for (layers, heads) in compared.layers if layers == name.layers]
    places, compared_places = ([heads for heads in of if heads > 0] for of in (by_heads, compared_heads))
    weights = dict.fromkeys(by_heads, 1)
    if places:
        counts = {-heads for heads in (*by_heads, *compared_heads) if heads < 0}
        counts |= {math.gcd(len(places), len(compared_places))} if compared_places else set()
        count = max(counts, default=1)
        if len(counts) != 1 or sorted(places) != list(range(1, len(places) + 1)) or len(places) % count:
            raise _incomparable(str(name), f"{sorted(counts)} heads", f"heads of {len(places)} ranks")
        keys = _keys(seed, "heads", np.arange(count)).tolist()
        weights |= {place: keys[(place - 1) * count // len(places)] * count for place in places}
    total = (0,) * len(by_heads[0])
    for heads, sums in by_heads.items():
        total = _added(total, [compared.ranks * weights[heads] * value for value in sums])
    return total


def _incomparable(what: str, local: str, remote: str) -> UnsupportedPairError:
    text = f"content_digests: {what}: D sums {local}, P {remote}; the two cannot be compared"
    return UnsupportedPairError(text, field="content_digests", local=local, remote=remote)


def _added(sums: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple((a + b) & _WRAP for a, b in zip(sums, more, strict=True))
