# SPDX-License-Identifier: Apache-2.0
"""Each fact that decides bytes or values of a cache, and each setting of vLLM that does or does not.

docs/how-it-works.md has the table of the facts, as :func:`table` makes it.
"""

from __future__ import annotations

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
DRAFT = "a draft model and its method"
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
        "field by field, but for lengths and ids of special tokens",
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
        "as texts: quantization by variables or online, no sliding window, other classes, no bounded replay, "
        "random experts, how items become embeddings",
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
        "as texts, if both sides have one",
        "tests/connector/test_prefill_engines.py::test_caches_of_another_model_are_refused",
        "draft",
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
    CONFIG: "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    OVERRIDES: """
        VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_CPU_INT4_W4A8 VLLM_DEEPEPLL_NVFP4_DISPATCH
        VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_ONLINE_QUANT_CONFIG
        VLLM_MARLIN_INPUT_DTYPE VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_PLUGINS VLLM_ROCM_FP8_MFMA_PAGE_ATTN
        VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4
        VLLM_XPU_INC_WNA16_BACKEND
    """,
    PROMPT: """
        VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
        VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_SYSTEM_START_DATE VLLM_USE_FASTOKENS
    """,
    PAGES: """
        VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_KV_CACHE_LAYOUT VLLM_MLA_DISABLE
        VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT
    """,
    RANKS: "VLLM_DCP_Q_REPLICATE VLLM_PP_LAYER_PARTITION",
    ROUNDING: """
        VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM
        VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_ATTN_SPLIT_KV
        VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DISABLED_KERNELS VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
        VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS
        VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_PREGRAD_PASSES
        VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLOAT32_MATMUL_PRECISION VLLM_GDN_DECODE_KERNEL
        VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_USE_F16_ACCUM VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR
        VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM
        VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM
        VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_REPLICATE_EMBED
        VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY
        VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE
        VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
        VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
        VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR
        VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM
        VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM
        VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2
        VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
        VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM
        VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TRITON_FORCE_FIRST_CONFIG
        VLLM_TRITON_USE_TD VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES
        VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS
        VLLM_USE_TRITON_AWQ VLLM_XPU_FORCE_N_CONTIG_WEIGHT
    """,
    SPEED: """
        CMAKE_BUILD_TYPE CUDA_HOME MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME NVCC_THREADS VERBOSE
        VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_BUILD_COMMIT
        VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CONFIGURE_LOGGING
        VLLM_CPU_CI_ENV VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH
        VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DBO_COMM_SMS VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE
        VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL
        VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE
        VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_PYNCCL VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DOCKER_BUILD_CONTEXT VLLM_DP_RANK
        VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
        VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENGINE_READY_TIMEOUT_S
        VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_GC_DEBUG VLLM_GPU_NIC_PCIE_MAPPING
        VLLM_GPU_SYNC_CHECK VLLM_HAS_FLASHINFER_CUBIN VLLM_IMAGE_TAG VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOOPBACK_IP
        VLLM_MAIN_CUDA_VERSION VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT
        VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG
        VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD
        VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS VLLM_NIXL_SIDE_CHANNEL_PORT
        VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS
        VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PATTERN_MATCH_DEBUG VLLM_PROCESS_NAME_PREFIX
        VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
        VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
        VLLM_RUST_FRONTEND_PATH VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SKIP_P2P_CHECK
        VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_TARGET_DEVICE VLLM_TPU_USING_PATHWAYS VLLM_TRACE_FUNCTION
        VLLM_USAGE_SOURCE VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK
        VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_LAYERNAME
        VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_NCCL_SYMM_MEM VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
        VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND
        VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_USE_SIMPLE_KV_OFFLOAD
        VLLM_USE_SPINLOOP_EXT VLLM_USE_STANDALONE_COMPILE VLLM_USE_V2_MODEL_RUNNER
        VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY
        VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD VLLM_XPU_PP_MICROBATCH
    """,
    ANSWERS: """
        VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_ENABLE_COHERE_API
        VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
        VLLM_RAISE_ON_LOGIT_NANS VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FLASHINFER_SAMPLER
        VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB VLLM_XPU_USE_SAMPLER_KERNEL
    """,
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
