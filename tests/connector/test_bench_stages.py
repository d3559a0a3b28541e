# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole engines finds every function that its waterfall watches: a missing one stops the engines."""

from pathlib import Path

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
pytest.importorskip("nixl._api")


def test_every_watched_function_is_there(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches"))
    from handoffs import in_engine, waterfall

    found = in_engine.inside(ours=True)
    assert len(found) == len(in_engine.INSIDE)
    assert {stage for _, _, stage, _, _ in found} <= set(waterfall.STAGES)
