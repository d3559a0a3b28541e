# SPDX-License-Identifier: Apache-2.0
"""Bodies whose prompt D computes itself according to the proxy, and vLLM's own parameters for them."""

import pytest
import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from kvhma.proxy import is_computed_by_decode

OLD = vllm.__version__.startswith("0.31.")
PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("kind", [PROMPT, CHAT], ids=["prompt", "chat"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": None},
        {"echo": True},
        {"echo": False, "logprobs": 1},
        {"echo": True, "logprobs": None},
        {"echo": True, "logprobs": 0},
        {"echo": True, "logprobs": 1, "top_logprobs": 1},
        {"echo": True, "top_logprobs": None},
        {"logprobs": 1},
    ],
    ids=str,
)
def test_whose_prompt_log_probabilities_vllm_computes(kind, more):
    """vLLM always computes those of an echoed chat."""
    made = (CompletionRequest if kind is PROMPT else ChatCompletionRequest)(**kind, **more)
    computed = made.to_sampling_params(4, {}).skip_reading_prefix_cache
    # vLLM 0.31 leaves an echoed chat without log-probabilities to its cache; the proxy does not know the version.
    goes_to_decode = is_computed_by_decode(kind | more)
    assert goes_to_decode == computed or (OLD and goes_to_decode and kind is CHAT and more.get("echo"))
