# SPDX-License-Identifier: Apache-2.0
"""SGLang's real pools on a CPU, and what its own setters write and its own getters read.

Needs the packages of `SGLANG` in python/kvhma/versions.py, which `make sglang` installs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mp, sp, configs, context = (
        pytest.importorskip(f"sglang.srt.{name}", reason="needs SGLang; make sglang runs it", exc_type=ImportError)
        for name in ("mem_cache.memory_pool", "mem_cache.swa_memory_pool", "configs.mamba_utils", "runtime_context")
    )

from kvhma import Geometry, Span, plan
from kvhma.geometry import Shard
from support.memory import carry_out_in_place

context.get_parallel().override_permanently(dcp_enabled=False, attn_dcp_size=1)

TP_PAIRS = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4)]
FP8 = torch.float8_e4m3fn
X_B_C = {"x": 128, "B": 48, "C": 48}
"""Channels of `mamba2`, which its pool does not know."""
BASIC = {"dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}


def mha(page_size: int = 16, pages: int = 4, **more: Any) -> Any:
    sizes = {"size": pages * page_size, "page_size": page_size, "head_num": 2, "head_dim": 16, "layer_num": 3}
    return mp.MHATokenToKVPool(**{**sizes, **BASIC, **more})


def mla(page_size: int = 16, pages: int = 4, **more: Any) -> Any:
    sizes = {"size": pages * page_size, "page_size": page_size, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    return mp.MLATokenToKVPool(**{**sizes, "layer_num": 2, "end_layer": 2, **BASIC, **more})


def dsa(pages: int = 3, **more: Any) -> Any:
    sizes = {"size": pages * 64, "page_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return mp.DSATokenToKVPool(
        **{**sizes, "layer_num": 2, "end_layer": 2, **BASIC, "dtype": FP8, "kv_cache_dim": 656, **more}
    )


def swa(page_size: int = 16, pages: int = 4, **more: Any) -> Any:
    """Layers 1 and 3 are full attention, 0 and 2 have windows."""
    sizes = {"size": pages * page_size, "size_swa": (pages + 3) * page_size, "page_size": page_size}
    layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
    return sp.SWAKVPool(
        **{**sizes, **layers, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 16, "device": "cpu", **more}
    )


def states(layers: Sequence[int], params: Any, shape: Any, **more: Any) -> Any:
    params = params(shape=shape, layers=list(layers), dtype=configs.mamba2_state_dtype(None))
    return mp.MambaPool(
        size=5, spec_state_size=0, cache_params=params, mamba_layer_ids=list(layers), device="cpu", **more
    )


def mamba2(layers: Sequence[int] = (0, 1, 4), tp: int = 1, groups: int = 4, **more: Any) -> Any:
    shape = configs.Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=128, n_groups=groups, num_heads=8, head_dim=16, state_size=12, conv_kernel=4
    )
    return states(layers, configs.Mamba2CacheParams, shape, **more)


def hybrid(full: Sequence[int], state: Any, page_size: int = 1, start: int | None = None, **more: Any) -> Any:
    sizes = {"size": 64, "page_size": page_size, "head_num": 2, "head_dim": 16, "start_layer": start}
    layers = {"full_attention_layer_ids": list(full), "mamba_pool": state}
    return mp.HybridLinearKVPool(**{**sizes, **layers, "dtype": torch.bfloat16, "device": "cpu", **more})


def layer(number: int) -> Any:
    """What SGLang's setters ask of a layer."""
    return SimpleNamespace(layer_id=number, is_cross_attention=False)


def cut(whole: Any, rank: int, tp: int, axis: int = 1) -> Any:
    """A rank's part of an axis."""
    held = whole.shape[axis] // tp
    return whole.narrow(axis, rank * held, held)


def share(extent: int, rank: int, tp: int) -> Shard:
    return Shard(extent, rank * extent // tp, extent // tp)


def slots_of(ids: Sequence[int], page_size: int, tokens: int) -> Any:
    return torch.tensor([ids[t // page_size] * page_size + t % page_size for t in range(tokens)])


def raw(values: Any) -> Any:
    """The bytes: NaN is equal to itself."""
    return values.contiguous().view(torch.uint8)


def hand_off(local: Geometry, remote: Sequence[Geometry], tokens: int, to: list[Any], of: list[Any]) -> Any:
    """Copy what a plan says, given the spans' ids, or `Span`, of each group."""
    spans = [[one if isinstance(one, Span) else Span(0, list(one)) for one in side] for side in (to, of)]
    moved = plan(local, list(remote), descriptor_bytes=0).transfer(tokens, *spans)
    carry_out_in_place(moved)
    return moved
