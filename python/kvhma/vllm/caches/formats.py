# SPDX-License-Identifier: Apache-2.0
"""The known cache formats, each recognised by everything that decides it.

A format is known if we have read the code of vLLM that writes it. A spec has the size of a page, but not always what a
kernel writes there. For example, on one GPU the indexer of DeepSeek-V3.2 stores the keys of a block and then their
scales; on another GPU it shuffles the keys. docs/formats.md has the lists of this module as a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvhma.errors import GeometryError, UnsupportedPairError
from kvhma.geometry import Kind
from kvhma.vllm.caches.writer_source import source_fingerprint

KINDS: dict[str, Kind] = {
    "ChunkedLocalAttentionSpec": "chunked",
    # One block for each request, written as a ring: valid at one position only, like a state.
    "CircularBufferSpec": "ssm",
    "FullAttentionSpec": "full",
    "HiddenStateCacheSpec": "mla",
    "KpoolTailSpec": "ssm",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "ssm",
    # Frees only generated tokens, which are not transferred.
    "RSWASpec": "full",
    # The sinks come from the model's weights in each engine. No request's block table has them.
    "SinkFullAttentionSpec": "full",
    "SlidingWindowMLASpec": "sliding",
    "SlidingWindowSpec": "sliding",
}
"""The planner's kind of group for each spec."""

NOT_TRANSFERRED = frozenset({"EncoderOnlyAttentionSpec", "HiSparseHotSpec", "HiSparseResidentSpec"})
"""Caches that are not transferred, because they have no bytes or vLLM fills them from other caches after a load."""

REFUSED = {
    "CrossAttentionSpec": "its blocks hold the encoder's tokens, and vLLM does not run the encoder for a prompt that "
    "was loaded",
}
"""Caches that would be wrong after a load, with the reason."""

_SPECS_WITH_HEADS = frozenset(
    {"ChunkedLocalAttentionSpec", "FullAttentionSpec", "RSWASpec", "SinkFullAttentionSpec", "SlidingWindowSpec"}
)
_SPECS_WITHOUT_HEADS = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
"""Specs whose layers cache tokens, with and without heads."""

_BACKENDS_BY_HEAD = frozenset(
    {
        "CUTLASS_MSA",
        "FLASH_ATTN",
        "FLASH_ATTN/Step5SplitKVFlashAttentionBackend",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "HPC_ATTN",
        "INKLING_SCONV_SWA",
        "MINIMAX_M3_SPARSE",
        "QWEN4_EXP_QSA_TRITON",
        "ROCM_AITER_UNIFIED_ATTN",
        "STEP5_DSA",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        "TRITON_FLASHINFER",
        "TRITON_FLASH_ATTN",
        "TRITON_MSA",
    }
)
"""Backends that address token and head by the strides of the view, with K of a token and head before its V."""

_BACKENDS_OF_MLA = frozenset(
    {
        "AITER_TRITON_MLA",
        "AMX_MLA",
        "CPU_MLA",
        "CUTLASS_MLA",
        "DOTS3_NOTE_PADDED_MLA_SPARSE",
        "FLASHINFER_MLA",
        "FLASHINFER_MLA_SPARSE/FlashInferMLASparseTRTLLMBackend",
        "FLASHINFER_MLA_SPARSE_SM120",
        "FLASHINFER_MLA_SPARSE_SM90",
        "FLASHMLA",
        "FLASHMLA_SPARSE",
        "FLASHMLA_SPARSE/HYV4FlashMLASparseBackend",
        "FLASH_ATTN_MLA",
        "FLASH_ATTN_MLA/XPUFlashAttnMLABackend",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4",
        "ROCM_AITER_MLA",
        "ROCM_AITER_MLA_SPARSE",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
        "TRITON_MLA/Dots3NoteTritonMLABackend",
        "XPU_MLA_SPARSE",
    }
)
"""Backends whose cache MLA's common functions write: for each token its latent, then its positions."""

_PLAIN_CACHE_DTYPES = frozenset({"", "auto", "bfloat16", "float", "float16", "float32", "half"})
"""Names of cache types that add nothing to the dtype of the view."""

_MIXED_TOKEN_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token of cache types that mix numbers of several types."""

_V32_INDEXER_SECTIONS = (128, 4)
_V4_WINDOW_SECTIONS = (576, 8)
_V41_WINDOW_SECTIONS = {"0.31": (512, 16), "0.32": (512, 16), "0.33": (528,)}
"""Bytes of a token in each section of a block, for DeepSeek. In 0.33 each token of V4.1 has its scales next to it."""

_KNOWN_VERSIONS = frozenset(_V41_WINDOW_SECTIONS)
"""Versions of vLLM whose writers we have read. Of other versions only the spec is known."""


_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(?:\.post\d+)?(?:\+[\w.]+)?")
"""A release of vLLM, and its series. Any other version is a development version."""

_DECIDES_BYTES = frozenset({"customize_spec", "get_impl_cls"})
"""Methods of a backend that decide the bytes of its cache: the page, and the class whose kernels write it."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a layer's cache, which is not part of its spec. Empty fields are unknown.

    Attributes:
        backend: the name of the writer, from :func:`backend_name`.
        platform: ``"cuda"``, ``"rocm"``, ``"xpu"`` or ``"cpu"``.
        capability: of the device, which decides the kernels, e.g. ``"9.0"``.
        cache_dtype: vLLM's name of the cache type, with the platform's kind of 8-bit floats if it has them, e.g.
            ``"fp8_ds_mla/float8_e4m3fn"``.
        version: vLLM's version.
        cpu_kernel: the instruction set for which vLLM's CPU attention packs a block, e.g. ``"amx"``; None for other
            attention.
        classes: of the layer and of its backend. Their source is compared for unknown formats.
    """

    backend: str = ""
    platform: str = ""
    capability: str = ""
    cache_dtype: str = ""
    version: str = ""
    cpu_kernel: str | None = None
    classes: tuple[type, ...] = field(default=(), compare=False, repr=False)


def backend_name(backend: Any) -> str:
    """Return the name of the class that writes an attention backend's cache, as the lists here use it.

    In a composite backend a child writes for both, so the name is the child's. A subclass may have the name of its base
    but a different page or different kernels. Then the name includes the class, as in
    ``"FLASHMLA_SPARSE/HYV4FlashMLASparseBackend"``. So does the name of a class that is not vLLM's.

    Args:
        backend: vLLM's class of the backend.
    """
    while (child := getattr(backend, "general_backend_cls", None)) is not None:
        backend = child
    name = str(backend.get_name())
    for cls in backend.__mro__:
        own = vars(cls).keys()
        is_vllm = cls.__module__.partition(".")[0] == "vllm"
        if "get_name" in own and is_vllm:
            return name
        if own & (_DECIDES_BYTES | {"get_name"}):
            return f"{name}/{cls.__name__}"
    return name


def release_of(writer: Writer) -> str:
    """Return what both sides need to have in common of vLLM itself, for an unknown format.

    Releases of one series write the same bytes if the source of the writer is equal. In development versions, with an
    unknown writer, or without its source, the version has to be equal.
    """
    release = _RELEASE.fullmatch(writer.version)
    if release is None or not writer.backend:
        return writer.version
    if not writer.classes:
        return release[1]
    source = source_fingerprint(writer.classes)
    return f"{release[1]}-{source}" if source else writer.version


def transferred_groups(config: Any) -> tuple[int, ...]:
    """Return the groups of a ``KVCacheConfig`` that are transferred, for the scheduler and for the workers."""
    specs = {index: config.kv_cache_groups[index].kv_cache_spec for index in config.transfer_group_ids}
    return tuple(index for index, spec in specs.items() if type(spec).__name__ not in NOT_TRANSFERRED)


def kind_of(name: str, spec: Any) -> Kind:
    """Return the kind of group of a layer with this spec.

    Raises:
        GeometryError: an unknown spec. A subclass may store other things in its blocks than its base, so the name of
            the subclass has to be known.
        UnsupportedPairError: a cache that would be wrong after a load.
    """
    found = type(spec).__name__
    if found in REFUSED:
        raise UnsupportedPairError(f"layer {name!r}: kv_cache_spec is {found}, which is refused: {REFUSED[found]}")
    if found not in KINDS:
        raise GeometryError(f"layer {name!r}: spec is {found}, known are {', '.join(KINDS)}")
    return KINDS[found]


def encoding_of(spec: Any, dtype: str, writer: Writer) -> str:
    """Return how numbers are stored, which has to be equal on both sides: items, cache type, quantisation.

    Raises:
        GeometryError: the quantisation mode's number has several names, and there is no cache type to decide.
    """
    kind = writer.cache_dtype or getattr(spec, "cache_dtype_str", None) or ""
    mode = spec.kv_quant_mode
    # If several modes have the same value, `mode.name` is only the first name.
    modes = "|".join(name.lower() for name, member in type(mode).__members__.items() if member is mode)
    if "|" in modes and not kind:
        raise GeometryError(f"kv_quant_mode is {mode.value}, which is {modes}, and no cache type says which of them")
    special = ["" if kind in _PLAIN_CACHE_DTYPES else kind, "" if modes == "none" else modes]
    return "/".join([dtype, *filter(None, special)])


def is_by_head(spec: Any, writer: Writer) -> bool:
    """Return whether a page has separate bytes for each token and head, addressed by the strides of the view."""
    if type(spec).__name__ not in _SPECS_WITH_HEADS or spec.num_head_slots is not None or spec.tokens_per_state != 1:
        return False
    if spec.state_content_bytes is not None:
        return _is_per_token_head(spec, writer)
    known = writer.backend in _BACKENDS_BY_HEAD or (writer.backend == "CPU_ATTN" and writer.cpu_kernel is not None)
    return known and _is_plain(spec, writer)


def section_bytes(spec: Any, dtype: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    """Return the bytes of a token in each section of a kernel block without heads; None if unknown.

    ::

        | token 0 | token 1 | ... | token 0 | token 1 | ... |
        |<---- first section ---->|<---- second section --->|

    Args:
        spec: vLLM's spec of the layer.
        dtype: items of the view.
        content: bytes of a token in the view.
        writer: of the cache.
    """
    if not _caches_one_vector(spec):
        return None
    if writer.backend in _BACKENDS_OF_MLA:
        return (content,) if _is_by_token(spec, content, writer) else None
    read = _SECTIONS.get((writer.backend, writer.platform, _minor_version(writer)))
    return read(spec, dtype, content, writer) if read is not None else None


def _caches_one_vector(spec: Any) -> bool:
    """Return whether a layer caches one vector for each token, in the blocks of the kernel."""
    return (
        type(spec).__name__ in _SPECS_WITHOUT_HEADS
        and spec.num_kv_heads == 1
        and spec.num_head_slots is None
        and spec.tokens_per_state == 1
        and getattr(spec, "storage_block_size", None) is None  # vLLM 0.31: the view has other blocks than the kernel
    )


def _minor_version(writer: Writer) -> str:
    return ".".join(writer.version.split(".")[:2])


def _is_plain(spec: Any, writer: Writer) -> bool:
    """Return whether numbers are stored separately, without scales in the cache."""
    mode = spec.kv_quant_mode.name
    return mode == "NONE" or (mode == "FP8_PER_TENSOR" and writer.cache_dtype != "")


def _is_per_token_head(spec: Any, writer: Writer) -> bool:
    """Return whether these are Triton's 8-bit numbers with a float32 scale after K and after V."""
    mode = spec.kv_quant_mode.name
    if writer.backend != "TRITON_ATTN" or mode not in ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"):
        return False
    sizes = spec.head_size + spec.head_size_v
    return (
        _minor_version(writer) in _KNOWN_VERSIONS
        and writer.cache_dtype != ""
        and spec.state_content_bytes == sizes + 2 * 4
    )


def _is_by_token(spec: Any, content: int, writer: Writer) -> bool:
    kind = writer.cache_dtype.partition("/")[0] or spec.cache_dtype_str or ""
    if spec.state_content_bytes is None:
        return kind not in _MIXED_TOKEN_BYTES and _is_plain(spec, writer)
    return _minor_version(writer) in _KNOWN_VERSIONS and spec.state_content_bytes == content == _MIXED_TOKEN_BYTES.get(
        kind
    )


def _indexer_sections(spec: Any, dtype: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    """Return the sections of DeepSeek-V3.2: keys of all tokens of a kernel block, then their scales."""
    role = getattr(getattr(spec, "cache_role", None), "value", None)
    known = role == "indexer" and dtype == "uint8" and spec.state_content_bytes is None
    written = writer.cache_dtype.startswith("indexer-fp8/")
    return _V32_INDEXER_SECTIONS if known and written and content == sum(_V32_INDEXER_SECTIONS) else None


def _window_sections(spec: Any, _: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    """Return the sections of DeepSeek-V4: 8-bit floats and positions of all tokens, then their scales.

    V4.1 depends on vLLM's version. Plain floats are one section.
    """
    if spec.state_content_bytes is None:
        return (content,) if _is_plain(spec, writer) else None
    sections = {584: _V4_WINDOW_SECTIONS, 528: _V41_WINDOW_SECTIONS[_minor_version(writer)]}.get(content)
    packed = getattr(spec, "cache_dtype_str", None) in _MIXED_TOKEN_BYTES and spec.state_content_bytes == content
    return sections if packed and spec.model_version == "deepseek_v4" else None


def _plain_section(spec: Any, _: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    return (content,) if spec.state_content_bytes is None and _is_plain(spec, writer) else None


def _float32_section(spec: Any, dtype: str, content: int, writer: Writer) -> tuple[int, ...] | None:
    return _plain_section(spec, dtype, content, writer) if dtype == "float32" else None


_SECTIONS: dict[tuple[str, str, str], Callable[[Any, str, int, Writer], tuple[int, ...] | None]] = {
    (backend, "cuda", version): read
    for backend, read in (
        ("CompressorBackend", _float32_section),
        ("DEEPSEEK_SPARSE_SWA", _window_sections),
        ("DEEPSEEK_V32_INDEXER", _indexer_sections),
        ("MINIMAX_M3_SPARSE_INDEXER", _plain_section),
    )
    for version in _KNOWN_VERSIONS
}
"""The function that returns the sections of a block, by writer, platform and vLLM's version: formats of one model."""
