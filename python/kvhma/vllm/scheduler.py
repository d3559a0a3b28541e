# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in the scheduler's process: what to load, what to keep for others, and for how long."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import kvhma
from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.nixl import decode_hello
from kvhma.vllm.leases import Courier, Ledger
from kvhma.vllm.metadata import Load, StepMetadata, WorkerHello, WorkerReport, later
from kvhma.vllm.params import Address, Claim, Remote, new_nonce
from kvhma.vllm.prefix_cache import check_manager, hit_blocks, never_cache_before
from kvhma.vllm.settings import Settings
from kvhma.vllm.side_channel import Listener
from kvhma.vllm.stats import TransferStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvhma")


@dataclass(frozen=True)
class EngineFacts:
    """What the scheduler's half has to know of its engine.

    Attributes:
        engine_id: name of the engine.
        address: where its listener binds and other engines reach it.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        has_state: whether any group keeps recurrent state, which is good for one position only.
        backoff: tokens at the end of a prompt that D computes itself.
        recompute: whether a load that failed is recomputed instead of failing the request.
        host_staged: whether blocks go through host memory.
        transfer_groups: which groups of the engine take part.
        drafted_state: whether decoding leaves a state where the drafts that were accepted ended: in another slot, some
            rows further, or in a ring. Only behind a prompt it is where another engine looks for it.
    """

    engine_id: str
    address: Address
    tp_size: int
    pp_size: int
    has_state: bool
    backoff: int
    recompute: bool
    host_staged: bool
    transfer_groups: tuple[int, ...]
    drafted_state: bool = False


_RENEWALS = 6
"""In the time of a lease: some may be lost."""


class Stage(enum.Enum):
    """How far a pull is."""

    WANTED = enum.auto()
    LOADING = enum.auto()


@dataclass
class Pull:
    """A request that is to be loaded from P. It is forgotten once it is loaded, given up or finished.

    Attributes:
        remote: what P said; None if it could not be read.
        refusal: why it cannot be loaded; empty if it can.
        num_tokens: tokens to have afterwards.
        tries: loads so far.
        finished: whether the request ended while it was loading.
        reader: random number by which P knows this reader of its blocks.
        first_tokens: of the ranks that have loaded, see `WorkerReport`.
    """

    remote: Remote | None
    refusal: str = ""
    num_tokens: int = 0
    stage: Stage = Stage.WANTED
    tries: int = 0
    finished: bool = False
    reader: int = field(default_factory=new_nonce)
    first_tokens: dict[int, int] = field(default_factory=dict)


class SchedulerHalf:
    """Decides; moves nothing and waits for nothing."""

    def __init__(self, settings: Settings, engine: EngineFacts) -> None:
        """Start the courier; the listener starts with the workers' hellos."""
        self._settings = settings
        self._engine = engine
        self._instance = new_nonce()
        self._ledger = Ledger(settings.kv_lease_duration)
        self._courier = Courier(timeout=settings.handshake_timeout, max_peers=settings.max_peers)
        self._listener: Listener | None = None
        self._geometry: Geometry | None = None
        self._pulls: dict[str, Pull] = {}
        self._metadata = StepMetadata()
        self._stats = TransferStats()
        self._staging: dict[str, Request] = {}
        self.manager: KVCacheManager | None = None

    def close(self) -> None:
        """Stop the threads."""
        self._courier.close()
        if self._listener is not None:
            self._listener.close()

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's manager of blocks.

        Raises:
            UnsupportedPairError: blocks cannot be kept out of its prefix cache.
        """
        check_manager(manager)
        self.manager = manager

    def serve(self, hellos: Mapping[tuple[int, int], Any]) -> None:
        """Take the hellos of the workers, by pipeline and tensor rank, and answer other engines from now on."""
        found = {rank: hello.data for rank, hello in hellos.items() if isinstance(hello, WorkerHello)}
        if not found:
            return
        self._geometry = decode_hello(found[min(found)]).geometry
        if self._listener is None:
            self._listener = Listener(
                self._engine.address,
                engine_id=self._engine.engine_id,
                instance=self._instance,
                hellos=found,
                desk=self._ledger,
            )

    # --- both sides ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Look at a new request once: whatever its parameters are, nothing later has to check them."""
        params: Any = request.kv_transfer_params
        if params is None:
            return
        if not isinstance(params, dict):
            # vLLM itself would stumble over it.
            request.kv_transfer_params = None
            self._pulls[request.request_id] = Pull(
                None, f"kv_transfer_params is of type {type(params).__name__}, expected a dictionary"
            )
            return
        if params.get("do_remote_decode") is True and not params.get("do_remote_prefill"):
            self._stop_early(request)
            if self._engine.host_staged:
                self._staging[request.request_id] = request
        elif params.get("do_remote_prefill"):
            self._pulls[request.request_id] = self._read(request, params)

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the workers have to know in this step."""
        metadata, self._metadata = self._metadata, StepMetadata()
        released, expired = self._ledger.strike_off()
        metadata.sent = released + expired
        metadata.idle = output.total_num_scheduled_tokens == 0
        self._stats.count("expired", len(expired))
        if expired:
            logger.warning("kvhma: the leases of %d requests ended before anybody read them: %s", len(expired), expired)
        if self._staging:
            metadata.stage = self._finished_prefills(output)
        return metadata

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Take note that a request has ended; P keeps its blocks if a decode engine is to read them."""
        request_id = request.request_id
        self._staging.pop(request_id, None)
        pull = self._pulls.get(request_id)
        if pull is not None:
            if pull.stage is Stage.LOADING:
                pull.finished = True
            else:
                self._let_go(request_id)
            return False, None
        params = request.kv_transfer_params
        if not isinstance(params, dict) or params.get("do_remote_decode") is not True:
            return False, None
        if request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED") or self._geometry is None:
            return False, None
        tokens = request.num_computed_tokens
        if not self._engine.has_state:
            # Behind the prompt is what P sampled itself, which D does not take over.
            tokens = min(tokens, request.num_prompt_tokens)
        elif self._engine.drafted_state and tokens > request.num_prompt_tokens:
            logger.warning(
                "kvhma: request %s is not handed on: it decoded %d tokens with speculative_config, and the state of a "
                "recurrent layer is then where the accepted drafts ended; ask P for max_tokens=1",
                request.request_id,
                tokens - request.num_prompt_tokens,
            )
            return False, None
        try:
            spans = kvhma.live_spans(self._geometry, None, self._transfer_tables(tables))
        except KvhmaError:
            logger.exception("kvhma: the blocks of %s cannot be handed on", request_id)
            return False, None
        remote = Remote(
            address=self._engine.address,
            engine_id=self._engine.engine_id,
            instance=self._instance,
            hold=self._ledger.hold(request_id),
            lease=self._settings.kv_lease_duration,
            num_tokens=tokens,
            digest="",
            spans=tuple(spans),
            tp_size=self._engine.tp_size,
        )
        sealed = replace(remote, digest=remote.seal(request.all_token_ids[:tokens]))
        return True, sealed.to_params(pp_size=self._engine.pp_size)

    def take_stats(self) -> TransferStats | None:
        """Return what was counted since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats

    # --- P -------------------------------------------------------------------------------------------------

    def _stop_early(self, request: Request) -> None:
        """Leave the last tokens of the prompt to D, which derives the state that follows from the one before."""
        backoff = self._engine.backoff
        tokens = request.prompt_token_ids
        params = request.kv_transfer_params or {}
        if (
            not backoff
            or request.num_prompt_tokens <= backoff
            or params.get("_kvhma_stopped_early")
            # D will not load anything for a request that may not use cached blocks.
            or request.get_skip_reading_prefix_cache()
        ):
            return
        if tokens is not None:
            del tokens[-backoff:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-backoff]
        else:
            return
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        params["_kvhma_stopped_early"] = True

    def _finished_prefills(self, output: SchedulerOutput) -> list[tuple[Span, ...]]:
        """Blocks of the requests whose prompt is computed in this step, before anybody is told of them."""
        staged = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._staging.get(request_id)
            if request is None or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            del self._staging[request_id]
            if self._geometry is not None and self.manager is not None:
                tables = self._transfer_tables(self.manager.get_block_ids(request_id))
                staged.append(tuple(kvhma.live_spans(self._geometry, None, tables)))
        return staged

    # --- D -------------------------------------------------------------------------------------------------

    def _read(self, request: Request, params: dict[str, Any]) -> Pull:
        if params.get("do_remote_decode"):
            return Pull(None, "kv_transfer_params: do_remote_prefill and do_remote_decode are both set")
        try:
            remote = Remote.from_params(params, num_prompt_tokens=request.num_prompt_tokens)
        except RequestError as error:
            return Pull(None, str(error))
        most = request.num_prompt_tokens - self._engine.backoff
        groups = 0 if self._geometry is None else len(self._geometry.groups)
        pull = Pull(remote, num_tokens=remote.num_tokens)
        # From here on P is told when its blocks are not wanted any more, whatever else is wrong.
        self._courier.track(remote.address, Claim(remote.hold, pull.reader), every=remote.lease / _RENEWALS)
        if request.num_prompt_tokens <= self._engine.backoff:
            pull.num_tokens = 0
        elif remote.num_tokens > most:
            pull.refusal = (
                f"P computed {remote.num_tokens} tokens, of this prompt at most {most} can be taken over: the last "
                f"{self._engine.backoff} are computed here, for a window or a state or for num_speculative_tokens; "
                "P has to leave as many, which follows from equal settings"
            )
        elif remote.seal(request.all_token_ids[: remote.num_tokens]) != remote.digest:
            pull.refusal = (
                f"kvhma.digest is {remote.digest!r}, these parameters and the first {remote.num_tokens} tokens have "
                "another: P computed another prompt, or the parameters were changed on the way"
            )
        elif not groups:
            pull.refusal = "this engine has no caches that were registered"
        return pull

    def matched_tokens(self, request: Request, local: int) -> tuple[int, bool]:
        """Return how many tokens beyond the `local` ones will be loaded. Changes nothing: it is asked again."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return 0, False
        # A refusal takes the way of a load that failed, so that the engine's policy decides about it.
        wanted = (request.num_prompt_tokens if pull.refusal else pull.num_tokens) - local
        return (wanted, True) if wanted > 0 else (0, False)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Take the blocks that a load is to fill; without external tokens there is nothing to load."""
        request_id = request.request_id
        pull = self._pulls.get(request_id)
        if pull is None or pull.stage is not Stage.WANTED:
            return
        if external <= 0:
            self._let_go(request_id)
            return
        pull.stage = Stage.LOADING
        pull.tries += 1
        pull.first_tokens = {}
        if not pull.refusal:
            try:
                self._metadata.loads.append(self._load(request_id, pull, blocks, external))
            except KvhmaError as error:
                pull.refusal = str(error)
        if pull.refusal:
            logger.warning("kvhma: request %s cannot be loaded: %s", request_id, pull.refusal)
            self._metadata.refusals[request_id] = pull.refusal

    def _load(self, request_id: str, pull: Pull, blocks: KVCacheBlocks, external: int) -> Load:
        if pull.remote is None or self._geometry is None:
            raise RequestError("there is nothing to load it from")
        cached = pull.num_tokens - external
        tables = self._transfer_tables([[block.block_id for block in table] for table in blocks.blocks])
        # Each group has a hit of its own: the one that vLLM names is that of full attention.
        hits = [hit_blocks(blocks.blocks[group]) for group in self._engine.transfer_groups]
        hits = [0 if group.kind == "ssm" else hit for group, hit in zip(self._geometry.groups, hits, strict=True)]
        spans = kvhma.live_spans(self._geometry, pull.num_tokens, tables, hits)
        return Load(request_id, pull.remote, pull.reader, pull.num_tokens, cached, tuple(spans))

    def results(self, output: KVConnectorOutput) -> None:
        """Take note of what the workers have ended."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = WorkerReport()
        failed = output.failed_recving or set()
        for request_id, tokens in report.first_tokens.items():
            if (pull := self._pulls.get(request_id)) is not None:
                pull.first_tokens = later(pull.first_tokens, tokens)
        for request_id, failure in report.failures.items():
            pull = self._pulls.get(request_id)
            if pull is not None and not failure.passing:
                pull.refusal = pull.refusal or failure.text
        for request_id in output.finished_recving or ():
            pull = self._pulls.get(request_id)
            if pull is None:
                continue
            if request_id not in failed and not pull.finished:
                self._keep_unfilled_out(request_id, pull.first_tokens)
            again = request_id in failed and not pull.refusal and pull.tries <= self._settings.load_retries
            if again and not pull.finished and self._engine.recompute:
                pull.stage = Stage.WANTED
            else:
                self._let_go(request_id)

    def _keep_unfilled_out(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        if self.manager is not None:
            for group, token in first_tokens.items():
                never_cache_before(self.manager, request_id, self._engine.transfer_groups[group], token)

    def _let_go(self, request_id: str) -> None:
        pull = self._pulls.pop(request_id)
        if pull.remote is not None:
            self._courier.release(pull.remote.address, Claim(pull.remote.hold, pull.reader))

    def _transfer_tables(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Choose the block tables of the groups that take part."""
        groups = self._engine.transfer_groups
        if groups and len(tables) <= max(groups):
            raise RequestError(f"{len(tables)} block tables, group {max(groups)} takes part")
        return [list(tables[index]) for index in groups]
