# SPDX-License-Identifier: Apache-2.0
"""One run: answers beforehand, engines, clients, events; then a quiet phase, after which nothing may be left over."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak.clients import MAX_TOKENS, Client, Prompt, World
from soak.fleet import Fleet, Slot, config
from soak.hostile import Address, Stranger
from soak.hosts import Hosts, NoNamespaces
from soak.journal import Journal
from soak.judge import Allowance, Outcome, Tally, judge, leaks_of_pool, leaks_of_process
from soak.plot import plot
from soak.samples import Sampler, growth, heap_growth
from soak.schedule import Event, schedule
from support.engines import Engine, EngineFailed, Zygote, engines, free_port, make_models
from support.handoff import arguments, decode, noise, prefill

NAMES = ("p1", "p2", "d1", "d2")
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""oneDNN caches 1,024 matrix products, and vLLM has four new ones for each number of tokens in a step.

A worker with a tiny model grows by 290 MiB before that stops, which would hide a leak of the connector."""
LEASE = 10.0
PROMPTS = 96


@dataclass(frozen=True)
class Options:
    """The options of `python -m soak`."""

    seconds: float
    seed: int
    model: str
    clients: int
    strangers: int
    without: tuple[str, ...]
    requests: tuple[str, ...]
    one_host: bool
    limit: float
    folder: Path
    models: Path


@dataclass
class Result:
    """The findings of a run; `lines` is the report."""

    options: Options
    tally: Tally
    processes: list[str] = field(default_factory=list)
    heaps: list[str] = field(default_factory=list)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [
            *self.facts,
            "",
            *self.tally.lines(),
            "",
            *(
                f"{name}: {', '.join(f'{key} {n}' for key, n in sorted(of.items()))}"
                for name, of in self.counters.items()
            ),
            "",
            *self.processes,
            "",
            *self.heaps,
        ]


def run(options: Options) -> Result:
    """Do one run. Its journal, logs, samples and picture are in the folder of the options."""
    options.folder.mkdir(parents=True)
    result = Result(options, Tally())
    with contextlib.ExitStack() as stack:
        zygote = stack.enter_context(Zygote(options.folder / "zygote.log", ENVIRONMENT))
        (model_dir,) = make_models(zygote, options.models, options.model)
        prompts = answer_beforehand(zygote, model_dir, options)
        journal = Journal(options.folder / "journal.jsonl")
        stack.callback(journal.close)
        hosts = stack.enter_context(closing(make_hosts(options, result)))
        slots = make_slots(zygote, model_dir, options, hosts, journal)
        fleet = Fleet(slots, journal)
        stack.callback(fleet.kill)
        fleet.start()
        world = World(fleet, journal, result.tally, prompts, 2 * noise(options.model), LEASE, options.limit)
        soak(world, options, result)
    return result


@contextlib.contextmanager
def closing(hosts: Hosts | None) -> Any:
    try:
        yield hosts
    finally:
        if hosts is not None:
            hosts.close()


def make_hosts(options: Options, result: Result) -> Hosts | None:
    if not options.one_host:
        try:
            return Hosts(NAMES)
        except NoNamespaces as error:
            result.facts.append(f"no partitions but by SIGSTOP: {error}")
    return None


def answer_beforehand(zygote: Zygote, model_dir: Path, options: Options) -> list[Prompt]:
    """Prompts of all lengths, a third of them with a shared beginning, and the plain engine's answers."""
    rng = random.Random(f"{options.seed} prompts")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(512) for _ in range(count)]

    shared = [tokens(length) for length in (64, 200, 480)]
    made = [tokens(rng.choice([1, 2, 31, 32, 33, 65, 100, 150, 301, 450, 700, 1200, 1900])) for _ in range(PROMPTS)]
    for at in range(0, PROMPTS, 3):
        made[at] = (rng.choice(shared) + made[at])[:2000]
    with engines(zygote, model_dir, options.folder, plain=arguments(options.model)) as (plain,):
        asked = [plain.generate(prompt, max_tokens=MAX_TOKENS) for prompt in made]
        return [Prompt(prompt, answer.result()) for prompt, answer in zip(made, asked, strict=True)]


def make_slots(zygote: Zygote, model_dir: Path, options: Options, hosts: Hosts | None, journal: Journal) -> list[Slot]:
    ports = {name: free_port() for name in NAMES}
    where = {name: "127.0.0.1" if hosts is None else hosts.address(name) for name in NAMES}
    prefill_engines = [f"{where[name]}:{ports[name]}" for name in ("p1", "p2")]
    # Mamba2 with prefix caching ends vLLM's CPU build.
    caching = {"enable_prefix_caching": "nemotron" not in options.model}
    # Room for some of the requests only: they wait, are preempted, and vLLM reuses their blocks at once.
    few = {"num_gpu_blocks_override": 400 if options.model == "gemma3" else 60, "max_num_batched_tokens": 256}
    kinds: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "p1": ("recompute", {}, caching),
        "p2": ("recompute", {}, {"max_num_batched_tokens": 256}),
        "d1": ("recompute", {"prefill_engines": prefill_engines, "piece_tokens": 64}, caching | few),
        "d2": ("fail", {"piece_tokens": 64}, {}),
    }
    slots = []
    for name, (policy, settings, engine_args) in kinds.items():
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": where[name]} if hosts is None else hosts.env(name)
        template = Engine(
            zygote,
            model_dir,
            options.folder / f"{name}.log",
            kv_transfer_config=config(name, policy=policy, lease=LEASE, settings=settings),
            env=env | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[name])},
            engine_args=arguments(options.model, **engine_args),
        )
        slots.append(Slot(name, template, journal, hosts))
    return slots


def soak(world: World, options: Options, result: Result) -> None:
    """The run itself, with engines that are ready."""
    fleet, journal = world.fleet, world.journal
    slots = list(fleet.slots.values())
    sampler = Sampler(slots, journal, options.folder / "samples.csv")
    sampler.start()
    shift = journal.now()
    events = [shifted(event, shift) for event in schedule(options.seed, options.seconds, NAMES, options.without)]
    clients = [Client(world, options.seed, number, options.requests) for number in range(options.clients)]
    addresses = [address_of(slot) for slot in slots]
    strangers = [Stranger(addresses, options.seed, n, fleet.stop, journal) for n in range(options.strangers)]
    counting = threading.Thread(target=count_often, args=(fleet,), daemon=True)
    for thread in (*clients, *strangers, counting):
        thread.start()
    fleet.run(events, shift + options.seconds)
    journal.note("over", seconds=round(journal.now() - shift, 1))
    fleet.look_for_crashes()
    fleet.stop.set()
    fleet.settle()
    for client in clients:
        client.join(3 * world.limit)
        if client.is_alive():
            result.tally.leaks.append(f"{client.name} does not end")
    result.tally.crashes += fleet.failures
    rest(world, result)
    sampler.stop()
    conclude(world, options, result, sampler, events)
    visits = sum((stranger.done for stranger in strangers), Counter[str]())
    result.facts.append(f"events: {dict(fleet.done)}, {fleet.skipped} left out; hostile clients: {dict(visits)}")


def shifted(event: Event, seconds: float) -> Event:
    return Event(event.at + seconds, event.kind, event.target, event.seconds, event.choice)


def address_of(slot: Slot) -> Address:
    env = slot.template.env
    return env["VLLM_NIXL_SIDE_CHANNEL_HOST"], int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"])


def count_often(fleet: Fleet) -> None:
    while not fleet.stop.wait(3):
        for slot in fleet.slots.values():
            if slot.up.is_set():
                slot.count()


def rest(world: World, result: Result) -> None:
    """After the last event: every pair hands off again, all blocks and requests are released."""
    slots = world.fleet.slots
    for p in (slots["p1"], slots["p2"]):
        for d in (slots["d1"], slots["d2"]):
            prompt = world.prompts[0]
            attempt(
                result, f"{p.name} to {d.name} afterwards", lambda p=p, d=d, prompt=prompt: right(world, p, d, prompt)
            )
    end = time.monotonic() + 2 * world.lease + 30
    for slot in slots.values():
        attempt(result, slot.name, lambda slot=slot: all_given_back(slot, end, result))


def attempt(result: Result, what: str, action: Callable[[], None]) -> None:
    try:
        action()
    except (EngineFailed, TimeoutError, AssertionError, OSError) as error:
        result.tally.crashes.append(
            f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def right(world: World, p: Slot, d: Slot, prompt: Prompt) -> None:
    """Fail unless a hand-off is right. The first may find a connection that an event has cut."""
    for last in (False, True):
        answer = decode(d.engine, prompt.tokens, prefill(p.engine, prompt.tokens))
        verdict = judge(answer, prompt.plain, world.noise, limit=world.limit)
        world.tally.add("afterwards", verdict, explained=not last)
        if verdict.outcome is not Outcome.REFUSED:
            return
    raise EngineFailed(verdict.cause)


def all_given_back(slot: Slot, end: float, result: Result) -> None:
    """Wait until nothing is held, and report what is; vLLM empties the prefix cache only if no block is in use."""
    while True:
        state = slot.engine.state()
        leaks = leaks_of_pool(slot.name, state)
        if not leaks or time.monotonic() > end:
            break
        time.sleep(0.2)
    result.tally.leaks += leaks
    if not leaks and not slot.engine.core("reset_prefix_cache"):
        result.tally.leaks.append(f"{slot.name}: the prefix cache cannot be emptied")
    slot.count()


def conclude(world: World, options: Options, result: Result, sampler: Sampler, events: list[Event]) -> None:
    """Read what processes hold, and write it to the report."""
    processes = sampler.processes()
    (options.folder / "memory.svg").write_text(plot(processes.values(), events, world.journal.now()))
    lives = {slot.name: slot.life for slot in world.fleet.slots.values()}
    for (slot, life, role, _), samples in processes.items():
        result.processes.append(growth(samples))
        if life == lives[slot]:
            name = f"{slot}-{life} {role}"
            result.tally.leaks += leaks_of_process(name, samples[0].census, samples[-1].census, Allowance())
    for slot in world.fleet.slots.values():
        result.counters[slot.name] = slot.counters + slot.latest
        for life in sorted({life for _, life, _ in slot.heaps}):
            result.heaps.append(heap_growth(f"{slot.name}-{life} worker", [h for _, at, h in slot.heaps if at == life]))
    answered = world.tally.total(Outcome.RIGHT)
    result.facts.append(f"{answered} right answers in {options.seconds:g} s, {answered / options.seconds:.1f} a second")
