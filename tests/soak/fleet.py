# SPDX-License-Identifier: Apache-2.0
"""Two prefill and two decode engines of a model, the events that hit them, and their replacements."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from soak.hosts import Hosts
from soak.journal import Journal
from soak.schedule import ALL, Event
from soak.site import Site
from support.engines import Engine, EngineFailed
from support.engines.engine import shared_memory

AFTERMATH = 30.0
"""Seconds for which an event at an engine explains a refusal: transports notice a dead peer that late."""

READY_SECONDS = 180.0
COUNTED = (
    "load_seconds",
    "failed_loads",
    "local_prefills",
    "expired",
    "handshakes",
    "tokens_loaded",
    "slow_loads",
    "content_digests",
    "answers",
    "followed",
    "thread_restarts",
)


@dataclass
class Slot:
    """A place in the fleet: one engine at a time, at the same address in all its lives."""

    name: str
    template: Engine
    journal: Journal
    hosts: Hosts | None
    site: Site
    kernels: tuple[str, ...]
    """Methods of the workers that replace kernels which fail in vLLM's build for CPUs."""
    life: int = field(default=0, init=False)
    """Number of its lives so far."""
    engine: Engine = field(init=False)
    up: threading.Event = field(default_factory=threading.Event, init=False)
    disturbed: list[tuple[float, float]] = field(default_factory=list, init=False)
    """Start and end of each event that hit it, in seconds of the journal."""
    meant_to_end: bool = field(default=True, init=False)
    busy: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def role(self) -> str:
        return self.name[0]

    def start(self) -> Slot:
        """Start the first or next life, without waiting."""
        self.life += 1
        log = self.template.log.with_name(f"{self.name}-{self.life}.log")
        self.engine = replace(self.template, log=log).start()
        self.journal.note("starts", engine=self.name, life=self.life, group=self.engine.pid)
        return self

    def ready(self) -> Slot:
        self.engine.ready(READY_SECONDS)
        for method in self.kernels:
            self.engine.rpc(method)
        if self.site.mounted:
            reserve_shared_memory()
        self.warm_up()
        self.meant_to_end = False
        self.up.set()
        self.journal.note("ready", engine=self.name, life=self.life, processes=self.engine.pids())
        return self

    def warm_up(self) -> None:
        """Compute the largest steps once: libraries keep the memory of their largest products, which looks like a
        leak where they come late."""
        rng = random.Random(self.life)
        prompts = [[rng.randrange(256, 500) for _ in range(2000)] for _ in range(4)]
        for answer in [self.engine.generate(prompt, max_tokens=4) for prompt in prompts]:
            answer.result(READY_SECONDS)

    def crashed(self) -> bool:
        """Whether it has ended without an event that ends it. Its front end may outlive its engine core."""
        if not self.up.is_set() or self.meant_to_end:
            return False
        return not self.engine.alive or not self.named("EngineCore")

    def note_crash(self) -> None:
        who = f"{self.name}, life {self.life}"
        self.journal.note("crash", text=f"{who}, ended by itself, see {self.engine.log.name}: {last_words(self)}")

    def explains(self, since: float, until: float) -> bool:
        """Whether an event that hit it reaches into this time."""
        return any(begun <= until and since <= ended + AFTERMATH for begun, ended in self.disturbed)

    def do(self, event: Event, stop: threading.Event) -> None:
        """Do an event, and undo it. One event at a time."""
        begun = self.journal.now()
        self.journal.note("event", kind=event.kind, engine=self.name, life=self.life, seconds=event.seconds)
        # Open to its end: a request that fails meanwhile is explained.
        self.disturbed.append((begun, float("inf")))
        with self.undoing(event):
            stop.wait(event.seconds)
        self.disturbed[-1] = (begun, self.journal.now())
        self.journal.note("event over", kind=event.kind, engine=self.name, life=self.life)

    @contextlib.contextmanager
    def undoing(self, event: Event) -> Iterator[None]:
        if event.kind.startswith("kill"):
            self.meant_to_end = True
            shared = shared_memory(self.engine.pids())
            if event.kind == "kill worker":
                for pid in self.named("Worker"):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(event.choice)  # gives vLLM time to react
            self.up.clear()
            self.engine.kill()
            for path in shared:  # that of workers which were killed before
                path.unlink(missing_ok=True)
            yield
            with self.site.starting:
                self.start().ready()
        elif event.kind == "partition" and self.hosts is not None:
            self.hosts.unplug(self.name)
            yield
            self.hosts.plug(self.name)
        else:
            pids = self.engine.pids()
            if event.kind == "stop one":
                pids = [pids[int(event.choice * len(pids))]]
            send(pids, signal.SIGSTOP)
            yield
            send(pids, signal.SIGCONT)

    def named(self, part: str) -> list[int]:
        return [pid for pid in self.engine.pids() if part in process_name(pid)]

    def count(self) -> None:
        """Note its counters; if it does not answer now, the next call notes them."""
        with contextlib.suppress(EngineFailed, TimeoutError, OSError):
            life = self.life
            found = read_counters(self.engine.metrics())
            if life == self.life:
                self.journal.note("counters", engine=self.name, life=life, counters=found)

    def has_read(self, number: int) -> Callable[[], bool]:
        """Return a function that searches its log, as an operator does, for the line that it has read so many secrets.

        The line has to be new. An engine that starts later reads what is there then.
        """
        life, log = self.life, self.engine.log
        at = log.stat().st_size

        def read() -> bool:
            if self.life != life or not self.up.is_set() or not self.engine.alive:
                return True
            with log.open("rb") as file:
                file.seek(at)
                return b"%d secrets read from" % number in file.read()

        return read


def reserve_shared_memory() -> None:
    """Allocate all of vLLM's queues between its processes, whose files are sparse: writing to them on a full /dev/shm
    would end vLLM, with or without a connector."""
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError), path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def send(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def read_counters(metrics: str) -> Counter[str]:
    """Counters of kvhma, and vLLM's preemptions, by the end of their name and their last label."""
    found: Counter[str] = Counter()
    pattern = rf"vllm:(kvhma_(?:{'|'.join(COUNTED)})|num_preemptions)(?:_total|_count)\{{([^}}]*)\}} (\S+)"
    for name, labels, value in re.findall(pattern, metrics):
        # The first two labels are vLLM's: the engine and the model.
        own = [text for key, text in re.findall(r'(\w+)="([^"]*)"', labels) if key not in ("engine", "model_name")]
        if float(value):
            found[" ".join([name.removeprefix("kvhma_"), *own])] += int(float(value))
    return found


def last_words(slot: Slot) -> str:
    """The first line of an engine's log that looks like the reason of its end."""
    with contextlib.suppress(OSError):
        found = re.findall(
            r"^.*(?:Fatal|Aborted|Error: ).*$", slot.engine.log.read_text(errors="replace"), re.MULTILINE
        )
        if found:
            return str(found[0])[:200]
    return "no reason in it"


class Fleet:
    """All slots, and the thread that executes the schedule."""

    def __init__(self, slots: list[Slot], site: Site, journal: Journal) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.site = site
        self.stop = threading.Event()
        self._journal = journal
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for slot in self.slots.values():
            slot.start()
        for slot in self.slots.values():
            slot.ready()

    def pick(self, role: str, rng: random.Random) -> Slot | None:
        """A running engine of a role, or the next one that starts; None if the run is over."""
        # One draw in every case: a client's next action must not depend on the time.
        order = [slot for slot in self.slots.values() if slot.role == role]
        if rng.random() < 0.5:
            order.reverse()
        while not self.stop.is_set():
            for slot in order:
                if slot.up.is_set():
                    return slot
            order[0].up.wait(0.5)
        return None

    def run(self, events: list[Event], until: float) -> None:
        """Execute the schedule until the end of the run, one event at a time for each engine."""
        for event in events:
            self._supervise(event.at)
            target = self.site if event.target == ALL else self.slots[event.target]
            if not target.busy.acquire(blocking=False):
                self._journal.note("event left out", kind=event.kind, engine=target.name)
                continue
            self._begin(target, event)
        self._supervise(until)

    def _supervise(self, until: float) -> None:
        """Replace engines that end by themselves, until then."""
        while (left := until - self._journal.now()) > 0 and not self.stop.wait(min(left, 0.5)):
            self.look_for_crashes()

    def _begin(self, target: Slot | Site, event: Event) -> None:
        thread = threading.Thread(target=self._do, args=(target, event), name=f"event {target.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _do(self, target: Slot | Site, event: Event) -> None:
        try:
            if isinstance(target, Slot):
                target.do(event, self.stop)
            else:
                target.do(event, list(self.slots.values()), self.stop)
        except Exception as error:
            self._journal.note("crash", text=f"{target.name}: {event.kind}: {type(error).__name__}: {error}")
        finally:
            target.busy.release()

    def look_for_crashes(self) -> None:
        """Record engines that ended by themselves, and start them again."""
        for slot in self.slots.values():
            if slot.crashed() and slot.busy.acquire(blocking=False):
                slot.note_crash()
                event = Event(self._journal.now(), "kill", slot.name, 0.0, 0.0)
                self._begin(slot, event)

    def settle(self) -> None:
        """Wait until all events are over."""
        for thread in self._threads:
            thread.join(READY_SECONDS)

    def kill(self) -> None:
        for slot in self.slots.values():
            if hasattr(slot, "engine"):
                slot.engine.kill()


def config(name: str, *, policy: str, lease: float, settings: dict[str, Any]) -> dict[str, Any]:
    """The transfer configuration of the engine of this name; it is the same in all its lives."""
    return {
        "kv_connector": "KvhmaConnector",
        "kv_connector_module_path": "kvhma.vllm",
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"kv_lease_duration": lease, "handshake_timeout": 3} | settings,
    }
