# SPDX-License-Identifier: Apache-2.0
"""Digests of a prompt: they cover all that decides the cache of its tokens, as vLLM's own block hash does."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import digest_prefixes, digest_tokens

if TYPE_CHECKING:
    from vllm.v1.request import Request


is_sample = re.compile(r"\d+_").match
"""Whether a request may be one of several samples of a prompt: vLLM begins their names so, and a client may too."""


def prompt_digest(request: Request, num_tokens: int, adapter: str | None = None) -> str:
    """Return a digest of the first tokens of a request and of everything else that decides their cache.

    It covers the same as vLLM's block hash: tokens, adapter, multimodal items with their positions, cache salt and
    embeddings. The block hash itself depends on the block size and settings of an engine, so two engines cannot compare
    it.

    Args:
        request: vLLM's request.
        num_tokens: how many of its tokens count.
        adapter: identifies the request's adapter together with its name, see
            :class:`kvhma.vllm.prompts.adapters.Adapters`; None without an adapter.

    Returns:
        32 hexadecimal digits.

    Raises:
        RequestError: the request has fewer tokens, or a token that does not fit 32 bits.
    """
    is_plain = request.lora_request is None and not (request.mm_features or request.cache_salt)
    if is_plain and request.prompt_embeds is None:  # what the header is then
        header = b"[%d, null, [], null, null]" % num_tokens
    else:
        header = _header(request, num_tokens, adapter)
    # The private list: a slice of vLLM's public view would be another pass over all tokens.
    return digest_tokens(header, request._all_token_ids, num_tokens).hex()


def prefix_digests(request: Request, counts: Sequence[int], adapter: str | None = None) -> list[str]:
    """Return the digests of several prefixes of a request.

    They cover the same as those of :func:`prompt_digest`, but differ from them. All take one pass over the tokens.

    Args:
        request: vLLM's request.
        counts: lengths of the prefixes in tokens, in ascending order.
        adapter: as for :func:`prompt_digest`.

    Raises:
        RequestError: the request has fewer tokens, or a token that does not fit 32 bits.
    """
    tokens = digest_prefixes(request._all_token_ids, list(counts))
    return [
        hashlib.blake2b(of_tokens + _header(request, count, adapter), digest_size=16).hexdigest()
        for count, of_tokens in zip(counts, tokens, strict=True)
    ]


def _header(request: Request, num_tokens: int, adapter: str | None) -> bytes:
    """Return everything besides the tokens that decides the cache of a request's first tokens."""
    header = [
        num_tokens,
        None if request.lora_request is None else [request.lora_request.lora_name, adapter],
        [
            [feature.identifier, feature.mm_position.offset, feature.mm_position.length]
            for feature in request.mm_features
            if feature.mm_position.offset < num_tokens
        ],
        request.cache_salt or None,
        _embeddings(request, num_tokens),
    ]
    return json.dumps(header).encode()


def _embeddings(request: Request, num_tokens: int) -> list[Any] | None:
    """Return a digest of the request's embeddings, and of which positions are tokens instead."""
    if request.prompt_embeds is None:
        return None
    from torch import uint8

    rows = request.prompt_embeds[:num_tokens].contiguous().cpu()
    mask = getattr(request, "prompt_is_token_ids", None)
    digest = hashlib.sha256(rows.flatten().view(uint8).numpy().data)
    digest.update(b"" if mask is None else bytes(mask[:num_tokens]))
    return [str(rows.dtype), list(rows.shape), mask is not None, digest.hexdigest()]
