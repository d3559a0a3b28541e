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

from kvhma.vllm.internals import find_take_check
from support.cache.engine import Engine, EngineShape
from support.cache.labels import GroupShape, Text

REMOTE = {"do_remote_decode": True}
GROUPS = (GroupShape("0.full", "full", 4), GroupShape("1.sliding", "sliding", 4, 5))


def engine(role="kv_producer", *, overlapped=False, groups=GROUPS):
    shape = EngineShape("p", groups, 60, batch=64, caching=True, role=role, overlapped=overlapped)
    return Engine(shape, random.Random(1))


def prefill(p, name="r", length=21):
    p.add(name, [1] * length, 1, dict(REMOTE))
    finish(p, name)


def finish(p, name):
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


def watch_touches(p, monkeypatch):
    touched = []
    monkeypatch.setattr(p.pool, "touch", lambda blocks, touch=p.pool.touch: touched.extend(blocks) or touch(blocks))
    return touched


def id_of(block):
    return block.block_id


def references(p):
    return [block.ref_cnt for block in p.pool.blocks[1:] if block.ref_cnt]


@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS, (GROUPS[0], GroupShape("1.state", "state", 4))])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_each_block_of_a_held_request_has_one_reference(role, overlapped, groups, monkeypatch):
    p = engine(role, overlapped=overlapped, groups=groups)
    touched = watch_touches(p, monkeypatch)
    free = p.pool.get_num_free_blocks()
    prefill(p)
    for _ in range(3):
        p.step()
    (held,) = p.kvhma.context.leases._held.values()
    assert references(p) == [1] * len(held.ids)
    assert p.pool.get_num_free_blocks() == free - len(held.ids)
    assert {block.block_id for block in held.blocks if not block.is_null} == set(held.ids.tolist())
    assert not touched, "vLLM computes one token of it, so no step in flight writes to it"
    free_all(p)
    assert (references(p), p.pool.get_num_free_blocks()) == ([], free)


def test_blocks_that_a_step_in_flight_may_write_are_not_taken(monkeypatch):
    p = engine("kv_both", overlapped=True, groups=GROUPS[:1])
    touched = watch_touches(p, monkeypatch)
    free = p.pool.get_num_free_blocks()
    p.add("r", [1] * 21, 8, dict(REMOTE), stop=Text([1] * 20).hashes[-1] % 3)  # the first token ends it
    request = p.scheduler.requests["r"]
    finish(p, "r")
    (held,) = p.kvhma.context.leases._held.values()
    assert request.last_sched_seq > p.scheduler.processed_step_seq, "a step in flight computes its second token"
    assert list(touched) == list(held.blocks)
    free_all(p)
    assert (references(p), p.pool.get_num_free_blocks()) == ([], free)


def test_blocks_are_freed_as_vllm_frees_them(monkeypatch):
    p, plain = engine(groups=GROUPS[:1]), engine(groups=GROUPS[:1])
    freed = {}
    for each in (p, plain):
        freed[each] = []
        monkeypatch.setattr(each.pool, "free_blocks", lambda blocks, to=freed[each]: to.append([*map(id_of, blocks)]))
    prefill(p)
    free_all(p)
    plain.add("r", [1] * 21, 1)
    finish(plain, "r")
    assert [ids for ids in freed[p] if ids] == [ids for ids in freed[plain] if ids]


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
    assert p.kvhma.context.may_take is None
    free = p.pool.get_num_free_blocks()
    prefill(p)
    assert set(references(p)) == {1}
    free_all(p)
    assert p.pool.get_num_free_blocks() == free


class Binding:
    """Binds a manager as vLLM's scheduler does."""

    def __init__(self, connector):
        self.connector = connector

    def bind(self, manager):
        self.connector.bind_kv_cache_manager(manager)


class BindingWithCheck(Binding):
    def _request_blocks_can_be_freed(self, request):
        return True


class Child:
    """A connector that asks as kvhma's does."""

    def bind_kv_cache_manager(self, manager):
        self.may_take = find_take_check(manager, self)


def test_another_connector_or_pool_may_need_the_blocks():
    pool = object()
    coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_pool=pool)])
    manager = SimpleNamespace(coordinator=coordinator, block_pool=pool, pop_blocks_for_free=list)
    child = Child()
    scheduler = BindingWithCheck(child)
    scheduler.bind(manager)
    assert child.may_take == scheduler._request_blocks_can_be_freed
    Binding(child).bind(manager)
    assert child.may_take is None, "a step in flight may still write"
    several = MultiConnector.__new__(MultiConnector)
    several._connectors = [child]
    BindingWithCheck(several).bind(manager)
    assert child.may_take is None, "another connector may still read"
    coordinator.single_type_managers.append(SimpleNamespace(block_pool=object()))
    scheduler.bind(manager)
    assert child.may_take is None, "ids are of one pool"
    assert find_take_check(manager, None) is None
