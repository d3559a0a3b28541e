# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/functions.md that replace vLLM's functions pair the blocks that vLLM's functions pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker", reason="needs vLLM; make connector runs it"
)

from kvhma.lowlevel import DescriptorOrder
from support.programs import program

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"


def lines():
    (code,) = re.findall(r"```python\n(def .*?)```", PAGE.read_text(), re.DOTALL)
    names = {"DescriptorOrder": DescriptorOrder}
    exec(code, names)
    return names["descriptor_order"]


@pytest.mark.parametrize(
    "name", ["gemma-3-27b", "gpt-oss-120b", "NVIDIA-Nemotron-3-Nano-30B-A3B", "Qwen3-Next-80B-A3B"]
)
@pytest.mark.parametrize("tokens", [100, 5000])
def test_the_pages_lines_pair_what_vllm_pairs(name, tokens, monkeypatch):
    # The program sets both for its own process; other tests of this process need them as they were.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    against = program("benches/against_vllm.py")
    pair = against.pair_of(name, tokens)
    request = against.request(pair, tokens, "scattered")
    order = lines()(pair.schedulers[0], pair.worker)
    ours = [order.ids(tables).tolist() for tables in (request.unhashed, request.remote)]
    theirs = [side.tolist() for side in against.vllm_functions(pair, request)()]
    assert len(ours[0]) == len(theirs[0]) > 0
    assert {*zip(*ours, strict=True)} == {*zip(*theirs, strict=True)}
