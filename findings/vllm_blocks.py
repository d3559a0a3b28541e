# SPDX-License-Identifier: Apache-2.0
"""vLLM's block manager with events, and requests for it, as an engine makes them. Hashes are of 16 tokens."""

import os

os.environ["PYTHONHASHSEED"] = "0"
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

init_none_hash(sha256)


def manager_of(specs, num_blocks):
    """Return a manager of one layer for each spec, each in a separate group."""
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=1024,
        scheduler_block_size=max(spec.block_size for spec in specs),
        hash_block_size=16,
        enable_kv_cache_events=True,
    )


def request_of(name, first, tokens):
    """Return a request whose prompt counts from a number."""
    params = SamplingParams(max_tokens=1)
    return Request(
        name, list(range(first, first + tokens)), params, None, block_hasher=get_request_block_hasher(16, sha256)
    )
