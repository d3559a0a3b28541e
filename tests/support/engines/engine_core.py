# SPDX-License-Identifier: Apache-2.0
"""Utilities of the engine core for tests: found by name beside vLLM's own utilities, and run between two steps."""

from __future__ import annotations

from collections import deque
from typing import Any


def install() -> None:
    """Give the engine core its methods; call it before the engine core is forked."""
    from vllm.v1.engine.core import EngineCore

    for name, method in METHODS.items():
        setattr(EngineCore, name, method)


def _state(self: Any) -> dict[str, Any]:
    scheduler = self.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "scheduler": type(scheduler).__name__,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "requests": {request.request_id: request.status.name for request in scheduler.requests.values()} | _kept(self),
        "free_blocks": pool.get_num_free_blocks(),
        "all_blocks": pool.num_gpu_blocks,
    }


def _kept(self: Any) -> dict[str, str]:
    """Requests that have ended, whose blocks kvhma's connector holds, or has not freed yet."""
    connector = self.scheduler.connector
    for one in (connector, *getattr(connector, "_connectors", ())):
        if (ours := getattr(one, "_scheduler", None)) is not None:
            leases = ours.context.leases
            ended = (lease.key for found in leases.ended.values() for lease in found)
            return {key.request_id: "kept" for key in (*leases._held, *ended)}
    return {}


def _blocks(self: Any, request_id: str) -> list[list[int]]:
    """Block ids that a request holds now, by group. `request_id` is the start of the scheduler's id."""
    scheduler = self.scheduler
    (found,) = [known for known in scheduler.requests if known.startswith(request_id)]
    return [list(ids) for ids in scheduler.kv_cache_manager.get_block_ids(found)]


def _connector(self: Any, path: str) -> Any:
    """An attribute of the scheduler's connector by its dotted path, called if it is callable, as plain data."""
    return plain(follow(self.scheduler.connector, path))


def _steps_ahead(self: Any) -> int:
    """Most steps that were launched and not yet processed since the first call of this; 0 if steps never overlap."""
    if self.batch_queue is None:
        return 0
    if not isinstance(self.batch_queue, _Watched):
        self.batch_queue = _Watched(self.batch_queue, self.batch_queue.maxlen)
    return self.batch_queue.longest


class _Watched(deque):  # type: ignore[type-arg]
    longest = 0

    def appendleft(self, item: Any) -> None:
        super().appendleft(item)
        self.longest = max(self.longest, len(self))


def _evict(self: Any, prompt: list[int], first: int, full: bool) -> None:
    """Evict what the prefix cache has of a prompt from a token on: of full attention, or of all other groups."""
    from vllm import SamplingParams
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.request import Request

    manager = self.scheduler.kv_cache_manager
    hashes = Request("", prompt, SamplingParams(), None, block_hasher=self.request_block_hasher).block_hashes
    for index, group in enumerate(manager.kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec) is full:
            for digest in hashes[first // group.kv_cache_spec.block_size :]:
                while found := manager.block_pool.get_cached_block(digest, [index]):
                    manager.evict_blocks({block.block_id for block in found})


def _hit_as_vllm(self: Any) -> None:
    """Let vLLM's own rule decide hits of the prefix cache again, from an empty cache on."""
    assert self.scheduler.reset_prefix_cache()
    del vars(self.scheduler.kv_cache_manager)["get_computed_blocks_for_connector"]


METHODS = {
    "e2e_state": _state,
    "e2e_blocks": _blocks,
    "e2e_connector": _connector,
    "e2e_steps_ahead": _steps_ahead,
    "e2e_evict": _evict,
    "e2e_hit_as_vllm": _hit_as_vllm,
}


def follow(start: Any, path: str) -> Any:
    """Walk a dotted path; a callable at its end is called."""
    for name in filter(None, path.split(".")):
        start = start[int(name)] if name.isdigit() else getattr(start, name)
    return start() if callable(start) else start


def plain(value: Any) -> Any:
    """Return numbers, texts, lists and dicts as they are; of anything else its length or its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return repr(value)
