# SPDX-License-Identifier: Apache-2.0
"""Generated sequences of requests through a prefill and a decode engine."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.cache.engine import FINE_CHECKPOINTS, Counts, Engine, EngineShape
from support.cache.labels import GroupShape

MIXES: dict[str, tuple[str, ...]] = {
    "full": ("full",),
    "sliding": ("sliding",),
    "chunked": ("chunked",),
    "state": ("state",),
    "full+sliding": ("full", "sliding"),
    "sliding+full": ("sliding", "full"),
    "mla+sliding_mla": ("mla", "sliding_mla"),
    "full+chunked": ("full", "chunked"),
    "full+two windows": ("full", "sliding", "sliding"),
    "sliding+chunked": ("sliding", "chunked"),
    "full+state": ("full", "state"),
    "full+state+state": ("state", "full", "state"),
    "full+sliding+state": ("full", "sliding", "state"),
    "sliding+state": ("sliding", "state"),
    "full+chunked+state": ("full", "chunked", "state"),
}
"""Kinds of the groups of a model."""

LONG = (16, 64)
PAIRS = [*itertools.product(range(1, 9), repeat=2), *itertools.permutations(LONG)]
"""Block sizes of P and D."""


@dataclass
class Case:
    """A pair of engines and the requests that they get.

    Attributes:
        seed: decides everything that is random.
        mix: kinds of the groups.
        p: the prefill engine.
        d: the decode engine.
        longest: tokens of a prompt at most.
        requests: how many.
        both_ways: whether the decode engine prefills as well, for the prefill engine.
        odds: who computes what.
        turns: whether the prefill engine reads the decode engine's answers for the next turns.
    """

    seed: int
    mix: str
    p: EngineShape
    d: EngineShape
    longest: int
    requests: int = 12
    both_ways: bool = False
    odds: dict[str, float] = field(default_factory=dict)
    turns: bool = False

    def __str__(self) -> str:
        sides = []
        for side in (self.p, self.d):
            groups = ", ".join(f"{group.kind} {group.reach or ''}/{group.block_size}" for group in side.groups)
            more = {
                key: value
                for key, value in vars(side).items()
                if key not in ("name", "groups") and value != EngineShape.__dataclass_fields__[key].default
            }
            sides.append(f"{side.name}: {groups} {more}")
        ways = ", both ways" if self.both_ways else ""
        return f"seed {self.seed}, {self.mix}, {'; '.join(sides)}, prompts up to {self.longest}{ways}"


ODDS = {"hand-off": 0.6, "d alone": 0.25, "p alone": 0.1, "abandoned": 0.05}


def case_of(seed: int, *, mix: str | None = None, sizes: tuple[int, int] | None = None) -> Case:
    """Draw a case.

    Args:
        seed: decides everything.
        mix: kinds of the groups; None for any.
        sizes: block sizes of P and D; None for the next of all pairs.
    """
    rng = random.Random(seed)
    mix = mix or list(MIXES)[rng.randrange(len(MIXES))]
    sizes = sizes or PAIRS[seed % len(PAIRS)]
    kinds = MIXES[mix]
    largest = max(sizes)
    longest = largest * rng.randint(3, 6) if largest > 8 else max(12, largest * rng.randint(3, 7))
    # Without prefix caching vLLM keeps one state for each request, in one large block.
    caching = (rng.random() < 0.9, rng.random() < 0.97)
    reaches = [_reach(rng, kind, sizes, caching) for kind in kinds]
    sides = [
        _side(rng, name, kinds, reaches, size, longest, cached)
        for name, size, cached in zip("pd", sizes, caching, strict=True)
    ]
    case = Case(seed, mix, sides[0], sides[1], longest, requests=rng.randint(10, 14), odds=ODDS)
    if rng.random() < 0.2:
        case.both_ways = True
        case.p, case.d = (replace(side, role="kv_both") for side in sides)
    return case


def _reach(rng: random.Random, kind: str, sizes: tuple[int, int], caching: tuple[bool, bool]) -> int:
    if kind in ("sliding", "sliding_mla"):
        return rng.choice((1, 2, rng.randint(2, 8), rng.randint(2, 3 * max(sizes))))
    if kind == "chunked":
        # vLLM's own prefix hits are wrong where a chunk begins inside of a block.
        step = math.lcm(*(size for size, cached in zip(sizes, caching, strict=True) if cached))
        return max(step * rng.randint(1, max(1, 3 * max(sizes) // step)), 2)
    return 0


def _side(
    rng: random.Random,
    name: str,
    kinds: Sequence[str],
    reaches: Sequence[int],
    size: int,
    longest: int,
    caching: bool,
) -> EngineShape:
    state = "state" in kinds
    sizes = [size] * len(kinds)
    unit = None
    overlapped = rng.random() < 0.3
    if state:
        if not caching:
            sizes = [2048 if kind == "state" else size for kind in kinds]
        elif size > 1 and len(kinds) > 1 and rng.random() < 0.3 and (FINE_CHECKPOINTS or not overlapped):
            # Overlapped steps of vLLM 0.31 overwrite such states in the prefix cache.
            unit = rng.choice([part for part in range(1, size) if size % part == 0])
            if rng.random() < 0.5:
                # Layers whose pages are larger get smaller blocks.
                sizes = [unit if kind in ("sliding", "chunked") else size for kind in kinds]
    elif "chunked" not in kinds and len(kinds) > 1 and rng.random() < 0.2:
        # Layers whose pages are smaller get larger blocks.
        sizes[rng.randrange(len(kinds))] *= 2
    groups = tuple(
        GroupShape(f"{index}.{kind}", kind, one, reach)
        for index, (kind, one, reach) in enumerate(zip(kinds, sizes, reaches, strict=True))
    )
    need = sum(2 if group.kind == "state" else -(-(longest + 10) // group.block_size) + 1 for group in groups)
    if any(group.kind == "state" for group in groups):
        need += 4
    blocks = 1 + need + rng.choice((0, 1, need // 2, need, need * 3))
    return EngineShape(
        name,
        groups,
        blocks,
        batch=rng.choice((longest * 4, max(8, longest // 2), max(4, size), max(8, 2 * size))),
        caching=caching,
        recompute=rng.random() < 0.5,
        overlapped=overlapped,
        hash_unit=unit,
        checkpoint=1 if state and caching and unit is None and rng.random() < 0.3 else None,
        reserve_full=rng.random() < 0.5,
        retention=rng.choice((None, None, None, 0, 1, 2)),
        ranks=1 if name == "p" else rng.randint(1, min(2, len(kinds))),
        role=rng.choice(("kv_both", "kv_producer" if name == "p" else "kv_consumer")),
        long_prefill=rng.choice((0, 0, 0, max(size, 3))),
    )


def turns_of(seed: int, *, mix: str | None = None, sizes: tuple[int, int] | None = None) -> Case:
    """Draw a case of conversations; the arguments are those of :func:`case_of`."""
    case = case_of(seed, mix=mix, sizes=sizes)
    rng = random.Random(~seed)
    threshold = rng.choice((0, 0, 3, 10))
    case.p, case.d = (replace(side, turns=True, threshold=threshold) for side in (case.p, case.d))
    case.turns, case.both_ways = True, False
    case.odds = {"next turn": 0.55, "hand-off": 0.35, "d alone": 0.05, "p alone": 0.05}
    return case


class Run:
    """One sequence."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = random.Random(case.seed ^ 0x5EED)
        self.p = Engine(case.p, self.rng)
        self.d = Engine(case.d, self.rng)
        self.d.read_from(self.p)
        if case.both_ways or case.turns:
            self.p.read_from(self.d)
        self.p.load_odds = self.d.load_odds = {"ok": 0.8, "nothing": 0.05, "part": 0.1, "garbage": 0.05}
        self.prompts: list[list[int]] = []
        self.waiting: dict[str, tuple[Engine, Engine | None, list[int]]] = {}
        self.numbers = itertools.count()
        self.answers: list[tuple[list[int], dict[str, Any]]] = []
        """Prompts with their answers, and what the decode engine returned with them."""

    def play(self) -> None:
        """Send all requests and wait until no work is left."""
        case, rng = self.case, self.rng
        asked = 0
        idle = 0
        for _ in range(case.requests * 200):
            if asked < case.requests and (rng.random() < 0.35 or (self.p.idle and self.d.idle and not self.waiting)):
                self._ask()
                asked += 1
            done = 0
            if rng.random() < 0.8:
                done += self.p.step()
            self._hand_over()
            if rng.random() < 0.8:
                done += self.d.step()
            self._disturb()
            idle = 0 if done else idle + 1
            if asked == case.requests and self.p.idle and self.d.idle and not self.waiting:
                break
            if idle > 20:
                self._pass_a_lease()
        else:
            raise AssertionError(f"{case}: never ended: {self.p.scheduler.requests} {self.d.scheduler.requests}")
        for engine in (self.p, self.d):
            free = engine.pool.get_num_free_blocks()
            assert free == engine.shape.num_blocks - 1, f"{case}: {engine.shape.name} has lost blocks"
            assert not engine.refused, f"{case}: {engine.refused}"

    @property
    def counts(self) -> Counts:
        """Counts of the decode engine; of both engines if both read."""
        return self.d.counts + self.p.counts if self.case.both_ways else self.d.counts

    def _ask(self) -> None:
        tokens = self._prompt()
        self.prompts.append(tokens)
        name = f"r{next(self.numbers)}"
        (how,) = self.rng.choices(list(self.case.odds), list(self.case.odds.values()))
        if self.case.turns:
            # Room for an answer, and for another turn.
            del tokens[max(1, self.case.longest // 2) :]
        more = {"greedy": self.rng.random() < 0.8, "unread": self.rng.random() < 0.05}
        if how == "next turn":
            tokens, params = self._next_turn(tokens)
            self.p.add(name, tokens, 1, params, **more)
            self.waiting[name] = (self.p, self.d, tokens)
        elif how == "d alone":
            self.d.add(name, tokens, self.rng.randint(1, 8), **more)
        elif how == "p alone":
            self.p.add(name, tokens, self.rng.randint(1, 4), **more)
        else:
            there, here = (self.d, self.p) if self.case.both_ways and self.rng.random() < 0.4 else (self.p, self.d)
            there.add(name, tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False}, **more)
            self.waiting[name] = (there, here if how == "hand-off" else None, tokens)

    def _next_turn(self, tokens: list[int]) -> tuple[list[int], dict[str, Any]]:
        """A prompt that continues after an answer, mostly unchanged, and what the proxy has of it."""
        rng, plain = self.rng, {"do_remote_decode": True, "do_remote_prefill": False}
        for name, answer in list(self.d.finished.items()):
            params = answer.kv_transfer_params
            if params is not None and params["do_remote_decode"]:
                self.answers.append((list(self.d._requests[name].all_token_ids), params))
                del self.d.finished[name]
        if not self.answers:
            return tokens, plain
        said, params = self.answers.pop(rng.randrange(len(self.answers))) if rng.random() < 0.9 else self.answers[-1]
        new = [rng.randrange(3) for _ in range(rng.choice((0, 1, rng.randint(1, 6), self.case.longest // 2)))]
        if rng.random() < 0.6:
            return [*said, *new][: self.case.longest], params
        if rng.random() < 0.05:
            params = {**params, "kvhma": {**params["kvhma"], "digest": "0" * 32}}
        # Another template: less of the answer, or other tokens somewhere.
        said = said[: rng.randint(1, len(said))]
        if rng.random() < 0.5:
            said[rng.randrange(len(said))] += 1
        return [*said, *new][: self.case.longest], params

    def _prompt(self) -> list[int]:
        """A new prompt, or one that shares a beginning with an earlier prompt or answer."""
        rng, longest = self.rng, self.case.longest
        if not self.prompts or rng.random() < 0.1:
            return [rng.randrange(3) for _ in range(rng.randint(1, longest))]
        source = rng.choice(self.prompts)
        if self.d.texts and rng.random() < 0.3:
            source = rng.choice(list(self.d.texts.values())).tokens
        cut = rng.choice((len(source), rng.randint(1, len(source)), max(1, len(source) - 1)))
        more = rng.choice((0, 1, rng.randint(0, max(1, longest - cut))))
        return [*source[:cut], *(rng.randrange(3) for _ in range(more))][:longest]

    def _hand_over(self) -> None:
        for name, (there, here, tokens) in list(self.waiting.items()):
            if name in there.scheduler.requests and name not in there.finished:
                continue
            if self.rng.random() < 0.3:
                continue
            del self.waiting[name]
            answer = there.finished.get(name)
            params = None if answer is None else answer.kv_transfer_params
            if here is not None and params is not None:
                self._give(here, name, tokens, params)

    def _give(self, engine: Engine, name: str, tokens: list[int], params: dict[str, Any]) -> None:
        rng = self.rng
        if rng.random() < 0.05:
            tokens = [*tokens, *(rng.randrange(3) for _ in range(3))]
        if rng.random() < 0.03 and len(tokens) > 1:
            # A different prompt from the one that P computed.
            place = rng.randrange(len(tokens) - 1)
            tokens = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
        if rng.random() < 0.03:
            params = {**params, "kvhma": {**params["kvhma"], "digest": "0" * 32}}
        unread = rng.random() < 0.03
        more = {"stop": rng.randrange(3)} if self.case.turns and rng.random() < 0.5 else {}
        engine.add(name, tokens, rng.randint(1, 8), params, greedy=rng.random() < 0.8, unread=unread, **more)

    def _disturb(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            self.p.scribble()
            self.d.scribble()
        if rng.random() < 0.02:
            engine = rng.choice((self.p, self.d))
            if engine.unfinished:
                engine.abort(rng.choice(engine.unfinished))
        if rng.random() < 0.01:
            self._expire()
        if rng.random() < 0.003:
            rng.choice((self.p, self.d)).forget()

    def _pass_a_lease(self) -> None:
        """Let a lease's time pass. Leases that a waiting request has claimed are renewed meanwhile, and do not end."""
        for engine, other in ((self.p, self.d), (self.d, self.p)):
            claimed = {load.remote.lease_key for load in other.kvhma.decode.pending.values() if load.remote is not None}
            for key, held in engine.kvhma.context.leases._held.items():
                if key not in claimed:
                    held.expires = held.overdue_since = 0.0
            for load in engine.kvhma.decode.pending.values():
                if load.waits_since is not None:
                    load.waits_since -= engine.kvhma.context.settings.kv_lease_duration + 1

    def _expire(self) -> None:
        for engine in (self.p, self.d):
            for held in engine.kvhma.context.leases._held.values():
                if self.rng.random() < 0.7:
                    held.expires = held.overdue_since = 0.0
