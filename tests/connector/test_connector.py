# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads, in each of its two processes."""

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make e2e runs it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvhma.vllm import KvhmaConnector
from support.cache.engine import vllm_config_of


def connector(role):
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])
    return KvhmaConnector(vllm_config_of("p", True, "kv_both"), role, caches)


def test_a_worker_without_caches_ends():
    """It has no scheduler's part: to ask for one raised, and the worker's threads were not stopped."""
    made = connector(KVConnectorRole.WORKER)
    assert made.get_kv_connector_stats() is None
    with pytest.raises(RuntimeError, match="the worker's side"):
        _ = made.supports_divergent_local_hybrid_hits
    made.shutdown()


def test_a_scheduler_without_requests_ends():
    made = connector(KVConnectorRole.SCHEDULER)
    assert made.get_kv_connector_stats() is None
    assert made.supports_divergent_local_hybrid_hits
    made.shutdown()
