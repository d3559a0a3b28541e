# SPDX-License-Identifier: Apache-2.0
"""D's part of the connector's scheduler: requests whose caches are loaded from P.

vLLM's calls become events of a load here. `kvhma.vllm.loads.load_machine` answers with effects, which are carried
out here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.geometry import Span
from kvhma.planning import live_entries
from kvhma.vllm.failures import Failure
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.internals import mark_uncacheable, recompute_prompt
from kvhma.vllm.loads.decode_digests import DecodeDigests
from kvhma.vllm.loads.failed_loads import FailedLoads
from kvhma.vllm.loads.following import FollowedLoad, FollowedLoads
from kvhma.vllm.loads.lease_renewer import LeaseRenewer
from kvhma.vllm.loads.load_machine import End, Load, LoadEffect, LoadEvent, Loads, LoadState
from kvhma.vllm.loads.prefix_cache import hit_blocks
from kvhma.vllm.loads.received_params import ReceivedParams
from kvhma.vllm.metadata import ReadCommand, StepMetadata, WorkerReport, merge_first_tokens
from kvhma.vllm.prompts.prompt import is_sample
from kvhma.vllm.recent import Recent
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import DIFFERS, LeaseKey, PrefillParams
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.tickets import TICKET

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

LOAD_RETRIES = 1
"""Times that D repeats a load after a transient error, with policy `recompute`."""

_RENEWALS = 6
"""Renewals during one lease: some of them may be lost."""

_MIN_RENEWAL_SECONDS = 0.5
"""Shortest time between renewals: an untrusted client may have written the lease's length."""

_CLAIM_AFTER_SECONDS = 0.05
"""Most loads have ended by then. P holds a finished request for one lease anyway, so D need not claim it earlier."""

_DIGEST_SECONDS = 5e-3
"""How long a step that has nothing else to do waits for the digest of a prompt."""

_KEYS_REMEMBERED = 4096
"""Requests at P that D remembers, to recognize one that it reads again."""

_TICKET_ENDS = {
    LoadEffect.TICKET_HANDED_OFF: "handed_over",
    LoadEffect.TICKET_LATE: "late",
    LoadEffect.TICKET_LOST: "lost",
    LoadEffect.TICKET_REFUSED: "refused",
    LoadEffect.TICKET_CANCELLED: "given_up",
}
"""Labels of the counter of followed tickets."""

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
        renewer: renews and releases leases.
        failed: requests whose load has failed, until vLLM gives them blocks again.
    """

    def __init__(self, context: SchedulerContext, makes_progress: Callable[[float], bool]) -> None:
        """Start without requests; `makes_progress` is that of :class:`LeaseRenewer`."""
        self._context = context
        self._received = ReceivedParams(context)
        self.renewer = LeaseRenewer(context.peers, context.stats, makes_progress)
        self._following = FollowedLoads(context)
        self._loads = Loads()
        self.pending = self._loads.by_id
        self._digests = DecodeDigests(context)
        self._shared: Recent[LeaseKey, bool] = Recent(_KEYS_REMEMBERED)
        """Whether a request at P has, or may have, more than one reader here."""
        self._metadata = StepMetadata()
        self.failed = FailedLoads(context)

    def close(self) -> None:
        """Wait a moment for replies of P."""
        self.renewer.close()

    # --- A new request ------------------------------------------------------------------------------------------

    def on_request_added(self, request: Request, params: dict[str, Any]) -> None:
        """Add a request whose prompt another engine has computed, or is computing."""
        load = Load(request)
        if params.get(TICKET) is None:
            self._add_params(load, params)
        else:
            self._add_ticket(load, params)

    def add_optional(self, request: Request, read: Callable[[], PrefillParams], min_tokens: int) -> None:
        """Add a request that this engine prefills, and whose beginning another engine may hold.

        Args:
            request: the request.
            read: returns what the other engine holds, or raises a `KvhmaError`.
            min_tokens: fewer tokens are not loaded, because computing them is as fast.
        """
        load = Load(request, is_optional=True, min_tokens=min_tokens)
        try:
            remote = self._received.check_optional(read())
        except KvhmaError as error:
            reason = "other_prompt" if isinstance(error, OtherPromptError) else "refused"
            self._fall_back(load, reason, str(error))
            return
        load.remote, load.num_tokens = remote, remote.num_tokens
        self._move(load, LoadEvent.OPTIONAL)

    def refuse_request(self, request: Request, text: str) -> None:
        """Add a request that cannot be loaded."""
        self._fail(Load(request), _refused(text))

    def release_rejected(self, request: Request, params: dict[str, Any]) -> None:
        """Notify P that D will not read a request, because vLLM has rejected it.

        vLLM reports a rejection by a request with the same parameters and one token, which it aborts at once. Its
        prompt cannot be compared. The parameters are proof enough: only their receivers know them.
        """
        try:
            if params.get(TICKET) is not None:
                self._following.cancel_ticket(self._received.read_ticket(params))
            else:
                self._release_claim(Load(request, remote=self._received.read_of_rejected(params)), read=True)
        except KvhmaError as error:
            logger.warning("kvhma: vLLM rejected request %s, and P cannot be notified: %s", request.request_id, error)

    def _add_params(self, load: Load, params: dict[str, Any]) -> None:
        """Add a load of a prompt that P has computed. D notifies P only if D's prompt is the same."""
        request = load.request
        try:
            load.remote = self._received.read(request, params)
        except OtherPromptError as error:
            self._fall_back(load, "other_prompt", str(error))
        except KvhmaError as error:
            self._fail(load, _refused(str(error)))
        else:
            self._move(load, LoadEvent.PARAMS)
            if not self._context.prompts.begin_digest(request, load.remote.num_tokens):
                self._compare_prompt(load)

    def _add_ticket(self, load: Load, params: dict[str, Any]) -> None:
        """Begin to follow a request that P computes at the same time."""
        request = load.request
        try:
            ticket = self._received.read_ticket(params)
            if request.get_skip_reading_prefix_cache():
                self._following.cancel_ticket(ticket)
                self._compute_unread(load)
            elif self._context.engine.loadable_tokens(request.num_prompt_tokens) == 0:
                self._following.cancel_ticket(ticket)
                self._move(load, LoadEvent.NOTHING_TO_LOAD)
            else:
                load.followed = self._following.follow_ticket(request, ticket)
                self._move(load, LoadEvent.TICKET)
        except KvhmaError as error:
            self._fail(load, _refused(str(error)))

    # --- The prompt ---------------------------------------------------------------------------------------------

    def _compare_prompt(self, load: Load) -> None:
        """Compare P's prompt with that of a request; waits if a thread is making the digest."""
        remote, request = load.remote, load.request
        assert remote is not None  # noqa: S101
        try:
            same = self._context.prompts.take_digest(request, remote.num_tokens) == remote.prompt
        except KvhmaError as error:
            self._fail(load, _refused(str(error)))
            return
        if not same:
            text = (
                f"P's prompt differs in its first {remote.num_tokens} tokens, or in adapter, items or salt: {DIFFERS}"
            )
            self._fall_back(load, "other_prompt", text)
            return
        self._move(load, LoadEvent.SAME_PROMPT)
        engine, prompt = self._context.engine, request.num_prompt_tokens
        load.num_tokens = min(remote.num_tokens, engine.loadable_tokens(prompt))
        if request.get_skip_reading_prefix_cache():
            self._compute_unread(load)
        elif load.num_tokens == 0:  # too short for a hand-off, which is no loss
            self._move(load, LoadEvent.NOTHING_TO_LOAD)
        elif engine.is_ahead(remote.num_tokens, prompt):
            text = (
                f"P's states and windows are those of {remote.num_tokens} tokens, but at most {load.num_tokens} of "
                f"this prompt can be loaded. D computes the last {engine.backoff} itself, for a state, for a window or "
                "for num_speculative_tokens. With equal settings and without prompt_logprobs P leaves as many to D"
            )
            self._fall_back(load, "state_ahead", text)
        else:
            load.is_shared = self._is_shared(load, remote)
            if load.is_shared:
                self._move(load, LoadEvent.SHARED)

    def _compare_finished(self, load: Load | None) -> Load | None:
        """Finish a comparison that still waits; return the load, or None if it has ended or there is no load."""
        if load is not None and load.request_id in self._loads.comparing:
            self._compare_prompt(load)
        return None if load is None or load.state.is_end else load

    def _is_shared(self, load: Load, remote: PrefillParams) -> bool:
        """Return whether other requests have, or may get, the same parameters."""
        key = remote.lease_key
        self._shared.note(key, key in self._shared or is_sample(load.request_id))
        return self._shared[key]

    # --- What vLLM asks -----------------------------------------------------------------------------------------

    def tokens_to_load(self, request: Request) -> int:
        """Return how many tokens of a request are there after its load; 0 if nothing is loaded, or not known."""
        load = self.pending.get(request.request_id)
        if load is None or load.state is LoadState.REFUSED or load.state.is_end:
            return 0
        announced = 0 if load.followed is None else load.followed.follower.total
        at_p = announced if load.remote is None else load.remote.num_tokens
        return load.num_tokens or min(at_p, self._context.engine.loadable_tokens(request.num_prompt_tokens))

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `local` ones will be loaded, None if that is not known yet.

        vLLM asks again in each step until it has scheduled the request. The answer follows from the state of the load.
        It changes only if P has replied or the request has waited too long.
        """
        load = self.pending.get(request.request_id)
        if self.failed.must_yield_to_running(request.request_id, is_load=load is not None):
            return _UNKNOWN
        if load is None:
            if not (why := self._why_not_computed(request, local)):
                return _NOTHING
            # vLLM has preempted it, and the prefix cache has lost what it had loaded.
            load = Load(request)
            self._fail(load, _refused(why))
        if load.followed is not None and load.state is LoadState.FOLLOWING:
            items = request.mm_features
            self._look_at_ticket(load)
            if request.mm_features is not items:
                return _UNKNOWN  # vLLM looked up its blocks by other items
        if request.request_id in self._loads.comparing:
            if not self._context.prompts.is_ready(request.request_id):
                return _UNKNOWN
            self._compare_prompt(load)
        if load.state in _WAITS:
            return self._answer_of_waiting(load, local)
        if load.state is LoadState.FOLLOWING and load.num_tokens:
            return _beyond(load, local)
        if load.state is LoadState.REFUSED:
            return self._answer_of_failing(request, local)
        return _NOTHING if load.state.is_end else _UNKNOWN

    def _answer_of_waiting(self, load: Load, local: int) -> tuple[int | None, bool]:
        held = self._is_held(load)
        if held is None:
            return _UNKNOWN
        if held and load.state is LoadState.ASKING:
            self._move(load, LoadEvent.HELD)
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
            self._move(load, LoadEvent.NOTHING_TO_LOAD)
            return _NOTHING
        elif load.num_tokens > local or not (why := self._why_not_computed(load.request, local)):
            return _beyond(load, local)
        else:
            reason, text = "refused", why
        self._fall_back(load, reason, text)
        return self._answer_of_failing(load.request, local) if load.state is LoadState.REFUSED else _NOTHING

    def _answer_of_failing(self, request: Request, local: int) -> tuple[int, bool]:
        """Return the answer to vLLM for a load that fails: vLLM can fail only a request that waits for tokens.

        With one token it needs the fewest blocks. If `local` excludes a hit's partial last block, one token is too few:
        vLLM lets a request wait only for more tokens than that block has. A hit never has all tokens, so the answer is
        all that are left. A prompt that must not read the prefix cache waits for nothing, and is computed.
        """
        for room in self._context.rooms:
            room.on_load_refused(request)
        return request.num_tokens - local if self._context.partial_hits else 1, True

    def _is_short(self, load: Load, local: int) -> bool:
        """Return whether so few tokens would be read that computing them is as fast."""
        if load.num_tokens - local >= load.min_tokens:
            return False
        return load.num_tokens - self.hit_without_load(load.request, local) < load.min_tokens

    def _why_not_computed(self, request: Request, local: int) -> str:
        """Return why D cannot compute a request if nothing is loaded; empty if it can."""
        return next((why for room in self._context.rooms if (why := room.why_not_computed(request, local))), "")

    def hit_without_load(self, request: Request, local: int) -> int:
        """Return how many tokens vLLM would not compute if nothing is loaded: `local` is only full attention's hit."""
        engine, manager = self._context.engine, self._context.manager
        if manager is not None and (engine.has_state or engine.has_windows):
            return min(local, int(manager.get_computed_blocks(request)[1]))
        return local

    def _is_held(self, load: Load) -> bool | None:
        """Return whether P still holds the blocks; None if P must reply first."""
        if not load.must_be_confirmed or load.remote is None:
            return True
        held = self.renewer.is_held(load.remote.address, load.remote.claim(load.reader))
        if held is None and time.monotonic() - load.since >= self._context.settings.handshake_timeout:
            # D's read will fail if P does not reply, and kv_load_failure_policy decides. A prefill computes instead.
            return not load.is_optional
        return held

    # --- Blocks and reads ---------------------------------------------------------------------------------------

    def on_blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Make the read command for the blocks that vLLM has given a load; without external tokens it loads nothing."""
        self.failed.on_blocks_or_end(request.request_id)
        load = self._compare_finished(self.pending.get(request.request_id))
        if load is None or load.state in _HAS_BLOCKS:
            return
        if external <= 0:
            self._move(load, LoadEvent.NOTHING_TO_LOAD)
            return
        self._digests.discard_sums(load.request_id)
        load.begin_attempt()
        if load.state is LoadState.REFUSED:
            self._move(load, LoadEvent.BLOCKS)
            return
        try:
            remote = load.remote if load.followed is None else load.followed.provisional()
            command = self._read_command(load, remote, blocks, external)
        except KvhmaError as error:
            load.refusal = _refused(str(error))
            self._move(load, LoadEvent.UNREADABLE)
        else:
            self._move(load, LoadEvent.BLOCKS, command)

    def _read_command(
        self, load: Load, remote: PrefillParams | None, blocks: KVCacheBlocks, external: int
    ) -> ReadCommand:
        geometry = self._context.geometry
        if remote is None or geometry is None:
            raise RequestError("there is no P to load it from")
        tables = [blocks.blocks[index] for index in self._context.engine.transfer_groups]
        entries = live_entries(geometry, load.num_tokens, list(map(len, tables)))
        spans = []
        for group, table, needed in zip(geometry.groups, tables, entries, strict=True):
            # Each group has its own hit; vLLM reports only that of full attention.
            is_state = group.kind == "ssm"
            first = needed.start if is_state else hit_blocks(table, needed.start)
            filled = table[first : needed.stop]
            if is_state and any(block.is_null for block in filled):
                raise RequestError("the block of its state is the null block")
            spans.append(Span(0 if is_state else first, [block.block_id for block in filled]))
        return ReadCommand(
            request_id=load.request_id,
            remote=remote,
            reader=load.reader,
            num_tokens=load.num_tokens,
            cached=load.num_tokens - external,
            spans=tuple(spans),
            outcome=self._outcome(remote),
            optional=load.is_optional,
        )

    # --- Tickets ------------------------------------------------------------------------------------------------

    def _look_at_ticket(self, load: Load) -> None:
        """Act on P's progress with a ticket whose request has no blocks yet."""
        followed = load.followed
        assert followed is not None  # noqa: S101
        if (params := followed.follower.handed_off_params()) is not None:
            self._move(load, LoadEvent.HANDED_OFF)
            load.since = time.monotonic()
            self._add_params(load, params)
        elif not is_sample(load.request_id):  # samples share P's blocks: each reads all of them after the hand-off
            try:
                load.num_tokens = self._following.announced_tokens(load.request, followed) or 0
            except OtherPromptError as error:
                self._fall_back(load, "other_prompt", str(error))
            except KvhmaError as error:
                load.refusal = _refused(str(error))
                self._move(load, LoadEvent.TICKET_LOST)

    def _read_next_piece(self, load: Load, followed: FollowedLoad) -> None:
        """Order the next piece of a followed load, or the rest after the hand-off; not while it reads a piece."""
        follower, geometry = followed.follower, self._context.geometry
        params = follower.handed_off_params()
        if followed.is_reading or geometry is None:
            return
        if load.end is not None:
            self._move(load, LoadEvent.CANCELLED)
        elif follower.error:
            load.refusal = _refused(follower.error)
            self._move(load, LoadEvent.TICKET_LOST)
        elif params is not None:
            try:
                command = self._last_piece(load, followed, params)
            except KvhmaError as error:
                load.refusal = _refused(str(error))
                self._move(load, LoadEvent.UNREADABLE)
            else:
                self._move(load, LoadEvent.HANDED_OFF, command)
        elif (piece := followed.next_piece(geometry)) is not None:
            self._move(load, LoadEvent.SETTLED, piece)

    def _last_piece(self, load: Load, followed: FollowedLoad, params: dict[str, Any]) -> ReadCommand:
        """Return the command that reads the rest of a followed load; from then on it is a load like others."""
        remote = self._received.read_of_ticket(params, followed.num_prompt_tokens)
        if self._context.geometry is None:
            raise RequestError("this engine has registered no caches")
        command = followed.last_piece(self._context.geometry, remote)
        load.remote, load.since = remote, time.monotonic()
        load.is_shared = self._is_shared(load, remote)
        return command._replace(outcome=self._outcome(remote))

    # --- Steps --------------------------------------------------------------------------------------------------

    def take_metadata(self) -> StepMetadata:
        """Return the reads and refusals since the last call. vLLM calls it at the end of each schedule."""
        for request_id, followed in list(self._following.with_blocks.items()):
            self._read_next_piece(self.pending[request_id], followed)
        if self._loads.unclaimed:
            self._claim_what_lasts()
        # After the claims: a load that the next step schedules needs no claim.
        for load in list(self._loads.comparing.values()):
            if not self._context.prompts.is_ready(load.request_id):
                break
            self._compare_prompt(load)
        metadata, self._metadata = self._metadata, StepMetadata()
        return metadata

    def wait_for_progress(self) -> None:
        """Wait a little for what pending loads need: progress of a followed prompt, or the digest of a prompt."""
        self._following.wait_for_progress(load.followed for load in self.pending.values())
        load = next(iter(self._loads.comparing.values()), None)
        if load is not None:  # the thread makes one after the other
            self._context.prompts.is_ready(load.request_id, _DIGEST_SECONDS)

    def _claim_what_lasts(self) -> None:
        """Claim loads that wait for blocks, or take long to read."""
        now = time.monotonic()
        for load in list(self._loads.unclaimed.values()):
            if load.state is not LoadState.LOADING or now - load.since >= _CLAIM_AFTER_SECONDS:
                self._move(load, LoadEvent.LASTS)

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
        for request_id, ranks in report.pieces.items():
            self._following.on_piece_read(request_id, ranks, report.lost_pieces.get(request_id, ""))
        if self._context.settings.content_digests:
            self._metadata.verdicts |= self._digests.verdicts(report)

    def _read_ended(self, load: Load, *, failed: bool) -> None:
        """Act on a read that has ended on all ranks; `failed`: whether vLLM knows it as failed."""
        attempt, recompute = load.attempt, self._context.engine.recompute
        assert attempt is not None  # noqa: S101
        if load.is_optional:
            failed = failed or attempt.rank_failed
            # A block that is not filled from its start cannot be handed off: D would lack a part of the window.
            if load.end is None and (failed or attempt.first_tokens):
                self._recompute(load, "failed_read" if failed else "short_window")
            event = LoadEvent.FAILED if failed else LoadEvent.LOADED
        elif not failed:
            if load.end is None:
                self._exclude_partial_blocks(load.request_id, attempt.first_tokens)
            event = LoadEvent.LOADED
        else:
            event = LoadEvent.FAILED
            if recompute and load.end is None:
                self.failed.on_load_failed(load.request_id)
                if load.refusal is None and attempt.number <= LOAD_RETRIES:
                    event, load.waits_since = LoadEvent.FAILED_TRANSIENT, None
        self._move(load, event)

    def _recompute(self, load: Load, reason: str) -> None:
        """Make vLLM compute the prompt of an optional load, for any ``kv_load_failure_policy``."""
        request = load.request
        self._compute_locally(load.request_id, reason, "what another engine holds of it could not be read completely")
        if self._context.manager is not None:
            recompute_prompt(self._context.manager, request)
            self.failed.on_load_failed(load.request_id)

    def _exclude_partial_blocks(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        """Exclude blocks from the prefix cache that the read has not filled from their first token on."""
        if self._context.manager is not None:
            for group, token in first_tokens.items():
                mark_uncacheable(self._context.manager, request_id, self._context.engine.transfer_groups[group], token)

    def on_request_finished(self, request: Request) -> bool:
        """Note that a request has ended; return whether it had a load."""
        self.failed.on_blocks_or_end(request.request_id)
        load = self._compare_finished(self.pending.get(request.request_id))
        if load is None:
            return False
        is_aborted = request.status.name == "FINISHED_ABORTED"
        load.end = End.ABORTED if is_aborted else End.FINISHED
        self._move(load, LoadEvent.ABORTED if is_aborted else LoadEvent.ENDED)
        return True

    # --- What is done about an event ----------------------------------------------------------------------------

    def _fail(self, load: Load, failure: Failure) -> None:
        """Make a request fail that has no blocks."""
        load.refusal = failure
        self._move(load, LoadEvent.REFUSED)
        load.remote, load.claim = None, None

    def _fall_back(self, load: Load, reason: str, text: str) -> None:
        """Let ``kv_load_failure_policy`` decide about a prompt that D cannot load; a prefill always computes it."""
        failure = Failure(reason, text, transient=False)
        if self._is_computed_instead(load):
            load.refusal = failure
            self._move(load, LoadEvent.LOCAL)
        else:
            self._fail(load, failure)

    def _is_computed_instead(self, load: Load) -> bool:
        """Return whether D computes a prompt that it cannot load; if not, the request fails."""
        return self._context.engine.recompute or load.is_optional

    def _compute_unread(self, load: Load) -> None:
        """Leave a prompt to vLLM, which computes it anyway because its log-probabilities are asked for."""
        text = "skip_reading_prefix_cache is set for it, for example because of prompt_logprobs"
        load.refusal = Failure("skip_reading_prefix_cache", text, transient=False)
        self._move(load, LoadEvent.LOCAL)

    def _compute_locally(self, request_id: str, reason: str, text: str) -> None:
        logger.warning("kvhma: falling back to local prefill of %s: %s", request_id, text)
        self._context.stats.count("local_prefills", label=reason)

    def _move(self, load: Load, event: LoadEvent, command: ReadCommand | None = None) -> None:
        """Give an event to a load's machine, and carry out its effects; `command` is the read that the event brings."""
        effects = self._loads.apply(load, event)
        if load.state.is_end:
            self._digests.discard_sums(load.request_id)
        for effect in effects:
            self._carry_out(load, effect, command)

    def _carry_out(self, load: Load, effect: LoadEffect, command: ReadCommand | None) -> None:
        request_id, followed, failure = load.request_id, load.followed, load.refusal
        if effect is LoadEffect.ORDER and command is not None:
            self._metadata.loads.append(command)
        elif effect is LoadEffect.RELEASE_UNNOTIFIED:
            # A claimed load is released in any case: a renewal in flight may have claimed it again.
            if load.claim is not None or not self._worker_has_notified(load):
                self._release_claim(load, read=True)
        elif effect is LoadEffect.PLACE and command is not None and followed is not None:
            self._following.on_blocks_allocated(request_id, followed, command)
        elif effect is LoadEffect.CANCEL_READ:
            self._metadata.cancelled.append(request_id)
        elif effect is LoadEffect.REPORT_FAILED and failure is not None:
            logger.warning("kvhma: request %s cannot be loaded: %s", request_id, failure.text)
            self._metadata.refusals[request_id] = failure
        elif effect is LoadEffect.COMPUTE_LOCALLY and failure is not None:
            self._compute_locally(request_id, failure.cause, failure.text)
        elif effect is LoadEffect.CLAIM and load.remote is not None:
            claim = load.remote.claim(load.reader)
            every = max(_MIN_RENEWAL_SECONDS, load.remote.lease / _RENEWALS)
            self.renewer.track_claim(load.remote.address, claim, every=every)
            self._loads.claimed(load, claim)
        elif effect in (LoadEffect.RELEASE, LoadEffect.RELEASE_UNREAD):
            self._release_claim(load, read=effect is LoadEffect.RELEASE)
        elif effect is LoadEffect.RELEASE_FAILED:
            self._release_claim(load, read=self._is_computed_instead(load) or load.end is End.ABORTED)
        elif effect in _TICKET_ENDS and followed is not None:
            load.followed = None
            self._following.stop_following(request_id, followed, _TICKET_ENDS[effect])

    # --- Leases -------------------------------------------------------------------------------------------------

    def _release_claim(self, load: Load, *, read: bool) -> None:
        """Notify P that a reader is done; if it has not `read`, another engine may get the same parameters."""
        if load.remote is not None:
            outcome = self._read_outcome(load.remote) if read else Outcome.UNREAD
            self.renewer.release_claim(load.remote.address, load.remote.claim(load.reader), outcome)

    def _worker_notifies(self, remote: PrefillParams | None) -> bool:
        """Return whether the worker itself notifies P after its read; not if D compares a digest first."""
        has_digest = remote is not None and remote.content_seed is not None
        return self._context.engine.worker_releases and not has_digest

    def _worker_has_notified(self, load: Load) -> bool:
        """Return whether a worker has notified P that a load was read."""
        asked_p = load.attempt is not None and not load.attempt.verified_by_board
        return asked_p and self._worker_notifies(load.remote)

    def _outcome(self, remote: PrefillParams) -> Outcome | None:
        """Return the outcome that a worker reports to P after its read; None if the scheduler notifies P."""
        return self._read_outcome(remote) if self._worker_notifies(remote) else None

    def _read_outcome(self, remote: PrefillParams) -> Outcome:
        # Each of these may still be a reader of the same blocks. If not, P holds them for two seconds longer.
        uncompared = (load.remote for load in self._loads.comparing.values() if load.remote is not None)
        may_be_shared = any(candidate.lease_key == remote.lease_key for candidate in uncompared)
        shared = may_be_shared or self._shared.get(remote.lease_key, False)
        return Outcome.READ_SHARED if shared else Outcome.READ


def _beyond(load: Load, local: int) -> tuple[int, bool]:
    """Return how many tokens of a load vLLM does not have yet."""
    return (load.num_tokens - local, True) if load.num_tokens > local else _NOTHING


def _refused(text: str) -> Failure:
    return Failure("refused", text, transient=False)
