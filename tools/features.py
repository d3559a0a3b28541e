# SPDX-License-Identifier: Apache-2.0
"""Features by the names that users know, the tests that prove each, and what vLLM's own connector does.

The one place that assigns tests to features. tools/compatibility.py makes docs/compatibility.md of it. A test is a file
below tests/ and a function, for real engines with its parameters if only some of them are meant:
``e2e/test_hand_off.py::test_equal_ranks[llama]``; ``*`` in brackets stands for anything. A test that does not exist
fails tests/unit/test_compatibility.py.
"""

from __future__ import annotations

from dataclasses import dataclass

PROOFS = ("engine", "processes", "imitation", "refused")
"""The fields of a feature that hold tests, the strongest first."""


@dataclass(frozen=True)
class Feature:
    """A line of the page.

    Attributes:
        name: the users' name for it.
        engine: tests that run it in real engines, and compare the answers with a plain engine's.
        processes: tests that run it with real NIXL, most between agents of one process, without a forward pass.
        imitation: tests with vLLM's own classes, or with imitated writers, devices and peers.
        refused: tests that show a typed error.
        upstream: what vLLM's NixlConnector does.
        note: remarks; where kvhma is ahead, why.
    """

    name: str
    engine: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    imitation: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    upstream: str = "?"
    note: str = ""


CACHES = (
    Feature(
        "full attention",
        engine=("e2e/test_hand_off.py::test_equal_ranks[llama]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=("connector/test_families.py::test_families",),
        upstream="yes",
    ),
    Feature(
        "sliding window",
        engine=("e2e/test_hand_off.py::test_equal_ranks[gemma3]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=("connector/test_families.py::test_families",),
        upstream="yes",
    ),
    Feature(
        "attention sinks, mixture of experts",
        engine=("e2e/test_hand_off.py::test_equal_ranks[gpt_oss]",),
        upstream="yes",
    ),
    Feature(
        "KV heads that differ by layer",
        engine=(
            "e2e/test_hand_off.py::test_equal_ranks[gemma4]",
            "e2e/test_hand_off.py::test_one_rank_to_two_and_back[gemma4]",
        ),
        imitation=("connector/test_heads.py::test_every_pair_of_sizes",),
        upstream="equal TP",
    ),
    Feature(
        "chunked attention",
        engine=("e2e/test_families.py::test_family[llama4]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=(
            "connector/test_families.py::test_families",
            "connector/test_cache_oracle.py::test_what_is_cached_and_read_is_right",
        ),
        upstream="?",
    ),
    Feature(
        "MLA",
        engine=("e2e/test_hand_off.py::test_equal_ranks[deepseek_v2]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=(
            "connector/test_formats.py::test_every_prompt_of_two_blocks",
            "connector/test_formats.py::test_blocks_of_other_sizes",
        ),
        upstream="yes",
    ),
    Feature(
        "sparse MLA, indexers",
        imitation=(
            "connector/test_formats.py::test_every_prompt_of_two_blocks",
            "connector/test_formats.py::test_blocks_of_other_sizes",
        ),
        upstream="yes",
        note="needs a GPU to run",
    ),
    Feature(
        "Mamba",
        engine=("e2e/test_hand_off.py::test_equal_ranks[nemotron_h*]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=("connector/test_formats.py::test_recurrent_state",),
        upstream="yes",
    ),
    Feature(
        "GDN",
        engine=("e2e/test_hand_off.py::test_equal_ranks[qwen3_next]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=("connector/test_formats.py::test_recurrent_state",),
        upstream="yes",
    ),
    Feature(
        "ring buffers (`CircularBufferSpec`)",
        imitation=("connector/test_specs.py::test_a_ring_is_moved_between_equal_engines",),
        upstream="yes",
    ),
    Feature(
        "HiSparse: blocks in host memory",
        refused=("connector/test_specs.py::test_blocks_in_host_memory_are_refused",),
        upstream="yes",
        note="a pool that ranks share; never seen outside of a GPU",
    ),
    Feature(
        "cross attention (encoder-decoder)", refused=("connector/test_specs.py::test_what_is_refused",), upstream="no"
    ),
    Feature(
        "quantized caches (fp8, int8, NVFP4)",
        engine=("e2e/test_topologies.py::test_caches_of_fp8",),
        imitation=(
            "connector/test_formats.py::test_every_prompt_of_two_blocks",
            "connector/test_formats.py::test_blocks_of_other_sizes",
            "connector/test_formats.py::test_cache_types_that_no_spec_says_are_compared",
        ),
        upstream="equal dtypes",
        note="engines ran fp8 only; int8 and NVFP4 by imitated writers",
    ),
)

# `make families` tests the hand-off of these, and the next requests, which hit D's prefix cache.
MODELS = (
    Feature(
        "Jamba (Mamba1, TP 1 ↔ 2)",
        engine=("e2e/test_families.py::test_family[jamba]",),
        note="Mamba1 by kernels in torch: vLLM has none for CPUs",
    ),
    Feature(
        "Llama 4 (chunked attention)",
        engine=("e2e/test_families.py::test_family[llama4]",),
    ),
    Feature(
        "MiMo-V2 (heads that differ by layer, TP 1 ↔ 2)",
        engine=("e2e/test_families.py::test_family[mimo_v2]",),
    ),
    Feature(
        "MiMo-V2, keys wider than values",
        engine=("e2e/test_families.py::test_family[mimo_v2_wide_keys]",),
    ),
    Feature(
        "gemma-3n (layers that share caches)",
        engine=("e2e/test_families.py::test_family[gemma3n]",),
    ),
    Feature(
        "Falcon-H1 (Mamba2 beside attention, TP 1 ↔ 2)",
        engine=("e2e/test_families.py::test_family[falcon_h1]",),
        note="Mamba2's prefix cache by kernels in torch: vLLM's fail on CPUs",
    ),
    Feature(
        "Zamba2 (shared attention, TP 1 ↔ 2)",
        engine=("e2e/test_families.py::test_family[zamba2]",),
        note="as Falcon-H1",
    ),
    Feature(
        "GraniteMoeHybrid (Mamba2, TP 2 ↔ 1)",
        engine=("e2e/test_families.py::test_family[granitemoehybrid]",),
        note="as Falcon-H1",
    ),
    Feature(
        "Qwen2.5-VL (pictures, three positions a token)",
        engine=("e2e/test_families.py::test_family[qwen2_5_vl]",),
    ),
    Feature(
        "Step-3.5 (heads that differ by layer, experts)",
        engine=("e2e/test_families.py::test_family[step3p5]",),
        note="experts by softmax: vLLM's router for CPUs has no sigmoid",
    ),
    Feature(
        "EXAONE 4 (windows, blocks of 32 ↔ 96)",
        engine=("e2e/test_families.py::test_family[exaone4]",),
    ),
)

PAIRS = (
    Feature(
        "unequal TP",
        engine=("e2e/test_hand_off.py::test_one_rank_to_two_and_back[llama]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=("connector/test_formats.py::test_ranks",),
        upstream="yes",
    ),
    Feature(
        "unequal TP with Mamba or GDN",
        engine=(
            "e2e/test_hand_off.py::test_one_rank_to_two_and_back[nemotron_h*]",
            "e2e/test_hand_off.py::test_one_rank_to_two_and_back[qwen3_next]",
        ),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        upstream="being built",
    ),
    Feature(
        "unequal block sizes",
        engine=("e2e/test_hand_off.py::test_other_block_sizes[llama*]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=(
            "connector/test_formats.py::test_every_prompt_of_two_blocks",
            "connector/test_formats.py::test_blocks_of_other_sizes",
        ),
        upstream="P's smaller",
    ),
    Feature(
        "unequal block sizes with windows or states",
        engine=("e2e/test_hand_off.py::test_other_block_sizes[gemma3*]",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=(
            "connector/test_formats.py::test_every_prompt_of_two_blocks",
            "connector/test_formats.py::test_blocks_of_other_sizes",
        ),
        upstream="no",
    ),
    Feature(
        "unequal layouts",
        engine=("e2e/test_hand_off.py::test_both_orders_of_the_convolution",),
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
        ),
        imitation=("connector/test_families.py::test_families_with_the_block_outermost",),
        upstream="HND ↔ NHD",
    ),
    Feature(
        "through host memory",
        engine=("e2e/test_hand_off.py::test_through_host_memory",),
        imitation=("connector/test_staging.py::test_a_hand_off_through_the_pools_of_both_engines",),
        upstream="yes",
    ),
    Feature(
        "pipeline parallel",
        processes=(
            "nixl/test_axes.py::test_axis",
            "nixl/test_nixl_plans.py::test_plans",
            "connector/test_pipeline.py::test_stages",
        ),
        upstream="P only, no states",
        note="by vLLM's scheduler, workers' geometry and NIXL in processes: vLLM runs it on GPUs only",
    ),
    Feature(
        "context parallel (DCP, PCP)",
        processes=("connector/test_context_parallel.py::test_ranks",),
        upstream="MLA; PCP on P",
        note="as pipeline parallel; windows, and drafts of a model, are refused",
    ),
    Feature(
        "data parallel",
        engine=("e2e/test_topologies.py::test_data_parallel",),
        upstream="yes",
        note="of dense models; experts over ranks were not run",
    ),
    Feature(
        "P restarted, killed",
        engine=("e2e/test_failures.py::test_p_killed_before_during_and_after_and_restarted",),
        processes=("nixl/test_nixl_processes.py::test_a_restart_nobody_noticed",),
        upstream="D recomputes or fails",
    ),
    Feature(
        "versions of vLLM mixed",
        engine=("e2e/test_rolling_upgrade.py::test_every_mixture",),
        imitation=("connector/test_formats.py::test_versions_that_store_the_same_spec_in_another_way_are_refused",),
        upstream="equal versions only",
    ),
    Feature(
        "an idle engine is released (`engine_ttl`)",
        processes=("nixl/test_nixl_processes.py::test_nothing_is_left_of_a_peer_that_ended",),
        imitation=("connector/test_prefill_engines.py::test_an_engine_that_is_not_used_is_let_go_and_connected_anew",),
        upstream="yes",
    ),
)

REQUESTS = (
    Feature(
        "prefix hits, chunked prefill",
        engine=("e2e/test_prefix.py::test_prefix_hits_and_chunks",),
        imitation=("connector/test_cache_oracle.py::test_hits_that_differ_by_group",),
        upstream="yes",
    ),
    Feature(
        "preemption, many at once",
        engine=(
            "e2e/test_prefix.py::test_preemption",
            "e2e/test_prefix.py::test_many_at_once",
        ),
        upstream="yes",
    ),
    Feature(
        "turn two: P reads D's answer",
        engine=("e2e/test_turns.py::test_three_turns",),
        imitation=("connector/test_answers.py::test_in_three_turns_p_computes_what_is_new",),
        upstream="yes (`bidirectional_kv_xfer`)",
    ),
    Feature("samples (`n` > 1)", engine=("e2e/test_readers.py::test_samples_of_one_prompt",), upstream="?"),
    Feature(
        "`logprobs`, `prompt_logprobs`",
        engine=("e2e/test_readers.py::test_log_probabilities_of_the_prompt_at_p",),
        upstream="yes",
    ),
    Feature(
        "LoRA",
        engine=("e2e/test_deployments.py::test_adapters_that_have_other_numbers",),
        imitation=("connector/test_adapters.py::test_equal_files_under_two_paths",),
        upstream="yes",
    ),
    Feature(
        "multimodal",
        engine=("e2e/test_topologies.py::test_pictures",),
        imitation=("connector/test_prompt.py::test_what_vllms_hash_tells_apart_the_digest_does_too",),
        upstream="?",
    ),
    Feature(
        "prompt embeddings",
        imitation=("connector/test_prompt.py::test_embeddings_of_a_type_that_numpy_lacks",),
        upstream="yes",
    ),
    Feature("structured output", engine=("e2e/test_deployments.py::test_structured_output",), upstream="?"),
    Feature(
        "cancelled requests",
        engine=("e2e/test_failures.py::test_given_up_in_any_phase",),
        upstream="yes",
    ),
    Feature(
        "routed experts returned",
        refused=("connector/test_engine_config.py::test_auxiliary_outputs",),
        upstream="?",
        note="P's experts are not D's to return",
    ),
)

ENGINES = (
    Feature(
        "speculation: ngram",
        engine=("e2e/test_speculation.py::test_ngram_on_one_side",),
        imitation=("connector/test_speculation.py::test_d_computes_what_it_would_have",),
        upstream="equal settings",
    ),
    Feature(
        "speculation: MTP, EAGLE, draft model",
        engine=("e2e/test_speculation.py::test_drafts_of_a_model",),
        imitation=("connector/test_allocator.py::test_a_draft_layer_with_heads_of_its_own",),
        upstream="equal drafts; states: ?",
    ),
    Feature("async scheduling", engine=("e2e/test_deployments.py::test_steps_are_scheduled_ahead",), upstream="yes"),
    Feature(
        "sleep mode",
        engine=("e2e/test_sleep.py::test_both_engines_sleep",),
        processes=("connector/test_sleep.py::test_d_reads_on_after_it_slept",),
        refused=("connector/test_sleep.py::test_sleep_mode_is_refused_where_vllm_does_not_ask",),
        upstream="from 0.33",
        note="vLLM asks connectors from 0.33 on",
    ),
    Feature(
        "offloading beside it (`MultiConnector`)",
        engine=("e2e/test_topologies.py::test_beside_an_offloading_connector",),
        upstream="yes",
        note="[what D needs for it](how-it-works.md#ds-prefix-cache)",
    ),
    Feature(
        "secrets between engines",
        engine=("e2e/test_trust.py::test_engines_with_a_secret",),
        imitation=("connector/test_prefill_engines.py::test_hellos_are_asked_for_with_the_secret",),
        upstream="no",
    ),
    Feature(
        "two hosts, a proxy",
        engine=(
            "e2e/test_network_faults.py::test_loss_and_a_partition",
            "e2e/test_http.py::test_the_proxy",
        ),
        upstream="yes",
    ),
    Feature(
        "P writes to D (push)",
        upstream="yes (`NixlPushConnector`)",
        note="D reads; with it P would have to know D's blocks before it computes",
    ),
    Feature(
        "NIXL without UCX (`backends`)", upstream="yes", note="the setting is handed to NIXL; nothing but UCX was run"
    ),
    Feature(
        "GPU",
        imitation=("connector/test_on_device.py::test_a_load_comes_after_the_steps_before_it_and_not_after_its_own",),
        upstream="yes",
        note="[reads on one GPU](vllm-devices.md#what-was-run), no engine: `make gpu`",
    ),
    Feature("CUDA graphs", upstream="yes", note="as GPU"),
)

FEATURES: dict[str, tuple[Feature, ...]] = {
    "caches": CACHES,
    "models, and the requests after a hand-off": MODELS,
    "P and D": PAIRS,
    "requests": REQUESTS,
    "engines": ENGINES,
}
"""All of them, by what they are about."""
