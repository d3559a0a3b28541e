# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between vLLM and SGLang, both ways: what one engine's setters write, the other's getters read.

SGLang's pools are real. vLLM makes specs, memory and views; its kernels are imitated (tests/support/writers.py).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
pytest.importorskip("vllm", reason="needs vLLM; make connector runs it")

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Geometry
from kvhma.tensors.sglang import geometry_of_pool
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from support import writers
from support.sglang_pools import (
    FP8,
    TP_PAIRS,
    X_B_C,
    configs,
    cut,
    hand_off,
    hybrid,
    layer,
    mha,
    mla,
    mp,
    raw,
    share,
    slots_of,
    states,
    swa,
    torch,
)
from support.vllm_caches import allocated

TOKENS, HEADS, DIM, WINDOW, BLOCK = 70, 4, 16, 9, 16
PAGES = {"full": (1, 16, 64), "windows": (1, 64), "latent": (1, 16, 64)}
ATTENTION = {"full": (0, 1, 2), "windows": (0, 1, 2, 3), "latent": (0, 1)}
STATES = {"mamba2": X_B_C, "gdn": {"q": 32, "k": 32, "v": 96}, "kda": {"q": 96, "k": 96, "v": 96}}
STATE_HEADS, ROWS = 8, 3
SLOT, TABLE = 3, [5, 2, 9, 7, 4]


def name_of(number: int, what: str = "attn") -> str:
    return f"model.layers.{number}.{'self_attn' if what == 'attn' else 'mixer'}.{what}"


def by_number(name: str) -> str:
    return f"layers.{name.split('.')[2]}"


def cell(values: Any) -> Any:
    """The bytes of each token and head."""
    return raw(values).numpy()


class Vllm:
    """The ranks of an engine, whose layers have separate memory."""

    def __init__(self, form: str, tp: int, *, order: str, conv: str = "DS", ssm: Any = torch.float32, **_: Any) -> None:
        self.form, self.tp = form, tp
        self.numbers = ATTENTION.get(form, (1,))
        self.spans, self.geometries, self.caches, self.raws = [TABLE], [], [], []
        if form in STATES or form == "windows":
            self.spans = [TABLE, [SLOT] if form in STATES else TABLE[::-1]]
        for rank in range(tp):
            groups = [(spec, [name_of(n) for n in self.numbers]) for spec in self.attention(tp)]
            if form == "windows":
                groups = [(groups[0][0], [name_of(1), name_of(3)]), (groups[1][0], [name_of(0), name_of(2)])]
            if form in STATES:
                groups.append((state_spec(form, tp, conv, ssm), [name_of(n, "mamba") for n in (0, 2)]))
            self.caches.append({})
            self.raws.append({})
            configs, views = [], {}
            for spec, names in groups:
                memory, own, config = allocated(spec, 10, names, order)
                configs.append(config)
                views |= own
                for name, view in own.items():
                    self.raws[rank][name] = (memory, view, conv)
                    if "mamba" not in name:
                        self.caches[rank][name] = writers.Cache.of(memory, view, KVCacheLayout[order])
            config = KVCacheConfig(
                10,
                [t for one in configs for t in one.kv_cache_tensors],
                [g for one in configs for g in one.kv_cache_groups],
            )
            info = RankInfo(rank, tp, state_groups=4 if form == "mamba2" else None)
            writer = Writer("TRITON_MLA" if form == "latent" else "FLASH_ATTN", "cuda", "9.0", "", "0.33.0")
            self.geometries.append(
                geometry_of(config, views, info, writer=lambda _, writer=writer: writer).by_parts(by_number)
            )

    def attention(self, tp: int) -> list[Any]:
        heads = {"num_kv_heads": HEADS // tp, "head_size": DIM, "block_size": BLOCK, "dtype": torch.bfloat16}
        if self.form == "latent":
            return [MLAAttentionSpec(**{**heads, "num_kv_heads": 1, "head_size": 32, "max_tp_shards": 1})]
        if self.form == "windows":
            return [FullAttentionSpec(**heads), SlidingWindowSpec(**heads, sliding_window=WINDOW)]
        return [FullAttentionSpec(**heads)]

    def rows(self, rank: int, number: int, first: int = 0) -> tuple[Any, Any]:
        """A layer's cache, and the places of all tokens from one on."""
        table = self.spans[-1] if self.form == "windows" and number % 2 == 0 else TABLE
        slots = slots_of(table, BLOCK, TOKENS).numpy()[first:]
        places = writers.reshape_and_cache_flash(DIM * 2, DIM * 2)
        if self.form == "latent":
            places = writers.concat_and_cache_mla(24 * 2, 8 * 2)
        cache = self.caches[rank][name_of(number)]
        return cache, places(cache, slots)

    def page(self, rank: int, number: int) -> Any:
        memory, view, _ = self.raws[rank][name_of(number, "mamba")]
        start = view.data_ptr() - memory.data_ptr() + SLOT * view.stride(0) * view.element_size()
        return memory.numpy().view(np.uint8)[start:]

    def write(self, values: dict[int, Any], state: dict[int, writers.State]) -> None:
        for rank in range(self.tp):
            for number, of_layer in values.items():
                cache, at = self.rows(rank, number)
                cache.memory[at] = self.cells(of_layer, rank)
            for number, one in state.items():
                page = one.page(rank, self.tp, self.raws[rank][name_of(number, "mamba")][2])
                self.page(rank, number)[: page.size] = page

    def cells(self, of_layer: Any, rank: int) -> Any:
        if self.form == "latent":
            return cell(of_layer)
        return np.concatenate([cell(cut(one, rank, self.tp)) for one in of_layer], axis=2)

    def right(self, rank: int, values: dict[int, Any], state: dict[int, writers.State]) -> int:
        found = 0
        for number, of_layer in values.items():
            first = first_needed(self.form, number)
            cache, at = self.rows(rank, number, first)
            found += bool((cache.memory[at] == self.cells(of_layer, rank)[first:]).all())
        for number, one in state.items():
            page = one.page(rank, self.tp, self.raws[rank][name_of(number, "mamba")][2])
            found += bool((self.page(rank, number)[: page.size] == page).all())
        return found


class Sglang:
    """The ranks of an engine."""

    def __init__(self, form: str, tp: int, *, page: int, **_: Any) -> None:
        self.form, self.tp, self.page = form, tp, page
        pages = -(-TOKENS // page)
        self.ids = [list(range(pages + 1, 1, -1)), list(range(2, pages + 2))]
        self.pools = [self.pool(pages + 2) for _ in range(tp)]
        self.spans = [self.ids[0]]
        if form in STATES or form == "windows":
            self.spans = [self.ids[0], [2] if form in STATES else self.ids[1]]
        self.geometries = [self.geometry(pool, rank) for rank, pool in enumerate(self.pools)]

    def pool(self, pages: int) -> Any:
        held = HEADS // self.tp
        if self.form == "latent":
            return mla(self.page, pages)
        if self.form == "windows":
            return swa(self.page, pages, head_num=held)
        if self.form in STATES:
            return hybrid((1,), state_pool(self.form, self.tp), self.page, size=pages * self.page, head_num=held)
        return mha(self.page, pages, head_num=held)

    def geometry(self, pool: Any, rank: int) -> Geometry:
        more: dict[str, Any] = {} if self.form == "latent" else {"heads": share(HEADS, rank, self.tp)}
        if self.form == "windows":
            more["sliding_window_size"] = WINDOW - 1
        if self.form == "mamba2":
            more["conv"] = X_B_C
        return geometry_of_pool(pool, **more, tp_rank=rank, tp_size=self.tp)

    def slots(self, number: int) -> Any:
        return slots_of(self.ids[self.form == "windows" and number % 2 == 0], self.page, TOKENS)

    def write(self, values: dict[int, Any], state: dict[int, writers.State]) -> None:
        for rank, pool in enumerate(self.pools):
            for number, of_layer in values.items():
                rows = (
                    (of_layer, None) if self.form == "latent" else [cut(one, rank, self.tp).clone() for one in of_layer]
                )
                both = [slots_of(ids, self.page, TOKENS) for ids in self.ids]
                at = mp.KVWriteLoc(*both) if self.form == "windows" else both[0]
                pool.set_kv_buffer(layer(number), at, *rows)
            for number, one in state.items():
                for cache, expected in self.state(pool, rank, number, one):
                    cache.copy_(expected)

    def state(self, pool: Any, rank: int, number: int, one: writers.State) -> list[tuple[Any, Any]]:
        """SGLang's views of a state, and what a rank has there."""
        cache = pool.mamba_pool.mamba2_layer_cache(pool.mamba_pool.mamba_layer_ids.index(number))
        columns, heads = one.of_rank(rank, self.tp)
        conv = torch.from_numpy(columns.copy()).view(torch.bfloat16)[..., 0]
        conv = conv.T if pool.mamba_pool.conv_slice_axis == 1 else conv
        temporal = torch.from_numpy(heads.copy()).view(torch.float32)
        return [(cache.conv[0][2], conv), (cache.temporal[2], temporal.view(cache.temporal[2].shape))]

    def right(self, rank: int, values: dict[int, Any], state: dict[int, writers.State]) -> int:
        found, pool = 0, self.pools[rank]
        for number, of_layer in values.items():
            first = first_needed(self.form, number)
            buffers = [pool.get_key_buffer(number)]
            rows = [of_layer]
            if self.form != "latent":
                buffers.append(pool.get_value_buffer(number))
                rows = [cut(one, rank, self.tp) for one in of_layer]
            pairs = zip(buffers, rows, strict=True)
            found += all(torch.equal(raw(one)[self.slots(number)][first:], raw(of)[first:]) for one, of in pairs)
        for number, one in state.items():
            found += all(torch.equal(raw(view), raw(own)) for view, own in self.state(pool, rank, number, one))
        return found


def first_needed(form: str, number: int) -> int:
    return TOKENS - WINDOW + 1 if form == "windows" and number % 2 == 0 else 0


def state_spec(form: str, tp: int, conv: str, ssm: Any) -> MambaSpec:
    """As vLLM's own layers make it."""
    shape, *rest = {
        "mamba2": lambda: Shapes.mamba2_state_shape(tp, 128, 4, STATE_HEADS, 16, 12, ROWS + 1),
        "gdn": lambda: Shapes.gated_delta_net_state_shape(tp, 4, STATE_HEADS, 8, 12, ROWS + 1),
        "kda": lambda: Shapes.kda_state_shape(tp, STATE_HEADS, 12, conv_kernel_size=ROWS + 1),
    }[form]()
    shape = shape if (shape[1] == ROWS) == (conv == "DS") else shape[::-1]
    kind = MambaAttentionBackendEnum["MAMBA2" if form == "mamba2" else "GDN_ATTN"]
    return MambaSpec(block_size=64, shapes=(shape, *rest), dtypes=(torch.bfloat16, ssm), mamba_type=kind)


def state_pool(form: str, tp: int) -> Any:
    sizes = {"tp_world_size": tp, "num_heads": STATE_HEADS}
    if form == "kda":
        return states((0, 2), configs.KimiLinearCacheParams, configs.KimiLinearStateShape.create(head_dim=12, **sizes))
    of_kind: dict[str, Any] = {"intermediate_size": 128, "head_dim": 16, "state_size": 12}
    if form == "gdn":
        of_kind = {"intermediate_size": 96, "head_dim": 12, "state_size": 8, "conv_shard_groups": [32, 32, 96]}
    shape = configs.Mamba2StateShape.create(n_groups=4, conv_kernel=ROWS + 1, **sizes, **of_kind)
    return states((0, 2), configs.Mamba2CacheParams, shape)


def values_of(form: str) -> tuple[dict[int, Any], dict[int, writers.State]]:
    """Random values of all layers over all ranks: attention, and states."""
    values: dict[int, Any] = {}
    for number in ATTENTION.get(form, (1,)):
        values[number] = torch.randn(TOKENS, 1, 32).bfloat16()
        if form != "latent":
            values[number] = torch.randn(2, TOKENS, HEADS, DIM).bfloat16()
    random = np.random.default_rng(1)
    size = {"mamba2": 16 * 12, "gdn": 12 * 8, "kda": 12 * 12}.get(form, 0)
    state = {}
    for number in (0, 2) if size else ():
        columns = {name: random.integers(0, 256, (n, ROWS, 2), np.uint8) for name, n in STATES[form].items()}
        heads = random.integers(0, 256, (STATE_HEADS, size * 4), np.uint8)
        state[number] = writers.State(columns, heads, {"B": 4, "C": 4} if form == "mamba2" else {})
    return values, state


@pytest.mark.parametrize("to_sglang", [True, False], ids=["to SGLang", "to vLLM"])
@pytest.mark.parametrize("form", [*ATTENTION, *STATES])
def test_every_layer_of_every_rank_crosses(form: str, to_sglang: bool) -> None:
    values, state = values_of(form)
    right, pages = 0, PAGES.get(form, (1, 64))
    for (tp_p, tp_d), page, order in product(TP_PAIRS, pages, ("LBNHC", "LBHNC")):
        more = {"page": page, "order": order, "conv": "SD" if order == "LBNHC" else "DS"}
        p = (Vllm if to_sglang else Sglang)(form, tp_p, **more)
        d = (Sglang if to_sglang else Vllm)(form, tp_d, **more)
        p.write(values, state)
        for rank in range(tp_d):
            hand_off(d.geometries[rank], p.geometries, TOKENS, d.spans, p.spans)
            right += d.right(rank, values, state)
    assert right == 21 * len(pages) * 2 * (len(values) + len(state))


def test_what_differs_is_refused_with_both_values() -> None:
    """Qwen3-Next: SGLang has float32 by default, vLLM the model's bfloat16."""
    p, d = Vllm("gdn", 1, order="LBNHC", ssm=torch.bfloat16), Sglang("gdn", 1, page=16)
    with pytest.raises(UnsupportedPairError, match=r'"layers.0.ssm".*dtype cannot be paired: bfloat16 with float32'):
        hand_off(d.geometries[0], p.geometries, TOKENS, d.spans, p.spans)
    p, d = Vllm("full", 1, order="LBNHC"), Sglang("full", 1, page=16)
    d.geometries[0] = geometry_of_pool(mha(16, 8, head_num=HEADS, dtype=FP8))
    with pytest.raises(
        UnsupportedPairError, match=r'"layers.0.k".*dtype cannot be paired: bfloat16 with float8_e4m3fn'
    ):
        hand_off(d.geometries[0], p.geometries, TOKENS, d.spans, p.spans)
