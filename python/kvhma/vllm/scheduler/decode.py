# SPDX-License-Identifier: Apache-2.0
"""D's part of the connector's scheduler: requests whose caches are loaded from P."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.geometry import Span
from kvhma.planning import live_entries
from kvhma.vllm.metadata import Failure, Load, StepMetadata, WorkerReport, later
from kvhma.vllm.scheduler.answers import readable_part
from kvhma.vllm.scheduler.context import SchedulerContext
from kvhma.vllm.scheduler.digests import DecodeDigests
from kvhma.vllm.scheduler.following import FollowedLoad, FollowedLoads
from kvhma.vllm.scheduler.items import adopt_items
from kvhma.vllm.scheduler.lease_renewer import LeaseRenewer
from kvhma.vllm.scheduler.pending_load import LoadState, PendingLoad, is_sample
from kvhma.vllm.scheduler.prefix_cache import hit_blocks, never_cache_before
from kvhma.vllm.scheduler.put_off import PutOffLoads
from kvhma.vllm.tracing import traceparent_of
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, leads_back
from kvhma.vllm.wire.peer_log import logger
from kvhma.vllm.wire.tickets import TICKET, Ticket, read_ticket

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_RENEWALS = 6
"""In the time of a lease: some may be lost."""

_MIN_LEASE_SECONDS = 1.0
_MAX_LEASE_SECONDS = 3600.0
_MIN_RENEWAL_SECONDS = 0.5
"""Bounds of what parameters say of a lease, and of how often it is renewed for that: anybody may have written them."""

_CLAIM_AFTER_SECONDS = 0.05
"""Most loads are over by then, and P has never to hear of them before: what has finished is kept for a lease anyway."""

_DIGEST_SECONDS = 5e-3
"""How long a step that has nothing else to do waits for the digest of a prompt."""

_KEYS_REMEMBERED = 4096
"""Requests at P that are remembered, to know those that are read again."""

_ITEMS_LOST = "only P has seen its multimodal items, and the prefix cache has not all of what was loaded of them"


class DecodeScheduler:
    """Decides which requests are loaded, and tells P when their blocks are not needed any more.

    Attributes:
        pending: requests that are to be loaded, by id.
        unfilled: of requests that were loaded, where blocks are not filled from their start: the first token from which
            on they are, by index of the group. Only if answers are kept.
        renewer: renews and releases leases.
        put_off: loads that have failed, and those that let others go first.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Start without requests."""
        settings = context.settings
        self._context = context
        self.renewer = LeaseRenewer(
            timeout=settings.handshake_timeout,
            max_peers=settings.max_peers,
            secrets=context.secrets,
            counters=context.stats,
        )
        self._following = FollowedLoads(context)
        self.pending: dict[str, PendingLoad] = {}
        self._digests = DecodeDigests(context)
        self.unfilled: dict[str, dict[int, int]] = {}
        self._shared: OrderedDict[LeaseKey, bool] = OrderedDict()
        """Whether a request at P has more than one reader here, or may have."""
        self._metadata = StepMetadata()
        self.put_off = PutOffLoads(context)
        self._items_end: dict[str, int] = {}
        """Of requests with multimodal items that only P has seen, where the last one of them ends."""
        self._unclaimed: dict[str, PendingLoad] = {}
        """Pending loads that P has not heard of."""
        self._uncompared: dict[str, Request] = {}
        """Requests with long prompts, of which it is not known yet whether P has computed the same. P does not hear of
        them before."""

    def close(self) -> None:
        """Stop to renew leases, and to follow."""
        self.renewer.close()
        self._following.close()

    def add(self, request: Request, params: dict[str, Any]) -> None:
        """Take a new request whose prompt another engine has computed, or computes now."""
        load = self._read(request, params) if params.get(TICKET) is None else self._follow(request, params)
        if load is not None:
            load.traceparent = traceparent_of(request)
            self.pending[request.request_id] = load

    def add_next_turn(self, request: Request, params: dict[str, Any]) -> None:
        """Take a new request that is prefilled here, of whose beginning another engine may hold the last turn."""
        try:
            remote = readable_part(self._context, request, params)
            self._check_source(remote.address, remote.engine_id)
            if remote.engine_id == self._context.engine.engine_id:
                raise RequestError("the last turn's answer is this engine's own")
        except KvhmaError as error:
            reason = "other_prompt" if isinstance(error, OtherPromptError) else "refused"
            self._compute_here(request.request_id, reason, str(error))
            return
        # D may have given it up long ago.
        load = PendingLoad(_bounded(remote), num_tokens=remote.num_tokens, ask_first=True, prefilled=request)
        self._claim(load, _bounded(remote))
        load.traceparent = traceparent_of(request)
        self.pending[request.request_id] = load

    def refuse(self, request_id: str, text: str) -> None:
        """Take a new request that cannot be loaded."""
        self.pending[request_id] = PendingLoad(None, _refused(text))

    def release_rejected(self, request: Request, params: dict[str, Any]) -> None:
        """Tell P that a request will not be read, since vLLM has rejected it.

        vLLM says so by a request of the same parameters and one token, which it aborts at once. That prompt is
        compared with nothing: the parameters name what P holds, and only whom P gave them to can know them.
        """
        try:
            if params.get(TICKET) is not None:
                self._following.give_up(self._ticket(params))
            else:
                remote = PrefillParams.from_params(params, self._context.secrets, num_prompt_tokens=None)
                self._check_source(remote.address)
                self._release(PendingLoad(remote), read=True)
        except KvhmaError as error:
            logger.warning("kvhma: request %s was rejected, and P is not told: %s", request.request_id, error)

    def take_metadata(self) -> StepMetadata:
        """Return the loads and refusals since the last call; called at the end of each of vLLM's schedules."""
        for request_id, followed in list(self._following.with_blocks.items()):
            self._follow_on(request_id, self.pending[request_id], followed)
        if self._unclaimed:
            self._claim_what_lasts()
        if self._uncompared:  # what is scheduled in the next step is not claimed
            self._compare_what_is_summed()
        metadata, self._metadata = self._metadata, StepMetadata()
        return metadata

    def wait_for_others(self) -> None:
        """Wait a little for what pending loads wait for: news of a followed prompt, the digest of one."""
        self._following.wait_for_news(load.followed for load in self.pending.values())
        if self._uncompared:  # the thread makes one after the other
            self._context.prompts.is_ready(next(iter(self._uncompared)), _DIGEST_SECONDS)

    def _compare_what_is_summed(self) -> None:
        for request in list(self._uncompared.values()):
            if not self._context.prompts.is_ready(request.request_id):
                break
            self._compare(request)

    def finish(self, request: Request) -> bool:
        """Take note that a request has ended; return whether it was one to be loaded."""
        self.put_off.forget(request.request_id)
        self._items_end.pop(request.request_id, None)
        load = self._compare(request)
        if load is None:
            return False
        load.finished = True
        load.aborted = request.status.name == "FINISHED_ABORTED"
        if load.state is LoadState.WANTED:
            self._end(request.request_id, read=load.aborted)
        return True

    def _follow(self, request: Request, params: dict[str, Any]) -> PendingLoad | None:
        """Begin to ask P about a request that it computes at the same time."""
        try:
            ticket = self._ticket(params)
            is_unread = request.get_skip_reading_prefix_cache()
            if is_unread:
                self._compute_unread(request.request_id)
            if is_unread or request.num_prompt_tokens <= self._context.engine.backoff:  # too short to be handed over
                self._following.give_up(ticket)
                return None
            return PendingLoad(None, followed=self._following.follow(request, ticket))
        except KvhmaError as error:
            return PendingLoad(None, _refused(str(error)))

    def _ticket(self, params: dict[str, Any]) -> Ticket:
        ticket = read_ticket(params)
        if ticket is None or params.get("do_remote_decode"):
            raise RequestError("kv_transfer_params: do_remote_prefill and do_remote_decode are both set")
        self._check_source(ticket.address)
        return ticket

    def _look(self, request: Request, load: PendingLoad, followed: FollowedLoad) -> PendingLoad | None:
        """Return what is pending of a followed request, which may be computed here, or have been handed over."""
        request_id = request.request_id
        if (params := followed.conversation.handed_over()) is not None:
            self._unfollow(request_id, load, "late")
            found = self._read(request, params)
            if found is None:
                del self.pending[request_id]
            else:
                found.traceparent = load.traceparent
                self.pending[request_id] = found
        elif not is_sample(request_id):  # samples share what P keeps: each reads it as a whole, when it is there
            try:
                load.num_tokens = self._following.look(request, followed) or 0
            except OtherPromptError as error:
                self._unfollow(request_id, load, "refused")
                if self._disagree(request_id, load, "other_prompt", str(error)) is None:
                    del self.pending[request_id]
            except KvhmaError as error:
                self._unfollow(request_id, load, "lost")
                load.refusal = _refused(str(error))
        return self.pending.get(request_id)

    def _unfollow(self, request_id: str, load: PendingLoad, end: str) -> None:
        followed, load.followed = load.followed, None
        if followed is not None:
            self._following.stop(request_id, followed, end)

    def _follow_on(self, request_id: str, load: PendingLoad, followed: FollowedLoad) -> None:
        """Order the next piece of a followed load, or the last one; unless a piece is being read."""
        told, geometry = followed.conversation, self._context.geometry
        params = told.handed_over()
        if followed.reading or geometry is None:
            return
        if load.finished:
            load.state = LoadState.LOADING
            self._unfollow(request_id, load, "given_up")
            self._metadata.given_up.append(request_id)
        elif told.error:
            self._unfollow(request_id, load, "lost")
            self._refuse(request_id, load, _refused(told.error))
        elif params is not None:
            self._unfollow(request_id, load, "handed_over")
            try:
                self._finish_following(request_id, load, followed, params)
            except KvhmaError as error:
                self._refuse(request_id, load, _refused(str(error)))
        elif (piece := followed.next_piece(geometry, self._context.settings.piece_tokens)) is not None:
            self._metadata.loads.append(piece)

    def _finish_following(
        self, request_id: str, load: PendingLoad, followed: FollowedLoad, params: dict[str, Any]
    ) -> None:
        """Order the last piece: from here on it is a load like others."""
        remote = self._taken(
            PrefillParams.from_params(params, self._context.secrets, num_prompt_tokens=followed.num_prompt_tokens)
        )
        if self._context.geometry is None:
            raise RequestError("this engine has no caches that were registered")
        order = followed.last_piece(self._context.geometry, remote)
        load.remote, load.state, load.since = remote, LoadState.LOADING, time.monotonic()
        load.tries += 1
        load.ask_first = self._is_shared(request_id, remote.lease_key)
        self._unclaimed[request_id] = load
        self._metadata.loads.append(order._replace(outcome=self._outcome(remote)))

    def _read(self, request: Request, params: dict[str, Any]) -> PendingLoad | None:
        """Return what is to be loaded, None if nothing is. P hears of a request only if the parameters are of it."""
        if params.get("do_remote_decode"):
            return PendingLoad(
                None, _refused("kv_transfer_params: do_remote_prefill and do_remote_decode are both set")
            )
        try:
            remote = PrefillParams.from_params(
                params, self._context.secrets, num_prompt_tokens=request.num_prompt_tokens
            )
            self._check_source(remote.address, remote.engine_id)
            self._adopt_items(request, remote)
        except OtherPromptError as error:
            return self._disagree(request.request_id, PendingLoad(None), "other_prompt", str(error))
        except KvhmaError as error:
            return PendingLoad(None, _refused(str(error)))
        load = PendingLoad(self._taken(remote))
        if not self._context.prompts.begin(request, remote.num_tokens):
            return self._start(request, load)
        self._uncompared[request.request_id] = request
        return load

    def _adopt_items(self, request: Request, remote: PrefillParams) -> None:
        """Make a request's multimodal items those of P, if they are trusted. Whether the rest agrees is seen later."""
        if self._trusts_items and remote.items:
            engine = self._context.engine
            # VLLM computes the last token in any case, and every one of a prompt that must not read its cache.
            most = request.num_prompt_tokens - max(1, engine.backoff)
            loaded = 0 if request.get_skip_reading_prefix_cache() else min(remote.num_tokens, most)
            depend = engine.positions_depend_on_items
            if end := adopt_items(request, remote.items, loaded, positions_depend=depend):
                self._items_end[request.request_id] = end

    @property
    def _trusts_items(self) -> bool:
        """Whether items of P are taken over: what cannot be loaded of them has to fail."""
        return self._context.settings.trusts_items and not self._context.engine.recompute

    def _would_compute_items(self, request: Request, local: int) -> bool:
        """Return whether D, if nothing is loaded, would compute an item that only P has seen."""
        end = self._items_end.get(request.request_id, 0)
        return end > 0 and self._hit_without_load(request, local) < end

    def _compare(self, request: Request) -> PendingLoad | None:
        """Return what is pending of a request; if its prompt was not compared yet it is now."""
        request_id = request.request_id
        if (
            self._uncompared.pop(request_id, None) is not None
            and self._start(request, self.pending[request_id]) is None
        ):
            del self.pending[request_id]
        return self.pending.get(request_id)

    def _check_source(self, address: Address, engine_id: str = "") -> None:
        """Refuse what may not, or cannot, be read; a ticket does not say which engine it is of."""
        engine = self._context.engine
        if engine_id not in ("", engine.engine_id) and engine.is_own(address):
            self._context.stats.count("refused_sources", label="itself")
            raise RequestError(leads_back(address, engine_id))
        if not self._context.settings.allows(address):
            self._context.stats.count("refused_sources", label="not_allowed")
            raise RequestError(f"remote_host and remote_port {address} are not among allowed_prefill_engines")
        if self._context.geometry is None or not self._context.geometry.groups:
            raise RequestError("this engine has no caches that were registered")

    def _start(self, request: Request, load: PendingLoad) -> PendingLoad | None:
        """Compare what P holds for a request with its prompt, and claim it; None if all of it is computed here."""
        remote, engine, request_id = load.remote, self._context.engine, request.request_id
        assert remote is not None  # noqa: S101
        try:
            same = self._context.prompts.take(request, remote.num_tokens) == remote.prompt
        except KvhmaError as error:
            load.remote, load.refusal = None, _refused(str(error))
            return load
        if not same:
            text = (
                f"of its first {remote.num_tokens} tokens or its adapter, items or salt, some are others at P; of a "
                "body with several prompts, vLLM hands over the parameters of the first"
            )
            return self._disagree(request_id, load, "other_prompt", text)
        if request.get_skip_reading_prefix_cache():
            self._compute_unread(request_id)
            self._release(load, read=True)
            return None
        most = request.num_prompt_tokens - engine.backoff
        if most <= 0:  # too short to be handed over: that is no loss
            self._release(load, read=True)
            return None
        load.num_tokens = min(remote.num_tokens, most)
        load.ask_first = self._is_shared(request_id, remote.lease_key)
        if remote.num_tokens > most and (engine.has_state or engine.has_windows):
            text = (
                f"P's states and windows are those of {remote.num_tokens} tokens, of this prompt at most {most} can be "
                f"taken over: the last {engine.backoff} are computed here, for a state, for a window or for "
                "num_speculative_tokens, and P leaves as many with equal settings and without prompt_logprobs"
            )
            self._release(load, read=engine.recompute)
            return self._disagree(request_id, load, "state_ahead", text)
        if load.ask_first:
            self._claim(load, remote)
        else:
            self._unclaimed[request_id] = load
        return load

    def _taken(self, remote: PrefillParams) -> PrefillParams:
        """Return parameters as they count here: a lease within bounds, a digest only if it is compared, no items."""
        remote = _bounded(remote)._replace(items=())
        is_compared = self._context.settings.content_digests or remote.content_seed is None
        return remote if is_compared else remote._replace(content_seed=None)

    def _claim(self, load: PendingLoad, remote: PrefillParams) -> None:
        every = max(_MIN_RENEWAL_SECONDS, remote.lease / _RENEWALS)
        self.renewer.track(remote.address, remote.claim(load.reader), every=every)
        load.claimed = True

    def _claim_what_lasts(self) -> None:
        """Claim what waits for room, or takes long to load."""
        now = time.monotonic()
        for request_id, load in list(self._unclaimed.items()):
            if load.state is LoadState.LOADING and now - load.since < _CLAIM_AFTER_SECONDS:
                continue
            del self._unclaimed[request_id]
            if load.remote is not None:
                self._claim(load, load.remote)

    def _is_shared(self, request_id: str, key: LeaseKey) -> bool:
        """Return whether other requests may come, or have come, with the same parameters."""
        known = key in self._shared
        self._shared[key] = known or is_sample(request_id)
        self._shared.move_to_end(key)
        if len(self._shared) > _KEYS_REMEMBERED:
            self._shared.popitem(last=False)
        return self._shared[key]

    def _disagree(self, request_id: str, load: PendingLoad, reason: str, text: str) -> PendingLoad | None:
        """Have ``kv_load_failure_policy`` decide about a prompt that P has computed and that cannot be taken over.

        Returns:
            The load, which fails then; None if the prompt is computed here.
        """
        if self._context.engine.recompute:
            self._compute_here(request_id, reason, text)
            return None
        load.remote, load.refusal = None, Failure(reason, text, passing=False)
        return load

    def _compute_unread(self, request_id: str) -> None:
        """Take note that vLLM computes a prompt whatever is there: it is asked for all of its log-probabilities."""
        text = "skip_reading_prefix_cache is set for it, which prompt_logprobs do"
        self._compute_here(request_id, "skip_reading_prefix_cache", text)

    def _compute_here(self, request_id: str, reason: str, text: str) -> None:
        logger.warning("kvhma: request %s is computed here: %s", request_id, text)
        self._context.stats.count("computed_prompts", label=reason)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `local` ones will be loaded, None if that is not known yet.

        vLLM asks again in each step until the request is scheduled. The answer is the same unless P has answered or
        the request has waited too long.
        """
        if self.put_off.lets_others_go(request.request_id, loads=request.request_id in self.pending):
            return None, False
        load = self.pending.get(request.request_id)
        if load is None and self._would_compute_items(request, local):
            # It was preempted, and what it had loaded is not in the prefix cache any more.
            self.refuse(request.request_id, _ITEMS_LOST)
            return self._failing(request, local)
        if load is not None and load.followed is not None:
            load = self._look(request, load, load.followed)
            if load is not None and load.followed is None and request.request_id in self._items_end:
                return None, False  # vLLM has looked for its blocks by the items that it had before
        if request.request_id in self._uncompared:
            if not self._context.prompts.is_ready(request.request_id):
                return None, False
            load = self._compare(request)
        if load is None:
            return 0, False
        if load.followed is not None:
            if not load.num_tokens:
                return None, False
            return (wanted, True) if (wanted := load.num_tokens - local) > 0 else (0, False)
        if load.refusal or load.remote is None:
            return self._failing(request, local)
        held = self._held_at_p(load, load.remote)
        if held is None:
            return None, False
        if not held:
            reason, text = "late_reader", "others have read what P held for it, and its lease has ended"
            if load.prefilled is not None:
                text = f"{load.remote.address} does not hold the last turn's answer any more, or does not answer"
        elif self.put_off.is_starved(load):
            reason = "no_room"
            text = "it waits for blocks that this engine keeps for others, who may wait for those that it claims"
            if load.tries:
                text = "its load has failed, and there are not enough free blocks to try again"
        else:
            wanted = load.num_tokens - local
            if load.prefilled is not None and self._is_short(load, request, local):
                self._end(request.request_id, read=True)
                return 0, False
            if wanted > 0 or not self._would_compute_items(request, local):
                return (wanted, True) if wanted > 0 else (0, False)
            reason, text = "refused", _ITEMS_LOST
        if load.prefilled is None and not self._context.engine.recompute:
            self._unclaimed.pop(request.request_id, None)
            self._release(load, read=False)
            self._disagree(request.request_id, load, reason, text)
            return self._failing(request, local)
        self._compute_here(request.request_id, reason, text)
        self._end(request.request_id, read=True)
        return 0, False

    def _failing(self, request: Request, local: int) -> tuple[int, bool]:
        """Return what vLLM hears of a load that fails: only a request that waits for tokens can.

        For one token it needs the fewest blocks. Where `local` leaves out what a hit has of a last block that is not
        full, vLLM lets it wait for more tokens than that only; a hit never has all of them. A prompt that must not read
        its cache waits for nothing; since it fails, it may read.
        """
        if self._trusts_items:
            request.skip_reading_prefix_cache = False
        return request.num_tokens - local if self._context.partial_hits else 1, True

    def _is_short(self, load: PendingLoad, request: Request, local: int) -> bool:
        """Return whether a prefill computes as fast what it would read."""
        least = self._context.settings.kv_recompute_threshold
        if load.num_tokens - local >= least:
            return False
        return load.num_tokens - self._hit_without_load(request, local) < least

    def _hit_without_load(self, request: Request, local: int) -> int:
        """Return how many tokens vLLM would not compute: the hit that it names is that of full attention."""
        engine, manager = self._context.engine, self._context.manager
        if manager is not None and (engine.has_state or engine.has_windows):
            return min(local, int(manager.get_computed_blocks(request)[1]))
        return local

    def _held_at_p(self, load: PendingLoad, remote: PrefillParams) -> bool | None:
        """Return whether P still holds what is to be loaded; None if it has to answer first."""
        if not load.ask_first:
            return True
        held = self.renewer.held(remote.address, remote.claim(load.reader))
        if held is None and time.monotonic() - load.since >= self._context.settings.handshake_timeout:
            # The load finds that P does not answer, and kv_load_failure_policy decides; a prefill does without it.
            return load.prefilled is None
        return held

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Take the blocks that a load is to fill; without external tokens there is nothing to load."""
        request_id = request.request_id
        self.put_off.forget(request_id)
        load = self._compare(request)
        if load is None or load.state is not LoadState.WANTED:
            return
        if external <= 0:
            if load.refusal:  # vLLM has not let it wait: it must not read the cache, or another connector loads it
                self._compute_here(request_id, load.refusal.cause, load.refusal.text)
            self._end(request_id, read=True)
            return
        load.state = LoadState.LOADING
        load.first_tokens, load.unheard = {}, False
        self._digests.forget(request_id)
        if load.refusal:
            self._refuse(request_id, load, load.refusal)
            return
        try:
            if load.followed is not None:
                remote = load.followed.provisional()
                order = self._make_load(request_id, load, remote, blocks, external)
                load.state = LoadState.FOLLOWING
                self._following.place(request_id, load.followed, order)
            else:
                load.tries += 1
                self._metadata.loads.append(self._make_load(request_id, load, load.remote, blocks, external))
        except KvhmaError as error:
            self._refuse(request_id, load, _refused(str(error)))

    def _refuse(self, request_id: str, load: PendingLoad, refusal: Failure) -> None:
        """Have the workers report a load as failed, so that ``kv_load_failure_policy`` decides about it."""
        logger.warning("kvhma: request %s cannot be loaded: %s", request_id, refusal.text)
        load.refusal = refusal
        self._metadata.refusals[request_id] = refusal

    def _make_load(
        self, request_id: str, load: PendingLoad, remote: PrefillParams | None, blocks: KVCacheBlocks, external: int
    ) -> Load:
        geometry = self._context.geometry
        if remote is None or geometry is None:
            raise RequestError("there is nothing to load it from")
        tables = [blocks.blocks[index] for index in self._context.engine.transfer_groups]
        entries = live_entries(geometry, load.num_tokens, list(map(len, tables)))
        spans = []
        for group, table, needed in zip(geometry.groups, tables, entries, strict=True):
            # Each group has a hit of its own: the one that vLLM names is that of full attention.
            is_state = group.kind == "ssm"
            first = needed.start if is_state else hit_blocks(table, needed.start)
            filled = table[first : needed.stop]
            if is_state and any(block.is_null for block in filled):
                raise RequestError("the block of its state is the null block")
            spans.append(Span(0 if is_state else first, [block.block_id for block in filled]))
        return Load(
            request_id=request_id,
            remote=remote,
            reader=load.reader,
            num_tokens=load.num_tokens,
            cached=load.num_tokens - external,
            spans=tuple(spans),
            outcome=self._outcome(remote),
            trace=load.trace(),
            optional=load.prefilled is not None,
        )

    def _worker_releases(self, remote: PrefillParams | None) -> bool:
        """Whether the worker that has read a load tells P so; not before its digest was compared."""
        has_digest = remote is not None and remote.content_seed is not None
        return self._context.engine.worker_releases and not has_digest

    def _is_released(self, load: PendingLoad) -> bool:
        """Whether P has heard that a load was read."""
        return self._worker_releases(load.remote) and not load.unheard

    def results(self, output: KVConnectorOutput) -> None:
        """Take note of the loads that have ended."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._note_report(report)
        failed = output.failed_recving or set()
        for request_id in output.finished_recving or ():
            load = self.pending.get(request_id)
            if load is not None and load.prefilled is not None:
                self._loaded_for_prefill(request_id, load, load.prefilled, failed=load.lost or request_id in failed)
            elif load is not None:
                self._loaded(request_id, load, failed=request_id in failed)

    def _note_report(self, report: WorkerReport) -> None:
        for request_id, tokens in report.first_tokens.items():
            if (load := self.pending.get(request_id)) is not None:
                load.first_tokens = later(load.first_tokens, tokens)
        for request_id in report.shown:
            if (load := self.pending.get(request_id)) is not None:
                load.unheard = True
        for request_id, ranks in report.pieces.items():
            self._following.note_piece(request_id, ranks, report.lost_pieces.get(request_id, ""))
        for request_id, failure in report.failures.items():
            load = self.pending.get(request_id)
            if load is not None:
                load.lost = load.prefilled is not None
                if not failure.passing:
                    load.refusal = load.refusal or failure
        if self._context.settings.content_digests:
            self._metadata.verdicts |= self._digests.verdicts(report)

    def _loaded_for_prefill(self, request_id: str, load: PendingLoad, request: Request, *, failed: bool) -> None:
        """Take note that the last turn was read; or make vLLM compute the prompt, whatever its policy.

        So it does where windows begin inside of blocks that are not filled from their start: these cannot be handed
        over, and D would lack the windows.
        """
        if not load.finished and (failed or load.first_tokens):
            reason = "failed_read" if failed else "short_window"
            self._compute_here(request_id, reason, "the last turn's answer could not be read as it is needed")
            if self._context.manager is not None:
                # What vLLM itself does with the recompute policy. It has not looked at the request yet.
                self._context.manager.free(request)
                request.num_computed_tokens = 0
                self.put_off.note_failed(request_id)
        self._end(request_id, read=True, released=not failed and self._is_released(load))

    def _loaded(self, request_id: str, load: PendingLoad, *, failed: bool) -> None:
        recompute = self._context.engine.recompute
        if failed and recompute and not load.finished:
            self.put_off.note_failed(request_id)
        if not failed and not load.finished:
            self._keep_unfilled_out(request_id, load.first_tokens)
        may_try_again = not load.refusal and load.tries <= self._context.settings.load_retries
        if failed and may_try_again and not load.finished and recompute:
            load.state = LoadState.WANTED
            load.asked_since = None
        else:
            # A D that recomputes the prompt does not need P any more; if the request fails, another D may read it.
            released = not failed and self._is_released(load)
            self._end(request_id, read=not failed or recompute or load.aborted, released=released)

    def _keep_unfilled_out(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        """Keep blocks that the load has not filled from their first token on out of the prefix cache."""
        if self._context.manager is not None:
            for group, token in first_tokens.items():
                never_cache_before(
                    self._context.manager, request_id, self._context.engine.transfer_groups[group], token
                )
            if first_tokens and self._context.engine.keeps_answers:
                self.unfilled[request_id] = dict(first_tokens)

    def _end(self, request_id: str, *, read: bool, released: bool = False) -> None:
        """Forget a load; P is told, unless the worker has `released` the blocks with its question.

        What is claimed is released all the same: a renewal may have been on its way then, and have claimed it again.
        """
        load = self.pending.pop(request_id)
        self._unfollow(request_id, load, "given_up")
        self._digests.forget(request_id)
        self._unclaimed.pop(request_id, None)
        if load.claimed or not released:
            self._release(load, read=read)

    def _release(self, load: PendingLoad, *, read: bool) -> None:
        """Tell P that a reader is gone; if it has not `read`, another engine may be given the same parameters."""
        if load.remote is not None:
            outcome = self._read_outcome(load.remote) if read else Outcome.UNREAD
            self.renewer.release(load.remote.address, load.remote.claim(load.reader), outcome)

    def _outcome(self, remote: PrefillParams) -> Outcome | None:
        """Return what a worker tells P itself when it has read; None if others read too."""
        return self._read_outcome(remote) if self._worker_releases(remote) else None

    def _read_outcome(self, remote: PrefillParams) -> Outcome:
        # Any of these may turn out to be a reader; if none is, P keeps the blocks for two seconds more.
        uncompared = (self.pending[request_id].remote for request_id in self._uncompared)
        may_be_shared = any(one is not None and one.lease_key == remote.lease_key for one in uncompared)
        shared = may_be_shared or self._shared.get(remote.lease_key, False)
        return Outcome.READ_SHARED if shared else Outcome.READ


def _refused(text: str) -> Failure:
    return Failure("refused", text, passing=False)


def _bounded(remote: PrefillParams) -> PrefillParams:
    """Return parameters whose lease is one that counts."""
    lease = min(max(remote.lease, _MIN_LEASE_SECONDS), _MAX_LEASE_SECONDS)
    return remote if lease == remote.lease else remote._replace(lease=lease)
