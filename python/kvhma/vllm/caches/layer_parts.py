# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer's page, from vLLM's spec of the layer and the writer of its cache only.

It never guesses: a page with unknown content becomes one part, which only an equal engine can read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kvhma.errors import GeometryError
from kvhma.geometry import Axis, Part
from kvhma.models import State, StateKind
from kvhma.models.pages import ConvOrder, section_parts, state_parts
from kvhma.vllm.caches.formats import Writer, encoding_of, is_by_head, release_of, section_bytes

_STRIDED_CPU_KERNELS = frozenset({"vec", "vec16"})
"""CPU kernels that store K of a head as (content, tokens) and V as (tokens, content)."""

_STATES: dict[str, StateKind] = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "GDN_ATTN": "gdn",
    "LINEAR": "linear",
    "SHORT_CONV": "short_conv",
}


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of a worker in its engine, and facts of the model that no spec has.

    Attributes:
        tp_rank: its tensor-parallel rank.
        tp_size: number of tensor-parallel ranks.
        state_groups: groups of B and C of Mamba2 over all ranks; None if the model's configuration has no such groups.
        cp_rank: its rank among the ranks that share the tokens of a cache; each of them has different tokens.
        cp_size: number of these ranks.
        cp_interleave: neighbouring tokens of one of these ranks.
        cp_tp_size: number of neighbouring tensor-parallel ranks among them, which have the same heads.
    """

    tp_rank: int = 0
    tp_size: int = 1
    state_groups: int | None = None
    cp_rank: int = 0
    cp_size: int = 1
    cp_interleave: int = 1
    cp_tp_size: int = 1

    def of_group(self, spec: Any) -> RankInfo:
        """Return the ranks for a group with this spec. In some groups, as for states, each rank has every token."""
        shares = self.cp_size > 1 and spec.dcp_sharded
        return self if shares else replace(self, cp_rank=0, cp_size=1, cp_tp_size=1)


@dataclass(frozen=True, slots=True)
class View:
    """A layer's cache as the engine addresses it.

    Attributes:
        shape: kernel blocks, heads, states of a kernel block, items of a state.
        strides: of these dimensions, in bytes.
        item_bytes: bytes of an item.
        dtype: name of the item's type.
        writer: of the cache.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str
    writer: Writer


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's cache: what vLLM's spec says of it, and how the engine addresses it. The spec is read once.

    Attributes:
        name: of the layer, for errors.
        spec: vLLM's spec of the layer.
        view: of the cache.
        encoding: how its numbers are stored, from :func:`kvhma.vllm.caches.formats.encoding_of`; empty for a state.
        by_head: whether a page has separate bytes for each token and head.
        sections: bytes of a token in each section of a kernel block without heads; None if unknown, or with heads.
    """

    name: str
    spec: Any
    view: View
    encoding: str = ""
    by_head: bool = False
    sections: tuple[int, ...] | None = None

    @property
    def is_state(self) -> bool:
        """Whether it holds states, and no tokens."""
        return type(self.spec).__name__ == "MambaSpec"

    @classmethod
    def read(cls, name: str, spec: Any, view: View) -> LayerCache:
        """Read a spec of a known kind.

        Raises:
            GeometryError: spec and view contradict each other; the text names the layer and both values.
        """
        cache = cls(name, spec, view)
        if cache.is_state:
            return cache
        item, stride = view.item_bytes, view.strides[3]
        if stride != item:
            raise GeometryError(f"layer {name!r}: content stride is {stride}, an item has {item} bytes")
        encoding = encoding_of(spec, view.dtype, view.writer)
        if is_by_head(spec, view.writer):
            return cls(name, spec, view, encoding, by_head=True)
        sections = section_bytes(spec, view.dtype, view.shape[3] * item, view.writer)
        return cls(name, spec, view, encoding, sections=sections)


def parts_of(cache: LayerCache, rank_info: RankInfo) -> tuple[Part, ...]:
    """Return the parts of a layer's page.

    Args:
        cache: of the layer.
        rank_info: of the worker.

    Raises:
        GeometryError: spec and view contradict each other; the text names the layer and both values.
    """
    if cache.is_state:
        return _state(cache, rank_info)
    if cache.sections is not None:
        return _by_token(cache, cache.sections)
    heads = _heads(cache, rank_info) if cache.by_head else None
    return _whole(cache, rank_info) if heads is None else _by_head(cache, heads)


def _by_head(cache: LayerCache, heads: Axis) -> tuple[Part, ...]:
    view = cache.view
    if view.writer.cpu_kernel is not None:
        return _cpu(cache, heads)
    tokens = Axis("tokens", view.shape[2], view.strides[2])
    content = Axis("content", view.shape[3], view.item_bytes)
    return (Part("kv", cache.encoding, view.item_bytes, 0, (heads, tokens, content)),)


def _by_token(cache: LayerCache, sections: tuple[int, ...]) -> tuple[Part, ...]:
    """Return content without heads, by token."""
    view = cache.view
    _, _, tokens, width = view.shape
    item = view.item_bytes
    if len(sections) == 1:
        row = (Axis("tokens", tokens, view.strides[2]), Axis("content", width, item))
        return (Part("kv", cache.encoding, item, 0, row),)
    if view.strides[2] != width * item:
        raise GeometryError(f"layer {cache.name!r}: token stride is {view.strides[2]}, its kernels need {width * item}")
    return section_parts(cache.encoding, tokens, sections)


def _heads(cache: LayerCache, rank_info: RankInfo) -> Axis | None:
    """Return the heads of this layer, from this layer only: layers of a model may have different numbers of heads.

    None if the ranks cannot hold equal shares.
    """
    spec, view = cache.spec, cache.view
    held, ranks = view.shape[1], rank_info.tp_size // rank_info.cp_tp_size
    shards = ranks if spec.max_tp_shards is None else min(ranks, spec.max_tp_shards)
    if ranks % shards:
        return None
    # vLLM repeats heads only if there are fewer heads than ranks. So a rank with one head may share it with its
    # neighbours. Neither the spec nor the layer has their number; the other side may have it.
    may_repeat = held == 1 and ranks > 1 and spec.max_tp_shards is None
    start = rank_info.tp_rank // rank_info.cp_tp_size * shards // ranks * held
    return Axis("heads", held * shards, view.strides[1], start, held, may_repeat=may_repeat)


def _cpu(cache: LayerCache, heads: Axis) -> tuple[Part, ...]:
    """Return K of all tokens of a head, then V. The kernel orders the bytes of a page differently than the view.

    ::

        one head of a kernel block  |  K: content, tokens  |  V: tokens, content  |
                                    0                      tokens * size items
    """
    spec, view = cache.spec, cache.view
    _, _, tokens, width = view.shape
    item = view.item_bytes
    if view.strides[2] != width * item:
        found = f"token stride is {view.strides[2]}, the CPU kernel needs {width * item}"
        raise GeometryError(f"layer {cache.name!r}: {found}")
    dtype = f"{cache.encoding}/cpu-{view.writer.cpu_kernel}"
    if view.writer.cpu_kernel in _STRIDED_CPU_KERNELS and spec.head_size == spec.head_size_v:
        size = spec.head_size
        k = (heads, Axis("content", size, tokens * item), Axis("tokens", tokens, item))
        v = (heads, Axis("tokens", tokens, size * item), Axis("content", size, item))
        return (Part("k", dtype, item, 0, k), Part("v", dtype, item, tokens * size * item, v))
    # Tiles over tokens and content: only whole blocks of a head can be cut out.
    return (Part("kv", dtype, item, 0, (heads, Axis("packed", tokens * width, item))),)


def _whole(cache: LayerCache, rank_info: RankInfo) -> tuple[Part, ...]:
    """Return one part, which pairs only with the same shard of an engine with the same number of shards."""
    spec, view = cache.spec, cache.view
    size = math.prod(view.shape[1:]) * view.item_bytes
    dims = sorted(zip(view.strides[1:], view.shape[1:], "HNC", strict=True))
    dense = view.item_bytes
    for stride, length, _ in dims:
        if length > 1 and stride != dense:
            raise GeometryError(
                f"layer {cache.name!r}: a page of {type(spec).__name__} with strides {view.strides} is not contiguous; "
                "set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        dense *= length
    # The order of heads and tokens in a page has to be equal as well.
    shape = "".join(f"{letter}{length}" for _, length, letter in reversed(dims) if length > 1)
    fields = (spec.head_size, spec.head_size_v, spec.num_head_slots, spec.state_content_bytes, spec.tokens_per_state)
    writer = view.writer
    kernel = "" if writer.cpu_kernel is None else f"cpu-{writer.cpu_kernel}"
    written_by = (writer.backend, writer.platform, writer.capability, release_of(writer), kernel)
    shard, shards = _shard(spec, rank_info)
    dtype = "/".join(
        [cache.encoding, type(spec).__name__, shape, *map(str, fields), *filter(None, written_by), f"tp{shards}"]
    )
    return _for_equal_engines(dtype, size, shard, shards)


def _shard(spec: Any, rank_info: RankInfo) -> tuple[int, int]:
    """Return the shard of a cache on this rank, and the number of different shards. Further ranks have copies.

    With context parallelism each rank has different tokens.
    """
    rank, ranks = rank_info.tp_rank, rank_info.tp_size
    shards = ranks if spec.max_tp_shards is None or rank_info.cp_size > 1 else min(ranks, spec.max_tp_shards)
    return (rank, ranks) if ranks % shards else (rank * shards // ranks, shards)


def _for_equal_engines(dtype: str, size: int, shard: int, shards: int) -> tuple[Part, ...]:
    """Return the bytes of one shard; `dtype` names everything that has to be equal on both sides.

    ::

        extent   | shard 0 | shard 1 | ... |
                           ^ size * shard
    """
    held = Axis("bytes", size * shards, 1, size * shard, size)
    return (Part("whole", dtype, 1, 0, (held,)),)


def _state(cache: LayerCache, rank_info: RankInfo) -> tuple[Part, ...]:
    spec, page_bytes = cache.spec, math.prod(cache.view.shape[1:]) * cache.view.item_bytes
    if page_bytes < spec.state_content_size_bytes:
        raise GeometryError(
            f"layer {cache.name!r}: a page has {page_bytes} bytes, its state {spec.state_content_size_bytes}"
        )
    if spec.tp_replicated:
        rank_info = RankInfo(state_groups=rank_info.state_groups)
    known = _known_state(spec, rank_info)
    if known is None:
        drafts = f"num_speculative_tokens={spec.num_speculative_blocks}"
        kinds = f"{spec.mamba_type.name}/{spec.shapes}/{spec.dtypes}/{drafts}/tp{rank_info.tp_size}"
        return _for_equal_engines(
            kinds.replace(" ", ""), spec.state_content_size_bytes, rank_info.tp_rank, rank_info.tp_size
        )
    state, conv = known
    return state_parts(state, rank_info.tp_rank, rank_info.tp_size, conv)


def _known_state(spec: Any, rank_info: RankInfo) -> tuple[State, ConvOrder] | None:
    """Return the state over all ranks and the order of its convolution; None if the spec does not decide both."""
    kind = _STATES.get(spec.mamba_type.name)
    if kind == "short_conv":
        return _short_convolution(spec, rank_info.tp_size)
    if kind == "linear":
        return _linear_attention(spec, rank_info.tp_size)
    if kind is None or len(spec.shapes) != 2 or len(spec.shapes[0]) != 2:
        return None
    conv, ssm = spec.shapes
    ranks = rank_info.tp_size
    # A step with drafts also stores the inputs before each draft: one more row of the convolution for each, after the
    # rows of the next token. It writes these rows before anything reads them. Mamba1 does not have them.
    drafts = 0 if kind == "mamba1" else spec.num_speculative_blocks
    heads, head_dim, d_state = (ssm[0], 1, ssm[1]) if kind == "mamba1" else ssm
    inner = heads * head_dim
    orders: tuple[tuple[ConvOrder, tuple[int, int]], ...] = (("DS", conv), ("SD", conv[::-1]))
    for order, (channels, rows) in orders:
        groups = _state_groups(kind, channels - inner, d_state, rank_info)
        if groups is not None and rows > drafts:
            state = State(
                kind=kind,
                conv_dim=inner * ranks + 2 * groups * d_state,
                d_conv=rows - drafts + 1,
                n_heads=heads * ranks,
                head_dim=head_dim,
                d_state=d_state,
                n_groups=groups,
                conv_dtype=str(spec.dtypes[0]).removeprefix("torch."),
                ssm_dtype=str(spec.dtypes[1]).removeprefix("torch."),
                draft_rows=drafts,
            )
            return state, order
    return None


def _short_convolution(spec: Any, ranks: int) -> tuple[State, ConvOrder] | None:
    """Return the state of a short convolution: only the last inputs of each channel.

    A rank has neighbouring channels. The larger dimension is the channels, which decides the order.
    """
    if len(spec.shapes) != 1 or len(set(spec.shapes[0])) != 2:
        return None
    rows, channels = sorted(spec.shapes[0])
    drafts = spec.num_speculative_blocks
    if rows <= drafts:
        return None
    dtype = str(spec.dtypes[0]).removeprefix("torch.")
    total = channels * ranks
    state = State("short_conv", total, rows - drafts + 1, total, 1, 0, 0, dtype, dtype, draft_rows=drafts)
    return state, "DS" if spec.shapes[0] == (channels, rows) else "SD"


def _linear_attention(spec: Any, ranks: int) -> tuple[State, ConvOrder] | None:
    """Return the state of linear attention: a matrix for each head, and no convolution."""
    if len(spec.shapes) != 1 or len(spec.shapes[0]) != 3:
        return None
    heads, rows, columns = spec.shapes[0]
    dtype = str(spec.dtypes[0]).removeprefix("torch.")
    return State("linear", 0, 1, heads * ranks, rows, columns, 0, dtype, dtype), "DS"


def _state_groups(kind: StateKind, channels: int, d_state: int, rank_info: RankInfo) -> int | None:
    """Return the groups of B and C over all ranks; None if a rank's `channels` beside x are not whole groups.

    ::

        channels of a convolution   | x: inner | B: held * d_state | C: held * d_state |
    """
    if kind == "mamba1":
        return 0 if channels == 0 else None
    held, rest = divmod(channels, 2 * d_state)
    if held < 1 or rest:
        return None
    groups = held * rank_info.tp_size if kind == "gdn" else rank_info.state_groups or 0
    # With fewer groups than ranks, each rank has the whole group of its heads.
    return groups if groups > 0 and held == max(1, groups // rank_info.tp_size) else None
