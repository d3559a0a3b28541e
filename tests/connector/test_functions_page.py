# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/functions.md that replace vLLM's functions pair the blocks that vLLM's functions pair."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker", reason="needs vLLM; make connector runs it"
)

ROOT = Path(__file__).parents[2]

# vLLM remembers the layout of states for as long as a process lives, so this is not the process of other tests.
COMPARE = """
import sys
import against_vllm as against
from kvhma.lowlevel import DescriptorOrder

exec(sys.argv[1])
for name in ("gemma-3-27b", "gpt-oss-120b", "NVIDIA-Nemotron-3-Nano-30B-A3B", "Qwen3-Next-80B-A3B"):
    for tokens in (100, 5000):
        pair = against.pair_of(name, tokens)
        request = against.request(pair, tokens, "scattered")
        # The page's lines.
        order = descriptor_order(pair.schedulers[0], pair.worker)
        ours = [order.ids(tables).tolist() for tables in (request.unhashed, request.remote)]
        # vLLM's functions.
        theirs = [side.tolist() for side in against.vllm_functions(pair, request)()]
        # Both in pairs.
        assert len(ours[0]) == len(theirs[0]) > 0, name
        assert {*zip(*ours, strict=True)} == {*zip(*theirs, strict=True)}, name
print("equal")
"""


def test_the_pages_lines_pair_what_vllm_pairs() -> None:
    (lines,) = re.findall(r"```python\n(def .*?)```", (ROOT / "docs/functions.md").read_text(), re.DOTALL)
    paths = os.pathsep.join([str(ROOT / "benches"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, lines],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["equal"]), done.stderr[-3000:]
