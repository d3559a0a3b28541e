# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32's own NIXL connector moved, recorded: the comparison has the same numbers, or none.

`tests/connector/test_nixl_comparison.py` asks vLLM again.
"""

from __future__ import annotations

from functools import partial

import pytest

from kvhma.cli.compare.engines import select_vllm_reads
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import Counted, RequestOptions, count, of_geometries, of_model
from kvhma.errors import NotCountedError, UnsupportedPairError
from kvhma.models.config import model_from_config
from kvhma.models.stride_orders import Order
from support.nixl_requests import FORMS, TOKENS, NixlRequest, recorded_answers, requests

ANSWERS = recorded_answers()
REQUESTS = {asked.name: asked for asked in requests()}
MOVED = [name for name, answer in ANSWERS.items() if "ranks" in answer]
REFUSED = [name for name, answer in ANSWERS.items() if "refused" in answer]
UNEQUAL_GROUPS = {
    name for name in MOVED if name.startswith(("gemma-4", "MiMo")) and REQUESTS[name].asked_blocks == (16, 64)
}
"""Groups with blocks of several lengths, each cut into another number of P's."""


def counted(asked: NixlRequest) -> Counted:
    return count(of_geometries(asked.model, asked.engines(), RequestOptions(TOKENS)))


def test_the_file_has_every_request() -> None:
    assert list(ANSWERS) == list(REQUESTS)


@pytest.mark.parametrize("name", MOVED)
def test_as_many_descriptors_and_bytes(name: str) -> None:
    asked = REQUESTS[name]
    prefill, decode = asked.tables()
    selected = partial(select_vllm_reads, asked.engines(), decode, prefill)
    if name in UNEQUAL_GROUPS:
        with pytest.raises(NotCountedError, match="kernel blocks of a block"):
            selected()
        return
    found = [
        [sum(one.descriptors for one in selections), sum(one.bytes for one in selections)] for selections in selected()
    ]
    assert found == ANSWERS[name]["ranks"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_refused(name: str) -> None:
    asked = REQUESTS[name]
    prefill, decode = asked.tables()
    with pytest.raises(UnsupportedPairError) as raised:
        select_vllm_reads(asked.engines(), decode, prefill)
    assert not isinstance(raised.value, NotCountedError)
    assert counted(asked).vllm.refused


def test_fewer_bytes_than_are_needed_are_not_shown() -> None:
    """vLLM takes the first layer's length for a region that layers of two lengths share: 40,960 where it is 81,920."""
    name = "MiMo-V2-Flash tp1-1 block16-16 BLHNC"
    found, ((_, moved),) = counted(REQUESTS[name]), ANSWERS[name]["ranks"]
    needed = found.total.bytes - found.excess
    assert moved < needed
    assert found.vllm.ranks == ()
    assert found.vllm.why_not == f"not counted: rank 0 of D would read {moved:,} bytes, and needs {needed:,}"


@pytest.mark.parametrize("name", MOVED)
def test_no_connector_is_shown_with_fewer(name: str) -> None:
    found = counted(REQUESTS[name])
    for other in (found.vllm, found.no_hma):
        assert other.why_not or other.total.bytes >= found.total.bytes - found.excess


GEMMA_4 = 10 * 16 * 256 * 2 * 2 + 2 * 2 * 512 * 2 * 2
"""Bytes of a token: 10 layers of 16 heads of 256 items, 2 of 2 heads of 512."""
DEEPSEEK = 61 * (576 * 2 + 132)


@pytest.mark.parametrize(
    ("model", "token"), [("gemma-4, 2 global heads", GEMMA_4), ("DeepSeek-V3.2, 61 layers", DEEPSEEK)]
)
@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_no_hma_takes_each_layer_as_long_as_it_is(model: str, token: int, order: Order) -> None:
    engine = EngineOptions(block_size=64, order=order)
    hand_off = of_model(model_from_config(FORMS[model]), engine, engine, RequestOptions(1000))
    assert count(hand_off).no_hma.total.bytes == 1024 * token
