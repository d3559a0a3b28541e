# SPDX-License-Identifier: Apache-2.0
"""Layers and windows of SGLang's pools, from imitations with the attributes of 0.5.23: no SGLang is needed.

tests/tensors/test_sglang.py has its real pools.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

from kvhma import Span, plan
from kvhma.errors import GeometryError
from kvhma.tensors.sglang import geometry_of_pool


def pool(name: str, **attributes: Any) -> Any:
    kind = type(name, (SimpleNamespace,), {"__module__": "sglang.srt.mem_cache.memory_pool"})
    return kind(page_size=1, dtype=torch.bfloat16, store_dtype=torch.bfloat16, **attributes)


def mha(*layers: int) -> Any:
    """A pool whose layers have these numbers in the model."""
    buffers = [[torch.zeros(65, 2, 16, dtype=torch.bfloat16) for _ in layers] for _ in "kv"]
    return pool(
        "MHATokenToKVPool", layer_num=len(layers), start_layer=0, model_layer_ids=layers, k_buffer=buffers[0],
        v_buffer=buffers[1], kv_cache_layout="nhd", is_quantized_kv_cache=False,
    )  # fmt: skip


def mla(start_layer: int, end_layer: int) -> Any:
    """A pool of two layers."""
    return pool(
        "MLATokenToKVPool", layer_num=2, start_layer=start_layer, end_layer=end_layer, use_dsa=False,
        model_layer_ids=(start_layer, start_layer + 1),
        kv_buffer=[torch.zeros(65, 1, 32, dtype=torch.bfloat16) for _ in range(2)],
    )  # fmt: skip


def names(of: Any) -> list[str]:
    return [layer.name for layer in geometry_of_pool(of).layers]


def test_the_attention_layers_of_a_hybrid_model_have_the_numbers_of_the_model() -> None:
    """They were layers 0 and 1, so a decode engine read other layers from a second pipeline stage, without an error."""
    assert names(mha(11, 15)) == ["layers.11.k", "layers.11.v", "layers.15.k", "layers.15.v"]


def test_latents_of_a_hybrid_model_are_refused() -> None:
    """SGLang does not write the numbers of the model's layers into this pool; `end_layer` is its default."""
    assert names(mla(4, 6)) == ["layers.4.kv", "layers.5.kv"]
    with pytest.raises(GeometryError, match=r"layer_num is 2, start_layer 0, end_layer 1: .* HybridLinearKVPool"):
        geometry_of_pool(mla(0, 1))


def test_a_pool_without_the_numbers_of_its_layers_is_refused() -> None:
    for numbers in ((), (3,)):
        other = mha(3, 7)
        other.model_layer_ids = numbers
        with pytest.raises(GeometryError, match="layer_num is 2, model_layer_ids"):
            geometry_of_pool(other)


def test_each_token_that_the_next_query_sees_is_moved() -> None:
    """SGLang's number 7 is a window of 8 tokens with the query. Taken as a window it lost the oldest token."""
    mapping = {0: (0, True), 1: (0, False)}
    p, d = (pool("SWAKVPool", layers_mapping=mapping, full_kv_pool=mha(0), swa_kv_pool=mha(0)) for _ in "pd")
    tokens, spans = 40, [Span(0, list(range(1, 41)))] * 2
    geometries = [geometry_of_pool(side, sliding_window_size=7) for side in (d, p)]
    moved = plan(geometries[0], geometries[1], descriptor_bytes=0).transfer(tokens, spans, spans)
    (k,) = p.swa_kv_pool.k_buffer
    slots = [(row[0] - k.data_ptr()) // k[0].nbytes for row in moved.reads[0].remote.tolist()]
    assert min(slot for slot in slots if 0 <= slot < len(k)) == 34, "the tokens 33 to 39 of 40, from slot 1 on"
