# SPDX-License-Identifier: Apache-2.0
"""The half of the connector in the scheduler's process: what to load, what to keep for others, and for how long."""

from __future__ import annotations

import enum
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import first_entries
from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.geometry import Geometry, Span
from kvhma.nixl import decode_handshake
from kvhma.planning import live_spans
from kvhma.vllm.metadata import Load, StepMetadata, WorkerHello, WorkerReport, later
from kvhma.vllm.scheduler.lease_renewer import LeaseRenewer
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.scheduler.prefix_cache import check_manager, hit_blocks, hits_may_differ, never_cache_before
from kvhma.vllm.scheduler.prompt import prompt_digest
from kvhma.vllm.settings import Settings
from kvhma.vllm.stats import TransferStats
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Address, LeaseClaim, LeaseKey, PrefillParams, new_nonce
from kvhma.vllm.wire.server import Listener

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
        has_windows: whether any group lets go of blocks that windows or chunks have passed.
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
    has_windows: bool = False


_RENEWALS = 6
"""In the time of a lease: some may be lost."""

_CHILD = re.compile(r"\d+_")
"""How vLLM begins the name of one of several samples of a prompt; a client may choose such a name too."""

_SEEN_HOLDS = 4096
"""Requests at P that are remembered, to know those that come again."""


class LoadState(enum.Enum):
    """How far a pull is."""

    WANTED = enum.auto()
    LOADING = enum.auto()


@dataclass
class PendingLoad:
    """A request that is to be loaded from P. It is forgotten once it is loaded, given up or finished.

    Attributes:
        remote: what P said; None if it could not be read.
        refusal: why it cannot be loaded; empty if it can.
        num_tokens: tokens to have afterwards.
        tries: loads so far.
        finished: whether the request ended while it was loading.
        aborted: whether its client wants no answer any more.
        ask_first: whether others read the same blocks, so that P has to say that it holds them before they are loaded.
        since: when the request was added, on the monotonic clock.
        asked: when vLLM first wanted blocks for it; None before.
        reader: random number by which P knows this reader of its blocks.
        first_tokens: of the ranks that have loaded, see `WorkerReport`.
    """

    remote: PrefillParams | None
    refusal: str = ""
    num_tokens: int = 0
    stage: LoadState = LoadState.WANTED
    tries: int = 0
    finished: bool = False
    aborted: bool = False
    ask_first: bool = False
    since: float = field(default_factory=time.monotonic)
    asked: float | None = None
    reader: int = field(default_factory=new_nonce)
    first_tokens: dict[int, int] = field(default_factory=dict)


class KvhmaScheduler:
    """Decides; moves nothing and waits for nothing."""

    def __init__(self, settings: Settings, engine: EngineFacts) -> None:
        """Start the courier; the listener starts with the workers' hellos."""
        self._settings = settings
        self._engine = engine
        self._instance = new_nonce()
        self._ledger = LeaseTable(settings.kv_lease_duration)
        self._courier = LeaseRenewer(timeout=settings.handshake_timeout, max_peers=settings.max_peers)
        self._listener: Listener | None = None
        self._geometry: Geometry | None = None
        self._pulls: dict[str, PendingLoad] = {}
        self._shared: OrderedDict[LeaseKey, bool] = OrderedDict()
        """Whether a request at P has more than one reader here, or may have."""
        self._metadata = StepMetadata()
        self._stats = TransferStats()
        self._staging: dict[str, Request] = {}
        self._staged: dict[str, int] = {}
        """How often a request had been preempted when its blocks were copied to host memory."""
        self.manager: KVCacheManager | None = None
        self.hits_may_differ = True

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
        self.hits_may_differ = hits_may_differ(manager)

    def serve(self, hellos: Mapping[tuple[int, int], Any]) -> None:
        """Take the hellos of the workers, by pipeline and tensor rank, and answer other engines from now on."""
        found = {rank: hello.data for rank, hello in hellos.items() if isinstance(hello, WorkerHello)}
        if not found:
            return
        self._geometry = decode_handshake(found[min(found)]).geometry
        if self._listener is None:
            self._listener = Listener(
                self._engine.address,
                engine_id=self._engine.engine_id,
                incarnation_id=self._instance,
                hellos=found,
                leases=self._ledger,
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
            self._pulls[request.request_id] = PendingLoad(
                None, f"kv_transfer_params is of type {type(params).__name__}, expected a dictionary"
            )
            return
        if params.get("do_remote_decode") is True and not params.get("do_remote_prefill"):
            self._stop_early(request)
            if self._engine.host_staged:
                self._staging[request.request_id] = request
        elif params.get("do_remote_prefill"):
            pull = self._read(request, params)
            if pull is not None:
                self._pulls[request.request_id] = pull

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the workers have to know in this step."""
        metadata, self._metadata = self._metadata, StepMetadata()
        released, expired = self._ledger.drain_ended()
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
        self._staged.pop(request_id, None)
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.finished = True
            pull.aborted = request.status.name == "FINISHED_ABORTED"
            if pull.stage is not LoadState.LOADING:
                self._let_go(request_id, read=pull.aborted)
            return False, None
        params = request.kv_transfer_params
        if not isinstance(params, dict) or params.get("do_remote_decode") is not True:
            return False, None
        if request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED") or self._geometry is None:
            return False, None
        remote = self._hand_over(request, tables, self._geometry)
        return (False, None) if remote is None else (True, remote.to_params(pp_size=self._engine.pp_size))

    def _hand_over(self, request: Request, tables: Sequence[Sequence[int]], geometry: Geometry) -> PrefillParams | None:
        """Keep the blocks of a request that was computed here; None if a decode engine could not use them."""
        tokens = self._tokens_to_hand_over(request)
        if tokens is None:
            return None
        spans = self._spans_to_hand_over(request.request_id, tokens, tables, geometry)
        if spans is None:
            return None
        return PrefillParams(
            address=self._engine.address,
            engine_id=self._engine.engine_id,
            incarnation_id=self._instance,
            lease_key=self._ledger.add(request.request_id),
            lease=self._settings.kv_lease_duration,
            num_tokens=tokens,
            prompt=self._prompt_digest(request, tokens),
            spans=tuple(spans),
            tp_size=self._engine.tp_size,
        )

    def _tokens_to_hand_over(self, request: Request) -> int | None:
        """Return how many tokens the caches of a request hold for a decode engine; None if its state is elsewhere."""
        tokens: int = request.num_computed_tokens
        if not self._engine.has_state:
            # What follows, P sampled itself or D computes itself; a cache of tokens is good for fewer of them too.
            tokens = min(tokens, request.num_prompt_tokens - self._not_left_yet(request))
        elif self._engine.drafted_state and tokens > request.num_prompt_tokens:
            logger.warning(
                "kvhma: request %s is not handed on: it decoded %d tokens with speculative_config, and the state of a "
                "recurrent layer is then where the accepted drafts ended; ask P for max_tokens=1",
                request.request_id,
                tokens - request.num_prompt_tokens,
            )
            return None
        elif self._engine.host_staged and tokens > request.num_prompt_tokens:
            logger.warning(
                "kvhma: request %s is not handed on: it decoded %d tokens, and the state of a recurrent layer in host "
                "memory (kv_buffer_device, host_staged) is that of its prompt; ask P for max_tokens=1",
                request.request_id,
                tokens - request.num_prompt_tokens,
            )
            return None
        return tokens

    def _spans_to_hand_over(
        self, request_id: str, tokens: int, tables: Sequence[Sequence[int]], geometry: Geometry
    ) -> list[Span] | None:
        """Return all blocks that are still held; None if a window or a chunk behind `tokens` begins before them."""
        try:
            spans = live_spans(geometry, None, self._transfer_tables(tables))
            needed = first_entries(geometry.core, tokens, [0] * len(spans))
        except KvhmaError:
            logger.exception("kvhma: the blocks of %s cannot be handed on", request_id)
            return None
        if any(span.first > first for span, first in zip(spans, needed, strict=True)):
            logger.warning(
                "kvhma: request %s is not handed on: the window of token %d begins in a block that is not held any "
                "more, since more tokens than that were computed here; its decode engine computes it itself",
                request_id,
                tokens,
            )
            return None
        return spans

    def _prompt_digest(self, request: Request, num_tokens: int) -> str:
        # Who names the model says that the adapters of one name are the same too, wherever they lie.
        return prompt_digest(request, num_tokens, adapter_paths=self._settings.model_id is None)

    def take_stats(self) -> TransferStats | None:
        """Return what was counted since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats

    # --- P -------------------------------------------------------------------------------------------------

    def _stop_early(self, request: Request) -> None:
        """Leave the last tokens of the prompt to D, which derives the state that follows from the one before."""
        backoff = self._not_left_yet(request)
        tokens = request.prompt_token_ids
        params = request.kv_transfer_params or {}
        # Of log-probabilities of the prompt none may be missing.
        if not backoff or request.get_skip_reading_prefix_cache():
            return
        if tokens is None and request.prompt_embeds is None:
            return
        if tokens is not None:
            del tokens[-backoff:]
        # A prompt may have both, and vLLM's worker expects that they are of one length.
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-backoff]
            if getattr(request, "prompt_is_token_ids", None) is not None:
                request.prompt_is_token_ids = request.prompt_is_token_ids[:-backoff]
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        # A copy: where engine and front end are one process, the samples of a prompt have one dictionary.
        request.kv_transfer_params = {**params, "_kvhma_stopped_early": True}

    def _not_left_yet(self, request: Request) -> int:
        """Return how many of the last tokens of a prompt D computes, if P was not made to stop before them."""
        stopped = (request.kv_transfer_params or {}).get("_kvhma_stopped_early")
        backoff = self._engine.backoff
        return backoff if not stopped and request.num_prompt_tokens > backoff else 0

    def _finished_prefills(self, output: SchedulerOutput) -> list[tuple[Span, ...]]:
        """Blocks of the requests whose prompt is computed in this step, before anybody is told of them.

        Once more after each preemption: the request has other blocks then, of which it may have hit all.
        """
        staged = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._staging.get(request_id)
            if request is None or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            if self._staged.get(request_id) == request.num_preemptions:
                continue
            self._staged[request_id] = request.num_preemptions
            if self._geometry is not None and self.manager is not None:
                tables = self._transfer_tables(self.manager.get_block_ids(request_id))
                staged.append(tuple(live_spans(self._geometry, None, tables)))
        return staged

    # --- D -------------------------------------------------------------------------------------------------

    def _read(self, request: Request, params: dict[str, Any]) -> PendingLoad | None:
        """Return what is to be loaded, None if nothing is. P hears of a request only if the parameters are of it."""
        if params.get("do_remote_decode"):
            return PendingLoad(None, "kv_transfer_params: do_remote_prefill and do_remote_decode are both set")
        try:
            remote = PrefillParams.from_params(params, num_prompt_tokens=request.num_prompt_tokens)
            if self._prompt_digest(request, remote.num_tokens) != remote.prompt:
                raise OtherPromptError(
                    f"of its first {remote.num_tokens} tokens or its adapter, items or salt, some are others at P"
                )
        except OtherPromptError as error:
            self._compute_here(request.request_id, "other_prompt", str(error))
            return None
        except KvhmaError as error:
            return PendingLoad(None, str(error))
        if self._geometry is None or not self._geometry.groups:
            return PendingLoad(None, "this engine has no caches that were registered")
        most = request.num_prompt_tokens - self._engine.backoff
        pull = PendingLoad(
            remote, num_tokens=min(remote.num_tokens, most), ask_first=self._is_shared(request, remote.lease_key)
        )
        if remote.num_tokens > most and (self._engine.has_state or self._engine.has_windows):
            text = (
                f"P's states and windows are those of {remote.num_tokens} tokens, of this prompt at most {most} can be "
                f"taken over: the last {self._engine.backoff} are computed here, for a state, for a window or for "
                "num_speculative_tokens, and P leaves as many with equal settings and without prompt_logprobs"
            )
            self._compute_here(request.request_id, "state_ahead", text)
            pull.num_tokens = 0
        if pull.num_tokens <= 0:
            self._tell(pull, read=True)
            return None
        self._courier.track(remote.address, LeaseClaim(remote.lease_key, pull.reader), every=remote.lease / _RENEWALS)
        return pull

    def _is_shared(self, request: Request, hold: LeaseKey) -> bool:
        """Whether other requests may come, or have come, with the same parameters."""
        known = hold in self._shared
        self._shared[hold] = known or _CHILD.match(request.request_id) is not None
        self._shared.move_to_end(hold)
        if len(self._shared) > _SEEN_HOLDS:
            self._shared.popitem(last=False)
        return self._shared[hold]

    def _compute_here(self, request_id: str, reason: str, text: str) -> None:
        logger.warning("kvhma: request %s is computed here: %s", request_id, text)
        self._stats.count(f"computed_{reason}")

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `local` ones will be loaded, None if that is not known yet.

        It is asked again, and says the same unless P has answered meanwhile.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return 0, False
        if pull.ask_first and not pull.refusal and pull.remote is not None:
            held = self._courier.held(pull.remote.address, LeaseClaim(pull.remote.lease_key, pull.reader))
            # A P that does not answer is found by the load, and the engine's policy decides.
            if held is None and time.monotonic() - pull.since < self._settings.handshake_timeout:
                return None, False
            if held is False:
                text = "others have read what P held for it, and its lease has ended"
                self._compute_here(request.request_id, "late_sibling", text)
                self._let_go(request.request_id, read=True)
                return 0, False
        if pull.remote is not None and not pull.refusal and self._stuck(pull):
            text = "it waits for blocks that this engine keeps for others, who may wait for those that it claims"
            self._compute_here(request.request_id, "no_room", text)
            self._let_go(request.request_id, read=True)
            return 0, False
        # A refusal takes the way of a load that failed, so that the engine's policy decides about it.
        wanted = (request.num_prompt_tokens if pull.refusal else pull.num_tokens) - local
        return (wanted, True) if wanted > 0 else (0, False)

    def _stuck(self, pull: PendingLoad) -> bool:
        """Whether a load has waited for blocks for a lease, while others have yet to read from here."""
        now = time.monotonic()
        if pull.asked is None:
            pull.asked = now
        return len(self._ledger) > 0 and now - pull.asked > self._settings.kv_lease_duration

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Take the blocks that a load is to fill; without external tokens there is nothing to load."""
        request_id = request.request_id
        pull = self._pulls.get(request_id)
        if pull is None or pull.stage is not LoadState.WANTED:
            return
        if external <= 0:
            self._let_go(request_id, read=True)
            return
        pull.stage = LoadState.LOADING
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

    def _load(self, request_id: str, pull: PendingLoad, blocks: KVCacheBlocks, external: int) -> Load:
        if pull.remote is None or self._geometry is None:
            raise RequestError("there is nothing to load it from")
        cached = pull.num_tokens - external
        tables = self._transfer_tables([[block.block_id for block in table] for table in blocks.blocks])
        # Each group has a hit of its own: the one that vLLM names is that of full attention.
        groups = zip(self._engine.transfer_groups, self._geometry.groups, strict=True)
        hits = [0 if group.kind == "ssm" else hit_blocks(blocks.blocks[index]) for index, group in groups]
        spans = live_spans(self._geometry, pull.num_tokens, tables, hits)
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
                pull.stage = LoadState.WANTED
            else:
                # A D that recomputes the prompt does not need P any more; if the request fails, another D may read it.
                served = request_id not in failed or self._engine.recompute or pull.aborted
                self._let_go(request_id, read=served)

    def _keep_unfilled_out(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        if self.manager is not None:
            for group, token in first_tokens.items():
                never_cache_before(self.manager, request_id, self._engine.transfer_groups[group], token)

    def _let_go(self, request_id: str, *, read: bool) -> None:
        self._tell(self._pulls.pop(request_id), read=read)

    def _tell(self, pull: PendingLoad, *, read: bool) -> None:
        """Tell P that a reader is gone; if it has not `read`, another engine may be given the same parameters."""
        if pull.remote is not None:
            shared = self._shared.get(pull.remote.lease_key, False)
            outcome = (Outcome.READ_SHARED if shared else Outcome.READ) if read else Outcome.UNREAD
            self._courier.release(pull.remote.address, LeaseClaim(pull.remote.lease_key, pull.reader), outcome)

    def _transfer_tables(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Choose the block tables of the groups that take part."""
        groups = self._engine.transfer_groups
        if groups and len(tables) <= max(groups):
            raise RequestError(f"{len(tables)} block tables, group {max(groups)} takes part")
        return [list(tables[index]) for index in groups]
