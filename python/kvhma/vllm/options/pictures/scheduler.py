# SPDX-License-Identifier: Apache-2.0
"""P hands out its multimodal items; D adopts them, and fails a request that would have to compute such an item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhma.vllm.internals import allow_prefix_cache
from kvhma.vllm.options.doors import SchedulerDoor
from kvhma.vllm.options.pictures.items import adopt_items, items_of
from kvhma.vllm.wire.params import PrefillParams

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvhma.vllm.scheduler import KvhmaScheduler


class Room(SchedulerDoor):
    """Adopts items only if failed loads fail their requests: D cannot compute what it did not get."""

    changes_prompts = True

    def __init__(self, core: KvhmaScheduler) -> None:
        """Start without requests."""
        self._context = core.context
        self._decode = core.decode
        self._ends: dict[str, int] = {}
        """Where the last item ends that only P has seen, by request."""

    def on_hand_off(self, request: Request, remote: PrefillParams) -> PrefillParams:
        """Return P's parameters with its items."""
        shapes = self._context.engine.positions_depend_on_items
        return remote._replace(items=items_of(request, remote.num_tokens, shapes=shapes))

    def on_params_read(self, request: Request, remote: PrefillParams) -> None:
        """Replace a request's items by P's. D compares the rest later."""
        engine = self._context.engine
        if engine.recompute or not remote.items:
            return
        # vLLM always computes the last token, and every token of a prompt that must not read the cache.
        loadable = min(engine.loadable_tokens(request.num_prompt_tokens), request.num_prompt_tokens - 1)
        loaded = 0 if request.get_skip_reading_prefix_cache() else min(remote.num_tokens, loadable)
        if end := adopt_items(request, remote.items, loaded, positions_depend=engine.positions_depend_on_items):
            self._ends[request.request_id] = end

    def why_not_computed(self, request: Request, local: int) -> str:
        """Return why D cannot compute a request: it would have to compute an item that only P has seen."""
        end = self._ends.get(request.request_id, 0)
        if end == 0 or self._decode.hit_without_load(request, local) >= end:
            return ""
        return "only P has seen its multimodal items, and the prefix cache has lost part of what was loaded of them"

    def on_load_refused(self, request: Request) -> None:
        """Have vLLM fail the request even if it must not read the prefix cache."""
        if not self._context.engine.recompute:
            allow_prefix_cache(request)

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> None:
        """Drop what is known of a request."""
        self._ends.pop(request.request_id, None)
