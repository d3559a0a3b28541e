# SPDX-License-Identifier: Apache-2.0
"""P takes the blocks of a request that ends from vLLM, or takes one more reference on each: pools are whole either way.

What counts are vLLM's references: one on each block of a held request, none once its lease has ended.
"""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvhma.vllm.internals import may_take_blocks
from support.cache.engine import Engine, EngineShape
from support.cache.labels import GroupShape

REMOTE = {"do_remote_decode": True}
GROUPS = (GroupShape("0.full", "full", 4), GroupShape("1.sliding", "sliding", 4, 5))


def engine(role="kv_producer", *, overlapped=False, groups=GROUPS):
    shape = EngineShape("p", groups, 60, batch=64, caching=True, role=role, overlapped=overlapped)
    return Engine(shape, random.Random(1))


def prefill(p, name="r", length=21):
    p.add(name, [1] * length, 1, dict(REMOTE))
    for _ in range(20):
        if name in p.finished:
            return
        p.step()
    raise AssertionError("it did not end")


def free_all(p):
    """End its leases, with the steps in flight."""
    p.kvhma.context.leases.end_all()
    for _ in range(4):
        p.step()


def references(p):
    return [block.ref_cnt for block in p.pool.blocks[1:] if block.ref_cnt]


@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS, (GROUPS[0], GroupShape("1.state", "state", 4))])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_each_block_of_a_held_request_has_one_reference(role, overlapped, groups, monkeypatch):
    p = engine(role, overlapped=overlapped, groups=groups)
    touched = []
    monkeypatch.setattr(p.pool, "touch", lambda blocks, touch=p.pool.touch: touched.extend(blocks) or touch(blocks))
    free = p.pool.get_num_free_blocks()
    prefill(p)
    for _ in range(3):
        p.step()
    (held,) = p.kvhma.context.leases._held.values()
    assert references(p) == [1] * len(held.blocks)
    assert p.pool.get_num_free_blocks() == free - len(held.blocks)
    # A consumer's step in flight may still write: vLLM itself frees such blocks later.
    takes_blocks = not overlapped or role == "kv_producer"
    assert p.kvhma.context.takes_blocks is takes_blocks
    assert bool(touched) is not takes_blocks
    free_all(p)
    assert (references(p), p.pool.get_num_free_blocks()) == ([], free)


def test_requests_with_the_same_prompt_share_blocks():
    p = engine()
    free = p.pool.get_num_free_blocks()
    for name in ("a", "b"):
        prefill(p, name)
    assert max(references(p)) == 2
    free_all(p)
    assert (references(p), p.pool.get_num_free_blocks()) == ([], free)


def test_a_version_without_the_call_takes_references(monkeypatch):
    monkeypatch.delattr(KVCacheManager, "pop_blocks_for_free")
    p = engine()
    assert not p.kvhma.context.takes_blocks
    free = p.pool.get_num_free_blocks()
    prefill(p)
    assert set(references(p)) == {1}
    free_all(p)
    assert p.pool.get_num_free_blocks() == free


class Binding:
    """Binds a manager as vLLM's scheduler does."""

    def __init__(self, connector, *, defer_block_free=False):
        self.connector, self.defer_block_free = connector, defer_block_free

    def bind(self, manager):
        self.connector.bind_kv_cache_manager(manager)


class Child:
    """A connector that asks as kvhma's does."""

    def bind_kv_cache_manager(self, manager):
        self.may_take = may_take_blocks(manager, self)


def test_another_connector_or_pool_may_need_the_blocks():
    pool = object()
    coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_pool=pool)])
    manager = SimpleNamespace(coordinator=coordinator, block_pool=pool, pop_blocks_for_free=list)
    child = Child()
    Binding(child).bind(manager)
    assert child.may_take
    Binding(child, defer_block_free=True).bind(manager)
    assert not child.may_take, "a step in flight may still write"
    several = MultiConnector.__new__(MultiConnector)
    several._connectors = [child]
    Binding(several).bind(manager)
    assert not child.may_take, "another connector may still read"
    coordinator.single_type_managers.append(SimpleNamespace(block_pool=object()))
    Binding(child).bind(manager)
    assert not child.may_take, "ids are of one pool"
    assert not may_take_blocks(manager, None)
