# SPDX-License-Identifier: Apache-2.0
"""The fields of a request that reach the connector, version by version, and what the connector does about each.

Written from vLLM's sources. `FIELDS` is compared with the installed vLLM: a new or removed field fails a test. A new
field may be a feature that clients use through vLLM's ordinary API.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path

from kvhma.versions import series as two_numbers

ANSWER = "it shapes D's answer, not the caches; D is given it as P was"
VLLM = "vLLM's own bookkeeping, which does not affect a transfer"
FRONT = "between vLLM's front end and its engine; a Request has no field for it"

FIELDS: Mapping[str, Mapping[str, str]] = {
    "EngineCoreRequest": {
        "request_id": "names the request; a number and a line in front of it are a sample's",
        "prompt_token_ids": "compared with P's, and shortened by what D computes",
        "mm_features": "compared with P's: identifier and place",
        "sampling_params": "see SamplingParams",
        "pooling_params": "a pooling request has no kv_transfer_params",
        "arrival_time": VLLM,
        "lora_request": "its name and a digest of its files are compared with P's",
        "cache_salt": "compared with P's",
        "data_parallel_rank": FRONT,
        "prompt_embeds": "their digest is compared with P's",
        "prompt_is_token_ids": "part of the digest of embeddings",
        "client_index": VLLM,
        "current_wave": FRONT,
        "priority": "vLLM schedules by it; a load that waits for blocks lets it",
        "trace_headers": "the span of a load is a child of the request's",
        "resumable": "P does not shorten a prompt that continues",
        "external_req_id": FRONT,
        "reasoning_ended": FRONT,
        "reasoning_parser_kwargs": FRONT,
        "abort_immediately": "vLLM has rejected the request: P is notified at once, nothing is compared",
        "session_id": "routers choose an engine by it",
        "kv_hints": "hints for caches of other connectors",
    },
    "Request": {
        "kv_transfer_params": "what P handed out, or that P is to keep the request; read and bounded once",
        "ec_transfer_params": "for encoder caches, which another connector moves",
        "block_hashes": "of all of the prompt, also where P's is shortened: vLLM uses those of computed tokens only",
        "max_tokens": "1 where P's prompt is shortened",
        "num_prompt_tokens": "bounds what is loaded; shortened with the prompt",
        "num_computed_tokens": "what P's caches hold when the request ends",
        "num_preemptions": "blocks that were copied to host memory before one are copied again",
        "skip_reading_prefix_cache": "vLLM computes all of the prompt: P does not shorten it, D reads nothing",
        "status": "how the request ended: P keeps only what ended well, D tells P what was aborted",
        "streaming_queue": "as resumable",
        "stop_reason": ANSWER,
        "output_token_ids": "the answer, which is kept for the next turn",
        "all_token_ids": "prompt and answer; read in their list, since a slice of the view copies it",
        "shared_prefix_boundary": "vLLM pins a shared prefix of its cache by it",
        "replay_start": "vLLM recomputes a window after a hit; what is loaded has its windows",
        "spec_token_ids": "drafts, which are computed after the prompt",
        "structured_output_request": ANSWER,
        "kv_cache_report_mode": "events of the prefix cache, which vLLM sends itself",
    }
    | dict.fromkeys(
        (
            "drop_stale_output", "events", "is_prefill_chunk", "last_sched_seq", "next_decode_eligible_step",
            "num_in_flight_tokens", "num_nans_in_logits", "num_output_placeholders", "num_stale_output_tokens",
            "prefill_stats", "spec_decode_metrics",
        ),
        VLLM,
    ),
    "SamplingParams": {
        "n": "each sample reads P's blocks, and P keeps them for those that come late",
        "max_tokens": "1 where P's prompt is shortened; D's is the client's",
        "extra_args": "kv_transfer_params come with it",
        "prompt_logprobs": "sets skip_reading_prefix_cache",
        "prompt_logprob_token_ids": "sets skip_reading_prefix_cache",
        "prompt_logprob_start": "vLLM skips rows of the answer, not the computing",
        "skip_reading_prefix_cache": "see Request",
        "routed_experts_prompt_start": "experts of loaded tokens are P's to tell",
    }
    | dict.fromkeys(
        (
            "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "top_p",
            "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs",
            "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
            "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length",
            "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget",
            "repetition_detection", "trace_decode_token_ids",
        ),
        ANSWER,
    ),
    "PoolingParams": dict.fromkeys(
        (
            "use_activation", "dimensions", "step_tag_id", "returned_token_ids", "task", "requires_token_ids",
            "skip_reading_prefix_cache", "late_interaction_params", "extra_kwargs", "output_kind",
            "late_chunking_params",
        ),
        "a pooling request has no kv_transfer_params",
    ),
}  # fmt: skip
"""By class, its public fields, and what the connector does about each."""

SINCE = {"late_chunking_params": "0.33"}
"""First series with a field, where that is not 0.31."""


def listed(cls: str, series: str) -> set[str]:
    """The fields of a class that are listed for a series; a Request has those of an EngineCoreRequest too."""
    names = set(FIELDS[cls])
    if cls == "Request":
        names |= {name for name, what in FIELDS["EngineCoreRequest"].items() if what != FRONT}
    return {name for name in names if two_numbers(SINCE.get(name, "0.31")) <= two_numbers(series)}


def fields(cls: type) -> set[str]:
    """Public fields of a class: those it declares, or those that its methods set."""
    declared = getattr(cls, "__struct_fields__", None) or getattr(cls, "__dataclass_fields__", None)
    names = set(declared) if declared is not None else _assigned(cls)
    return {name for name in names if not name.startswith("_")}


def _assigned(cls: type) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    targets = (
        target
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return {
        one.attr
        for one in targets
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
    }


def used(folder: Path) -> set[str]:
    """Public attributes of requests that the connector's code uses."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "request":
                found.add(node.attr)
    return {name for name in found if not name.startswith("_")}
