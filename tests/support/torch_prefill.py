# SPDX-License-Identifier: Apache-2.0
"""A prefill rank with torch caches in a separate process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import kvhma
from kvhma.models import Model
from kvhma.nixl import Agent
from kvhma.oracle import fill_source
from kvhma.torch import AllocatorOptions, Cache, allocate, model_specs
from support.torch_labels import regions_of

SECONDS = 240.0
"""No answer takes longer. Nearly all take milliseconds, but on a busy machine importing torch takes a minute."""


def cache_of(one: Model, layout: str, num_blocks: int, **form: Any) -> Cache:
    sizes = {name: form[name] for name in ("tp_rank", "tp_size") if name in form}
    tensors = {name: form.pop(name) for name in ("kv", "dim_order") if name in form}
    return allocate(model_specs(one, AllocatorOptions(**form), **tensors), num_blocks, layout=layout, **sizes)


def serve(pipe: Connection) -> None:
    """Execute the parent's commands until it closes the connection."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    kept = []  # memory has to outlive the agents of both processes
    with Agent("P") as agent, contextlib.suppress(EOFError):
        while (order := pipe.recv()) is not None:
            what, arguments = order
            if what == "allocate":
                kept.append(_allocate(agent, *arguments))
                pipe.send(agent.handshake_payload(kept[-1].geometry))
            else:
                pipe.send(_news(agent, *arguments))


def _allocate(agent: Agent, form: Mapping[str, Any], spans: Sequence[kvhma.Span], seed: int) -> Cache:
    cache = cache_of(**form)
    fill_source(regions_of(cache), cache.geometry, spans, seed=seed)
    agent.register(cache.geometry)
    return cache


def _news(agent: Agent, count: int) -> list[bytes]:
    """Return the agent's notifications, once there are `count`: they may arrive after the data."""
    news: list[bytes] = []
    deadline = time.monotonic() + SECONDS / 2
    while len(news) < count and time.monotonic() < deadline:
        news += [message for _, message in agent.notifications()]
        time.sleep(0.002)
    return news


class Prefill:
    """The process as a test sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def allocate(self, form: Mapping[str, Any], spans: Sequence[kvhma.Span], seed: int) -> bytes:
        """Allocate and fill a cache; return the handshake payload."""
        return self._ask("allocate", form, spans, seed)

    def news(self, count: int) -> list[bytes]:
        """Return `count` notifications."""
        return self._ask("news", count)

    def _ask(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, arguments))
        if not self._pipe.poll(SECONDS):
            raise TimeoutError("the prefill process does not answer")
        return self._pipe.recv()


@contextlib.contextmanager
def prefill_process() -> Iterator[Prefill]:
    """Start the process, and stop it at the end."""
    # NIXL has threads, which a forked process would not survive.
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=serve, args=(child,), daemon=True)
    process.start()
    child.close()
    try:
        yield Prefill(parent)
    finally:
        with contextlib.suppress(OSError):
            parent.send(None)
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join(20)
        parent.close()
