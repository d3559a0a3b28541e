# SPDX-License-Identifier: Apache-2.0
"""Multimodal items of a request: D may adopt P's, so that its prefix cache identifies their blocks correctly.

A router may send pictures, audio and video to P only. D then gets placeholders: the prompt's tokens alone, or items
without content. vLLM's prefix cache identifies a block by its items' identifiers, among others. If D adopts those of P,
a loaded block is identified by its content. By its placeholder, another request could hit it with another picture::

    P | tokens, item "sha of a cat" | hands off the blocks, and "sha of a cat" with its position
    D | tokens, item "placeholder"  | adopts "sha of a cat", hashes its blocks again, then looks them up

D cannot compute such an item, only the tokens after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvhma.errors import OtherPromptError, RequestError
from kvhma.vllm.internals import replace_items
from kvhma.vllm.wire.params import Item

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request


_NOT_KNOWN = Item("", "", 0, 0).shape


def items_of(request: Request, num_tokens: int, *, shapes: bool) -> tuple[Item, ...]:
    """Return the items that begin in the first tokens of a request, in order; with shapes only if `shapes`."""
    return tuple(
        Item(
            feature.identifier,
            feature.modality,
            feature.mm_position.offset,
            feature.mm_position.length,
            _shape(feature) if shapes else _NOT_KNOWN,
        )
        for feature in request.mm_features
        if feature.mm_position.offset < num_tokens
    )


def _shape(feature: MultiModalFeatureSpec) -> str:
    """Return a digest of the fields that vLLM uses for positions; unknown if they are in shared memory."""
    fields = {
        key: field.data for key, field in (feature.data or {}).items() if getattr(field.field, "keep_on_cpu", False)
    }
    if not fields:
        return _NOT_KNOWN
    return hashlib.blake2b(json.dumps(fields, default=_plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def adopt_items(request: Request, items: Sequence[Item], num_tokens: int, *, positions_depend: bool) -> int:
    """Replace a request's items by P's, before vLLM looks for its blocks.

    Args:
        request: of D. An exception leaves it unchanged.
        items: of P, in the order of their positions.
        num_tokens: tokens that are loaded: D computes those after them itself.
        positions_depend: whether the positions of tokens depend on the items before them (M-RoPE).

    Returns:
        The end of the last item that only P has seen, in tokens; 0 if D has seen all of them.

    Raises:
        OtherPromptError: the request has items at other positions.
        RequestError: D would have to compute such an item, or cannot number the tokens after it.
    """
    own = items_of(request, request.num_prompt_tokens, shapes=positions_depend)
    seen = {item[:4] for item in own}
    unseen = [item for item in items if item[:4] not in seen]
    if not unseen:
        return 0
    if own and _places(own) != _places(items):
        raise OtherPromptError(f"its {len(own)} multimodal items are not where the {len(items)} of P are")
    if not own and positions_depend:
        raise RequestError(
            f"mm_items is trust_prefill, and the prompt has no items, but P has {len(items)}. With this model (M-RoPE) "
            "token positions depend on the size of items: send D placeholders of the same size"
        )
    if positions_depend:
        _check_shapes(own, items)
    end = max(item.offset + item.length for item in unseen)
    if end > num_tokens:
        raise RequestError(
            f"a multimodal item that only P has seen ends with token {end}, but only {num_tokens} tokens are loaded"
        )
    replace_items(request, _features(request, items))
    return end


def _check_shapes(own: Sequence[Item], items: Sequence[Item]) -> None:
    """Refuse items with as many tokens as P's but another shape, or an unknown one."""
    for local, item in zip(own, items, strict=True):
        if item[:4] != local[:4] and (item.shape != local.shape or item.shape == _NOT_KNOWN):
            problem = "is unknown" if _NOT_KNOWN in (item.shape, local.shape) else "differs from D's"
            raise RequestError(
                f"mm_items is trust_prefill, and the shape of P's multimodal item at token {item.offset} {problem}. "
                "With this model (M-RoPE) token positions depend on it"
            )


def _places(items: Iterable[Item]) -> list[tuple[int, int]]:
    return [(item.offset, item.length) for item in items]


def _features(request: Request, items: Sequence[Item]) -> list[MultiModalFeatureSpec]:
    if request.mm_features:
        return [
            replace(feature, identifier=item.identifier)
            for feature, item in zip(request.mm_features, items, strict=True)
        ]
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        MultiModalFeatureSpec(
            data=None,
            modality=item.modality,
            identifier=item.identifier,
            mm_position=PlaceholderRange(offset=item.offset, length=item.length),
        )
        for item in items
    ]
