# SPDX-License-Identifier: Apache-2.0
"""One run: for each model answers beforehand, engines, clients, events; then a quiet phase, after which nothing may be
left over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from soak.census import MAX_TOKENS, Prompt, take_census
from soak.clients import PROXIED, Client, World
from soak.fleet import Fleet, Slot, config
from soak.hostile import Address, UntrustedClient
from soak.hosts import Hosts, NoNamespaces
from soak.journal import Journal
from soak.judge import Outcome, judge, leaks_of_pool
from soak.samples import EVERY_SECONDS, Sampler
from soak.schedule import Event, schedule
from soak.site import Site
from support.engines import Engine, EngineFailed, Zygote, engines, free_port, make_models
from support.engines.engine_process import CONSTANTS
from support.front import Proxy
from support.handoff import arguments, decode, noise, prefill
from support.tokenizer import with_tokenizer

NAMES = ("p1", "p2", "d1", "d2")
SPARED = ("p2", "d2")
HTTP_PORT = 8100
ENVIRONMENT = {
    # oneDNN caches 1,024 matrix products, and vLLM has four new ones for each number of tokens in a step. A worker with
    # a tiny model grows by 290 MiB before that stops, which would hide a leak of the connector.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    # The queues between vLLM's processes, which are allocated as a whole here: ten times this, for each process.
    "VLLM_MQ_MAX_CHUNK_BYTES_MB": "1",
    CONSTANTS: '{"kvhma.vllm.options.tickets.following.PIECE_TOKENS": 64}',  # several pieces of each prompt
}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}
LEASE = 10.0
LATEST = 24
"""Number of prompts that D is asked for again at the end."""

SETTINGS = {
    "content_digests": 0.1,
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": 0,
    "decoder_kv_blocks_ttl": LEASE,
}


@dataclass(frozen=True)
class Options:
    """The options of `python -m soak`."""

    seconds: float
    seed: int
    models: tuple[str, ...]
    clients: int
    untrusted: int
    without: tuple[str, ...]
    requests: tuple[str, ...]
    one_host: bool
    limit: float

    @property
    def proxied(self) -> bool:
        return any(kind in PROXIED for kind in self.requests)


Kinds = dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]]
"""Engines by name: ranks, policy, settings of the connector, arguments of vLLM. d1 knows the prefill engines."""


@dataclass(frozen=True)
class Run:
    """What the parts of a run share, and the engines and events that are the soak's own."""

    options: Options
    folder: Path
    journal: Journal
    site: Site
    hosts: Hosts | None
    zygote: Zygote
    slot_type: ClassVar[type[Slot]] = Slot

    def kinds(self, model: str) -> Kinds:
        caching = {"enable_prefix_caching": True}
        # Room for some of the requests only: they wait, are preempted, and vLLM reuses their blocks at once.
        few = {"num_gpu_blocks_override": 400 if model == "gemma3" else 60, "max_num_batched_tokens": 256}
        cases = {"case_folder": str(self.site.disk / "cases")}
        # All four pairs of ranks: 1 to 2, 1 to 1, 2 to 2 and 2 to 1.
        return {
            "p1": (1, "recompute", {}, caching),
            "p2": (2, "recompute", {}, {"max_num_batched_tokens": 256}),
            "d1": (2, "recompute", cases, caching | few),
            "d2": (1, "fail", cases, caching),
        }

    def events(self, model: str, seconds: float) -> list[Event]:
        return schedule(f"{self.options.seed} {model}", seconds, NAMES, SPARED, self.options.without)


def run(options: Options, folder: Path) -> None:
    """Do a run. Its journal, logs and samples are in the folder."""
    with contextlib.ExitStack() as stack:
        journal = Journal(folder / "journal.jsonl")
        stack.callback(journal.close)
        hosts = make_hosts(options, journal)
        site = Site(folder, journal, LEASE, mounted=hosts is not None)
        zygote = stack.enter_context(Zygote(folder / "zygote.log", ENVIRONMENT | {"TMPDIR": str(site.disk)}))
        made = Run(options, folder, journal, site, hosts, zygote)
        for model in options.models:
            run_model(made, model)


def make_hosts(options: Options, journal: Journal) -> Hosts | None:
    if not options.one_host:
        try:
            return Hosts(NAMES)
        except NoNamespaces as error:
            journal.note("fact", text=f"no partitions but by SIGSTOP, and nothing is ever full: {error}")
    return None


def run_model(run: Run, model: str) -> None:
    """Put engines of one model under load, and check what they hold afterwards."""
    (made,) = make_models(run.zygote, run.folder.parent / "models", model)
    folder = with_tokenizer(made, run.folder / model)
    with engines(run.zygote, folder, run.folder, plain=arguments(model)) as (plain,):
        prompts = take_census(plain, f"{run.options.seed} {model}")
    with contextlib.ExitStack() as stack:
        slots = make_slots(run, model, folder)
        fleet = Fleet(slots, run.site, run.journal)
        stack.callback(fleet.kill)
        fleet.start()
        proxy = None
        if run.options.proxied:
            prefill_urls, decode_urls = ([url_of(slot) for slot in slots if slot.role == role] for role in "pd")
            proxy = Proxy(run.folder / "proxy.log", prefill_urls, decode_urls, "--tickets")
            stack.callback(proxy.close)
            proxy.ready()
        world = World(fleet, run.journal, proxy, prompts, 2 * noise(model), LEASE, run.options.limit)
        soak(world, run, model)


def make_slots(run: Run, model: str, folder: Path) -> list[Slot]:
    hosts = run.hosts
    kinds = run.kinds(model)
    ports = {name: free_port() for name in kinds}
    where = {name: "127.0.0.1" if hosts is None else hosts.address(name) for name in kinds}
    known = {"d1": {"prefill_engines": [f"{where[name]}:{ports[name]}" for name in kinds if name[0] == "p"]}}
    secret = {"secret_file": str(run.site.file)}
    slots = []
    for name, (ranks, policy, settings, engine_args) in kinds.items():
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": where[name]} if hosts is None else hosts.env(name)
        template = Engine(
            run.zygote,
            folder,
            run.folder / f"{name}.log",
            kv_transfer_config=config(
                name, policy=policy, lease=LEASE, settings=SETTINGS | secret | known.get(name, {}) | settings
            ),
            tensor_parallel_size=ranks,
            env=env | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[name])} | (TWO_RANKS if ranks == 2 else {}),
            engine_args=arguments(model, skip_tokenizer_init=False, **engine_args),
            http=(where[name], HTTP_PORT if hosts is not None else free_port()) if run.options.proxied else None,
        )
        # vLLM's build for CPUs ends with a prefix cache of states.
        kernels = ("e2e_mamba_2",) if "nemotron" in model else ()
        slots.append(run.slot_type(name, template, run.journal, hosts, run.site, kernels))
    return slots


def soak(world: World, run: Run, model: str) -> None:
    """The load itself, with engines that are ready."""
    fleet, journal, options = world.fleet, world.journal, run.options
    slots = list(fleet.slots.values())
    seconds, seed = options.seconds / len(options.models), f"{options.seed} {model}"
    sampler = Sampler(slots, world.proxy, journal, run.folder / "samples.csv")
    sampler.start()
    journal.note("load", model=model)
    begun = journal.now()
    events = [replace(event, at=event.at + begun) for event in run.events(model, seconds)]
    clients = [Client(world, seed, number, options.requests) for number in range(options.clients)]
    addresses = [address_of(slot) for slot in slots]
    untrusted = [UntrustedClient(addresses, seed, n, fleet.stop) for n in range(options.untrusted)]
    counting = threading.Thread(target=count_often, args=(fleet,), daemon=True)
    for thread in (*clients, *untrusted, counting):
        thread.start()
    fleet.run(events, begun + seconds)
    journal.note("load over", model=model)
    fleet.look_for_crashes()
    fleet.stop.set()
    fleet.settle()
    for client in clients:
        client.join(3 * world.limit)
        if client.is_alive():
            journal.note("leak", text=f"{client.name} does not end")
    journal.note("untrusted clients", of=sum((client.done for client in untrusted), Counter[str]()))
    back = check_afterwards(world)
    time.sleep(2 * EVERY_SECONDS)  # the last samples are of engines that are asked nothing
    sampler.stop()
    journal.note("model over", model=model, back=f"{back} of {len(slots)} engines")


def address_of(slot: Slot) -> Address:
    env = slot.template.env
    return env["VLLM_NIXL_SIDE_CHANNEL_HOST"], int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"])


def url_of(slot: Slot) -> str:
    assert slot.template.http is not None
    host, port = slot.template.http
    return f"http://{host}:{port}"


def count_often(fleet: Fleet) -> None:
    while not fleet.stop.wait(3):
        for slot in fleet.slots.values():
            if slot.up.is_set():
                slot.count()


def check_afterwards(world: World) -> int:
    """After the last event: what D has from hand-offs is right, every pair hands off again, all blocks and requests are
    released. Return the number of engines that hold nothing."""
    slots = world.fleet.slots
    prefilling, decoding = ([slot for slot in slots.values() if slot.role == role] for role in "pd")
    if world.proxy is not None and not world.proxy.alive:
        world.journal.note("crash", text="the proxy ended by itself")
    with attempt(world, "d1 and d2 alone"):
        for d in decoding:
            ask_all_alone(world, d)
    for p in prefilling:
        for d in decoding:
            with attempt(world, f"{p.name} to {d.name} afterwards"):
                ask_parts_alone(world, p, d)
    end = time.monotonic() + 2 * world.lease + 30
    back = 0
    for slot in slots.values():
        with attempt(world, slot.name):
            back += all_given_back(world, slot, end)
    return back


@contextlib.contextmanager
def attempt(world: World, what: str) -> Iterator[None]:
    try:
        yield
    except (EngineFailed, TimeoutError, AssertionError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        world.journal.note("crash", text=f"{what}: {type(error).__name__}: {first}")


def ask_all_alone(world: World, d: Slot) -> None:
    """Ask D for prompts that it got by a hand-off, and their parts; the latest first: its blocks are still there."""
    handed = {tuple(prompt.tokens): prompt for prompt in world.handed.get(d.name, ())}
    for prompt in list(reversed(handed.values()))[:LATEST]:
        judge_alone(world, d, [prompt, *prompt.parts])


def ask_parts_alone(world: World, p: Slot, d: Slot) -> None:
    """Let P compute one prompt for a D that has nothing, and ask D for the parts behind each of its blocks."""
    until_empty(d, time.monotonic() + 2 * world.lease + 30)
    prompt = world.prompts[0]
    # The first may find a connection that an event has cut.
    for last in (False, True):
        answer = decode(d.engine, prompt.tokens, prefill(p.engine, prompt.tokens))
        verdict = judge(answer, prompt.plain, world.noise, limit=world.limit)
        world.journal.note(verdict.outcome.value, kind="afterwards", cause=verdict.cause, explained=not last)
        if verdict.outcome is not Outcome.REFUSED:
            break
    else:
        raise EngineFailed(verdict.cause)
    hits = judge_alone(world, d, list(prompt.parts))
    if not hits:
        raise EngineFailed("no question hits a block of the hand-off")


def judge_alone(world: World, d: Slot, prompts: list[Prompt]) -> int:
    """Ask D without parameters; return the number of tokens that it had."""
    asked = [d.engine.generate(prompt.tokens, max_tokens=MAX_TOKENS) for prompt in prompts]
    hits = 0
    for prompt, future in zip(prompts, asked, strict=True):
        verdict = judge(future, prompt.plain, world.noise, limit=world.limit)
        cached = (future.result().num_cached_tokens or 0) if verdict.outcome is Outcome.RIGHT else 0
        hits += cached
        world.journal.note(
            verdict.outcome.value,
            kind="alone afterwards",
            cause=verdict.cause,
            explained=False,
            engines=[d.name],
            tokens=len(prompt.tokens),
            cached=cached,
        )
    return hits


def until_empty(slot: Slot, end: float) -> list[str]:
    """Wait until nothing is held, and return what is; vLLM empties the prefix cache only if no block is in use."""
    while (leaks := leaks_of_pool(slot.name, slot.engine.state())) and time.monotonic() < end:
        time.sleep(0.2)
    if not leaks and not slot.engine.core("reset_prefix_cache"):
        leaks = [f"{slot.name}: the prefix cache cannot be emptied"]
    return leaks


def all_given_back(world: World, slot: Slot, end: float) -> bool:
    leaks = until_empty(slot, end)
    for leak in leaks:
        world.journal.note("leak", text=leak)
    slot.count()
    world.journal.note("quiet", engine=slot.name, life=slot.life)
    return not leaks
