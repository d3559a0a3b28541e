# SPDX-License-Identifier: Apache-2.0
"""What a prompt is: everything that vLLM's own block hash distinguishes, with vLLM's own requests and hashes."""

import hashlib
import itertools

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvhma.errors import RequestError
from kvhma.vllm.prompts import prompt
from kvhma.vllm.prompts.adapters import Adapters

TOKENS = 32


def adapter(name="fine", path="/adapters/fine", number=1):
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def item(identifier="cat", offset=4, length=8):
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def prompt_digest(asked, num_tokens):
    """As an engine makes it that has seen no adapter yet."""
    lora = asked.lora_request
    return prompt.prompt_digest(asked, num_tokens, None if lora is None else Adapters().identify(lora))


def request(*, tokens=TOKENS, hasher=None, **more):
    return Request("r", list(range(tokens)), SamplingParams(max_tokens=4), None, block_hasher=hasher, **more)


PROMPTS = {
    "plain": {},
    "adapter": {"lora_request": adapter()},
    "adapter of another name": {"lora_request": adapter("other")},
    "adapter at another path": {"lora_request": adapter(path="/adapters/newer")},  # which has no files here
    "image": {"mm_features": [item()]},
    "another image": {"mm_features": [item("dog")]},
    "image one token later": {"mm_features": [item(offset=5)]},
    "two images": {"mm_features": [item(), item(offset=16)]},
    "salt": {"cache_salt": "tenant"},
    "another salt": {"cache_salt": "other tenant"},
    "embeddings": {"prompt_embeds": torch.arange(TOKENS * 4.0).reshape(TOKENS, 4)},
    "other embeddings": {"prompt_embeds": torch.arange(TOKENS * 4.0).reshape(TOKENS, 4).flip(0)},
}


def test_what_vllms_hash_tells_apart_the_digest_does_too():
    # Before version 2 of the parameters the digest was of tokens alone: these twelve prompts had one digest.
    init_none_hash(hash)
    hasher = get_request_block_hasher(TOKENS, lambda value: hashlib.sha256(repr(value).encode()).digest())
    for (one, more), (other, others) in itertools.combinations(PROMPTS.items(), 2):
        first, second = request(hasher=hasher, **more), request(hasher=hasher, **others)
        assert first.block_hashes != second.block_hashes, (one, other)
        assert prompt_digest(first, TOKENS) != prompt_digest(second, TOKENS), (one, other)


@pytest.mark.parametrize("name", PROMPTS)
def test_equal_prompts_have_one_digest(name):
    assert prompt_digest(request(**PROMPTS[name]), TOKENS) == prompt_digest(request(**PROMPTS[name]), TOKENS)


def test_the_number_of_an_adapter_is_an_engines_own():
    first, second = (request(lora_request=adapter(number=number)) for number in (1, 7))
    assert prompt_digest(first, TOKENS) == prompt_digest(second, TOKENS)


def test_only_what_lies_in_the_tokens_counts():
    near, far = item(offset=4), item(offset=20, length=8)
    assert prompt_digest(request(mm_features=[near, far]), 20) == prompt_digest(request(mm_features=[near]), 20)
    assert prompt_digest(request(mm_features=[near, far]), 21) != prompt_digest(request(mm_features=[near]), 21)
    assert prompt_digest(request(mm_features=[far]), 20) == prompt_digest(request(), 20)
    longer = request(tokens=TOKENS + 1)
    assert prompt_digest(longer, TOKENS) == prompt_digest(request(), TOKENS)
    assert prompt_digest(longer, TOKENS) != prompt_digest(longer, TOKENS + 1)


def test_a_prompt_that_p_cut_short_is_the_same_one():
    whole, cut = request(), request()
    del cut._all_token_ids[-1:]
    assert prompt_digest(whole, TOKENS - 1) == prompt_digest(cut, TOKENS - 1)


def test_embeddings_of_a_type_that_numpy_lacks():
    rows = torch.ones(TOKENS, 4, dtype=torch.bfloat16)
    assert prompt_digest(request(prompt_embeds=rows), TOKENS) != prompt_digest(request(prompt_embeds=2 * rows), TOKENS)


def test_tokens_that_are_not_there():
    with pytest.raises(RequestError, match="tokens: 32 of 33 are in the list"):
        prompt_digest(request(), TOKENS + 1)
