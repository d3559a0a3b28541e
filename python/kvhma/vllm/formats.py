# SPDX-License-Identifier: Apache-2.0
"""Which cache formats are known: those whose writer in vLLM was read, each recognised by everything that decides it.

A spec says how large a page is, not always what a kernel does with it: on one GPU the indexer of DeepSeek-V3.2 stores
the keys of a block and then their scales, on another one it shuffles the keys. What is not on a list here is not known.
docs/formats.md has the same as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Kind

KINDS: dict[str, Kind] = {
    "ChunkedLocalAttentionSpec": "chunked",
    # One block for each request, written in a circle: good for one position only, which is what a state is.
    "CircularBufferSpec": "ssm",
    "FullAttentionSpec": "full",
    "HiddenStateCacheSpec": "mla",
    "KpoolTailSpec": "ssm",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "ssm",
    # Lets go of generated tokens only, which are not handed over.
    "RSWASpec": "full",
    # The sinks are the engine's own, from the model's weights, and in no request's block table.
    "SinkFullAttentionSpec": "full",
    "SlidingWindowMLASpec": "sliding",
    "SlidingWindowSpec": "sliding",
}
"""What a group of layers of a spec is to the planner."""

NOT_TRANSFERRED = frozenset({"EncoderOnlyAttentionSpec", "HiSparseHotSpec", "HiSparseResidentSpec"})
"""Caches that are not handed over: they have no bytes, or vLLM fills them from other caches after a load."""

REFUSED = {
    "CrossAttentionSpec": "its blocks hold the encoder's tokens, and vLLM does not run the encoder for a prompt that "
    "was loaded",
}
"""Caches that cannot be right after a load, and why."""

_HEADED = frozenset(
    {"ChunkedLocalAttentionSpec", "FullAttentionSpec", "RSWASpec", "SinkFullAttentionSpec", "SlidingWindowSpec"}
)
_LATENTS = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
"""Specs whose layers have a cache of tokens, with and without heads."""

_BY_HEAD = frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "HPC_ATTN",
        "INKLING_SCONV_SWA",
        "MINIMAX_M3_SPARSE",
        "QWEN4_EXP_QSA_TRITON",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
    }
)
"""Backends that address token and head by the strides of the view, with K of a token and head before its V."""

_LATENT = frozenset(
    {
        "AITER_TRITON_MLA",
        "AMX_MLA",
        "CPU_MLA",
        "CUTLASS_MLA",
        "DOTS3_NOTE_PADDED_MLA_SPARSE",
        "FLASHINFER_MLA",
        "FLASHINFER_MLA_SPARSE",
        "FLASHINFER_MLA_SPARSE_SM120",
        "FLASHINFER_MLA_SPARSE_SM90",
        "FLASHMLA",
        "FLASHMLA_SPARSE",
        "FLASH_ATTN_MLA",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4",
        "ROCM_AITER_MLA",
        "ROCM_AITER_MLA_SPARSE",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
        "XPU_MLA_SPARSE",
    }
)
"""Backends whose cache is written by MLA's common functions: one row a token, latent before positions."""

_PLAIN = frozenset({"", "auto", "bfloat16", "float", "float16", "float32", "half"})
"""Names of cache types that say no more than the items of the view."""

_ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Rows of a token that mix numbers of several types, by the name of the cache type."""

_INDEXER_BYTES = (128, 4)
_WINDOW_BYTES = (576, 8)
_MX_WINDOW_BYTES = {"0.31": (512, 16), "0.32": (512, 16), "0.33": (528,)}
"""V4.1's window: vLLM 0.33 moved the scales of a block to the tokens they belong to."""

_READ = frozenset(_MX_WINDOW_BYTES)
"""Versions of vLLM whose writers were read. In others only what a spec itself promises is known."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes a layer's cache, which no spec says. What is empty is not known.

    Attributes:
        backend: vLLM's name of the layer's attention backend.
        platform: ``"cuda"``, ``"rocm"``, ``"xpu"`` or ``"cpu"``.
        capability: what of the device kernels are chosen by, e.g. ``"9.0"``.
        cache_dtype: the cache type as vLLM calls it, with the platform's 8-bit float where it has one, e.g.
            ``"fp8_ds_mla/float8_e4m3fn"``.
        version: vLLM's version.
        cpu_kernel: what vLLM's CPU attention packs a block for, e.g. ``"amx"``; None for other attention.
    """

    backend: str = ""
    platform: str = ""
    capability: str = ""
    cache_dtype: str = ""
    version: str = ""
    cpu_kernel: str | None = None


def is_left_out(spec: Any) -> bool:
    """Return whether a spec's cache is nothing to hand over."""
    return type(spec).__name__ in NOT_TRANSFERRED


def transferred_groups(config: Any) -> tuple[int, ...]:
    """Return which groups of a ``KVCacheConfig`` are handed over; both halves of the connector go by it."""
    return tuple(i for i in config.transfer_group_ids if not is_left_out(config.kv_cache_groups[i].kv_cache_spec))


def check_supported(name: str, spec: Any) -> None:
    """Refuse a cache that cannot be right after a load.

    Raises:
        UnsupportedPairError: the text names the layer, the spec and why.
    """
    why = REFUSED.get(type(spec).__name__)
    if why is not None:
        raise UnsupportedPairError(f"layer {name!r}: kv_cache_spec is {type(spec).__name__}, which is refused: {why}")


def encoding_of(spec: Any, dtype: str, writer: Writer) -> str:
    """Return what of a cache's numbers has to be equal on the other side: items, cache type, quantisation."""
    kind = writer.cache_dtype or getattr(spec, "cache_dtype_str", None) or ""
    mode = spec.kv_quant_mode
    # Of several modes with one number, Python tells the name of the first.
    modes = "|".join(name.lower() for name, member in type(mode).__members__.items() if member is mode)
    special = ["" if kind in _PLAIN else kind, "" if modes == "none" else modes]
    return "/".join([dtype, *filter(None, special)])


def is_by_head(spec: Any, writer: Writer) -> bool:
    """Return whether a page is the bytes of each token and head, addressed by the strides of the view."""
    if type(spec).__name__ not in _HEADED or spec.num_head_slots is not None or spec.tokens_per_state != 1:
        return False
    if spec.state_content_bytes is not None:
        return _is_per_token_head(spec, writer)
    known = writer.backend in _BY_HEAD or (writer.backend == "CPU_ATTN" and writer.cpu_kernel is not None)
    return known and _is_plain(spec, writer)


def section_bytes(spec: Any, dtype: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    """Return the bytes of a token in each piece of a block without heads; None if that is not known.

    A block is the first piece of all its tokens, then the second of all of them.

    Args:
        spec: vLLM's spec of the layer.
        dtype: items of the view.
        content: bytes of a token in the view.
        writer: who writes it.
    """
    if type(spec).__name__ not in _LATENTS or spec.num_kv_heads != 1:
        return None
    if spec.num_head_slots is not None or spec.tokens_per_state != 1:
        return None
    if getattr(spec, "storage_block_size", None) is not None:  # vLLM 0.31: the view has other blocks than the kernel
        return None
    if writer.backend in _LATENT:
        return (content,) if _is_row(spec, content, writer) else None
    # The rest are caches of one model each, on one platform.
    if writer.platform != "cuda" or _series(writer) not in _READ:
        return None
    if writer.backend == "DEEPSEEK_V32_INDEXER":
        return _indexer_bytes(spec, dtype, content, writer)
    if writer.backend == "DEEPSEEK_SPARSE_SWA":
        return _window_bytes(spec, content, writer)
    if spec.state_content_bytes is not None or not _is_plain(spec, writer):
        return None
    rows = writer.backend == "MINIMAX_M3_SPARSE_INDEXER" or (writer.backend, dtype) == ("CompressorBackend", "float32")
    return (content,) if rows else None


def _series(writer: Writer) -> str:
    return ".".join(writer.version.split(".")[:2])


def _is_plain(spec: Any, writer: Writer) -> bool:
    """Return whether numbers are stored one by one, with nothing beside them."""
    mode = spec.kv_quant_mode.name
    return mode == "NONE" or (mode == "FP8_PER_TENSOR" and writer.cache_dtype != "")


def _is_per_token_head(spec: Any, writer: Writer) -> bool:
    """Triton's 8-bit numbers with a float32 scale behind those of K and of V."""
    mode = spec.kv_quant_mode.name
    if writer.backend != "TRITON_ATTN" or mode not in ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"):
        return False
    sizes = spec.head_size + spec.head_size_v
    return _series(writer) in _READ and writer.cache_dtype != "" and spec.state_content_bytes == sizes + 2 * 4


def _is_row(spec: Any, content: int, writer: Writer) -> bool:
    kind = writer.cache_dtype.partition("/")[0] or spec.cache_dtype_str or ""
    if spec.state_content_bytes is None:
        return kind not in _ROW_BYTES and _is_plain(spec, writer)
    return _series(writer) in _READ and spec.state_content_bytes == content == _ROW_BYTES.get(kind)


def _indexer_bytes(spec: Any, dtype: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    """DeepSeek-V3.2: keys of all tokens of a kernel block, then their scales."""
    role = getattr(getattr(spec, "cache_role", None), "value", None)
    known = role == "indexer" and dtype == "uint8" and spec.state_content_bytes is None
    written = writer.cache_dtype.startswith("indexer-fp8/")
    return _INDEXER_BYTES if known and written and content == sum(_INDEXER_BYTES) else None


def _window_bytes(spec: Any, content: int, writer: Writer) -> tuple[int, ...] | None:
    """DeepSeek-V4: 8-bit floats and positions of all tokens, then their scales; V4.1 by version; plain floats: rows."""
    if spec.state_content_bytes is None:
        return (content,) if _is_plain(spec, writer) else None
    pieces = {584: _WINDOW_BYTES, 528: _MX_WINDOW_BYTES[_series(writer)]}.get(content)
    packed = getattr(spec, "cache_dtype_str", None) in _ROW_BYTES and spec.state_content_bytes == content
    return pieces if packed and spec.model_version == "deepseek_v4" else None
