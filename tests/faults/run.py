# SPDX-License-Identifier: Apache-2.0
"""One run: P behind a link, two decode engines at its other end, the soak's clients; then nothing may be left over."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import Any

from faults.schedule import fault_of, schedule
from soak.clients import KINDS as REQUESTS
from soak.clients import Client, World
from soak.fleet import Fleet, Slot, config
from soak.journal import Journal
from soak.judge import Outcome, Tally
from soak.run import ENVIRONMENT, LEASE, Options, Result, all_given_back, answer_beforehand, attempt, count_often, right
from soak.schedule import Event
from support.engines import Engine, Zygote, free_port, make_models
from support.handoff import arguments, noise
from support.link import Fault, Link

UCX_END = re.compile(r"ucp_request\.inl:\d+ +Fatal: unexpected error: Endpoint timeout|ucp_worker_discard_uct_ep")
"""What UCX writes when it ends a prefill engine that has lost a connection: docs/security.md."""
SIDES = {"p1": 0, "d1": 1, "d2": 1}
"""End of the link that each engine is at."""


class LinkedSlot(Slot):
    """An engine at an end of the link."""

    def crashed(self) -> bool:
        # The front end of the tests outlives an engine core that has ended with its worker.
        return super().crashed() or (self.up.is_set() and not self.meant_to_end and not self.named("EngineCore"))

    def explains(self, since: float, until: float) -> bool:
        # There is a fault every few seconds, and TCP may send nothing for two minutes after it.
        return True


def run(options: Options) -> Result:
    """Do one run. Its journal and logs are in the folder of the options."""
    options.folder.mkdir(parents=True)
    result = Result(options, Tally())
    with contextlib.ExitStack() as stack:
        zygote = stack.enter_context(Zygote(options.folder / "zygote.log", ENVIRONMENT))
        (model_dir,) = make_models(zygote, options.models, options.model)
        prompts = answer_beforehand(zygote, model_dir, options)
        journal = Journal(options.folder / "journal.jsonl")
        stack.callback(journal.close)
        link = stack.enter_context(Link(options.seed))
        slots = make_slots(zygote, model_dir, options, link, journal)
        fleet = Fleet(slots, journal)
        stack.callback(fleet.kill)
        fleet.start()
        world = World(fleet, journal, result.tally, prompts, 2 * noise(options.model), LEASE, options.limit)
        ask_and_fail(world, link, options, result)
        counts = link.counts()
        result.facts += [f"packets from {side}: {dict(count)}" for side, count in zip("PD", counts, strict=True)]
    return result


def make_slots(zygote: Zygote, model_dir: Path, options: Options, link: Link, journal: Journal) -> list[Slot]:
    ports = {name: free_port() for name in SIDES}
    # Mamba2 with prefix caching ends vLLM's CPU build.
    caching = {"enable_prefix_caching": "nemotron" not in options.model}
    address = f"{link.addresses[0]}:{ports['p1']}"
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "p1": ("recompute", {}),
        "d1": ("recompute", {"prefill_engines": [address], "piece_tokens": 64}),
        "d2": ("fail", {"piece_tokens": 64}),
    }
    slots: list[Slot] = []
    for name, (policy, settings) in kinds.items():
        template = Engine(
            zygote,
            model_dir,
            options.folder / f"{name}.log",
            kv_transfer_config=config(name, policy=policy, lease=LEASE, settings=settings),
            env=link.env(SIDES[name]) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[name])},
            engine_args=arguments(options.model, **caching),
        )
        slots.append(LinkedSlot(name, template, journal, None))
    return slots


def supervise(fleet: Fleet, journal: Journal, until: float) -> None:
    """Replace engines that end, until then."""
    while journal.now() < until:
        fleet.look_for_crashes()
        time.sleep(0.5)


def fail(link: Link, world: World, event: Event) -> None:
    """Do a fault, and undo it."""
    journal = world.journal
    journal.note("fault", kind=event.kind, choice=event.choice, seconds=event.seconds)
    before = link.set(*fault_of(event))
    supervise(world.fleet, journal, journal.now() + event.seconds)
    after = link.set(Fault())
    done = [dict(now - then) for now, then in zip(after, before, strict=True)]
    journal.note("fault over", kind=event.kind, from_p=done[0], from_d=done[1])


def ask_and_fail(world: World, link: Link, options: Options, result: Result) -> None:
    """The run itself, with engines that are ready."""
    fleet = world.fleet
    shift = world.journal.now()
    clients = [Client(world, options.seed, number, list(REQUESTS)) for number in range(options.clients)]
    for thread in (*clients, threading.Thread(target=count_often, args=(fleet,), daemon=True)):
        thread.start()
    for event in schedule(options.seed, options.seconds):
        supervise(fleet, world.journal, shift + event.at)
        fail(link, world, event)
        fleet.done[event.kind] += 1
    supervise(fleet, world.journal, shift + options.seconds)
    fleet.stop.set()
    fleet.settle()
    for client in clients:
        client.join(3 * world.limit)
        if client.is_alive():
            result.tally.leaks.append(f"{client.name} does not end")
    for failure in fleet.failures:
        ended = ended_by_ucx(failure, options.folder)
        (result.facts if ended else result.tally.crashes).append(ended or failure)
    slots = fleet.slots
    for d in (slots["d1"], slots["d2"]):
        attempt(result, f"{d.name} afterwards", lambda d=d: right(world, slots["p1"], d, world.prompts[0]))
    end = time.monotonic() + 2 * world.lease + 30
    for slot in slots.values():
        attempt(result, slot.name, lambda slot=slot: all_given_back(slot, end, result))
        result.counters[slot.name] = slot.counters + slot.latest
    answered = world.tally.total(Outcome.RIGHT)
    result.facts.append(f"{answered} right answers in {options.seconds:g} s, {answered / options.seconds:.1f} a second")
    result.facts.append(f"faults: {dict(fleet.done)}")


def ended_by_ucx(failure: str, logs: Path) -> str:
    """Which engine UCX ended and with what words, if that is what a failure of the fleet says; otherwise no text."""
    found = re.match(r"(.*, life \d+), ended by itself, see ([^:]+):", failure)
    words = UCX_END.search((logs / found[2]).read_text(errors="replace")) if found else None
    return f"{found[1]}, was ended by UCX: {words[0]}" if found and words else ""
