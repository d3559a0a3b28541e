# SPDX-License-Identifier: Apache-2.0
"""What vLLM's kernels do with the bytes of a page, imitated in numpy.

Read from the sources of vLLM 0.31 to 0.33: the file is named with each. Nothing here uses kvhma's description of a
page. A cell is what a kernel stores of one token and head: opaque bytes, in the order in which the kernel gets them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhma.geometry import Geometry

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cache:
    """A layer's cache as a kernel gets it, all numbers in bytes.

    Attributes:
        memory: the allocation.
        start: where the view begins.
        shape: kernel blocks, head slots, states of a kernel block, bytes of a state.
        strides: of these, bytes of neighbouring items of a state are next to each other.
        order: order of the four dimensions in memory, as FlashInfer receives it.
    """

    memory: Bytes
    start: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    order: tuple[int, int, int, int]

    @classmethod
    def of(cls, raw: Any, view: Any, layout: Any) -> Cache:
        """Take a view that vLLM made of an allocation."""
        item = view.element_size()
        blocks, heads, states, content = view.shape
        block, head, state, _ = (stride * item for stride in view.stride())
        start = view.data_ptr() - raw.data_ptr()
        memory = raw.numpy().view(np.uint8)
        return cls(
            memory, start, (blocks, heads, states, content * item), (block, head, state), layout.layer_view_order
        )

    def slots(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return kernel block and place in it of each slot, shaped to be added to heads and bytes."""
        block, place = np.divmod(slots, self.shape[2])
        return block[:, None, None], place[:, None, None]


Places = Callable[[Cache, Ints], Ints]
"""Where the bytes of some slots are in memory: [slots, heads, bytes of a cell]."""


def write(cache: Cache, places: Places, slots: Ints, cells: Bytes) -> None:
    """Store cells [slots, heads, bytes] as a kernel does."""
    cache.memory[places(cache, slots)] = cells


def _range(size: int) -> Ints:
    return np.arange(size)[None, None, :]


def _heads(count: int) -> Ints:
    return np.arange(count)[None, :, None]


def execute(transfer: Any, local: Geometry, mine: Bytes, remotes: list[Geometry], theirs: list[Bytes]) -> None:
    """Execute a transfer, row by row."""
    base = local.regions[0].base
    for address, size, _ in transfer.zero.tolist():
        mine[address - base : address - base + size] = 0
    for read in transfer.reads:
        source, start = theirs[read.source], remotes[read.source].regions[0].base
        for (here, size, _), (there, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            mine[here - base : here - base + size] = source[there - start : there - start + size]


# --- attention -----------------------------------------------------------------------------------------------------


def reshape_and_cache_flash(key: int, value: int) -> Places:
    """K, then V, of a token and head, each in its half of the last dimension: `csrc/cache_kernels.cu`.

    FlashAttention, Triton and FlexAttention split the view at the head size; `key` and `value` are bytes of a head.
    The kernels for K and V of other sizes (`triton_reshape_and_cache_flash_diffkv.py`) do the same.
    """

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        base = cache.start + block * cache.strides[0] + token * cache.strides[2]
        k = base + _heads(cache.shape[1]) * cache.strides[1] + _range(key)
        v = base + _heads(cache.shape[1]) * cache.strides[1] + key + _range(value)
        return np.concatenate([k, v], axis=2)

    return places


def flashinfer_paged_kv(key: int, value: int) -> Places:
    """FlashInfer reads a view that is permuted to the order in memory and split in two: `flashinfer.py`."""

    def places(cache: Cache, slots: Ints) -> Ints:
        shape, strides = cache.shape, (*cache.strides, 1)
        addresses = np.full(shape, cache.start)
        for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
            line = [1, 1, 1, 1]
            line[axis] = length
            addresses = addresses + (np.arange(length) * stride).reshape(line)
        paged = addresses.transpose(cache.order)
        halves = np.split(paged, [key], axis=3)
        block, token = np.divmod(slots, shape[2])
        hnd = cache.order.index(1) < cache.order.index(2)
        found = [half[block, :, token] if hnd else half[block, token] for half in halves]
        assert found[1].shape[2] == value
        return np.concatenate(found, axis=2)

    return places


def per_token_head(data: int) -> Places:
    """Triton's 8-bit caches: numbers and a float32 scale of K, then of V: `triton_attn.py`, `_ensure_scale_caches`."""

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        half = cache.shape[3] // 2
        head = cache.start + block * cache.strides[0] + token * cache.strides[2]
        head = head + _heads(cache.shape[1]) * cache.strides[1]
        k, v = head + _range(data), head + half + _range(data)
        scales = head + data + _range(4), head + half + data + _range(4)
        return np.concatenate([k, scales[0], v, scales[1]], axis=2)

    return places


def nvfp4(head_size: int) -> Places:
    """FlashInfer's 4-bit cache in HND order: `csrc/nvfp4_kv_cache_kernels.cu`.

    The first half of the head slots is K, the second half V: all numbers of a side, then all its scales. The scales of
    V are transposed in groups of four tokens.
    """
    data, scales = head_size // 2, head_size // 16

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        heads, tokens = cache.shape[1] // 2, cache.shape[2]
        page = cache.start + block * cache.strides[0]
        found = []
        for side in range(2):
            base = page + side * heads * cache.strides[1]
            numbers = base + _heads(heads) * tokens * data + token * data + _range(data)
            at, scale = token, _range(scales)
            if side:
                group = scales // 4
                at, scale = token // 4 * 4 + scale // group, scale % group * 4 + token % 4
            behind = base + heads * tokens * data + _heads(heads) * tokens * scales + at * scales + scale
            found += [numbers, behind]
        return np.concatenate(found, axis=2)

    return places


# --- latents -------------------------------------------------------------------------------------------------------


def concat_and_cache_mla(latent: int, rope: int) -> Places:
    """A row a token, the latent and then the positions: `csrc/cache_kernels.cu`; `cpu_mla.py` the same."""

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        row = cache.start + block * cache.strides[0] + token * cache.strides[2]
        return np.concatenate([row + _range(latent), row + latent + _range(rope)], axis=2)

    return places


def strided_rows(size: int) -> Places:
    """A row a token by the strides of the view: `save_partial_states.py`, V4's window of plain floats."""

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        return cache.start + block * cache.strides[0] + token * cache.strides[2] + _range(size)

    return places


def flat_rows(size: int) -> Places:
    """Readers that read the cache as one list of rows: `amx_mla.py`, `flashmla_sparse.py`."""
    return lambda cache, slots: cache.start + slots[:, None, None] * size + _range(size)


def fp8_ds_mla(cache: Cache, slots: Ints) -> Ints:
    """512 8-bit floats, four scales, 64 positions of 16 bits: `concat_and_cache_ds_mla_kernel`."""
    block, token = cache.slots(slots)
    row = cache.start + block * cache.strides[0] + token * cache.strides[2]
    positions = row + (512 // 2 + 8) * 2 + _range(128)
    scales = row + 512 // 4 * 4 + _range(16)
    return np.concatenate([row + _range(512), positions, scales], axis=2)


def nvfp4_ds_mla(cache: Cache, slots: Ints) -> Ints:
    """512 4-bit floats, 64 positions of 8 bits, 32 scales in another order: `csrc/nvfp4_ds_mla_cache_kernels.cu`."""
    block, token = cache.slots(slots)
    row = cache.start + block * cache.strides[0] + token * cache.strides[2]
    scale = np.arange(32)
    scales = row + 320 + (8 * (scale & 3) + (scale >> 2))[None, None, :]
    return np.concatenate([row + _range(256), row + 256 + _range(64), scales], axis=2)


# --- keys or numbers of a block, then its scales -------------------------------------------------------------------


def indexer_k_quant_and_cache(cache: Cache, slots: Ints) -> Ints:
    """The indexer of DeepSeek-V3.2: 128 bytes of each token of a block, then four of each: `csrc/cache_kernels.cu`."""
    block, token = cache.slots(slots)
    page = cache.start + block * cache.strides[0]
    keys = page + token * 128 + _range(128)
    scales = page + cache.shape[2] * 128 + (token * 128) * 4 // 128 + _range(4)
    return np.concatenate([keys, scales], axis=2)


def cp_gather_indexer_k_quant_cache(cache: Cache, slots: Ints) -> Ints:
    """How the indexer's cache is read for a prompt: 16 bytes at a time, `csrc/cache_kernels.cu`."""
    block, token = cache.slots(slots)
    keys = [cache.start + block * cache.strides[0] + token * 128 + at + _range(16) for at in range(0, 128, 16)]
    scale = cache.start + block * cache.strides[0] + cache.shape[2] * 128 + token * 4 + _range(4)
    return np.concatenate([*keys, scale], axis=2)


def deepseek_v4_window(cache: Cache, slots: Ints) -> Ints:
    """448 8-bit floats and 64 positions of 16 bits of each token, then 8 scale bytes of each:

    `csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu` without `kv_mxfp8`.
    """
    block, token = cache.slots(slots)
    page = cache.start + block * cache.strides[0]
    data = page + token * 576
    scales = page + cache.shape[2] * 576 + token * 8
    return np.concatenate([data + _range(448), data + 448 + _range(128), scales + _range(8)], axis=2)


def deepseek_v41_window_apart(cache: Cache, slots: Ints) -> Ints:
    """The same kernel with `kv_mxfp8` in vLLM 0.31 and 0.32: 512 8-bit floats of each token, then 16 scales of each."""
    block, token = cache.slots(slots)
    page = cache.start + block * cache.strides[0]
    return np.concatenate(
        [page + token * 512 + _range(512), page + cache.shape[2] * 512 + token * 16 + _range(16)], axis=2
    )


def deepseek_v41_window(cache: Cache, slots: Ints) -> Ints:
    """The same kernel with `kv_mxfp8` in vLLM 0.33: 512 8-bit floats and their 16 scales in one row a token."""
    block, token = cache.slots(slots)
    row = cache.start + block * cache.strides[0] + token * 528
    return np.concatenate([row + _range(512), row + 512 + _range(16)], axis=2)


# --- CPU attention -------------------------------------------------------------------------------------------------


def _cpu_sides(cache: Cache, head_bytes: int) -> tuple[Ints, Ints]:
    """Where K and V of a block and head begin: the view is taken for twice as many tokens, and halved."""
    heads = np.arange(cache.shape[1])[None, :, None] * cache.strides[1]
    return heads, heads + cache.shape[2] * head_bytes


def cpu_vec(head_size: int, item: int = 2) -> Places:
    """K by columns and V by rows: `csrc/cpu/cpu_attn_vec.hpp`, `cpu_attn_vec16.hpp`."""

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        k, v = _cpu_sides(cache, head_size * item)
        page = cache.start + block * cache.strides[0]
        element, byte = np.divmod(_range(head_size * item), item)
        column = page + k + element * cache.shape[2] * item + token * item + byte
        row = page + v + token * head_size * item + _range(head_size * item)
        return np.concatenate([column, row], axis=2)

    return places


def cpu_amx(head_size: int) -> Places:
    """Tiles of 16 tokens by 4 bytes for K, of 2 tokens by 16 numbers for V: `csrc/cpu/cpu_attn_amx.hpp`, 16 bits."""

    def places(cache: Cache, slots: Ints) -> Ints:
        block, token = cache.slots(slots)
        k, v = _cpu_sides(cache, head_size * 2)
        page = cache.start + block * cache.strides[0]
        word, byte = np.divmod(_range(head_size * 2), 4)
        group, place = np.divmod(token, 16)
        tiles = page + k + (group * 16 * (head_size // 2) + word * 16 + place) * 4 + byte
        number, byte = np.divmod(_range(head_size * 2), 2)
        group, column = np.divmod(number, 16)
        pair, half = np.divmod(token, 2)
        packed = page + v + (group * cache.shape[2] * 16 + pair * 32 + column * 2 + half) * 2 + byte
        return np.concatenate([tiles, packed], axis=2)

    return places


# --- recurrent state -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a model stores of a sequence, over all ranks.

    Attributes:
        columns: the convolution's last inputs, by name in the order of the page: [channels, rows, bytes of an item].
        heads: the state proper: [heads, bytes of a head].
        shared: columns of which ranks beyond their number of shards hold the same.
    """

    columns: dict[str, Bytes]
    heads: Bytes
    shared: dict[str, int]

    def of_rank(self, rank: int, ranks: int) -> tuple[Bytes, Bytes]:
        """Return convolution and state of a rank, cut as `mamba_v2_sharded_weight_loader` does (`mamba_mixer2.py`).

        Everything is cut evenly; one group of B and C is repeated on every rank.
        """
        held = []
        for name, column in self.columns.items():
            shards = min(ranks, self.shared.get(name, ranks))
            size = column.shape[0] // shards
            first = rank * shards // ranks * size
            held.append(column[first : first + size])
        size = self.heads.shape[0] // ranks
        return np.concatenate(held), self.heads[rank * size : rank * size + size]

    def page(self, rank: int, ranks: int, order: str) -> Bytes:
        """Return the bytes of a page: convolution, then state, without a gap: `mamba/abstract.py`, `bind_kv_cache`.

        The convolution has its channels first ("DS") or last ("SD"): `is_conv_state_dim_first`.
        """
        conv, state = self.of_rank(rank, ranks)
        conv = conv if order == "DS" else conv.transpose(1, 0, 2)
        return np.concatenate([conv.reshape(-1), state.reshape(-1)])
