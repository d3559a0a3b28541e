# SPDX-License-Identifier: Apache-2.0
"""What a prompt is, for the caches of its tokens: all that vLLM's own block hash covers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import digest_prefixes, digest_tokens

if TYPE_CHECKING:
    from vllm.v1.request import Request


_SAMPLE = re.compile(r"\d+_")
"""How vLLM begins the name of one of several samples of a prompt; a client may choose such a name too."""


def is_sample(request_id: str) -> bool:
    """Return whether a request may be one of several samples of a prompt."""
    return _SAMPLE.match(request_id) is not None


def prompt_digest(request: Request, num_tokens: int, *, adapter_paths: bool = True) -> str:
    """Return a digest of the first tokens of a request and of everything else that decides their cache.

    That is what vLLM gives to its block hash, which itself depends on the block size and on settings of an engine, so
    that two engines cannot compare it: tokens, adapter, multimodal items with their places, cache salt and embeddings.

    Args:
        request: vLLM's request.
        num_tokens: how many of its tokens count.
        adapter_paths: whether an adapter is its name and its path, as for vLLM, and not its name alone.

    Returns:
        32 hexadecimal digits.

    Raises:
        RequestError: the request has fewer tokens, or one that does not fit 32 bits.
    """
    # The list itself: a slice of vLLM's public view would be one more pass over all tokens.
    header = _header(request, num_tokens, adapter_paths)
    return digest_tokens(header, request._all_token_ids, num_tokens).hex()


def prefix_digests(request: Request, counts: Sequence[int], *, adapter_paths: bool = True) -> list[str]:
    """Return a digest of some numbers of first tokens each, and of what :func:`prompt_digest` is of besides.

    One pass over the tokens is enough for all. The digests are others than those of :func:`prompt_digest`.

    Args:
        request: vLLM's request.
        counts: how many of its tokens count, none less than the one before.
        adapter_paths: as for :func:`prompt_digest`.

    Raises:
        RequestError: the request has fewer tokens, or one that does not fit 32 bits.
    """
    tokens = digest_prefixes(request._all_token_ids, list(counts))
    return [
        hashlib.blake2b(of_tokens + _header(request, count, adapter_paths), digest_size=16).hexdigest()
        for count, of_tokens in zip(counts, tokens, strict=True)
    ]


def _header(request: Request, num_tokens: int, adapter_paths: bool) -> bytes:
    """Return what decides the cache of the first tokens of a request besides themselves."""
    header = [
        num_tokens,
        _adapter(request.lora_request, adapter_paths),
        [
            [feature.identifier, feature.mm_position.offset, feature.mm_position.length]
            for feature in request.mm_features
            if feature.mm_position.offset < num_tokens
        ],
        request.cache_salt or None,
        _embeddings(request, num_tokens),
    ]
    return json.dumps(header).encode()


def _adapter(lora: Any, with_path: bool) -> list[str] | None:
    if lora is None:
        return None
    return [lora.lora_name, lora.lora_path] if with_path else [lora.lora_name]


def _embeddings(request: Request, num_tokens: int) -> list[Any] | None:
    """Name the given embeddings, and which tokens stand among them."""
    if request.prompt_embeds is None:
        return None
    from torch import uint8

    rows = request.prompt_embeds[:num_tokens].contiguous().cpu()
    mask = getattr(request, "prompt_is_token_ids", None)
    digest = hashlib.sha256(rows.flatten().view(uint8).numpy().data)
    digest.update(b"" if mask is None else bytes(mask[:num_tokens]))
    return [str(rows.dtype), list(rows.shape), mask is not None, digest.hexdigest()]
