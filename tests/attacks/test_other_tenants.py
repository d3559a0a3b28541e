# SPDX-License-Identifier: Apache-2.0
"""What one client of two engines can do to another client: vLLM's schedulers and block pools, labels for bytes.

Every block that a request attends to must hold the labels of the request's tokens; else the engine raises a violation.
"""

import random

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

from kvhma.vllm.holds import lease_table
from support.cache.engine import Engine, EngineShape, Violation
from support.cache.labels import GroupShape
from support.params import text_of, with_fields

REMOTE = {"do_remote_decode": True}
GROUPS = (GroupShape("0.full", "full", 4), GroupShape("1.sliding", "sliding", 4, 5))


def engine(name, blocks=100, *, recompute=True):
    return Engine(EngineShape(name, GROUPS, blocks, batch=64, caching=True, recompute=recompute), random.Random(1))


def step_until(*engines, done, most=200):
    for _ in range(most):
        if done():
            return
        for one in engines:
            one.step()
            one.check_cache()
    raise AssertionError("it did not end")


def prefill(p, name, tokens):
    p.add(name, tokens, 1, dict(REMOTE))
    step_until(p, done=lambda: name in p.finished)
    return p.finished[name].kv_transfer_params


def forge(own, victim):
    """Parameters of an attacker's request with another request's blocks, and a digest that is right for them."""
    return with_fields(own, spans=text_of(victim)["spans"])


def test_another_requests_blocks(caplog):
    p, d = engine("p"), engine("d")
    d.read_from(p)
    victims, mine = [1] * 21, [2] * 21
    victim, own = prefill(p, "victim", victims), prefill(p, "mine", mine)
    forged = forge(own, victim)
    assert forged["kvhma"]["digest"] not in (own["kvhma"]["digest"], victim["kvhma"]["digest"])
    d.add("attack", mine, 3, forged)
    step_until(d, p, done=lambda: "attack" in d.finished)
    assert str(d.finished["attack"].finish_reason) == "length", "it computes its own prompt"
    assert d.counts.failed == 1
    d.add("later", mine, 3)  # the prefix cache has nothing of the victim's either
    d.add("victim", victims, 3, victim)
    step_until(d, p, done=lambda: {"later", "victim"} <= d.finished.keys())
    assert (d.counts.loads, d.counts.failed) == (2, 1), "the victim reads what is its"
    assert "does not match the parameters that P returned" in caplog.text


def test_the_labels_show_the_attack():
    """The same with a P that does not compare digests."""
    p, d = engine("p"), engine("d")
    d.read_from(p)
    p.kvhma.context.leases._is_of_params = lambda held, claim: True
    victim, own = prefill(p, "victim", [1] * 21), prefill(p, "mine", [2] * 21)
    d.add("attack", [2] * 21, 3, forge(own, victim))
    with pytest.raises(Violation):
        step_until(d, p, done=lambda: "attack" in d.finished)


def test_requests_that_nobody_reads(monkeypatch, caplog):
    p, d = engine("p", blocks=121), engine("d")
    d.read_from(p)
    told = [prefill(p, f"unread {at}", [at] * 21) for at in range(20)]
    step_until(p, done=lambda: p.pool.get_num_free_blocks() >= 60, most=3)
    assert p.kvhma.context.leases.usage().blocks <= 60
    p.add("plain", [30] * 100, 2)
    step_until(p, done=lambda: "plain" in p.finished)
    for at, loads in ((19, 1), (0, 0)):
        before = d.counts.loads - d.counts.failed
        d.add(f"{at}", [at] * 21, 2, told[at])
        step_until(d, p, done=lambda at=at: f"{at}" in d.finished)
        assert d.counts.loads - d.counts.failed - before == loads
    assert "more blocks than max_held_share allows (" in caplog.text
    for held in p.kvhma.context.leases._held.values():
        held.expires = 0.0
    monkeypatch.setattr(lease_table, "OVERDUE_SECONDS", 0.0)
    step_until(p, done=lambda: p.pool.get_num_free_blocks() == 120, most=3)
