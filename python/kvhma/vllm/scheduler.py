# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler's process: it passes each of vLLM's calls to the part that handles it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhma.nixl import decode_handshake
from kvhma.vllm.config.engine_facts import EngineFacts
from kvhma.vllm.config.rooms import find_rooms
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.failures import refused
from kvhma.vllm.holds.engine_loop import STEPS_UNDER_WAY, EngineLoop
from kvhma.vllm.holds.lease_table import LeaseTable
from kvhma.vllm.holds.prefill import PrefillScheduler
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.internals import (
    check_manager,
    drop_params,
    find_take_check,
    hit_each_group,
    observe_adapters,
    reset_connector_first,
)
from kvhma.vllm.loads.decode import DecodeScheduler
from kvhma.vllm.loads.load_machine import Load
from kvhma.vllm.loads.prefix_cache import has_partial_hits, hits_may_differ
from kvhma.vllm.metadata import NOTHING, NOTHING_IDLE, LocalWorkerIdentity, StepMetadata, WorkerReport
from kvhma.vllm.options.doors import Rooms, SchedulerDoor
from kvhma.vllm.telemetry.stats import StatsCollector
from kvhma.vllm.wire.secrets import Secrets

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvhma")

_END_SECONDS = 5e-4
"""How long a step that has nothing else to do waits for a lease to end. It is short, since a new request may come."""


class KvhmaScheduler:
    """Decides which requests are loaded, and which blocks this engine holds for how long. It moves no data.

    Attributes:
        context: state that both parts share.
        prefill: requests that other engines load.
        decode: requests that this engine loads from other engines.
        hits_may_differ: whether groups may begin with prefix-cache hits of different lengths.
    """

    def __init__(self, settings: Settings, secrets: Secrets, engine: EngineFacts) -> None:
        """Start without threads; :meth:`serve` begins to answer other engines."""
        leases = LeaseTable(settings.kv_lease_duration)
        stats = StatsCollector(lambda: lease_gauges(leases), busy=leases.held)
        self.context = SchedulerContext(settings, engine, leases, secrets, stats)
        self.prefill = PrefillScheduler(self.context)
        free = self.prefill.free_ended_leases
        self._loop = EngineLoop(leases, self.context.peers, free, engine.step_timeout, engine.pp_size)
        self.decode = DecodeScheduler(self.context, self._loop.makes_progress)
        self.context.rooms = Rooms(SchedulerDoor, [room(self) for room in find_rooms("scheduler", engine.options)])
        self.hits_may_differ = True
        self._idle_steps = 0
        """Steps without work since the last step with work."""
        self._is_due = True
        """Whether the next step may have something to do besides what it computes. Each call of vLLM's that may bring
        something sets this. A step keeps it set while loads are pending or blocks are held, because other threads and
        the time bring something then, or while an option asks for it."""
        self.take_stats = stats.take

    def close(self) -> None:
        """Stop the threads."""
        self.decode.claims.renewer.close()
        self.context.peers.close()
        self.prefill.close()
        for close in self.context.rooms.close:
            close()
        self.context.prompts.close()

    def bind(self, manager: KVCacheManager, connector: object = None) -> None:
        """Use vLLM's block manager; from now on unread requests may hold only a share of its blocks.

        Args:
            manager: vLLM's.
            connector: that vLLM knows, if it has called.

        Raises:
            UnsupportedPairError: kvhma cannot exclude blocks from its prefix cache.
        """
        check_manager(manager)
        reset_connector_first(manager, self.reset_cache)
        observe_adapters(self.context.prompts.adapters.identify)
        self.context.manager = manager
        self.context.may_take = find_take_check(manager, connector)
        self.context.partial_hits = has_partial_hits(manager)
        # The null block is never held.
        blocks = manager.block_pool.num_gpu_blocks - 1
        self.context.leases.max_unread_blocks = int(blocks * self.context.settings.max_held_share)
        self.hits_may_differ = hits_may_differ(manager)
        if self.hits_may_differ:
            hit_each_group(manager, self.decode.tokens_to_load)

    def serve(self, hellos: Mapping[tuple[int, int], Any]) -> None:
        """Answer other engines from now on; `hellos` are the worker identities by pipeline and tensor rank."""
        found = {rank: hello for rank, hello in hellos.items() if isinstance(hello, LocalWorkerIdentity)}
        if found:
            self.context.geometry = decode_handshake(found[min(found)].data).geometry
            self.prefill.serve(found)
        elif hellos:
            logger.warning(
                "kvhma: this engine publishes the handshake of another connector, so it answers no other engine. Under "
                "MultiConnector list kvhma first"
            )

    def reset_cache(self) -> None:
        """Free all that this engine holds for other engines: vLLM resets its caches, as for other weights."""
        self._is_due = True
        self.prefill.reset_cache()

    def on_request_added(self, request: Request) -> None:
        """Add a new request, and check its parameters once: no later call has to."""
        params: Any = request.kv_transfer_params
        if params is None:
            return
        self._is_due = True
        if not isinstance(params, dict):
            drop_params(request)
            text = f"kv_transfer_params is of type {type(params).__name__}, expected a dictionary"
            self.decode.fail_load(Load(request), refused(text))
        elif request.abort_immediately:
            if params.get("do_remote_prefill"):
                self.decode.release_rejected(request, params)
        elif params.get("do_remote_prefill"):
            is_taken = False
            for on_request_added in self.context.rooms.on_request_added:
                is_taken |= on_request_added(request, params)
            if not is_taken:
                self.decode.add_params(Load(request), params)
        elif params.get("do_remote_decode") is True:
            self.prefill.on_request_added(request)
            for on_request_added in self.context.rooms.on_request_added:
                on_request_added(request, params)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones will be loaded, None if that is not known yet."""
        self._is_due = True
        found = self.decode.matched_tokens(request, num_computed_tokens)
        if found[0] is not None:
            for on_blocks_wanted in self.context.rooms.on_blocks_wanted:
                on_blocks_wanted(request)
        return found

    def on_blocks_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Pass on the blocks that vLLM has allocated for a request."""
        self._is_due = True
        for on_blocks_allocated in self.context.rooms.on_blocks_allocated:
            on_blocks_allocated(request)
        self.decode.on_blocks_allocated(request, blocks, num_external_tokens)

    def make_room(self) -> bool:
        """Free blocks for a request that lacks some; return whether the next step has more."""
        self._is_due = True
        return self.prefill.free_ended_leases() or any(make_room() for make_room in self.context.rooms.make_room)

    def needs_step(self) -> bool:
        """Return whether vLLM must make a step with nothing to compute; free blocks whose lease has ended."""
        is_due = self._loop.must_step()  # in any case: it notes that no step runs
        return is_due or any(needs() for needs in self.context.rooms.needs_step)

    def on_step(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what the workers must know in this step; look for nothing if nothing can have come."""
        idle = scheduler_output.total_num_scheduled_tokens == 0
        self._loop.on_step(computes=not idle)
        self._idle_steps = self._idle_steps + 1 if idle else 0
        if not self._is_due:
            return NOTHING_IDLE if idle else NOTHING
        if self._idle_steps > STEPS_UNDER_WAY and self.context.engine.may_wait:
            self._wait_for_peers()
        metadata, leases = self.decode.metadata, self.context.leases
        metadata.idle = idle
        is_asked = False
        for on_step in self.context.rooms.on_step:
            is_asked |= on_step(scheduler_output, metadata)
        if leases.held or leases.ended or leases.digests_refused:
            self.prefill.free_ended_leases()
        metadata = self.decode.take_metadata()
        self._is_due = is_asked or bool(self.decode.pending or leases.held or leases.ended)
        return metadata

    def _wait_for_peers(self) -> None:
        """Wait a little for other threads and engines: a spinning step would take Python's lock and cores from them."""
        if self.decode.pending:
            for wait_for_progress in self.context.rooms.wait_for_progress:
                wait_for_progress()
            self.decode.wait_for_progress()
        else:
            self.context.leases.wait_for_end(_END_SECONDS)

    def on_worker_results(self, connector_output: KVConnectorOutput) -> None:
        """Pass on which loads have ended."""
        report = connector_output.kv_connector_worker_meta
        if report is None and not connector_output.finished_recving:
            return
        self._is_due = True
        if report is not None and isinstance(report, WorkerReport):  # the latter asks an abstract class
            self.decode.on_worker_report(report)
            for on_results in self.context.rooms.on_results:
                on_results(report)
        for on_request_loaded in self.context.rooms.on_request_loaded:
            for name in (connector_output.finished_recving or set()) - (connector_output.failed_recving or set()):
                load = self.decode.pending.get(name)  # the call below removes it
                if load is not None and load.end is None and load.attempt is not None:
                    on_request_loaded(name, load.attempt.first_tokens)
        self.decode.on_worker_results(connector_output)

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Return the parameters by which an engine reads the blocks of an ended request; None if they are not held."""
        self._is_due, params = True, None
        is_loaded = not self.decode.on_request_finished(request)
        if is_loaded:
            params = self.prefill.on_request_finished(request, tables)
        else:
            self.prefill.discard_request(request.request_id)
        for on_request_finished in self.context.rooms.on_request_finished:
            held = on_request_finished(request, tables if is_loaded and params is None else None)
            params = held or params
        return params


def lease_gauges(leases: LeaseTable) -> dict[str, float]:
    """Return the gauges of what this engine holds for other engines."""
    usage = leases.usage()
    return {
        "held_leases": usage.requests,
        "pinned_blocks": usage.blocks,
        "oldest_unread_seconds": usage.oldest_unread_seconds,
        "held_answers": usage.expendable,
    }
