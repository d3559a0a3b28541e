# SPDX-License-Identifier: Apache-2.0
"""States and hybrid models of SGLang on a CPU: written and read through SGLang's own views of a layer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma.errors import GeometryError
from kvhma.tensors.sglang import geometry_of_pool
from support.sglang_pools import (
    TP_PAIRS,
    X_B_C,
    configs,
    cut,
    hand_off,
    hybrid,
    layer,
    mamba2,
    slots_of,
    states,
    torch,
)

LAYERS = (0, 1, 4)


def gdn(layers: Any, tp: int, **more: Any) -> Any:
    shape = configs.Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=96, n_groups=4, num_heads=8, head_dim=12, state_size=8, conv_kernel=4,
        conv_shard_groups=[32, 32, 96],
    )  # fmt: skip
    return states(layers, configs.Mamba2CacheParams, shape, **more)


def kda(layers: Any, tp: int, **more: Any) -> Any:
    shape = configs.KimiLinearStateShape.create(tp_world_size=tp, num_heads=8, head_dim=12)
    return states(layers, configs.KimiLinearCacheParams, shape, **more)


def one_group(layers: Any, tp: int, **more: Any) -> Any:
    return mamba2(layers, tp, 1, **more)


def mamba1(layers: Any, tp: int, **more: Any) -> Any:
    shape = configs.Mamba2StateShape.create_full_rank(
        tp_world_size=tp, intermediate_size=64, state_size=8, conv_kernel=4
    )
    return states(layers, configs.Mamba2CacheParams, shape, **more)


def short_conv(layers: Any, tp: int, **more: Any) -> Any:
    """As in LFM2: no recurrent state."""
    shape = configs.Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=64, n_groups=1, num_heads=tp, head_dim=64, state_size=0, conv_kernel=3
    )
    return states(layers, configs.Mamba2CacheParams, shape, **more)


def linear(layers: Any, tp: int, **more: Any) -> Any:
    """As in Bailing: no convolution."""
    shape = configs.Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=0, n_groups=0, num_heads=8, head_dim=12, state_size=12, conv_kernel=1
    )
    return states(layers, configs.Mamba2CacheParams, shape, **more)


KINDS: dict[str, tuple[Any, dict[str, int], bool]] = {  # the pool, the parts, whether the pool knows their sizes
    "mamba2": (mamba2, X_B_C, False),
    "mamba2 of one group": (one_group, {"x": 128, "B": 12, "C": 12}, False),
    "gdn": (gdn, {"q": 32, "k": 32, "v": 96}, True),
    "kda": (kda, {"q": 96, "k": 96, "v": 96}, True),
    "mamba1": (mamba1, {"x": 64}, False),
    "short_conv": (short_conv, {"x": 64}, False),
    "linear": (linear, {}, True),
}


class Model:
    """The state of one token position in all layers, over all ranks."""

    def __init__(self, kind: str) -> None:
        self.make, self.parts, self.is_known = KINDS[kind]
        pool = self.make(LAYERS, 1)
        self.is_row_first = pool.conv_slice_axis == 1
        rows = pool.mamba_cache.conv[0].shape[2 if self.is_row_first else 3]
        self.conv = {name: torch.randn(len(LAYERS), size, rows).bfloat16() for name, size in self.parts.items()}
        self.temporal = torch.randn(len(LAYERS), *pool.mamba_cache.temporal.shape[2:])

    def of(self, at: int, rank: int, tp: int) -> tuple[Any, Any]:
        """Convolution and recurrent state of a layer on a rank: each part is cut, a single group is whole."""
        ranks = {name: 1 if name in "BC" and self.parts[name] == 12 else tp for name in self.conv}
        own = [cut(whole[at], rank % ranks[name], ranks[name], 0) for name, whole in self.conv.items()]
        conv = torch.cat(own) if own else torch.zeros(0, 0)
        temporal = self.temporal[at] if self.temporal.numel() == 0 else cut(self.temporal[at], rank, tp, 0)
        return (conv.T if self.is_row_first else conv), temporal

    def pool(self, rank: int, tp: int, slot: int | None, **more: Any) -> Any:
        """A rank's pool, with the state in a slot."""
        pool = self.make(LAYERS, tp, **more)
        for at in range(len(LAYERS) if slot is not None else 0):
            (conv,), temporal = pool.mamba2_layer_cache(at).conv, pool.mamba2_layer_cache(at).temporal
            values = self.of(at, rank, tp)
            if conv.numel():
                conv[slot] = values[0]
            temporal[slot] = values[1]
        return pool

    def geometry(self, pool: Any, rank: int, tp: int) -> Any:
        return geometry_of_pool(pool, conv=None if self.is_known else self.parts, tp_rank=rank, tp_size=tp)

    def is_right(self, pool: Any, rank: int, tp: int, slot: int) -> bool:
        found = [pool.mamba2_layer_cache(at) for at in range(len(LAYERS))]
        return all(
            (not one.conv[0].numel() or torch.equal(one.conv[0][slot], self.of(at, rank, tp)[0]))
            and torch.equal(one.temporal[slot], self.of(at, rank, tp)[1])
            for at, one in enumerate(found)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_unequal_ranks(kind: str) -> None:
    """21 ranks; SGLang's own rule is right for Mamba2 only if both sides have equally many."""
    model, right = Model(kind), 0
    for tp_p, tp_d in TP_PAIRS:
        remote = [(model.pool(rank, tp_p, 3), rank) for rank in range(tp_p)]
        described = [model.geometry(pool, rank, tp_p) for pool, rank in remote]
        for rank in range(tp_d):
            pool = model.pool(rank, tp_d, None)
            hand_off(model.geometry(pool, rank, tp_d), described, 50, [[2]], [[3]])
            right += model.is_right(pool, rank, tp_d, 2)
    assert right == 21


def test_a_state_whose_layers_share_one_buffer() -> None:
    model = Model("gdn")
    p = model.pool(0, 1, 3, envelope_layout=True)
    for rank in range(2):
        d = model.pool(rank, 2, None)
        hand_off(model.geometry(d, rank, 2), [model.geometry(p, 0, 1)], 50, [[2]], [[3]])
        assert model.is_right(d, rank, 2, 2)


@pytest.mark.parametrize("is_mla", [False, True])
def test_pipeline_stages_of_a_hybrid_model(is_mla: bool) -> None:
    """Layers 3, 7, 11 and 15 of 16 are attention; P has two stages and pages of 16, D has none and pages of 1."""
    model, tokens, full = Model("gdn"), 70, (3, 7, 11, 15)
    more = {"use_mla": True, "kv_lora_rank": 24, "qk_rope_head_dim": 8} if is_mla else {}
    latent = torch.randn(16, tokens, 1, 32).bfloat16()
    k, v = torch.randn(2, 16, tokens, 2, 16).bfloat16()
    remote, kept = [], []
    slots = slots_of([1, 4, 2, 5, 3], 16, tokens)
    of_stage = [(0, 1, 2), (8, 9, 10)]
    for ids, of_state in zip((full[:2], full[2:]), of_stage, strict=True):
        pool = hybrid(ids, gdn(of_state, 1), 16, of_state[0], size=96, **more)
        for n in ids:
            pool.set_kv_buffer(layer(n), slots, *((latent[n], None) if is_mla else (k[n].clone(), v[n].clone())))
        for at, n in enumerate(of_state):
            pool.mamba_pool.mamba2_layer_cache(at).temporal[2] = model.temporal[0] + n
        kept.append(pool)
        remote.append(geometry_of_pool(pool))
    d = hybrid(full, gdn((*of_stage[0], *of_stage[1]), 1), 1, size=96, **more)
    local, to = geometry_of_pool(d), list(range(20, 20 + tokens))
    assert [one.kind for one in local.groups] == ["mla" if is_mla else "full", "ssm"]
    hand_off(local, remote, tokens, [to, [1]], [[1, 4, 2, 5, 3], [2]])
    for n in full:
        assert torch.equal(d.get_key_buffer(n)[to], (latent if is_mla else k)[n])
        assert is_mla or torch.equal(d.get_value_buffer(n)[to], v[n])
    for at, n in enumerate(d.mamba_pool.mamba_layer_ids):
        assert torch.equal(d.mamba_pool.mamba2_layer_cache(at).temporal[1], model.temporal[0] + n)
    if is_mla:
        with pytest.raises(GeometryError, match="describe that one"):
            geometry_of_pool(d.full_kv_pool)
    else:
        child = [one.name for one in geometry_of_pool(kept[1].full_kv_pool).layers]
        assert child == [f"layers.{n}.{part}" for n in full[2:] for part in "kv"]


def test_a_layer_with_attention_and_a_state_has_all_their_names() -> None:
    """As in Falcon-H1."""
    described = geometry_of_pool(hybrid((0, 1), mamba2((0, 1))), conv=X_B_C)
    names = [one.name for one in described.layers if one.name.startswith("layers.1.")]
    assert names == [f"layers.1.{part}" for part in ("k", "v", "x", "B", "C", "ssm")]


def test_states_that_are_not_known_are_refused() -> None:
    pool = gdn(LAYERS, 1)
    with pytest.raises(GeometryError, match=r"conv_shard_groups is \[32, 32, 96\], and conv is \{'x': 160\}"):
        geometry_of_pool(pool, conv={"x": 160})
    pool.register_slot_state(object())
    with pytest.raises(GeometryError, match="its slots also have object"):
        geometry_of_pool(pool)
    pool = gdn(LAYERS, 1)
    pool.mamba_cache.conv.append(pool.mamba_cache.conv[0])
    with pytest.raises(GeometryError, match="2 convolution states"):
        geometry_of_pool(pool)
