# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler alone, and requests, tables and results as vLLM passes them."""

from __future__ import annotations

import json
from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool

from kvhma import Geometry
from kvhma.nixl import encode_handshake
from kvhma.vllm.config.engine_facts import EngineFacts
from kvhma.vllm.config.rooms import WITHOUT_SETTING
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.metadata import LocalWorkerIdentity, WorkerReport
from kvhma.vllm.scheduler import KvhmaScheduler
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.engines.engine import free_port
from support.tiny import tiny_hybrid
from support.waiting import until

STEP = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
BUSY = SimpleNamespace(num_scheduled_tokens={"another": 1}, total_num_scheduled_tokens=1)


def scheduler(
    *,
    recompute=True,
    backoff=0,
    lease=30.0,
    has_state=False,
    drafted_state=False,
    drafts=False,
    has_windows=False,
    secrets=(),
    ranks=2,  # so that the scheduler notifies P; a single worker does that itself
    staging=None,
    may_wait=True,
    engine_id="engine",
    at=None,
    bind=None,
    **more,
):
    geometry = tiny_hybrid(100)
    assert isinstance(geometry, Geometry)
    facts = EngineFacts(
        engine_id=engine_id,
        address=at or Address("127.0.0.1", free_port()),
        bind=bind,
        tp_size=ranks,
        pp_size=1,
        has_state=has_state,
        drafted_state=drafted_state,
        drafts=drafts,
        has_windows=has_windows,
        backoff=backoff,
        recompute=recompute,
        host_staged=staging is not None,
        extras={"staging": staging},
        transfer_groups=tuple(range(len(geometry.groups))),
        may_wait=may_wait,
        options=(
            *WITHOUT_SETTING,
            "spans",
            *(["pictures"] if more.get("mm_items") == "trust_prefill" else []),
            *(["staging"] if staging is not None else []),
            *(["digests"] if more.get("content_digests") else []),
            *(["trace"] if more.get("trace_out") else []),
        ),
    )
    settings = Settings(**{"kv_lease_duration": lease, "handshake_timeout": 0.5} | more)
    made = KvhmaScheduler(settings, secrets if isinstance(secrets, Secrets) else Secrets(secrets), facts)
    made.context.manager = manager()
    hello = encode_handshake(b"x", geometry, name="a", incarnation=1)
    made.serve({(0, 0): LocalWorkerIdentity(hello, private_key=bytes(32))})
    return made


def tickets_of(made):
    """The option of a scheduler that follows tickets."""
    return next(room for room in made.context.rooms if hasattr(room, "with_blocks"))


def number_of(metadata):
    """The number of a step; None before P computes for followers."""
    return metadata.extras.get("tickets")


def report_of(number):
    """A report of the workers with the results of a step."""
    return WorkerReport(extras={} if number is None else {"tickets": number})


def manager(num_gpu_blocks=4000, **more):
    """A manager whose pool is vLLM's own. No request of the test owns any of its blocks."""
    pool = BlockPool(num_gpu_blocks, True, 16)
    return SimpleNamespace(block_pool=pool, reset_prefix_cache=pool.reset_prefix_cache, **more)


def bind(p, num_gpu_blocks):
    """Bind a manager of this many blocks; in the tests there is room for all requests."""
    single = SimpleNamespace(num_cached_block={}, block_size=16)
    coordinator = SimpleNamespace(single_type_managers=[single], enable_partial_hash_hits=False)
    p.bind(manager(num_gpu_blocks, coordinator=coordinator, kv_cache_config=None))
    p.context.manager = manager()


def kept(of):
    """The blocks that are held for peers."""
    pool = of.context.manager.block_pool
    return {block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null}


def frees(of, tables):
    """Whether a step without work frees exactly these blocks."""
    before = kept(of)
    of.on_step(STEP)
    return before - kept(of) == {block for table in tables for block in table}


def request(name="r", tokens=40, params=None, status="FINISHED_LENGTH_CAPPED"):
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        arrival_time=1.0,
        kv_transfer_params=params,
        prompt_token_ids=list(ids),
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        all_token_ids=ids,
        _all_token_ids=ids,
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        max_tokens=16,
        status=SimpleNamespace(name=status),
        get_skip_reading_prefix_cache=lambda: False,
        abort_immediately=False,
        resumable=False,
    )


def tables(of, start=1):
    return [
        list(range(start + 20 * index, start + 20 * index + 10)) for index in range(len(of.context.geometry.groups))
    ]


def blocks(of):
    groups = [
        [SimpleNamespace(block_id=block, is_null=False, block_hash=None) for block in table] for table in tables(of)
    ]
    return SimpleNamespace(blocks=tuple(groups))


def output(received=(), failed=(), failures=None):
    return SimpleNamespace(
        finished_recving=set(received),
        failed_recving=set(failed),
        kv_connector_worker_meta=WorkerReport(failures or {}),
    )


def finished_at(p, name="at p", start=1, **more):
    """Have P compute a request; return the parameters for D."""
    asked = request(name, params={"do_remote_decode": True}, **more)
    p.on_request_added(asked)
    params = p.on_request_finished(asked, tables(p, start))
    assert params is not None
    return json.loads(json.dumps(params))


def load(d, asked, tokens=40):
    """Have a request loaded; return its load."""
    matched = until(lambda: answer if (answer := d.matched_tokens(asked, 0))[0] is not None else None)
    assert matched == (tokens, True)
    d.on_blocks_allocated(asked, blocks(d), tokens)
    (order,) = d.on_step(STEP).loads
    return order


def end_read(d, asked, failure=None):
    name = asked.request_id
    d.on_worker_results(output([name], [name], {name: failure}) if failure else output([name]))
