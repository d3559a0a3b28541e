# SPDX-License-Identifier: Apache-2.0
"""What tests/golden/nixl_connector.json records is what vLLM's own NIXL connector moves."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
pytest.importorskip("torch", reason="needs torch; make connector runs it")

import vllm

from support.nixl_requests import recorded_answers, requests

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from vLLM's imports
    pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="the comparison is with vLLM 0.32"),
]

ANSWERS = recorded_answers()
SHORT = (
    "gemma-3-4b tp1-2 block16-16 LBHNC",
    "granite-4.0-h-tiny tp2-1 block16-16 LBHNC",
    "DeepSeek-V3.2 tp1-1 block64-64 LBHNC",
    "gemma-4, 2 global heads tp1-1 block16-64 LBHNC",
    "MiMo-V2-Flash tp1-1 block16-16 BLHNC",
)


@pytest.mark.parametrize(
    "asked",
    [pytest.param(asked, id=asked.name, marks=() if asked.name in SHORT else pytest.mark.long) for asked in requests()],
)
def test_what_vllm_moves(asked):
    from support.nixl_connector import answer

    assert answer(asked) == ANSWERS[asked.name]
