# SPDX-License-Identifier: Apache-2.0
"""All that the scheduler's part of the connector does to vLLM's objects without a hook of vLLM for it.

Each function names the hook that is missing. docs/upstream.md has the text of the change that would add it. A version
of vLLM in which one of them does not work is refused when the engine starts, or falls back to what is named here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.callers import caller_variables
from kvhma.vllm.wire.peer_log import logger

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import Request

    _Hit = tuple[KVCacheBlocks, int, int, bool]
    """Blocks, their tokens, the end of a shared beginning (0: none), and whether other groups than full lack some."""

OwnerT = TypeVar("OwnerT")

_LOOP = ("input_queue", "is_running", "is_scheduler_paused")
"""Attributes of vLLM's loop that are used here."""

_FLAG = "reset_connector"
"""Argument of vLLM's functions that reset the prefix cache: whether they reset the connector, too."""


def _caller(kind: type[OwnerT]) -> OwnerT | None:
    """Return the object of a class one of whose methods is being called; None without one."""
    owners = (variables.get("self") for variables in caller_variables())
    return next((owner for owner in owners if isinstance(owner, kind)), None)


# --- Missing: a connector wakes the engine ------------------------------------------------------------------------


def calling_engine() -> EngineCoreProc | None:
    """Return the engine whose loop is the caller; None if no loop called, or if it lacks an attribute used here.

    vLLM does not give its engine to connectors. The queue by which requests come also wakes a loop that waits for them.
    """
    from vllm.v1.engine.core import EngineCoreProc

    engine = _caller(EngineCoreProc)
    return engine if engine is not None and all(hasattr(engine, name) for name in _LOOP) else None


def wake_up(engine: EngineCoreProc) -> None:
    """Have the loop of an engine ask its connector again whether it must make a step."""
    from vllm.v1.engine import EngineCoreRequestType

    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


# --- Missing: vLLM resets its connector before it resets its prefix cache -----------------------------------------


def reset_connector_first(manager: KVCacheManager, reset: Callable[[], None]) -> None:
    """Have vLLM `reset` the connector first when it resets its prefix cache and its connector, as a pause does.

    vLLM does it afterwards, and raises an error before that because the connector still holds blocks.
    """
    reset_blocks: Callable[[], bool] = manager.reset_prefix_cache

    def reset_both() -> bool:
        if next((variables[_FLAG] for variables in caller_variables() if _FLAG in variables), False):
            reset()
        return reset_blocks()

    vars(manager)["reset_prefix_cache"] = reset_both


# --- Missing: vLLM tells its connector which adapters it loads ----------------------------------------------------


def observe_adapters(observe: Callable[[LoRARequest], object]) -> None:
    """Have the engine that builds its connector `observe` each adapter that it has loaded ahead of a request."""
    from vllm.v1.engine.core import EngineCore

    engine = _caller(EngineCore)
    if engine is None:
        return
    load: Callable[[LoRARequest], bool] = engine.add_lora

    def add_lora(lora: LoRARequest) -> bool:
        is_loaded = load(lora)
        observe(lora)
        return is_loaded

    vars(engine)["add_lora"] = add_lora


# --- Missing: a connector says from which token on a loaded block may be hashed -----------------------------------


def check_manager(manager: KVCacheManager) -> None:
    """Refuse a manager that offers no way to exclude blocks from the prefix cache.

    Raises:
        UnsupportedPairError: this version of vLLM counts cached blocks in another way.
    """
    for single in manager.coordinator.single_type_managers:
        if not isinstance(getattr(single, "num_cached_block", None), dict):
            raise UnsupportedPairError(
                f"{type(single).__name__} of this vLLM has no num_cached_block, with which kvhma excludes partly "
                "filled blocks from the prefix cache; use a version of docs/compatibility.md"
            )


def mark_uncacheable(manager: KVCacheManager, request_id: str, group: int, token: int) -> None:
    """Exclude the blocks of a loaded request that begin before a token from the prefix cache.

    Call it before vLLM processes the end of the load, since it then gives blocks their hashes. vLLM takes these blocks
    for cached already, and drops that count with the request.

    Args:
        manager: vLLM's.
        request_id: the request.
        group: index of the KV cache group.
        token: first token from which on the blocks are filled.
    """
    single = manager.coordinator.single_type_managers[group]
    blocks = -(-token // single.block_size)
    single.num_cached_block[request_id] = max(blocks, single.num_cached_block.get(request_id, 0))


# --- Missing: a window or a chunk has its own prefix-cache hit, as a state has -----------------------------------


def hit_each_group(manager: KVCacheManager, tokens_to_load: Callable[[Request], int]) -> None:
    """Give a request that will be loaded the hit of full attention, even if windows or chunks have a shorter one.

    A load fills only the last window of a prompt. So a later prompt with the same beginning hits no window, and vLLM
    drops the hit of full attention as well. For a model with Mamba layers it does not::

        full attention   | hit ------------> | load |
        windows          | null blocks | load ----> |

    vLLM goes back to the hit of all groups if nothing is loaded, so at least one token is left to the load.

    Args:
        manager: vLLM's. Without full attention beside other groups, or without a prefix cache, nothing changes.
        tokens_to_load: returns how many tokens of a request are there after its load; 0 if nothing is loaded.
    """
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    coordinator, config = manager.coordinator, manager.kv_cache_config
    if not isinstance(coordinator, HybridKVCacheCoordinator):
        return
    try:
        full, look_up = coordinator.full_attention_group_id, coordinator.find_longest_cache_hit_per_group
        ask_vllm: Callable[..., _Hit] = manager.get_computed_blocks_for_connector
        make_blocks, is_cached = manager.create_kv_cache_blocks, manager.block_pool.get_cached_block
        hash_block = coordinator.hash_block_size
    except AttributeError as error:
        logger.warning("kvhma: D hits its prefix cache as this vLLM does, not each group by itself: %s", error)
        return
    if full is None:
        return
    block = coordinator.single_type_managers[full].block_size

    def bound_of_hit(request: Request) -> int:
        """Return a bound of full attention's hit, so that other groups are not looked up far beyond it.

        It is the hit itself unless blocks are missing in the middle.
        """
        hashes = request.block_hashes
        found, missing = -1, min(len(hashes) * hash_block, request.num_tokens - 1) // block
        index = 0  # most prompts have no hit
        while index < missing:
            if is_cached(hashes[(index + 1) * block // hash_block - 1], [full]) is not None:
                found = index
            else:
                missing = index
            index = (found + missing + 1) // 2
        return int(missing * block)

    def ask(request: Request, *more: int | None) -> _Hit:
        loaded = tokens_to_load(request)
        if loaded == 0 or more not in ((), (None,)) or not manager.prefix_cache_lookup_enabled(request):
            return ask_vllm(request, *more)
        if config.has_mamba_layers:  # vLLM asks each group itself
            answer = ask_vllm(request, *more)
            _, hit, _, diverged = answer
            limit = loaded - 1
            if not diverged or hit <= limit:
                return answer
        elif (bound := bound_of_hit(request)) == 0:
            return ask_vllm(request)
        else:
            blocks, hits = look_up(request.block_hashes, bound)
            if min(hits) == max(hits):
                return (
                    ask_vllm(request) if manager.enable_kv_cache_events else (make_blocks(blocks), hits[full], 0, False)
                )
            limit = min(hits[full], loaded - 1)
            if max(hits) <= limit:
                return make_blocks(blocks), hits[full], 0, True
            hit = hits[full]
        if loaded <= hit:  # then the load may bring less than all groups have
            usual = manager.get_computed_blocks(request)
            if usual[1] >= loaded:
                return *usual, False
        blocks, hits = look_up(request.block_hashes, limit)
        return make_blocks(blocks), hits[full], 0, min(hits) < hits[full]

    vars(manager)["get_computed_blocks_for_connector"] = ask


# --- Missing: a connector holds blocks without a step of the engine ----------------------------------------------


def find_take_check(manager: KVCacheManager, connector: object) -> Callable[[Request], bool] | None:
    """Return vLLM's own check of whether the blocks of a request that ends may be free at once.

    It denies that while a step in flight may still write them. Then kvhma takes an extra reference on each block. If
    this returns None, kvhma does so for all requests: another connector may need the blocks (a child of
    MultiConnector), or this vLLM has several pools or lacks a call. Call it while vLLM's scheduler binds the manager.
    """
    for variables in caller_variables():
        scheduler = variables.get("self")
        if connector is not None and getattr(scheduler, "connector", None) is connector:
            pools = {single.block_pool for single in manager.coordinator.single_type_managers}
            is_alone = pools == {manager.block_pool} and hasattr(manager, "pop_blocks_for_free")
            return getattr(scheduler, "_request_blocks_can_be_freed", None) if is_alone else None
    return None


# --- Missing: a connector says how many tokens of a prompt the engine computes ------------------------------------


def shorten_prompt(request: Request, num_tokens: int) -> None:
    """Shorten a request to the first tokens of its prompt, and to one sampled token, which only ends it.

    A recurrent state is that of the last computed token, and vLLM frees a block that a window has passed. So P must not
    compute the tokens that D computes itself:

        prompt       t0 t1 ... t(n-2) | t(n-1)
        P computes   ----------------->                its state is that of t(n-2), its windows are those of t(n-1)
        D computes                      ------> t(n)

    The block hashes of the whole prompt stay: vLLM uses them only for computed tokens.
    """
    # In place: the request's public view shows this list, which vLLM has copied from the prompt's.
    del request._all_token_ids[num_tokens:]
    whole, mask = request.prompt_token_ids, getattr(request, "prompt_is_token_ids", None)
    # The prompt's own list is not cut: samples share it if engine and front end are one process. It stays with the
    # request, and vLLM frees both. To copy or to free it here takes 0.5 ms for 131,000 tokens.
    vars(request)["whole_prompt"] = whole
    if whole is not None and mask is not None:  # the copy has zeros where embeddings are
        request.prompt_token_ids, request.prompt_is_token_ids = whole[:num_tokens], mask[:num_tokens]
    elif whole is not None:
        request.prompt_token_ids = request._all_token_ids
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:num_tokens]
    request.num_prompt_tokens = num_tokens
    request.max_tokens = 1


# --- Missing: a connector has the engine compute one request whose load failed ------------------------------------


def recompute_prompt(manager: KVCacheManager, request: Request) -> None:
    """Have vLLM compute the prompt of a request whose load has failed, for any ``kv_load_failure_policy``.

    vLLM does the same with the policy ``recompute``. Call it before vLLM processes the end of the load.
    """
    manager.free(request)
    request.num_computed_tokens = 0


# --- Missing: a connector says which multimodal items a prompt has ------------------------------------------------


def replace_items(request: Request, items: list[MultiModalFeatureSpec]) -> None:
    """Replace the multimodal items of a request. Call it before vLLM looks for the request's blocks.

    vLLM has hashed the blocks of the prompt by then, and has not looked them up.
    """
    request.mm_features = items
    request.block_hashes.clear()
    request.update_block_hashes()


# --- Missing: a connector refuses a request -----------------------------------------------------------------------


def allow_prefix_cache(request: Request) -> None:
    """Let a request that is to fail read the prefix cache: vLLM fails only a request that waits for a load."""
    request.skip_reading_prefix_cache = False


def drop_params(request: Request) -> None:
    """Remove the parameters of a request, which are no dictionary: vLLM uses them as one without a check."""
    request.kv_transfer_params = None
