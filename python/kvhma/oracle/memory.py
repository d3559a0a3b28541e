# SPDX-License-Identifier: Apache-2.0
"""The oracle over real memory: fills P with bytes from coordinates, and checks every byte of D afterwards.

Two processes that share only geometries and spans can each call their half. :mod:`kvhma.oracle.content` defines the
bytes. Filling or checking a gigabyte takes a second or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import OracleError
from kvhma.geometry import Geometry, Group, Layer, Part, Span
from kvhma.oracle.content import BATCH, Bytes, batches, content_of, spread, tile_with, tokens_axis, view_of
from kvhma.oracle.labels import (
    Ints,
    RemoteSpans,
    blocks_of,
    by_source,
    check_spans,
    first_needed,
    parts_of,
    together,
    tokens_from_first,
    used_blocks,
)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The effect of a correct transfer on D's real memory.

    Attributes:
        moved: bytes that hold P's content now, `excess` included.
        excess: the moved bytes of tokens after the token count.
        zeroed: bytes that are zero now.
        untouched: bytes that are unchanged.
    """

    moved: int
    excess: int
    zeroed: int
    untouched: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One byte of D with the wrong content.

    Attributes:
        region: index of the region.
        offset: offset of the byte in the region.
        layer: layer of the byte, None for padding.
        part: part of the layer's page, None for padding.
        token: absolute token, None for padding, for state and outside of the request's blocks.
        expected: the required content, in words.
        found: the actual content, in words.
    """

    region: int
    offset: int
    layer: str | None
    part: str | None
    token: int | None
    expected: str
    found: str

    def __str__(self) -> str:
        place = f"{self.layer}/{self.part}" if self.layer else "padding"
        token = "" if self.token is None else f" token {self.token}"
        where = f"region {self.region} at {self.offset} ({place}{token})"
        return f"{where}: expected {self.expected}, found {self.found}"


def fill_source(memory: Sequence[Bytes], geometry: Geometry, spans: Sequence[Span], *, seed: int = 0) -> None:
    """Fill a P rank's memory: content where the request's blocks are, junk everywhere else.

    Args:
        memory: the regions of `geometry`, each uint8 ``(region.bytes,)``; written.
        geometry: the rank.
        spans: the request's blocks, by group; they are filled beyond the last token as well.
        seed: selects the bytes; both sides need the same seed.

    Raises:
        ValueError: the memory or the spans do not fit the geometry.
    """
    _check_memory(memory, geometry)
    check_spans(geometry, spans)
    for index, region in enumerate(memory):
        tile_with(region, seed, f"junk {index}")
    for layer, part in parts_of(geometry):
        group = geometry.groups[layer.group]
        view = view_of(memory, geometry, layer, part)
        for ids, tokens in batches(blocks_of(group, spans[layer.group]), part, group):
            view[ids] = content_of(layer, part, tokens, seed)


def fill_stale(memory: Sequence[Bytes], *, seed: int = 0) -> None:
    """Fill a D rank's memory with bytes that :func:`check_memory` treats as another request's.

    Args:
        memory: the regions, each uint8 ``(n,)``; written.
        seed: the seed of :func:`check_memory`.
    """
    for index, region in enumerate(memory):
        tile_with(region, seed, f"stale {index}")


class Request(NamedTuple):
    """One request.

    Attributes:
        num_tokens: tokens that P computed.
        local_spans: D's blocks, by D's groups.
        remote_spans: P's blocks, by P's groups, for every source; or a list of spans for each source.
    """

    num_tokens: int
    local_spans: Sequence[Span]
    remote_spans: RemoteSpans


def check_memory(
    memory: Sequence[Bytes],
    local: Geometry,
    remotes: Sequence[Geometry],
    request: Request,
    *,
    excess_bytes: int | None = None,
    seed: int = 0,
) -> MemoryReport:
    """Check every byte of D's memory after the transfer of one request.

    Before the transfer, :func:`fill_stale` must fill the memory, and :func:`fill_source` the memory of every source.
    This check assumes that the sources together hold every coordinate of D's layers; the label oracle verifies that.

    Args:
        memory: the regions of `local`, each uint8 ``(region.bytes,)``; read.
        local: the D rank.
        remotes: the P ranks that D read from.
        request: the transferred request.
        excess_bytes: the transfer's count of bytes after the last token; None to accept any.
        seed: the seed of the fills.

    Returns:
        How many bytes were moved, zeroed and left untouched.

    Raises:
        OracleError: a byte or `excess_bytes` is wrong.
        ValueError: memory or spans do not fit the geometries.
    """
    _check_memory(memory, local)
    check_spans(local, request.local_spans)
    sources = list(zip(remotes, by_source(request.remote_spans, len(remotes)), strict=True))
    for remote, spans in sources:
        check_spans(remote, spans)
    expected, report = _expected(memory, local, _HeldTokens(sources), request, seed)
    _compare(memory, expected, local, request.local_spans, seed)
    if excess_bytes is not None and report.excess != excess_bytes:
        raise OracleError(f"excess_bytes is {excess_bytes}, {report.excess} were moved", code="counts")
    return report


def _expected(
    memory: Sequence[Bytes], local: Geometry, held: _HeldTokens, request: Request, seed: int
) -> tuple[list[Bytes], MemoryReport]:
    """Return the required content of D's memory; `memory` decides between two valid bytes."""
    expected = [np.empty_like(region) for region in memory]
    fill_stale(expected, seed=seed)
    moved = excess = zeroed = 0
    for layer, part in parts_of(local):
        group = local.groups[layer.group]
        blocks = used_blocks(group, request.local_spans[layer.group], request.num_tokens)
        rows = _Rows(layer, part, group, request.num_tokens, held)
        view = view_of(expected, local, layer, part)
        actual = view_of(memory, local, layer, part)
        for ids, tokens in batches(blocks, part, group):
            content = content_of(layer, part, tokens, seed)
            excess += rows.keep(content, tokens, actual[ids])
            came = int(np.count_nonzero(content))
            moved += came
            zeroed += content.size - came
            view[ids] = content
    total = sum(region.bytes for region in local.regions)
    return expected, MemoryReport(moved=moved, excess=excess, zeroed=zeroed, untouched=total - moved - zeroed)


class _Rows:
    """Which rows of a part must be P's after a request, and which rows may be.

    Args:
        layer: the layer.
        part: a part of its page.
        group: its group.
        num_tokens: tokens of the request.
        held: tokens that the sources hold.
    """

    def __init__(self, layer: Layer, part: Part, group: Group, num_tokens: int, held: _HeldTokens) -> None:
        self._part, self._group, self._num_tokens = part, group, num_tokens
        self._held = held.of(layer.name, part.name)
        self._low = first_needed(group, num_tokens)
        self._end = held.last_block_end(layer.name, group, num_tokens) if self._low < num_tokens else 0
        self._size = 1 if tokens_axis(part)[0] >= 0 else group.kernel_block_size

    def keep(self, content: Bytes, tokens: Ints, actual: Bytes) -> int:
        """Zero the bytes of P's `content` that must not be there, and count the moved bytes after the last token.

            tokens     low - 1 | low ..  num_tokens - 1 | num_tokens ..  end - 1 | end ..
            expected   either  | P's                    | either, counted        | zero

        Args:
            content: P's bytes of some blocks; written.
            tokens: the tokens of the rows.
            actual: D's memory at that place; it decides where both P's byte and zero are valid.
        """
        moved = self._held[np.clip(tokens + 1, 0, self._held.size - 1)]
        excess = 0
        if self._group.kind not in ("ssm", "opaque"):
            moved &= tokens < self._end
            after = moved & (tokens >= self._num_tokens)
            either = after | (moved & (tokens + self._size <= self._low))
            if either.any():
                content[spread(either, self._part) & (actual == 0)] = 0
                excess = int(np.count_nonzero(spread(after, self._part) & (content != 0)))
        content *= spread(moved, self._part)
        return excess


def _check_memory(memory: Sequence[Bytes], geometry: Geometry) -> None:
    sizes = [region.bytes for region in geometry.regions]
    found = [(region.dtype.name, region.shape) for region in memory]
    if found != [("uint8", (size,)) for size in sizes]:
        raise ValueError(f"memory is {found}, the regions have {sizes} bytes")


class _HeldTokens:
    """The content of a request's sources.

    Args:
        sources: every rank of P with the request's blocks there, by group.
    """

    def __init__(self, sources: Sequence[tuple[Geometry, Sequence[Span]]]) -> None:
        self._sources = sources
        self._masks: dict[tuple[tuple[int, int], ...], NDArray[np.bool_]] = {}

    def of(self, layer: str, part: str) -> NDArray[np.bool_]:
        """Return which tokens of a part the sources hold; index 0 is the state, index ``t + 1`` token ``t``."""
        holders = []
        for index, (remote, _) in enumerate(self._sources):
            found = remote.layer_by_name.get(layer)
            if found is not None and any(held.name == part for held in found.page.parts):
                holders.append((index, found.group))
        key = tuple(holders)
        if key not in self._masks:
            self._masks[key] = self._mask(holders)
        return self._masks[key]

    def _mask(self, holders: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        ranges = []
        for source, index in holders:
            remote, spans = self._sources[source]
            group = remote.groups[index]
            tokens = blocks_of(group, spans[index]).token
            if group.kind == "ssm":
                ranges += [(0, 1)] * tokens.size
            else:
                inside = tokens_from_first(group, np.arange(0, group.block_size, together(group)))
                starts = (tokens[:, None] + inside).ravel().tolist()
                ranges += [(token + 1, token + 1 + together(group)) for token in starts]
        # One entry more than the last token: all later tokens are clipped to it, and no source holds it.
        mask = np.zeros(max((end for _, end in ranges), default=1) + 1, bool)
        for start, end in ranges:
            mask[start:end] = True
        return mask

    def last_block_end(self, layer: str, group: Group, num_tokens: int) -> int:
        """Return how far a whole last block may extend: the nearer end of the two sides' last kernel blocks."""
        kernels = [together(group)]
        for remote, _ in self._sources:
            found = remote.layer_by_name.get(layer)
            if found is not None:
                kernels.append(together(remote.groups[found.group]))
        return min(-(-num_tokens // kernel) * kernel for kernel in kernels)


def _compare(
    memory: Sequence[Bytes], expected: Sequence[Bytes], local: Geometry, spans: Sequence[Span], seed: int
) -> None:
    for index, (found, wanted) in enumerate(zip(memory, expected, strict=True)):
        # Piece by piece, because allocating a mask of a whole region costs more than computing it.
        pieces = range(0, found.size, BATCH)
        bad = [at for at in pieces if not np.array_equal(found[at : at + BATCH], wanted[at : at + BATCH])]
        if not bad:
            continue
        offset = bad[0] + int(np.argmax(found[bad[0] :][:BATCH] != wanted[bad[0] :][:BATCH]))
        before = np.empty_like(found)
        tile_with(before, seed, f"stale {index}")
        stale = int(before[offset])
        said = (_say(int(side[offset]), stale) for side in (wanted, found))
        difference = Difference(index, offset, *owner_of(local, spans, index, offset), *said)
        wrong = int(np.count_nonzero(found != wanted))
        raise OracleError(f"{wrong} wrong bytes in region {index}, the first: {difference}", code="wrong-bytes")


def _say(byte: int, stale: int) -> str:
    return {0: "zero", stale: f"{byte:#04x} (as before)"}.get(byte, f"{byte:#04x}")


def owner_of(
    geometry: Geometry, spans: Sequence[Span], region: int, offset: int
) -> tuple[str | None, str | None, int | None]:
    """Return layer, part and token of a byte: in the request's blocks if possible, else in any block."""
    elsewhere: tuple[str | None, str | None, int | None] = (None, None, None)
    for layer, part in parts_of(geometry):
        if layer.region != region:
            continue
        group = geometry.groups[layer.group]
        blocks = blocks_of(group, spans[layer.group])
        tokens = dict(zip(blocks.ids.tolist(), blocks.token.tolist(), strict=True))
        for block, local in _blocks_at(geometry, layer, part, offset):
            if block not in tokens:
                elsewhere = (layer.name, part.name, None)
            elif group.kind == "ssm":
                return layer.name, part.name, None
            else:
                return layer.name, part.name, tokens[block] + int(tokens_from_first(group, np.array([local]))[0])
    return elsewhere


def _blocks_at(geometry: Geometry, layer: Layer, part: Part, offset: int) -> Iterator[tuple[int, int]]:
    """Yield each block of a part to which a byte belongs, with the token's number in the block (0 without tokens)."""
    group = geometry.groups[layer.group]
    for block, kernel in product(range(layer.num_blocks), range(group.ratio)):
        start = layer.offset + block * layer.block_stride + kernel * geometry.kernel_stride(layer)
        inside = _token_at(part, offset - start - part.offset)
        if inside is not None:
            yield block, kernel * group.kernel_block_size + inside


def _token_at(part: Part, rest: int) -> int | None:
    """Return the token of a byte (0 if the part has no tokens), or None if the byte is not of the part."""
    token = 0
    if rest < 0:
        return None
    for axis in sorted(part.axes, key=lambda axis: axis.stride, reverse=True):
        index = min(rest // axis.stride, axis.shard.held - 1) if axis.shard.held > 1 else 0
        rest -= index * axis.stride
        token = index if axis.name == "tokens" else token
    return token if rest < part.item_bytes else None
