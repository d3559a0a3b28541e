# SPDX-License-Identifier: Apache-2.0
"""Features of an engine that are refused when it starts."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make e2e runs it")

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.compat import check_config


def config(**more):
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    model = {"enable_return_routed_experts": False}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: more.get(name, value) for name, value in parallel.items()}),
        model_config=SimpleNamespace(**{name: more.get(name, value) for name, value in model.items()}),
    )


def test_a_plain_engine():
    check_config(config())


@pytest.mark.parametrize(
    ("name", "found", "needed"),
    [
        ("pipeline_parallel_size", 2, 1),
        ("decode_context_parallel_size", 4, 1),
        ("prefill_context_parallel_size", 2, 1),
        ("enable_return_routed_experts", True, False),
    ],
)
def test_refused(name, found, needed):
    with pytest.raises(UnsupportedPairError, match=f"{name} is {found}, the kvhma connector supports only {needed}"):
        check_config(config(**{name: found}))
