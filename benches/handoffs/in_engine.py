# SPDX-License-Identifier: Apache-2.0
"""Connectors that record the engine's calls, loaded by `kv_connector_module_path`.

One module for both, so that the same code records both. It is the only place that knows methods by their names: vLLM's
methods of a connector in `CALLS`, those that only a waterfall needs in `INSIDE`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as Upstream

from handoffs import DELAY
from kvhma.vllm import KvhmaConnector as Ours

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "has_pending_push_work",
)
"""vLLM's calls of a connector in every step or for every request, on both of its sides; both sides count."""

Told = Callable[[Any], bool]


def _always(_: Any) -> bool:
    return True


def _is_done(result: Any) -> bool:
    return bool(result == "DONE")


def _shows(result: Any) -> bool:
    return bool(result[1])


INSIDE: tuple[tuple[str, str, str, str, Told], ...] = (
    # stage, module, method, whether its begin or its end is meant, and of which results
    ("planned", "nixl._api", "nixl_agent.make_prepped_xfer", "begin", _always),
    ("planned", "nixl._api", "nixl_agent.initialize_xfer", "begin", _always),
    ("posted", "nixl._api", "nixl_agent.transfer", "end", _always),
    ("read", "nixl._api", "nixl_agent.transfer", "end", _is_done),  # a transport that copies inline
    ("read", "nixl._api", "nixl_agent.check_xfer_state", "end", _is_done),
    ("checked", "kvhma.vllm.peers.board_reader", "BoardReader.look", "end", _shows),
    ("checked", "kvhma.vllm.peers.lease_question", "LeaseQuestion.check", "end", _always),
)
"""Stages of a load that vLLM's calls do not show. Those of `kvhma` exist in engines of our connector only."""

_nixl_threads: set[int] = set()


def thread_ids() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


class Recorded:
    """Mixed into a connector: how long its calls took, by the clock and of the processor, and when each event came."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        _note_threads_of_backends()
        super().__init__(vllm_config, role, kv_cache_config)
        self._bench_steps: list[dict[str, Any]] = []
        self._bench_cpu: dict[int, float] = {}
        self._bench_events: list[tuple[str, str | None, float]] = []
        self._bench_ids: list[str] = []
        # Looked up here: a renamed function stops the engine at its start, not the run at its end.
        self._bench_inside = inside(ours=isinstance(self, Ours))
        for name in CALLS:
            setattr(self, name, self._bench_timed(name, getattr(self, name)))
        bind = self.bind_connector_metadata

        def bound(metadata: Any) -> None:
            self._bench_ids = ids_of_loads(metadata)
            step = {"begun": time.perf_counter(), "calls": 0.0, "ordered": {}, "loaded": {}, "failed": []}
            self._bench_steps.append(step)
            bind(metadata)

        self.bind_connector_metadata = bound

    def _bench_timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def around(*args: Any, **kwargs: Any) -> Any:
            begun, worked = time.perf_counter(), time.thread_time()
            result = call(*args, **kwargs)
            ended = time.perf_counter()
            # By the millisecond: a step of an engine that waits is shorter, and a turn begins without asking it.
            moment = int(ended * 1e3)
            self._bench_cpu[moment] = self._bench_cpu.get(moment, 0.0) + time.thread_time() - worked
            self._bench_note(name, args, result, begun, ended)
            return result

        return around

    def _bench_note(self, name: str, args: tuple[Any, ...], result: Any, begun: float, ended: float) -> None:
        if name == "on_new_request":
            self._bench_events.append(("added", args[0].request_id, begun))
        elif name == "build_connector_meta":
            self._bench_events += [("scheduled", new.req_id, begun) for new in args[0].scheduled_new_reqs]
        if not self._bench_steps:  # the scheduler's side has none
            return
        step = self._bench_steps[-1]
        step["calls"] += ended - begun
        if name == "start_load_kv":
            step["ordered"] = dict.fromkeys(self._bench_ids, begun)
            self._bench_events += [("ordered", one, begun) for one in self._bench_ids]
        elif name == "get_transfer_results":
            step["loaded"] = dict.fromkeys(result.finished_recving, ended)
            step["failed"] = list(result.failed_recving)
            self._bench_events += [("reported", one, ended) for one in result.finished_recving]

    # --- calls from the measuring process --------------------------------------------------------------------

    def bench_take(self) -> dict[str, Any]:
        """Return the record since the last call."""
        taken = {"steps": self._bench_steps, "cpu": self._bench_cpu, "events": self._bench_events}
        self._bench_steps, self._bench_cpu, self._bench_events = [], {}, []
        return taken

    def bench_watch(self) -> None:
        """Record the stages of `INSIDE` too, from now on. It costs time, so it is off while times are measured."""
        for kind, name, stage, moment, told in self._bench_inside:
            setattr(kind, name, self._bench_stage(getattr(kind, name), stage, moment, told))

    def _bench_stage(self, call: Callable[..., Any], stage: str, moment: str, told: Told) -> Callable[..., Any]:
        @functools.wraps(call)
        def around(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = call(*args, **kwargs)
            if told(result):
                self._bench_events.append((stage, None, begun if moment == "begin" else time.perf_counter()))
            return result

        return around

    def bench_process(self) -> dict[str, Any]:
        """Return this process's id, the names of its threads by their ids."""
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        return {
            "pid": os.getpid(),
            "threads": {one: python.get(one) or _native(one) for one in thread_ids()},
        }


class KvhmaConnector(Recorded, Ours):
    """Ours."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)


class NixlConnector(Recorded, Upstream):
    """VLLM's, as it is, or on even terms where `DELAY` is set: its handicaps on two cores are undone.

    Its progress thread then sleeps as long as ours, and its worker may use all cores again. On CPUs vLLM's connector
    binds the worker's main thread, which computes, to the last core of each socket: P's and D's to the same core.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        delay = vllm_config.kv_transfer_config.get_from_extra_config(DELAY, None)
        cores = os.sched_getaffinity(0)
        with progress_delay(delay) if delay is not None else contextlib.nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)
        if delay is not None:
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def progress_delay(microseconds: int) -> Iterator[None]:
    """Make the progress threads of new agents sleep for this time while they are idle.

    NIXL's Python API sets the delay to zero and makes the agent in one call. So its binding is replaced by one that
    sets the delay again in between.
    """
    names = importlib.import_module("nixl._api").nixl_agent.__init__.__globals__
    bindings = names["nixlBind"]

    class Delayed:
        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

        def nixlAgent(self, name: str, config: Any) -> Any:
            config.pthrDelay = microseconds
            return bindings.nixlAgent(name, config)

    names["nixlBind"] = Delayed()
    try:
        yield
    finally:
        names["nixlBind"] = bindings


def inside(*, ours: bool) -> list[tuple[type, str, str, str, Told]]:
    """Find the classes of `INSIDE`: what to patch, and stage, moment and results as there."""
    found = []
    for stage, module, method, moment, told in INSIDE:
        if ours or not module.startswith("kvhma."):
            owner, name = method.split(".")
            kind = getattr(importlib.import_module(module), owner)
            getattr(kind, name)
            found.append((kind, name, stage, moment, told))
    return found


def ids_of_loads(metadata: Any) -> list[str]:
    """Requests that a step orders to load, from the metadata of either connector."""
    if hasattr(metadata, "reqs_to_recv"):
        return list(metadata.reqs_to_recv)
    return [load.request_id for load in metadata.loads]


def _note_threads_of_backends() -> None:
    """Remember which threads NIXL's backends start; these threads have no names."""
    kind = importlib.import_module("nixl._api").nixl_agent
    create = kind.create_backend
    if hasattr(create, "noted"):
        return

    @functools.wraps(create)
    def noted(*args: Any, **kwargs: Any) -> Any:
        before = thread_ids()
        result = create(*args, **kwargs)
        _nixl_threads.update(thread_ids() - before)
        return result

    noted.noted = True
    kind.create_backend = noted


def _native(thread: int) -> str:
    with contextlib.suppress(OSError):
        if Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "async":
            return "UCX async"
    return "NIXL" if thread in _nixl_threads else "native"
