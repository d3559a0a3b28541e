# SPDX-License-Identifier: Apache-2.0
"""One run of the soak with P behind a link, two decode engines at its other end, and faults of the link as events."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from faults.schedule import fault_of, schedule
from soak.clients import KINDS, PROXIED
from soak.fleet import Slot
from soak.hosts import Hosts
from soak.journal import Journal
from soak.run import ENVIRONMENT, LEASE, Kinds, Options, Run, run_model
from soak.schedule import Event
from soak.site import Reader, Site
from support.engines import Zygote
from support.link import Fault, Link

REQUESTS = tuple(kind for kind in KINDS if kind not in PROXIED)
"""Clients are outside the two namespaces, where they do not reach the engines' HTTP servers."""


class LinkedSlot(Slot):
    """An engine at an end of the link."""

    def explains(self, since: float, until: float) -> bool:
        # There is a fault every few seconds, and TCP may send nothing for two minutes after it.
        return True


class Ends(Hosts):
    """P is one end of the link, all decode engines are the other."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def address(self, name: str) -> str:
        return self._link.addresses[name[0] == "d"]

    def env(self, name: str) -> dict[str, str]:
        return self._link.env(int(name[0] == "d"))


class LinkedSite(Site):
    """Its events are faults of the link."""

    def __init__(self, folder: Path, journal: Journal, link: Link) -> None:
        super().__init__(folder, journal, LEASE, mounted=False)
        self._link = link

    def do(self, event: Event, readers: list[Reader], stop: threading.Event) -> None:
        note = {"kind": event.kind, "engine": self.name, "life": 0}
        self._journal.note("event", **note, choice=event.choice, seconds=event.seconds)
        before = self._link.set(*fault_of(event))
        stop.wait(event.seconds)
        after = self._link.set(Fault())
        p, d = (dict(now - then) for now, then in zip(after, before, strict=True))
        self._journal.note("event over", **note, from_p=p, from_d=d)


class LinkedRun(Run):
    """A run with one prefill engine, two decode engines and faults."""

    slot_type = LinkedSlot

    def kinds(self, model: str) -> Kinds:
        caching = {"enable_prefix_caching": True}
        # Only P is read from: a reset can end the engine that serves a read (docs/security-agents.md).
        settings = {"bidirectional_kv_xfer": False}
        return {
            "p1": (1, "recompute", settings, caching),
            "d1": (1, "recompute", settings, caching),
            "d2": (1, "fail", settings, caching),
        }

    def events(self, model: str, seconds: float) -> list[Event]:
        return schedule(self.options.seed, seconds)


def run(options: Options, folder: Path) -> None:
    """Do a run. Its journal, logs and samples are in the folder."""
    with contextlib.ExitStack() as stack:
        journal = Journal(folder / "journal.jsonl")
        stack.callback(journal.close)
        link = stack.enter_context(Link(options.seed))
        site = LinkedSite(folder, journal, link)
        zygote = stack.enter_context(Zygote(folder / "zygote.log", ENVIRONMENT | {"TMPDIR": str(site.disk)}))
        run_model(LinkedRun(options, folder, journal, site, Ends(link), zygote), *options.models)
        for side, counts in zip("PD", link.counts(), strict=True):
            journal.note("fact", text=f"packets from {side}: {dict(counts)}")
