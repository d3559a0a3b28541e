# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler's process: which part of it gets what vLLM says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhma.nixl import decode_hello
from kvhma.vllm.engine_facts import EngineFacts
from kvhma.vllm.metadata import StepMetadata, WorkerHello
from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.scheduler.decode import DecodeScheduler
from kvhma.vllm.scheduler.lease_table import LeaseTable
from kvhma.vllm.scheduler.prefill import PrefillScheduler
from kvhma.vllm.scheduler.prefix_cache import check_manager, hits_may_differ
from kvhma.vllm.settings import Settings
from kvhma.vllm.stats import TransferStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvhmaScheduler:
    """Decides what is loaded, and what is kept for others and for how long. Moves nothing and waits for nothing.

    Attributes:
        context: what both parts know of their engine.
        prefill: requests that other engines load.
        decode: requests that are loaded from other engines.
        hits_may_differ: whether groups may begin with prefix-cache hits of different lengths.
    """

    def __init__(self, settings: Settings, engine: EngineFacts) -> None:
        """Start the thread that renews leases; other engines are answered once the workers' hellos are there."""
        self.context = SchedulerContext(settings, engine, LeaseTable(settings.kv_lease_duration))
        self.prefill = PrefillScheduler(self.context)
        self.decode = DecodeScheduler(self.context)
        self.hits_may_differ = True

    def close(self) -> None:
        """Stop the threads."""
        self.decode.close()
        self.prefill.close()

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's manager of blocks.

        Raises:
            UnsupportedPairError: blocks cannot be kept out of its prefix cache.
        """
        check_manager(manager)
        self.context.manager = manager
        self.hits_may_differ = hits_may_differ(manager)

    def serve(self, hellos: Mapping[tuple[int, int], Any]) -> None:
        """Take the hellos of the workers, by pipeline and tensor rank, and answer other engines from now on."""
        found = {rank: hello.data for rank, hello in hellos.items() if isinstance(hello, WorkerHello)}
        if found:
            self.context.geometry = decode_hello(found[min(found)]).geometry
            self.prefill.serve(found)

    def add(self, request: Request) -> None:
        """Look at a new request once: whatever its parameters are, nothing later has to check them."""
        params: Any = request.kv_transfer_params
        if params is None:
            return
        if not isinstance(params, dict):
            request.kv_transfer_params = None  # vLLM itself takes it for a dictionary
            text = f"kv_transfer_params is of type {type(params).__name__}, expected a dictionary"
            self.decode.refuse(request.request_id, text)
        elif params.get("do_remote_prefill"):
            self.decode.add(request, params)
        elif params.get("do_remote_decode") is True:
            self.prefill.add(request)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `local` ones will be loaded, None if that is not known yet."""
        return self.decode.matched_tokens(request, local)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Take the blocks that a load is to fill."""
        self.decode.allocated(request, blocks, external)

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the workers have to know in this step."""
        metadata = self.decode.take_metadata()
        metadata.idle = output.total_num_scheduled_tokens == 0
        self.prefill.step(output, metadata)
        return metadata

    def results(self, output: KVConnectorOutput) -> None:
        """Take note of the loads that have ended."""
        self.decode.results(output)

    def finish(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Take note that a request has ended; return whether its blocks are kept, and the parameters to read them."""
        if self.decode.finish(request):
            return False, None
        params = self.prefill.finish(request, tables)
        return params is not None, params

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
                staged.append(tuple(kvhma.live_spans(self._geometry, None, tables)))
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
            remote, num_tokens=min(remote.num_tokens, most), ask_first=self._is_shared(request, remote.hold)
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
        self._courier.track(remote.address, LeaseClaim(remote.hold, pull.reader), every=remote.lease / _RENEWALS)
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
        self._stats.count("computed_prompts", label=reason)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `local` ones will be loaded, None if that is not known yet.

        It is asked again, and says the same unless P has answered meanwhile.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return 0, False
        if pull.ask_first and not pull.refusal and pull.remote is not None:
            held = self._courier.held(pull.remote.address, LeaseClaim(pull.remote.hold, pull.reader))
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
            shared = self._shared.get(pull.remote.hold, False)
            outcome = (Outcome.READ_BY_SIBLING if shared else Outcome.READ) if read else Outcome.UNREAD
            self._courier.release(pull.remote.address, LeaseClaim(pull.remote.hold, pull.reader), outcome)

    def _transfer_tables(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Choose the block tables of the groups that take part."""
        groups = self._engine.transfer_groups
        if groups and len(tables) <= max(groups):
            raise RequestError(f"{len(tables)} block tables, group {max(groups)} takes part")
        return [list(tables[index]) for index in groups]
