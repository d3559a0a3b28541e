# SPDX-License-Identifier: Apache-2.0
"""Clients that act as a proxy and its users do, odd requests included; each answer is compared with a plain
engine's."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from soak.census import MAX_TOKENS, Prompt
from soak.fleet import Fleet, Slot
from soak.journal import Journal
from soak.judge import Outcome, Verdict, judge, outcome_of_error, shorten
from support.engines import REMOTE_DECODE, Answer, EngineFailed
from support.front import Proxy

SAMPLES = {"temperature": 1.0, "top_k": 1}  # vLLM refuses several samples at temperature 0; these are as greedy
KINDS = {
    "ordinary": 10,
    "slow": 2,
    "aborted": 2,
    "twice": 2,
    "samples": 1,
    "unread": 1,
    "changed": 2,
    "followed": 8,
    "left": 2,
    "unnotified": 1,
    "proxied": 8,
    "hung up": 1,
    "chat": 3,
    "alone": 4,
}
"""A client's actions and how often each occurs relative to the rest.

`changed` has parameters that P did not write. In `followed` P and D are asked at once with a ticket; in `left` D's
client disconnects, and in `unnotified` P never gets the ticket. `proxied` goes through the proxy, which writes tickets;
in `hung up` its client disconnects. In a `chat` P reads D's answer of the turn before. In `alone` D answers a prompt
after a hand-off, and then without parameters the same prompt or its beginning, whose blocks it may have from the
hand-off.
"""
EXPECTED = ("aborted", "changed", "left", "slow", "twice", "unnotified", "unread")
"""Kinds that may be refused although nothing is done to an engine."""
PROXIED = ("proxied", "hung up")

ODD_VALUES = [None, "", "x", 7, -1, True, [], {}, "y" * 10_000, [[1]] * 100, 10**30, float("nan"), [[0, "1-9"]] * 7]


@dataclass(frozen=True)
class World:
    """What all clients share."""

    fleet: Fleet
    journal: Journal
    proxy: Proxy | None
    """None if no request goes through it."""
    prompts: Sequence[Prompt]
    noise: float
    lease: float
    limit: float
    addresses: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Where the schedulers of prefill engines listen, as far as their answers have named it."""
    handed: dict[str, list[Prompt]] = field(default_factory=dict)
    """Prompts that each decode engine has answered after a hand-off, in order."""


class Client(threading.Thread):
    """Sends one request after the other until the run is over. Its requests follow from the seed and its number."""

    def __init__(self, world: World, seed: str, number: int, kinds: Sequence[str]) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self._world = world
        self._rng = random.Random(f"{seed} client {number}")
        self._number = number
        self._kinds = {kind: KINDS[kind] for kind in kinds}
        self._asked = 0

    def run(self) -> None:
        world = self._world
        while not world.fleet.stop.is_set():
            (kind,) = self._rng.choices(list(self._kinds), list(self._kinds.values()))
            self._asked += 1
            try:
                self._hand_over(kind)
            except Exception as error:  # the harness's own: it must not look like a quiet client
                world.journal.note("crash", text=f"client {self._number}: {kind}: {type(error).__name__}: {error}")

    def _hand_over(self, kind: str) -> None:
        world, rng = self._world, self._rng
        prompt = rng.choice(world.prompts)
        p, d, other = (world.fleet.pick(role, rng) for role in "pdd")
        # Drawn always, so that the next request does not depend on the result of this one.
        choice, more = rng.random(), random.Random(rng.random())
        if p is None or d is None or other is None:
            return
        if kind in ("followed", "left", "unnotified") and p.name in world.addresses:
            self._follow(kind, prompt, p, d, more)
            return
        if kind in PROXIED:
            self._ask_proxy(kind, prompt, choice)
            return
        if kind == "chat":
            self._chat(more.choice([one for one in world.prompts if one.turn is not None]), p, (d, other))
            return
        params = self._prefill(kind, prompt, p)
        if params is None or kind == "unread":
            return
        if kind == "slow":
            world.fleet.stop.wait(choice * 1.2 * world.lease)
        if kind == "changed":
            params = changed(params, more)
        if kind == "twice":
            self._ask_twice(prompt, params, d, other, choice)
        elif kind == "aborted":
            self._ask_and_abort(prompt, params, d, choice)
        elif kind == "samples":
            self._ask(kind, prompt, params, d, n=1 + int(3 * choice), **SAMPLES)
        else:
            right = self._ask(kind, prompt, params, d).outcome is Outcome.RIGHT
            if kind == "alone" and right and d.up.is_set():
                self._ask(kind, more.choice([prompt, *prompt.parts]), None, d)

    def _chat(self, prompt: Prompt, p: Slot, answering: Sequence[Slot]) -> None:
        """All turns of a chat, at one decode engine after the other. P gets D's parameters of the turn before."""
        asked: dict[str, Any] = {}
        turn: Prompt | None = prompt
        for d in (*answering, answering[0]):
            params = None if turn is None else self._prefill("chat", turn, p, asked)
            if turn is None or params is None or not d.up.is_set():
                return
            sent = self._send(turn, params, d, f"d{len(turn.tokens)}")
            if self._judge("chat", turn, d, sent).outcome is not Outcome.RIGHT:
                return
            # As a router has it, between two bodies.
            asked = json.loads(json.dumps(sent.future.result().kv_transfer_params)) or {}
            turn = turn.turn

    def _ask_proxy(self, kind: str, prompt: Prompt, choice: float) -> None:
        """Ask the proxy; any engine may have had the request."""
        world = self._world
        assert world.proxy is not None
        since = world.journal.now()
        future: Future[Answer] = Future()
        if kind == "hung up":
            world.proxy.hang_up(prompt.tokens, max_tokens=MAX_TOKENS, after=choice**3 + 0.01, timeout=world.limit)
            verdict = Verdict(Outcome.ABORTED)
        else:
            try:
                answer = world.proxy.complete(
                    prompt.tokens, max_tokens=MAX_TOKENS, stream=choice < 0.5, timeout=world.limit
                )
                future.set_result(answer)
            except Exception as error:
                future.set_exception(error)
            verdict = judge(future, prompt.plain, world.noise, limit=world.limit)
        if verdict.outcome is Outcome.HUNG:
            for slot in world.fleet.slots.values():
                slot.engine.stacks()
        self._note(kind, verdict, since, *world.fleet.slots.values(), tokens=len(prompt.tokens))

    def _follow(self, kind: str, prompt: Prompt, p: Slot, d: Slot, rng: random.Random) -> None:
        """Ask P and D at once, or one a little later; P's answer to its client is not needed."""
        ticket = {"kvhma_ticket": f"{rng.getrandbits(128):032x}"}
        params = {"do_remote_prefill": True, **ticket, **self._world.addresses[p.name]}
        asked: list[Asked] = []
        steps: list[Callable[[], object]] = [lambda: asked.append(self._send(prompt, params, d, "d"))]
        if kind != "unnotified":
            steps.insert(rng.randrange(2), lambda: self._ask_p(prompt, p, ticket))
        for step in steps:
            step()
            self._world.fleet.stop.wait(rng.random() ** 4)
        if kind == "left":
            with contextlib.suppress(EngineFailed, TimeoutError):
                asked[0].slot_engine.abort(asked[0].request_id)
        self._judge(kind, prompt, d, asked[0], aborted=kind == "left", p=p)

    def _ask_p(self, prompt: Prompt, p: Slot, more: dict[str, Any]) -> Future[Answer]:
        return p.engine.generate(
            prompt.tokens,
            max_tokens=1,
            kv_transfer_params=REMOTE_DECODE | more,
            request_id=f"c{self._number}-{self._asked}-p{len(prompt.tokens)}",
            timeout=None,
        )

    def _prefill(self, kind: str, prompt: Prompt, p: Slot, more: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """P's parameters for D; None if it returns none, which is counted."""
        since = self._world.journal.now()
        future = self._ask_p(prompt, p, more or {})
        cause = "no parameters"
        outcome = Outcome.REFUSED
        try:
            answer = future.result(self._world.limit)
            if answer.error is None and answer.kv_transfer_params is not None:
                told = answer.kv_transfer_params
                self._world.addresses[p.name] = {name: told[name] for name in ("remote_host", "remote_port")}
                if kind == "unread":
                    self._note(kind, Verdict(Outcome.ABORTED, "never read"), since, p)
                return answer.kv_transfer_params
            if answer.error is not None:
                outcome = outcome_of_error(answer.error)
            cause = answer.error or f"{cause}, {answer.finish_reason}"
        except EngineFailed as error:
            outcome, cause = Outcome.LOST, str(error)
        except TimeoutError:
            outcome = Outcome.HUNG
            p.engine.stacks()
        self._note(kind, Verdict(outcome, f"prefill: {shorten(cause)[:100]}"), since, p)
        return None

    def _ask(self, kind: str, prompt: Prompt, params: Any, d: Slot, **sampling: Any) -> Verdict:
        return self._judge(kind, prompt, d, self._send(prompt, params, d, "d" if params else "alone", **sampling))

    def _ask_twice(self, prompt: Prompt, params: Any, d: Slot, other: Slot, choice: float) -> None:
        """The same parameters again: at once or after the first answer, at the same engine or another one."""
        first = self._send(prompt, params, d, "d1")
        if choice < 0.3:
            self._judge("twice", prompt, d, first)
        second = self._send(prompt, params, other, "d2")
        if choice >= 0.3:
            self._judge("twice", prompt, d, first)
        self._judge("twice", prompt, other, second)

    def _ask_and_abort(self, prompt: Prompt, params: Any, d: Slot, choice: float) -> None:
        asked = self._send(prompt, params, d, "d")
        self._world.fleet.stop.wait(choice**3)
        with contextlib.suppress(EngineFailed, TimeoutError):
            asked.slot_engine.abort(asked.request_id)
        self._judge("aborted", prompt, d, asked, aborted=True)

    def _send(self, prompt: Prompt, params: Any, d: Slot, tag: str, **sampling: Any) -> Asked:
        request_id = f"c{self._number}-{self._asked}-{tag}"
        engine = d.engine
        since = self._world.journal.now()
        future = engine.generate(
            prompt.tokens,
            max_tokens=MAX_TOKENS,
            kv_transfer_params=params,
            request_id=request_id,
            timeout=None,
            **sampling,
        )
        return Asked(future, request_id, engine, since, params)

    def _judge(
        self, kind: str, prompt: Prompt, d: Slot, asked: Asked, *, aborted: bool = False, p: Slot | None = None
    ) -> Verdict:
        world = self._world
        verdict = judge(asked.future, prompt.plain, world.noise, limit=world.limit, aborted=aborted)
        if verdict.outcome is Outcome.HUNG:
            asked.slot_engine.stacks()
        if p is None and isinstance(asked.params, dict):
            p = world.fleet.slots.get(str(asked.params.get("remote_engine_id")))
        facts: dict[str, Any] = {"request": asked.request_id, "tokens": len(prompt.tokens)}
        if verdict.outcome is Outcome.RIGHT:
            if asked.params is None:
                facts["cached"] = asked.future.result().num_cached_tokens
            else:
                world.handed.setdefault(d.name, []).append(prompt)
        self._note(kind, verdict, asked.since, p or d, d, **facts)
        return verdict

    def _note(self, kind: str, verdict: Verdict, since: float, *slots: Slot, **facts: Any) -> None:
        world = self._world
        disturbed = any(slot.explains(since, world.journal.now()) for slot in slots)
        # Aborted, unread or changed on purpose, or too slow for the lease: a refusal is right then.
        explained = disturbed or kind in EXPECTED
        world.journal.note(
            verdict.outcome.value,
            kind=kind,
            client=self._number,
            since=round(since, 3),
            engines=[slot.name for slot in slots],
            cause=verdict.cause,
            explained=explained,
            **facts,
        )


@dataclass(frozen=True)
class Asked:
    """A request to D that has been sent."""

    future: Future[Answer]
    request_id: str
    slot_engine: Any
    since: float
    params: Any


def changed(params: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Parameters with one value that P did not write."""
    got = copy.deepcopy(params)
    own = got.get("kvhma")
    where = own if isinstance(own, dict) and rng.random() < 0.7 else got
    key = rng.choice(sorted(where))
    if rng.random() < 0.2:
        del where[key]
    else:
        where[key] = rng.choice(ODD_VALUES)
    return got
