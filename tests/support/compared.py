# SPDX-License-Identifier: Apache-2.0
"""Each fact that decides bytes or values of a cache, and each setting of vLLM that does or does not.

docs/how-it-works.md has the table of the facts, as :func:`table` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """A fact that decides a cache.

    Attributes:
        name: what it is.
        compared: how engines compare it.
        test: the test that changes only this fact, and sees the refusal.
        fields: of `ModelIdentity` that carry it.
    """

    name: str
    compared: str
    test: str
    fields: str = ""


NAME = "the model's name and revision, or `model_id`"
CONFIG = "the model's configuration"
BUILT = "scales, switches and position tables"
TYPES = "dtypes of activations and caches, and quantization"
OVERRIDES = "settings of vLLM that change the model"
WEIGHTS = "weights, also a draft's"
DRAFT = "a draft model, its configuration and its method"
PAGES = "layers, groups, pages, heads, blocks and windows"
PROMPT = "tokens, adapter, multimodal items, salt and embeddings of a prompt"
RANKS = "which rank has which heads, channels and tokens"

FACTS = (
    Fact(
        NAME,
        "as texts; with `model_id` on both sides only that",
        "tests/connector/test_prefill_engines.py::test_caches_of_another_model_are_refused",
        "model revision model_id",
    ),
    Fact(
        CONFIG,
        "field by field, but for lengths and for ids of special tokens that no module holds; "
        "files of processors as texts",
        "tests/connector/test_identity.py::test_fields_of_the_models_own_file",
        "config versions",
    ),
    Fact(
        BUILT,
        "of each layer, as vLLM has built it; tables at the positions that both have, up to rounding",
        "tests/connector/test_built_layers.py::test_tables_of_positions",
        "layers",
    ),
    Fact(
        TYPES,
        "as texts",
        "tests/connector/test_identity.py::test_what_changes_the_values_in_a_cache_changes_the_identity",
        "dtype quantization cache_dtype",
    ),
    Fact(
        OVERRIDES,
        "as texts: quantization by variables or online, no sliding window, other, remote or a plugin's classes, "
        "no bounded replay, random experts, how items become embeddings",
        "tests/connector/test_identity.py::test_what_changes_the_values_in_a_cache_changes_the_identity",
        "overrides",
    ),
    Fact(
        WEIGHTS,
        "by [digests of their files](weights.md)",
        "tests/connector/test_weight_files.py::test_a_link_that_moves",
        "weights draft_weights",
    ),
    Fact(
        DRAFT,
        "as texts and field by field, if both sides have one",
        "tests/connector/test_identity.py::test_how_a_draft_drafts_is_compared",
        "draft draft_config",
    ),
    Fact(
        PAGES,
        "layer by layer, axis by axis ([which pairs work](vllm-pairs.md))",
        "tests/golden/test_pairs.py::test_pages_that_do_not_mean_the_same_are_refused",
    ),
    Fact(
        RANKS,
        "need not be equal: the plan reads from the ranks that have them",
        "tests/property/test_pairs.py::test_every_byte_of_unequal_engines",
    ),
    Fact(
        PROMPT,
        "by a digest, for each request",
        "tests/connector/test_prompt.py::test_what_vllms_hash_tells_apart_the_digest_does_too",
    ),
)

# Reasons why a field decides nothing of a cache.
ROUNDING = "by which kernels, which compute the same up to rounding"
SPEED = "how fast, with which memory, on which machine"
ANSWERS = "what is sampled, returned or logged"
BLOCKS = "which blocks stay in the prefix cache"
LOADING = "how the model is loaded; its files are compared"

MODEL = {
    NAME: "model model_weights revision",
    CONFIG: "hf_config hf_text_config hf_overrides max_model_len",
    BUILT: "generation_config override_generation_config",
    TYPES: "dtype quantization",
    OVERRIDES: "quantization_config disable_sliding_window model_class_overrides multimodal_config",
    DRAFT: "spec_target_max_model_len is_submodel_config",
    PROMPT: "enable_prompt_embeds tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init",
    PAGES: "model_impl runner convert",
    SPEED: "allow_deprecated_quantization allowed_local_media_path allowed_media_domains disable_cascade_attn "
    "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode enforce_eager io_processor_plugin "
    "renderer_num_workers sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
    ANSWERS: "enable_trace_replay logits_processors logprobs_mode max_logprobs pooler_config return_sampling_mask seed "
    "served_model_name use_fp64_gumbel word_embeddings_untied_by_checkpoint",
    LOADING: "code_revision config_format hf_config_path hf_token trust_remote_code",
}
CACHE = {
    TYPES: "cache_dtype mamba_cache_dtype mamba_ssm_cache_dtype kv_cache_dtype_skip_layers",
    OVERRIDES: "swa_bounded_replay",
    PAGES: "block_size user_specified_block_size kv_cache_layout sliding_window mamba_page_size_padded "
    "skip_page_size_padded mamba_block_size user_specified_mamba_block_size mamba_cache_mode use_replayssm "
    "use_kda_recoverssm replayssm_buffer_len is_attention_free effective_attention_block_size _block_size_resolved",
    SPEED: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_memory_bytes "
    "kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size kv_offloading_backend "
    "simple_cpu_offload_num_blocks kv_sharing_fast_prefill",
    BLOCKS: "prefix_match_unit enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval "
    "enable_mamba_shared_prefix_checkpoint hash_block_size cache_hit_alignment_tokens",
}
PARALLEL = {
    RANKS: "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size "
    "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size dcp_q_replicate "
    "world_size rank",
    SPEED: """
        data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
        data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index is_moe_model
        enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb
        eplb_config expert_placement_strategy

        all2all_backend max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena
        enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env
        placement_group distributed_executor_backend worker_cls sd_worker_cls worker_extension_cls master_addr

        master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
        distributed_timeout_seconds cpu_distributed_timeout_seconds _data_parallel_master_port_list
        _coord_store_port dcp_comm_backend _api_process_count _api_process_rank enable_fault_tolerance
        fault_tolerance_config
    """,
}
ATTENTION = {
    CONFIG: "num_heads num_kv_heads head_size alibi_slopes use_alibi_sqrt attn_type mm_prefix_clamp_sliding_window "
    "kv_sharing_target_layer_name",
    BUILT: "scale logits_soft_cap",
    TYPES: "cache_config quant_config",
    PAGES: "per_layer_sliding_window head_size_v attn_backend prefix",
}
LATENT = {
    CONFIG: "num_heads q_lora_rank indexer index_group_builder topk_indices_buffer use_sparse "
    "non_causal_multi_token_decode kv_b_proj",
    BUILT: "scale",
    TYPES: "cache_config quant_config",
    PAGES: "qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank attn_backend prefix sliding_window",
    RANKS: "dcp_q_replicate",
    SPEED: "prefill_backend_cls",
}
KERNEL = {
    CONFIG: "num_heads num_kv_heads head_size alibi_slopes attn_type kv_sharing_target_layer_name",
    BUILT: "scale logits_soft_cap",
    TYPES: "kv_cache_dtype",
    PAGES: "sliding_window",
}
VARIABLES = {
    fact: " ".join(names) for fact, names in json.loads(Path(__file__).with_name("variables.json").read_text()).items()
}
"""Variables that vLLM takes for part of what it compiles; it names those that are not itself."""
CLASSES: dict[str, dict[str, str]] = {
    "ModelConfig": MODEL,
    "CacheConfig": CACHE,
    "ParallelConfig": PARALLEL,
    "Attention": ATTENTION,
    "MLAAttention": LATENT,
    "AttentionImpl": KERNEL,
    "compile_factors": VARIABLES,
}
"""Of each class of vLLM, and of its variables: the fact, or the reason, under which each name falls."""

ABSENT = {
    "0.31": """
        cache_hit_alignment_tokens enable_hc_sp enable_shm_tensor_arena hash_block_size simple_cpu_offload_num_blocks
        sleep_mode_offload_cudagraph VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
        VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS
        VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_MONO_DECODE VLLM_ROCM_MUSE_MOE_ONLINE_QUANT
        VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA
        VLLM_STEP5_SHARD_SP_SHARED_EXPERT
    """,
    "0.32": """
        sd_worker_cls simple_cpu_offload_num_blocks user_specified_mamba_block_size VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
        VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_ROCM_MUSE_MOE_ONLINE_QUANT
        VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_STEP5_SHARD_SP_SHARED_EXPERT
    """,
    "0.33": """
        sd_worker_cls user_specified_mamba_block_size VLLM_RAY_BUNDLE_INDICES
        VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_MONO_DECODE
        VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
        VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
    """,
}
"""Names that a series of vLLM does not have."""


def names_of(name: str) -> list[str]:
    """Return the classified names of a class of vLLM."""
    return [field for fields in CLASSES[name].values() for field in fields.split()]


def table() -> str:
    """Return the facts as Markdown."""
    rows = [f"| {fact.name} | {fact.compared} |" for fact in FACTS]
    return "\n".join(["| what decides a cache | how engines compare it |", "|---|---|", *rows])
