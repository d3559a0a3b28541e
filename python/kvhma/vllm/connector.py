# SPDX-License-Identifier: Apache-2.0
"""The connector as vLLM sees it: a KvhmaScheduler in the scheduler's process, a KvhmaWorker in a worker's process."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvhma._kvhma import __version__ as kvhma_version
from kvhma.errors import KvhmaError, TransferError
from kvhma.geometry import Geometry
from kvhma.nixl import Agent, AgentOptions, key_hash
from kvhma.nixl.library import PROGRESS_DELAY_US, READER_PROGRESS_DELAY_US
from kvhma.nixl.ports import listening_sockets
from kvhma.versions import VLLM, is_newer_than_tested
from kvhma.vllm.caches.formats import transferred_groups
from kvhma.vllm.caches.geometry import geometry_of
from kvhma.vllm.caches.layer_parts import RankInfo
from kvhma.vllm.config.engine_config import (
    CACHE_HIT_SOURCE,
    advertised_of,
    check_config,
    check_items,
    engine_facts,
    engine_id_of,
    identity_of,
    may_wait,
    nixl_package,
    no_answers,
    options_of,
    rank_info_of,
    side_channel_of,
    writer_of,
)
from kvhma.vllm.config.identity import ModelIdentity, encode_extra
from kvhma.vllm.config.net_devices import choose_devices, is_loopback, warn_of_open_ports
from kvhma.vllm.config.rooms import find_rooms
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.device.memory import DeviceMemory, Memory
from kvhma.vllm.metadata import LocalWorkerIdentity, StepMetadata, WorkerReport
from kvhma.vllm.peers.worker_context import WorkerContext
from kvhma.vllm.plugin import register
from kvhma.vllm.scheduler import KvhmaScheduler
from kvhma.vllm.telemetry.stats import PromMetrics, TransferStats
from kvhma.vllm.wire.lease_board import LeaseBoard
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.proofs import new_agent_key
from kvhma.vllm.wire.secrets import Secrets
from kvhma.vllm.worker import KvhmaWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvhma")

_NOTICED_SECONDS = 0.1
"""How long memory stays mapped after its connections were closed."""

_DIRECT_CALLS = {
    "on_new_request": "on_request_added",
    "get_num_new_matched_tokens": "matched_tokens",
    "update_state_after_alloc": "on_blocks_allocated",
    "build_connector_meta": "on_step",
    "update_connector_output": "on_worker_results",
    "get_kv_connector_stats": "take_stats",
}
"""Calls that vLLM makes in every step, or for every request. They reach KvhmaScheduler without a call in between."""


class KvhmaConnector(KVConnectorBase_V1, SupportsHMA):
    """Transfers KV caches of hybrid models from a prefill engine to a decode engine; the decode engine reads.

    Load it with ``--kv-transfer-config '{"kv_connector": "KvhmaConnector", "kv_role": "kv_producer"}'`` at a prefill
    engine, ``kv_consumer`` at a decode engine. If kvhma is on the path but not installed, add
    ``"kv_connector_module_path": "kvhma.vllm"``. docs/vllm-settings.md has the settings.
    """

    _cache_hit_source = CACHE_HIT_SOURCE
    _scheduler: KvhmaScheduler
    """Only in the scheduler's process."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Check the engine's configuration; in the scheduler's process also start its half.

        Raises:
            SettingsError: a setting is unknown or has a wrong value.
            UnsupportedPairError: the engine has a feature on that the connector does not support.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        check_config(vllm_config)
        check_items(vllm_config, self._settings)
        self._options = options_of(vllm_config, self._settings)
        self._secrets = Secrets.load(self._settings)
        self._engine_id = engine_id_of(vllm_config)
        self._worker: KvhmaWorker | None = None
        self._identity: ModelIdentity | None = None
        self._worker_identity: LocalWorkerIdentity | None = None
        self._report: WorkerReport | None = None
        self._caches: dict[str, torch.Tensor] = {}
        if role is KVConnectorRole.SCHEDULER:
            _warn_of_unusual(self._settings)
            facts = engine_facts(vllm_config, kv_cache_config, self._settings)
            bind = side_channel_of(vllm_config, self._settings)
            _warn_of_open_access(self._settings, self._secrets, bind)
            if bind != facts.address:
                logger.info("kvhma: the side channel listens at %s and advertises %s", bind, facts.address)
            if self._settings.bidirectional_kv_xfer and (why := no_answers(vllm_config)):
                logger.warning("kvhma: bidirectional_kv_xfer has no effect: %s", why)
            self._scheduler = scheduler = KvhmaScheduler(self._settings, self._secrets, facts)
            for call, name in _DIRECT_CALLS.items():
                if getattr(type(self), call) is getattr(KvhmaConnector, call):  # no subclass has its own
                    setattr(self, call, getattr(scheduler, name))

    # --- scheduler's side ----------------------------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether each group may have its own prefix hit; a load fills what groups with shorter hits lack."""
        return self._scheduler.hits_may_differ

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's manager of blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager, self)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the identities of the workers, and start to answer other engines."""
        self._scheduler.serve(metadata)

    def on_new_request(self, request: Request) -> None:
        """Note a new request."""
        self._scheduler.on_request_added(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load fills the blocks of every transferred group; the engine must not zero them meanwhile."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load, always in the background.

        None while that is not known: a thread makes the prompt's digest, P has not replied, or the request yields to
        running ones.
        """
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Take the blocks of a load."""
        self._scheduler.on_blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return the loads of this step, and other commands for the workers."""
        return self._scheduler.on_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' results."""
        self._scheduler.on_worker_results(connector_output)

    def has_pending_block_frees(self) -> bool:
        """Whether the next step will have more free blocks, so that vLLM need not preempt a request."""
        return self._scheduler.make_room()

    def reset_cache(self) -> bool:
        """Free all that is held for other engines; what they know of it is of an old incarnation from now on."""
        self._scheduler.reset_cache()
        return True

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must step with nothing to compute. Nothing is pushed, and held blocks are freed here."""
        return self._scheduler.needs_step()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request of an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request. The connector holds the blocks for readers, so vLLM frees the request."""
        return False, self._scheduler.on_request_finished(request, block_ids)

    # --- worker's side -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and register the caches, and start the threads that load.

        Raises:
            GeometryError: an unknown cache format; the text names the layer and what was found.
        """
        config = self._vllm_config
        self._caches = kv_caches
        place = rank_info_of(config)
        caches = self._transferred(kv_caches)
        said: dict[str, Any] = {}
        if self._kv_transfer_config.is_kv_producer or self._settings.bidirectional_kv_xfer:
            for room in find_rooms("worker", self._options):
                said |= room.share(caches, authenticated=self._secrets.enabled)
        memory = self._describe(caches, place)
        geometry = memory.geometry
        parallel = config.parallel_config
        private_key, public_key = new_agent_key()
        name = f"kvhma-{self._engine_id[:64]}-{parallel.rank}"
        agent = self._agent(name, public_key, on_host=memory.device.is_host)
        if memory.scratch is not None:
            agent.register_scratch(memory.scratch)
        agent.register(geometry)
        board = _make_board(agent, public_key)
        board_place, board_file = (None, None) if board is None else (board.place, board.file)
        # Memory keeps its weights while the engine sleeps; the files may change.
        self._identity = identity = self._identity or identity_of(config, self._settings, kv_caches)
        extra = encode_extra(identity, vllm=vllm.__version__, place=board_place, options=said)
        self._worker_identity = LocalWorkerIdentity(agent.handshake_payload(geometry, extra), private_key, board_file)
        context = WorkerContext(
            self._settings,
            self._secrets,
            self._engine_id,
            identity,
            geometry,
            agent,
            memory.device,
            rank=parallel.rank,
            may_wait=may_wait(config),
            cp_tp_size=place.cp_tp_size,
            board=board,
            options=self._options,
        )
        self._worker = KvhmaWorker(context, memory)
        kinds = ", ".join(f"{group.kind} of {group.block_size}" for group in geometry.groups)
        logger.info(
            "kvhma: %d layers in %d regions, groups: %s; worker identity of %d bytes",
            len(geometry.layers),
            len(geometry.regions),
            kinds,
            len(self._worker_identity.data),
        )

    def unregister_kv_caches(self) -> None:
        """Unregister the caches before the engine sleeps: from now on no other engine can reach them.

        Raises:
            TransferError: loads are in flight. vLLM must not unmap what they write to; its call fails.
        """
        if self._worker is not None:
            self._worker.close(idle=True)
            self._worker = self._worker_identity = None
            # A transport that copies by itself notices the closed connection only after some milliseconds. The memory
            # that it reads until then has to be mapped, and vLLM unmaps it after this call.
            time.sleep(_NOTICED_SECONDS)

    def restore_kv_caches(self) -> None:
        """Register the caches again after the engine slept, with a new agent name and key.

        vLLM then asks for the worker identity again, and gives it to the scheduler's process.
        """
        if self._worker is None and self._caches:
            self.register_kv_caches(self._caches)

    def _transferred(self, kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the caches that are transferred."""
        layout = self._kv_cache_config
        groups = (layout.kv_cache_groups[index] for index in transferred_groups(layout))
        names = {name for group in groups for name in group.layer_names}
        return {name: cache for name, cache in kv_caches.items() if name in names}

    def _describe(self, caches: dict[str, torch.Tensor], place: RankInfo) -> Memory:
        """Return the memory in which other engines read the transferred caches."""
        config, layout = self._vllm_config, self._kv_cache_config
        geometry = geometry_of(layout, caches, place, writer=writer_of(config))
        for room in find_rooms("worker", self._options):
            memory: Memory | None = room.memory_of(geometry, caches, config, layout, self._settings)
            if memory is not None:
                return memory
        return DeviceMemory(geometry, caches)

    def _agent(self, name: str, public_key: bytes, *, on_host: bool) -> Agent:
        settings = self._settings
        advertised = advertised_of(self._vllm_config, settings).host
        choose_devices(settings, advertised)
        copies = on_host and self._kv_transfer_config.is_kv_consumer
        delay = READER_PROGRESS_DELAY_US if copies else PROGRESS_DELAY_US
        options = AgentOptions(settings.nixl_backends, settings.num_threads, delay, package=nixl_package())
        before = listening_sockets()
        agent = Agent(f"{name}-{key_hash(public_key)}", options, public_key=public_key)
        warn_of_open_ports(listening_sockets() - before)
        # It costs a quarter of a second, and was measured to gain for host memory and peers of the same host only.
        if on_host and is_loopback(advertised):
            try:
                agent.prewarm_transport()
            except KvhmaError as error:
                logger.warning("kvhma: prewarm failed, so the first hand-off will be slower: %s", error)
        return agent

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the identity of this worker. The engine asks for it once it has captured its graphs."""
        if self._worker is not None:
            self._worker.be_ready()
        return self._worker_identity

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the orders of a step, before the step is launched."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata) and self._worker is not None:
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of this step; returns at once. The step may already be launched."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata) and self._worker is not None:
            self._worker.start_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before vLLM schedules their request."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: other engines read the caches in place."""

    def wait_for_save(self) -> None:
        """Let options use what the step computes: other engines read the caches in place."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata) and self._worker is not None:
            self._worker.on_step_launched(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, each once. The received requests include the failed ones."""
        if self._worker is None:
            return KVConnectorTransferResults()
        metadata = self._connector_metadata
        metadata = metadata if isinstance(metadata, StepMetadata) else StepMetadata()
        received, report = self._worker.collect(idle=metadata.idle)
        self._report = None if report.is_empty else report
        failed = {request_id for request_id, failure in report.failures.items() if not failure.optional}
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the report on loads that ended, for the scheduler."""
        report, self._report = self._report, None
        return report

    # --- both ----------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the statistics since the last call."""
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        """Stop the threads and release all resources."""
        if self.role is KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        if self._worker is not None:
            try:
                self._worker.close()
            except TransferError as error:
                logger.warning("kvhma: %s", error)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether vLLM may remap the caches: only with UCX alone, which keeps no state of a closed agent."""
        return Settings.read(kv_transfer_config.kv_connector_extra_config).nixl_backends == ("UCX",)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout to ask for: heads outside tokens, so that a slice of heads is contiguous."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config if vllm_config.kv_transfer_config else {}
        layout = Settings.read(extra).kv_cache_layout
        if layout is not None:
            return layout
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Return the statistics of another process."""
        return TransferStats() if data is None else TransferStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> PromMetrics:
        """Return the Prometheus metrics."""
        return PromMetrics(*args)


# vLLM may have loaded this by its path, but MultiConnector looks up the class of a child's statistics by its name.
register()


def _make_board(agent: Agent, public_key: bytes) -> LeaseBoard | None:
    """Make and register a lease board. If that fails, return None: only engines with our secret then read from us."""
    board: LeaseBoard | None = None
    try:
        board = LeaseBoard(public_key)
        agent.register(Geometry(regions=(board.region,), groups=(), layers=()))
    except (OSError, KvhmaError) as error:
        if board is not None:
            board.close()
        logger.warning(
            "kvhma: no lease board, so decode engines will ask for their leases, and refuse this engine if there is "
            "no secret: %s",
            error,
        )
        return None
    return board


def _warn_of_unusual(settings: Settings) -> None:
    """Log, once for each engine, an untested version of vLLM, and settings without effect."""
    if is_newer_than_tested(vllm.__version__):
        logger.warning(
            "kvhma: vLLM %s was not tested with kvhma %s; the newest tested version is %s",
            vllm.__version__,
            kvhma_version,
            VLLM[-1],
        )
    if settings.ignored:
        logger.warning("kvhma: settings of vLLM's own connector without effect here: %s", "; ".join(settings.ignored))


def _warn_of_open_access(settings: Settings, secrets: Secrets, side_channel: Address) -> None:
    """Log, once for each engine, what untrusted peers and users can reach."""
    if settings.allowed_prefill_engines is None:
        logger.info(
            "kvhma: requests may be loaded from any engine %s that their parameters name; allowed_prefill_engines can "
            "restrict this",
            "with the secret" if secrets.enabled else "on a private network",
        )
    if not secrets.enabled:
        logger.warning(
            "kvhma: the side channel at %s is open: any %s can read and write the workers' memory. "
            "Set secret_file or KVHMA_SECRET, or let only engines reach it",
            side_channel,
            "process of this host" if is_loopback(side_channel.host) else "peer that reaches it",
        )
    if settings.secret_file is not None and Path(settings.secret_file).stat().st_mode & 0o007:
        logger.warning(
            "kvhma: every user of this machine can read the secrets in %s: chmod 600 it", settings.secret_file
        )
