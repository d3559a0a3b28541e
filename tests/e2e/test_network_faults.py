# SPDX-License-Identifier: Apache-2.0
"""P and D as two hosts whose network loses packets, and is gone for a while (`make faults` does much more of it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engines import Zygote, engines
from support.handoff import all_free, arguments, at_once, decode, kvhma, loads, prefill, prompts, same
from support.link import Fault, Link, NoLink
from support.waiting import until


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        made = Link(seed=1)
    except NoLink as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.mark.smoke
def test_loss_and_a_partition(link: Link, zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    name = "gemma3"
    sides = {role: kvhma(name, policy="recompute", env=link.env(side)) for side, role in enumerate("pd")}
    with engines(zygote, model(name), tmp_path, **sides, plain=arguments(name)) as (p, d, plain):
        many = prompts(name, [33, 301, 1201] * 4)
        expected = at_once(plain, many, max_tokens=16)

        link.set(Fault(loss=0.05))
        told = [prefill(p, prompt) for prompt in many]
        answers = [decode(d, prompt, params) for prompt, params in zip(many, told, strict=True)]
        for answer, right in zip(answers, expected, strict=True):
            same(name, answer.result(), right, "while packets are lost")
        assert all(way["lost"] > 0 for way in link.counts())
        assert loads(d) == len(many)
        # So slow that the partition finds reads that have begun.
        link.set(Fault(rate=100_000))

        again = prompts((name, 2), [33, 301, 1201] * 4)
        expected = at_once(plain, again, max_tokens=16)
        told = [prefill(p, prompt) for prompt in again]
        answers = [decode(d, prompt, params) for prompt, params in zip(again, told, strict=True)]
        sent = link.counts()[0]["packets"]
        until(lambda: link.counts()[0]["packets"] > sent + 40)
        before = link.set(Fault(loss=1))
        # TCP sends again after 0.2 s, and waits twice as long each time: the network is gone for seconds.
        until(lambda: all(now["lost"] > then["lost"] + 5 for now, then in zip(link.counts(), before, strict=True)))
        link.set(Fault())
        for answer, right in zip(answers, expected, strict=True):
            same(name, answer.result(), right, "while the network was gone")
        (more,) = prompts((name, 3), [301])
        right = plain.generate(more, max_tokens=16).result()
        count = loads(d)
        same(name, decode(d, more, prefill(p, more)).result(), right, "afterwards")
        assert loads(d) == count + 1
        all_free(p, d)
