# SPDX-License-Identifier: Apache-2.0
"""What the connector reaches into vLLM for is there, in the version that runs these tests."""

from __future__ import annotations

import queue

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request

from kvhma.vllm import internals


def test_the_loop_of_this_version_can_be_woken_up() -> None:
    """`EngineCoreProc` has what `calling_engine` asks for; the queue is made in its constructor."""
    assert all(hasattr(EngineCoreProc, name) for name in ("is_running", "is_scheduler_paused"))

    class Engine(EngineCoreProc):
        def __init__(self) -> None:
            self.input_queue = queue.Queue()

        def run(self) -> object:
            return internals.calling_engine()

        def __del__(self) -> None: ...

    engine = Engine()
    assert engine.run() is engine
    internals.wake_up(engine)
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    del engine.input_queue
    assert engine.run() is None, "an engine without a queue cannot be woken up"
    assert internals.calling_engine() is None


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_prompt_is_shortened_and_other_requests_keep_theirs(is_shared: bool) -> None:
    tokens = list(range(40))
    made = [Request(name, tokens if is_shared else list(tokens), SamplingParams(max_tokens=9), None) for name in "ab"]
    internals.shorten_prompt(made[0], 39)
    short, whole = made
    assert (short.num_prompt_tokens, len(short.prompt_token_ids), short.num_tokens, short.max_tokens) == (39, 39, 39, 1)
    assert list(short.all_token_ids) == list(range(39))
    assert (whole.num_prompt_tokens, list(whole.all_token_ids), whole.prompt_token_ids) == (40, tokens, tokens)


def test_a_prompt_with_embeddings_is_shortened_in_all_its_fields() -> None:
    tokens, mask = list(range(1, 41)), [True, False] * 20
    made = Request(
        "a", tokens, SamplingParams(max_tokens=9), None, prompt_embeds=torch.ones(40, 2), prompt_is_token_ids=mask
    )
    internals.shorten_prompt(made, 39)
    assert (made.prompt_token_ids, made.prompt_is_token_ids, len(made.prompt_embeds)) == (tokens[:39], mask[:39], 39)
    assert (
        list(made.all_token_ids)
        == [token if is_token else 0 for token, is_token in zip(tokens, mask, strict=True)][:39]
    )
    only = Request("b", None, SamplingParams(max_tokens=9), None, prompt_embeds=torch.ones(40, 2))
    internals.shorten_prompt(only, 39)
    assert (only.prompt_token_ids, len(only.prompt_embeds), only.num_tokens) == (None, 39, 39)
