# SPDX-License-Identifier: Apache-2.0
"""Which layers share a block table: the rules by which vLLM's allocator forms groups on one rank.

The allocator sees a layer as a kind, tokens of a block and bytes of a page. All groups take blocks from one pool, so a
block has the same number of bytes for each group. There are two ways to achieve this. If the blocks of a layer follow
each other, all pages get one size: smaller pages hold more tokens, or are padded. If all layers of a block follow each
other, a page may have any size. Groups are then formed so that their pages fill about the same share of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvhma.errors import LayoutError
from kvhma.geometry import Shard
from kvhma.models.block_size import hybrid_block_size, token_bytes
from kvhma.models.pages import state_bytes
from kvhma.models.shards import kv_heads, shard
from kvhma.models.table import LATENT_KINDS, STATE_KINDS, Attention, CacheKind, Model, State

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer as the allocator sees it. Layers with equal specs are of one sort.

    Attributes:
        cache: the cache over all ranks. Layers that differ only in this field are still of one sort.
        held: the rank's share of it: heads, items of K and V, dtype.
        kind: kind of its group: ``cache.kind``, unless a layer with a window gets blocks for all tokens.
        block_size: tokens of a block.
        content: bytes of a page that are used.
        page: bytes of a page, padding included.
        window: tokens that a query sees, for windows.
        chunk: tokens of a chunk, for chunks.
        heads: KV heads of the rank; None for state.
    """

    cache: Attention | State = field(compare=False)
    held: tuple[object, ...]
    kind: CacheKind
    block_size: int
    content: int
    page: int
    window: int | None = None
    chunk: int | None = None
    heads: Shard | None = field(default=None, compare=False)

    @property
    def family(self) -> tuple[object, ...]:
        """What the layers of a group share if their pages may differ: they need blocks for the same tokens."""
        if isinstance(self.cache, State):
            return ("state", self.page)
        if self.kind in ("sliding", "chunked"):
            return (self.kind, self.window, self.chunk, self.block_size)
        return ("every token", self.block_size)


Members = dict[str, LayerSpec]
"""Layers by name, in memory order within a group, except that layers of one spec follow each other."""


def layer_specs(
    model: Model, *, tp_rank: int = 0, tp_size: int = 1, block_size: int = 16, align: int | None = None
) -> Members:
    """Return the layers of one rank as the allocator sees them, in model order.

    Args:
        model: the model.
        tp_rank: index among the tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        block_size: as for :func:`kvhma.models.block_size.hybrid_block_size`.
        align: the same.

    Raises:
        LayoutError: the model has no cache, or a size does not divide over the ranks.
    """
    if model.query_heads is not None and model.has_attention:
        shard("query_heads", model.query_heads, 0, tp_size)
    logical = hybrid_block_size(model, tp_size=tp_size, block_size=block_size, align=align)
    state = state_bytes(model.state, tp_size=tp_size) if model.state else 0
    padded = logical * token_bytes(model.token_spec(), tp_size=tp_size) if model.has_attention else state
    specs = {}
    for name, cache in model.specs:
        if isinstance(cache, State):
            specs[name] = LayerSpec(cache, (), cache.kind, logical, state, padded)
        else:
            heads = kv_heads(cache, tp_rank, tp_size)
            held = (heads.held, cache.head_dim, cache.v_head_dim, cache.dtype)
            page = logical * heads.held * cache.token_bytes
            specs[name] = LayerSpec(cache, held, cache.kind, logical, page, page, cache.window, cache.chunk, heads)
    if not specs:
        raise LayoutError(f"layers: {model.name} has no layer with a cache")
    return specs


def group_layers(specs: Members, *, block_major: bool) -> list[Members]:
    """Cut a rank's layers into groups, as vLLM's allocator does.

    Layers of one sort are cut into groups as large as the smallest sort. If the largest sort has less than 1.5 times as
    many layers as the smallest, its size is used instead. Layers that need blocks for the same tokens, such as latents
    and their index, form one group even if their pages differ, if there are no other layers.

    Args:
        specs: layers by name, in the order in which the engine makes them.
        block_major: whether all layers of a block follow each other in memory.

    Returns:
        The groups with their layers' specs, whose block or page may be larger than before. Sorts are in the order in
        which the model first uses them. Each is cut with a stride, so that neighbouring layers are in different groups.

    Raises:
        LayoutError: pages that cannot get one size, or layers that cannot be divided.
    """
    if len({spec.family for spec in specs.values()}) == 1:
        return [dict(specs)]
    if block_major and len({spec.page for spec in specs.values()}) > 1:
        return _packed(specs)
    found = {spec.kind for spec in specs.values()}
    try:
        return _equal_counts(_equal_pages(specs))
    except LayoutError:
        # A window next to a latent, for example of a draft model, may get blocks for every token instead.
        if not ("mla" in found and found <= {"full", "sliding", *LATENT_KINDS} and "sliding" in found):
            raise
    return [
        {
            name: replace(spec, kind="full", window=None) if spec.kind == "sliding" else spec
            for name, spec in specs.items()
        }
    ]


def alike(specs: Members, key: Callable[[LayerSpec], _Key]) -> dict[_Key, Members]:
    """Return layers by a common property, ordered by the first layer with it; each keeps the order of its layers."""
    found: dict[_Key, Members] = {}
    for name, spec in specs.items():
        found.setdefault(key(spec), {})[name] = spec
    return found


def _equal_pages(specs: Members) -> Members:
    """Give all pages the size of the largest page."""
    page = max(spec.page for spec in specs.values())
    equal: Members = {}
    for name, spec in specs.items():
        if not isinstance(spec.cache, State) and page % spec.page == 0:
            times = page // spec.page
            content = spec.content if times == 1 else spec.content * times
            equal[name] = replace(spec, block_size=spec.block_size * times, content=content, page=page)
        elif spec.kind not in LATENT_KINDS:
            equal[name] = replace(spec, page=page)
        else:
            raise LayoutError(
                f"layers: a page of {name} ({spec.kind}) has {spec.page} bytes, the largest {page}; that is no "
                "multiple, and a latent cannot be padded"
            )
    return equal


def _equal_counts(specs: Members) -> list[Members]:
    """Cut pages of one size into groups with as many layers as the smallest sort.

    If the largest sort has less than 1.5 times as many layers, its number is used: a few empty slots cost less than
    twice as many block tables.
    """
    sorts = alike(specs, lambda spec: spec).values()
    counts = [len(layers) for layers in sorts]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = []
    for layers in sorts:
        count = -(-len(layers) // size)
        groups += [dict(list(layers.items())[first::count]) for first in range(count)]
    return groups


@dataclass(frozen=True, slots=True)
class _Sort:
    """Layers of one family, by the size of their pages.

    Attributes:
        layers: all of them.
        pages: the layers of each size, by bytes of a page.
    """

    layers: Members
    pages: dict[int, Members]

    @property
    def repeats(self) -> int:
        """Number of layers of the most frequent size."""
        return max(map(len, self.pages.values()))

    @property
    def is_pattern(self) -> bool:
        """Whether each size has the same number of layers, so that groups can take one layer of each size together."""
        return len({len(names) for names in self.pages.values()}) == 1

    def widest(self, groups: int) -> int:
        """Bytes of a block in the largest of so many groups."""
        return sum(-(-len(names) // groups) * page for page, names in self.pages.items())

    def cut(self, groups: int) -> list[Members]:
        """Cut into groups with a stride, one layer of each size at a time."""
        if groups == 1:
            return [self.layers]
        if not self.is_pattern:
            sizes = ", ".join(f"{len(names)} of {page} bytes" for page, names in self.pages.items())
            raise LayoutError(
                f"layers: windows of one length with pages of several sizes, {sizes}: cannot be shared out"
            )
        together = list(zip(*self.pages.values(), strict=True))
        return [
            {name: self.layers[name] for names in together[first::groups] for name in names} for first in range(groups)
        ]


def _packed(specs: Members) -> list[Members]:
    """Form groups whose pages, of any size, fill about the same share of a block."""
    sorts = [
        _Sort(layers, alike(layers, lambda spec: spec.page))
        for layers in alike(specs, lambda spec: spec.family).values()
    ]
    patterns = [sort.repeats for sort in sorts if sort.is_pattern]
    smallest = max((sort.repeats for sort in sorts if sort.is_pattern and len(sort.pages) > 1), default=0)
    each = _least_padding(patterns, smallest) if smallest else None

    def groups_of(sort: _Sort) -> int:
        return -(-sort.repeats // each) if each and sort.is_pattern else 1

    def is_small(sort: _Sort) -> bool:
        """Whether these layers need few blocks of a request, so they fill the remaining room."""
        kind = next(iter(sort.layers.values())).kind
        return kind in STATE_KINDS or (each is None and kind == "sliding")

    block = max(sort.widest(len(sort.layers) if is_small(sort) else groups_of(sort)) for sort in sorts)
    groups: list[Members] = []
    for sort in sorts:
        count = groups_of(sort)
        if is_small(sort):
            fit = max(block // next(iter(sort.layers.values())).page, 1)
            count = max(count, -(-len(sort.layers) // fit))
        groups += sort.cut(count)
    return groups


def _least_padding(counts: Sequence[int], smallest: int) -> int:
    """Return the size of at least `smallest` that pads `counts` with the fewest slots, or the largest such size."""
    return min(range(smallest, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
