# SPDX-License-Identifier: Apache-2.0
"""D's part of the connector's scheduler: requests whose caches are loaded from P.

vLLM's calls become events of a load here. `kvhma.vllm.loads.load_machine` answers with effects, which are carried
out here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import spans_to_fill
from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.vllm.failures import Failure, refused
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.internals import mark_uncacheable, recompute_prompt
from kvhma.vllm.loads.failed_loads import FailedLoads
from kvhma.vllm.loads.load_claims import LoadClaims
from kvhma.vllm.loads.load_machine import End, Load, LoadEffect, LoadEvent, Loads, LoadState
from kvhma.vllm.loads.received_params import ReceivedParams
from kvhma.vllm.metadata import ReadCommand, StepMetadata, WorkerReport, merge_first_tokens
from kvhma.vllm.wire.params import DIFFERS, PrefillParams
from kvhma.vllm.wire.peer_log import logger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

LOAD_RETRIES = 1
"""Times that D repeats a load after a transient error, with policy `recompute`."""

_CLAIM_AFTER_SECONDS = 0.05
"""Most loads have ended by then. P holds a finished request for one lease anyway, so D need not claim it earlier."""

_DIGEST_SECONDS = 5e-3
"""How long a step that has nothing else to do waits for the digest of a prompt."""

_WAITS = (LoadState.ASKING, LoadState.WAITING, LoadState.RETRYING)
_HAS_BLOCKS = (LoadState.PIECES, LoadState.LOADING, LoadState.FAILING)
_IS_READ = (LoadState.LOADING, LoadState.FAILING)

_UNKNOWN = None, False
"""Answer to vLLM while the number of tokens to load is not known: it asks again in the next step."""

_NOTHING = 0, False
"""Answer to vLLM for a request that loads nothing."""


class DecodeScheduler:
    """Decides which requests are loaded, and notifies P when it may free their blocks.

    Attributes:
        pending: loads that have not ended, by request.
        received: reads the parameters of requests.
        claims: what P holds for the loads.
        metadata: commands of the next step.
        failed: requests whose load has failed, until vLLM gives them blocks again.
    """

    def __init__(self, context: SchedulerContext, makes_progress: Callable[[float], bool]) -> None:
        """Start without requests; `makes_progress` is that of :class:`LeaseRenewer`."""
        self._context = context
        self.received = ReceivedParams(context)
        self._loads = Loads()
        self.claims = LoadClaims(context, self._loads, makes_progress)
        self.pending = self._loads.by_id
        self.metadata = StepMetadata()
        self.failed = FailedLoads(context)

    # --- A new request ------------------------------------------------------------------------------------------

    def add_optional(self, request: Request, read: Callable[[], PrefillParams], min_tokens: int) -> None:
        """Add a request that this engine prefills, and whose beginning another engine may hold.

        Args:
            request: the request.
            read: returns what the other engine holds, or raises a `KvhmaError`.
            min_tokens: fewer tokens are not loaded, because computing them is as fast.
        """
        load = Load(request, is_optional=True, min_tokens=min_tokens)
        try:
            remote = read()
            self.received.check_source(remote.address, remote.engine_id)
        except KvhmaError as error:
            reason = "other_prompt" if isinstance(error, OtherPromptError) else "refused"
            self.fall_back(load, reason, str(error))
            return
        load.remote, load.num_tokens = remote, remote.num_tokens
        self.move_load(load, LoadEvent.OPTIONAL)

    def release_rejected(self, request: Request, params: dict[str, Any]) -> None:
        """Notify P that D will not read a request, because vLLM has rejected it.

        vLLM reports a rejection by a request with the same parameters and one token, which it aborts at once. Its
        prompt cannot be compared. The parameters are proof enough: only their receivers know them.
        """
        try:
            if not any(rejected(request, params) for rejected in self._context.rooms.on_request_rejected):
                remote = self.received.read_of_rejected(params)
                self.claims.release_load(Load(request, remote=remote), read=True)
        except KvhmaError as error:
            logger.warning("kvhma: vLLM rejected request %s, and P cannot be notified: %s", request.request_id, error)

    def add_params(self, load: Load, params: dict[str, Any]) -> None:
        """Add a load of a prompt that P has computed. D notifies P only if D's prompt is the same."""
        request = load.request
        try:
            load.remote = self.received.read(request, params)
        except OtherPromptError as error:
            self.fall_back(load, "other_prompt", str(error))
        except KvhmaError as error:
            self.fail_load(load, refused(str(error)))
        else:
            self.move_load(load, LoadEvent.PARAMS)
            if not self._context.prompts.begin_digest(request, load.remote.num_tokens):
                self._compare_prompt(load)

    # --- The prompt ---------------------------------------------------------------------------------------------

    def _compare_prompt(self, load: Load) -> None:
        """Compare P's prompt with that of a request; waits if a thread is making the digest."""
        remote, request = load.remote, load.request
        assert remote is not None  # noqa: S101
        try:
            same = self._context.prompts.take_digest(request, remote.num_tokens) == remote.prompt
        except KvhmaError as error:
            self.fail_load(load, refused(str(error)))
            return
        if not same:
            differs = f"P's prompt differs in its first {remote.num_tokens} tokens, or in adapter, items or salt"
            self.fall_back(load, "other_prompt", f"{differs}: {DIFFERS}")
            return
        self.move_load(load, LoadEvent.SAME_PROMPT)
        engine, prompt = self._context.engine, request.num_prompt_tokens
        loadable = engine.loadable_tokens(prompt)
        load.num_tokens = min(remote.num_tokens, loadable)
        if request.get_skip_reading_prefix_cache():
            self.compute_unread(load)
        elif load.num_tokens == 0:  # too short for a hand-off, which is no loss
            self.move_load(load, LoadEvent.NOTHING_TO_LOAD)
        elif remote.num_tokens > loadable and engine.is_ahead(remote.num_tokens, prompt):
            self.fall_back(load, "state_ahead", engine.why_ahead(remote.num_tokens, prompt))
        else:
            load.is_shared = self.claims.is_shared(load, remote)
            if load.is_shared:
                self.move_load(load, LoadEvent.SHARED)

    # --- What vLLM asks -----------------------------------------------------------------------------------------

    def tokens_to_load(self, request: Request) -> int:
        """Return how many tokens of a request are there after its load; 0 if nothing is loaded, or not known."""
        load = self.pending.get(request.request_id)
        if load is None or load.state is LoadState.REFUSED or (remote := self._known_remote(load)) is None:
            return 0
        loadable = self._context.engine.loadable_tokens(request.num_prompt_tokens)
        return load.num_tokens or min(remote.num_tokens, loadable)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `local` ones will be loaded, None if that is not known yet.

        vLLM asks again in each step until it has scheduled the request. The answer follows from the state of the load.
        It changes only if P has replied or the request has waited too long.
        """
        load = self.pending.get(request.request_id)
        if self.failed.yielded_at and self.failed.must_yield_to_running(request.request_id, is_load=load is not None):
            return _UNKNOWN
        if load is None:
            if not (why := self._why_not_computed(request, local)):
                return _NOTHING
            # vLLM has preempted it, and the prefix cache has lost what it had loaded.
            load = Load(request)
            self.fail_load(load, refused(why))
        items = request.mm_features
        for on_tokens_asked in self._context.rooms.on_tokens_asked:
            on_tokens_asked(load)
        if request.mm_features is not items:
            return _UNKNOWN  # vLLM looked up its blocks by other items
        if request.request_id in self._loads.comparing:
            if not self._context.prompts.is_ready(request.request_id):
                return _UNKNOWN
            self._compare_prompt(load)
        if load.state in _WAITS:
            return self._answer_of_waiting(load, local)
        if load.state is LoadState.FOLLOWING and load.num_tokens:
            return (load.num_tokens - local, True) if load.num_tokens > local else _NOTHING
        if load.state is LoadState.REFUSED:
            return self._answer_of_failing(request, local)
        return _NOTHING if load.state.is_end else _UNKNOWN

    def _answer_of_waiting(self, load: Load, local: int) -> tuple[int | None, bool]:
        held = not (load.is_shared or load.is_optional) or self.claims.is_held(load)
        if held is None:
            return _UNKNOWN
        if held and load.state is LoadState.ASKING:
            self.move_load(load, LoadEvent.HELD)
        if not held:
            reason, text = "late_reader", "P no longer holds it: other readers have read it, and its lease has ended"
            if load.is_optional and load.remote is not None:
                text = f"{load.remote.address} no longer holds its beginning, or does not reply"
        elif self.failed.waited_too_long_for_blocks(load):
            reason = "no_room"
            text = "it waits for blocks that this engine holds for readers, and they may wait for blocks that it claims"
            if load.state is LoadState.RETRYING:
                text = "its load has failed, and there are not enough free blocks to retry"
        elif load.is_optional and self._is_short(load, local):
            self.move_load(load, LoadEvent.NOTHING_TO_LOAD)
            return _NOTHING
        elif load.num_tokens > local or not (why := self._why_not_computed(load.request, local)):
            return (load.num_tokens - local, True) if load.num_tokens > local else _NOTHING
        else:
            reason, text = "refused", why
        self.fall_back(load, reason, text)
        return self._answer_of_failing(load.request, local) if load.state is LoadState.REFUSED else _NOTHING

    def _answer_of_failing(self, request: Request, local: int) -> tuple[int, bool]:
        """Return the answer to vLLM for a load that fails: vLLM can fail only a request that waits for tokens.

        With one token it needs the fewest blocks. If `local` excludes a hit's partial last block, one token is too few:
        vLLM lets a request wait only for more tokens than that block has. A hit never has all tokens, so the answer is
        all that are left. A prompt that must not read the prefix cache waits for nothing, and is computed.
        """
        for on_load_refused in self._context.rooms.on_load_refused:
            on_load_refused(request)
        return request.num_tokens - local if self._context.partial_hits else 1, True

    def _is_short(self, load: Load, local: int) -> bool:
        """Return whether so few tokens would be read that computing them is as fast."""
        if load.num_tokens - local >= load.min_tokens:
            return False
        return load.num_tokens - self.hit_without_load(load.request, local) < load.min_tokens

    def _why_not_computed(self, request: Request, local: int) -> str:
        """Return why D cannot compute a request if nothing is loaded; empty if it can."""
        for ask in self._context.rooms.why_not_computed:
            if why := ask(request, local):
                return str(why)
        return ""

    def hit_without_load(self, request: Request, local: int) -> int:
        """Return how many tokens vLLM would not compute if nothing is loaded: `local` is only full attention's hit."""
        engine, manager = self._context.engine, self._context.manager
        if manager is not None and (engine.has_state or engine.has_windows):
            return min(local, int(manager.get_computed_blocks(request)[1]))
        return local

    # --- Blocks and reads ---------------------------------------------------------------------------------------

    def on_blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Make the read command for the blocks that vLLM has given a load; without external tokens it loads nothing."""
        self.failed.yielded_at.pop(request.request_id, None)
        if request.request_id in self._loads.comparing:
            self._compare_prompt(self._loads.comparing[request.request_id])
        load = self.pending.get(request.request_id)
        if load is None or load.state in _HAS_BLOCKS:
            return
        if external <= 0:
            self.move_load(load, LoadEvent.NOTHING_TO_LOAD)
            return
        load.begin_attempt()
        if load.state is LoadState.REFUSED:
            self.move_load(load, LoadEvent.BLOCKS)
            return
        try:
            command = self._read_command(load, blocks, external)
        except KvhmaError as error:
            load.refusal = refused(str(error))
            self.move_load(load, LoadEvent.UNREADABLE)
        else:
            self.move_load(load, LoadEvent.BLOCKS, command)

    def _read_command(self, load: Load, blocks: KVCacheBlocks, external: int) -> ReadCommand:
        remote, geometry = load.remote or self._known_remote(load), self._context.geometry
        if remote is None or geometry is None:
            raise RequestError("there is no P to load it from")
        tables = list(map(blocks.blocks.__getitem__, self._context.engine.transfer_groups))
        return ReadCommand(
            request_id=load.request_id,
            remote=remote,
            reader=load.reader,
            num_tokens=load.num_tokens,
            cached=load.num_tokens - external,
            spans=spans_to_fill(geometry.core, load.num_tokens, tables),
            outcome=self.claims.outcome(remote),
            optional=load.is_optional,
        )

    def _known_remote(self, load: Load) -> PrefillParams | None:
        """Return P's parameters of a load; before the hand-off those that an option knows."""
        remote = load.remote
        for early in self._context.rooms.remote_before_hand_off:
            remote = remote or early(load.request_id)
        return remote

    # --- Steps --------------------------------------------------------------------------------------------------

    def take_metadata(self) -> StepMetadata:
        """Return the reads and refusals since the last call. vLLM calls it at the end of each schedule."""
        if self._loads.unclaimed:  # claim what waits for blocks, or takes long to read
            now = time.monotonic()
            for load in list(self._loads.unclaimed.values()):
                if load.state is not LoadState.LOADING or now - load.since >= _CLAIM_AFTER_SECONDS:
                    self.move_load(load, LoadEvent.LASTS)
        # After the claims: a load that the next step schedules needs no claim.
        for load in list(self._loads.comparing.values()):
            if not self._context.prompts.is_ready(load.request_id):
                break
            self._compare_prompt(load)
        metadata, self.metadata = self.metadata, StepMetadata()
        return metadata

    def wait_for_progress(self) -> None:
        """Wait a little for the digest of a prompt."""
        load = next(iter(self._loads.comparing.values()), None)
        if load is not None:  # the thread makes one after the other
            self._context.prompts.is_ready(load.request_id, _DIGEST_SECONDS)

    def on_worker_results(self, output: KVConnectorOutput) -> None:
        """Act on reads that have ended."""
        failed = output.failed_recving or set()
        for request_id in output.finished_recving or ():
            load = self.pending.get(request_id)
            if load is not None and load.state in _IS_READ:
                self._read_ended(load, failed=request_id in failed or load.state is LoadState.FAILING)

    def on_worker_report(self, report: WorkerReport) -> None:
        """Note what some ranks report of reads that they have ended."""
        for request_id in {*report.first_tokens, *report.verified_by_board, *report.failures}:
            load = self.pending.get(request_id)
            if load is None or load.attempt is None:
                continue
            attempt, failure = load.attempt, report.failures.get(request_id)
            attempt.first_tokens = merge_first_tokens(attempt.first_tokens, report.first_tokens.get(request_id, {}))
            attempt.verified_by_board |= request_id in report.verified_by_board
            attempt.rank_failed |= failure is not None
            if failure is not None and not failure.transient:
                load.refusal = load.refusal or failure

    def _read_ended(self, load: Load, *, failed: bool) -> None:
        """Act on a read that has ended on all ranks; `failed`: whether vLLM knows it as failed."""
        attempt, recompute = load.attempt, self._context.engine.recompute
        assert attempt is not None  # noqa: S101
        if load.is_optional:
            failed = failed or attempt.rank_failed
            # A block that is not filled from its start cannot be handed off: D would lack a part of the window.
            if load.end is None and (failed or attempt.first_tokens):
                text = "what another engine holds of it could not be read completely"
                self._compute_locally(load.request_id, "failed_read" if failed else "short_window", text)
                if self._context.manager is not None:  # for any kv_load_failure_policy
                    recompute_prompt(self._context.manager, load.request)
                    self.failed.yielded_at[load.request_id] = None
            event = LoadEvent.FAILED if failed else LoadEvent.LOADED
        elif not failed:
            if load.end is None and attempt.first_tokens:
                self._exclude_partial_blocks(load.request_id, attempt.first_tokens)
            event = LoadEvent.LOADED
        else:
            event = LoadEvent.FAILED
            if recompute and load.end is None:
                self.failed.yielded_at[load.request_id] = None
                if load.refusal is None and attempt.number <= LOAD_RETRIES:
                    event, load.waits_since = LoadEvent.FAILED_TRANSIENT, None
        self.move_load(load, event)

    def _exclude_partial_blocks(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        """Exclude blocks from the prefix cache that the read has not filled from their first token on."""
        if self._context.manager is not None:
            for group, token in first_tokens.items():
                mark_uncacheable(self._context.manager, request_id, self._context.engine.transfer_groups[group], token)

    def on_request_finished(self, request: Request) -> bool:
        """Note that a request has ended; return whether it had a load."""
        self.failed.yielded_at.pop(request.request_id, None)
        if request.request_id in self._loads.comparing:
            self._compare_prompt(self._loads.comparing[request.request_id])
        load = self.pending.get(request.request_id)
        if load is None:
            return False
        is_aborted = request.status.name == "FINISHED_ABORTED"
        load.end = End.ABORTED if is_aborted else End.FINISHED
        self.move_load(load, LoadEvent.ABORTED if is_aborted else LoadEvent.ENDED)
        return True

    # --- What is done about an event ----------------------------------------------------------------------------

    def fail_load(self, load: Load, failure: Failure) -> None:
        """Make a request fail that has no blocks."""
        load.refusal = failure
        self.move_load(load, LoadEvent.REFUSED)
        load.remote, load.claim = None, None

    def fall_back(self, load: Load, reason: str, text: str) -> None:
        """Let ``kv_load_failure_policy`` decide about a prompt that D cannot load; a prefill always computes it."""
        failure = Failure(reason, text, transient=False)
        if self._context.engine.recompute or load.is_optional:
            load.refusal = failure
            self.move_load(load, LoadEvent.LOCAL)
        else:
            self.fail_load(load, failure)

    def compute_unread(self, load: Load) -> None:
        """Leave a prompt to vLLM, which computes it anyway because its log-probabilities are asked for."""
        text = "skip_reading_prefix_cache is set for it, for example because of prompt_logprobs"
        load.refusal = Failure("skip_reading_prefix_cache", text, transient=False)
        self.move_load(load, LoadEvent.LOCAL)

    def _compute_locally(self, request_id: str, reason: str, text: str) -> None:
        logger.warning("kvhma: falling back to local prefill of %s: %s", request_id, text)
        self._context.stats.count("local_prefills", label=reason)

    def move_load(self, load: Load, event: LoadEvent, command: ReadCommand | None = None) -> None:
        """Give an event to a load's machine, and carry out its effects; `command` is the read that the event brings."""
        effects = self._loads.apply(load, event)
        for effect in effects:
            self._carry_out(load, effect, command)

    def _carry_out(self, load: Load, effect: LoadEffect, command: ReadCommand | None) -> None:
        request_id, failure = load.request_id, load.refusal
        if effect is LoadEffect.ORDER and command is not None:
            self.metadata.loads.append(command)
        elif effect is LoadEffect.RELEASE_UNNOTIFIED:
            self.claims.release_unnotified(load)
        elif effect is LoadEffect.CANCEL_READ:
            self.metadata.cancelled.append(request_id)
        elif effect is LoadEffect.REPORT_FAILED and failure is not None:
            logger.warning("kvhma: request %s cannot be loaded: %s", request_id, failure.text)
            self.metadata.refusals[request_id] = failure
        elif effect is LoadEffect.COMPUTE_LOCALLY and failure is not None:
            self._compute_locally(request_id, failure.cause, failure.text)
        elif effect is LoadEffect.CLAIM:
            self.claims.claim_load(load)
        elif effect in (LoadEffect.RELEASE, LoadEffect.RELEASE_UNREAD):
            self.claims.release_load(load, read=effect is LoadEffect.RELEASE)
        elif effect is LoadEffect.RELEASE_FAILED:
            is_computed = self._context.engine.recompute or load.is_optional
            self.claims.release_load(load, read=is_computed or load.end is End.ABORTED)
        else:
            for carry_out in self._context.rooms.carry_out:
                carry_out(load, effect, command)
