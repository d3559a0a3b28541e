# SPDX-License-Identifier: Apache-2.0
"""The recorder under vLLM's own connector: it records what that connector does, right or wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import vllm
from audit.grid import Row, grid
from audit.verdicts import Verdict, judged, table
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

from kvhma.oracle import traces
from kvhma.oracle.audit import audit

# vLLM's imports warn.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("order_of_states")]


of_this_version = pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="known of vLLM 0.32 only")


@pytest.fixture
def order_of_states() -> Iterator[None]:
    """The order that vLLM's connector supports. vLLM asks once a process."""
    with mock.patch.dict(os.environ, {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}):
        get_conv_state_layout.cache_clear()
        yield
    get_conv_state_layout.cache_clear()


def verdict(name: str, folder: Path | None = None) -> Verdict:
    (row,) = (row for row in grid() if row.name == name)
    return judged(row, folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "llama/tp1-2/block16-16/hit128/303",
        "deepseek_v2/tp2-1/block16-16/hit0/300",
        "push/deepseek_v2/tp1-2/block16-16/hit0/300",
        "push/llama/tp2-1/block16-16/hit128/303",
        # 0.33's P answers the recorder's D without a result: Mooncake was recorded with 0.32 only.
        pytest.param("mooncake/llama/tp2-1/block16-16/hit0/303", marks=of_this_version),
    ],
)
def test_what_is_right(name: str, tmp_path: Path) -> None:
    found = verdict(name, tmp_path)
    assert (found.outcome, found.text) == ("right", "")
    (path,) = tmp_path.iterdir()
    trace = traces.load(path)
    judgements = [judgement for _, judgement in audit(trace)]
    assert [one.outcome for one in judgements] == ["right"] * len(trace.local)
    for one in judgements:
        assert one.bytes >= one.needed > 0
        assert one.planned is not None
        assert 0 < one.planned.descriptors <= one.descriptors


@pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="vLLM 0.31 does not reorder such blocks on a CPU")
def test_a_block_of_d_for_two_of_p_is_put_in_order_on_the_device() -> None:
    found = verdict("llama/tp1-1/block16-32/hit0/303")
    assert found.outcome == "right"
    assert found.ranks[0].needed


@of_this_version
def test_a_refusal_is_recorded() -> None:
    found = verdict("llama/tp1-1/block32-16/hit0/300")
    assert found.outcome == "refused"
    assert "block size" in found.text
    page = table([found, Verdict(Row("llama", (1, 1), (16, 16), 0, 300), "right")])
    assert "| refused | llama | 1 | `llama/tp1-1/block32-16/hit0/300` |" in page
    assert "| `llama/tp1-1` | refused | right |" in page
