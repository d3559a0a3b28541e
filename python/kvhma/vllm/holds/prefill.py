# SPDX-License-Identifier: Apache-2.0
"""P's part of the connector's scheduler: requests that P computes, and holds until decode engines have read them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhma._kvhma import first_entries
from kvhma.errors import KvhmaError
from kvhma.geometry import Geometry, Span
from kvhma.planning import live_spans
from kvhma.vllm.holds.held_blocks import hold_blocks
from kvhma.vllm.holds.lease_boards import LeaseBoards
from kvhma.vllm.holds.lease_table import EndedLease, LeaseEnd
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.internals import shorten_prompt
from kvhma.vllm.metadata import LocalWorkerIdentity
from kvhma.vllm.peers.server import Listener, LocalEngine
from kvhma.vllm.wire import peer_log
from kvhma.vllm.wire.messages import Handler, Question
from kvhma.vllm.wire.params import Incarnation, LeaseClaim, LeaseKey, PrefillParams, random_id

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvhma")

FINISHED_WELL = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""P holds blocks only of requests that end with one of these statuses of vLLM."""

_UNREAD = {
    LeaseEnd.UNCLAIMED: "no decode engine has asked for it",
    LeaseEnd.NOT_RENEWED: "its decode engine has not renewed it in time",
    LeaseEnd.UNREAD: "its decode engine could not read it, and no other engine has asked for it",
    LeaseEnd.RESET: "this engine has reset its caches, as for other weights or for sleep",
}
"""Why a lease may end before a reader has read the request."""

_MAX_NAMES = 8
"""At most so many requests are named in one log line."""


class PrefillScheduler:
    """Hands off requests: P holds their blocks, and the parameters of the decode request name them."""

    def __init__(self, context: SchedulerContext) -> None:
        """Start; :meth:`serve` begins to answer other engines."""
        self._context = context
        self._incarnation_id = random_id()
        self._listener: Listener | None = None
        self._hellos: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self._shortened: set[str] = set()
        """Requests whose last tokens P leaves to D."""

    def close(self) -> None:
        """Stop answering other engines."""
        if self._listener is not None:
            self._listener.close()

    def serve(self, hellos: Mapping[tuple[int, int], LocalWorkerIdentity]) -> None:
        """Answer other engines from now on; `hellos` are the worker identities by pipeline and tensor rank.

        After sleep vLLM brings other worker identities, and the caches are gone. It brings the same identities if it
        wakes an engine that is awake.
        """
        context = self._context
        signed = {rank: (hello.data, hello.private_key) for rank, hello in hellos.items()}
        if signed == self._hellos:
            return
        if self._listener is not None:
            self._listener.close()
            self.reset_cache()
        self._hellos = signed
        context.leases.show_on_boards(LeaseBoards(hello.board for hello in hellos.values() if hello.board is not None))
        handlers: dict[type[Question], Handler] = {}
        for answer_questions in context.rooms.answer_questions:
            handlers |= answer_questions()
        self._listener = Listener(
            context.engine.bind or context.engine.address,
            LocalEngine(context.engine.engine_id, self._incarnation_id, signed, context.engine.address),
            leases=context.leases,
            secrets=context.secrets,
            counters=context.stats,
            handlers=handlers,
        )

    def notify_progress(self, topic: bytes) -> None:
        """Answer the questions of other engines that wait for a topic. Any thread may call this."""
        if self._listener is not None:
            self._listener.notify_progress(topic)

    def reset_cache(self) -> None:
        """Free all that other engines may read: the caches are reset, as after other weights were loaded.

        All leases end. The engine gets a new incarnation, which other engines see in its replies and in the
        parameters of later requests.
        """
        for reset_cache in self._context.rooms.reset_cache:
            reset_cache()
        self._incarnation_id = random_id()
        if self._listener is not None:
            self._listener.begin_incarnation(self._incarnation_id)  # first: it is why P does not hold a request
        self._context.leases.end_all()
        self.free_ended_leases()

    def on_request_added(self, request: Request) -> None:
        """Add a new request that another engine decodes."""
        tokens = self.tokens_of_prompt(request)
        # Prompt log-probabilities need all tokens of the prompt, and a resumable request gets more tokens later.
        if tokens < request.num_prompt_tokens and not (request.get_skip_reading_prefix_cache() or request.resumable):
            shorten_prompt(request, tokens)
            self._shortened.add(request.request_id)
        self._context.prompts.begin_digest(request, tokens)

    @property
    def source(self) -> Incarnation:
        """This engine, as decode engines read from it."""
        engine = self._context.engine
        return Incarnation(
            engine.address, engine.engine_id, self._incarnation_id, engine.ranks_of_stage, engine.pp_size
        )

    def tokens_of_prompt(self, request: Request) -> int:
        """Return how many tokens of a prompt P will hand off."""
        tokens: int = request.num_prompt_tokens
        backoff = self._context.engine.backoff
        if tokens <= backoff or request.request_id in self._shortened:
            return tokens
        return tokens - backoff

    def free_ended_leases(self) -> bool:
        """Free blocks whose lease has ended; return whether there were any."""
        leases = self._context.leases
        ended = leases.drain_ended() if leases.held or leases.ended else None
        if ended:
            self._free_ended(ended)
        if leases.digests_refused:
            refused = leases.take_digests_refused()
            self._context.stats.count("digest_refused", refused)
            peer_log.logger.warning(
                "kvhma: refused %d claims: their digest does not match the parameters that P returned", refused
            )
        return bool(ended)

    def _free_ended(self, ended: Mapping[LeaseEnd, Sequence[EndedLease]]) -> None:
        """Free the blocks of requests whose lease has ended; count and log those that were not read."""
        manager = self._context.manager
        for why, leases in ended.items():
            for on_expendable_ended in self._context.rooms.on_expendable_ended:
                if expendable := sum(lease.is_expendable for lease in leases):
                    on_expendable_ended(why, expendable)
            if why is not LeaseEnd.READ:
                self._report_unread(why, [lease for lease in leases if not lease.is_expendable])
        for key, blocks, _ in itertools.chain.from_iterable(ended.values()):
            for on_lease_ended in self._context.rooms.on_lease_ended:
                on_lease_ended(key)
            if manager is not None:
                manager.block_pool.free_blocks(reversed(blocks))  # as vLLM does: the last block first

    def _report_unread(self, why: LeaseEnd, leases: Sequence[EndedLease]) -> None:
        if leases and why is LeaseEnd.EVICTED:
            self._context.stats.count("held_dropped", len(leases))
            peer_log.logger.warning(
                "kvhma: evicting the oldest unclaimed requests: together they hold more blocks than max_held_share "
                "allows (%d requests: %s)",
                *_some(leases),
            )
        elif leases:
            self._context.stats.count("expired", len(leases), label=why.value)
            logger.warning(
                "kvhma: the lease ended before the request was read: %s (%d requests: %s)", _UNREAD[why], *_some(leases)
            )

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Hold the blocks of a request that has ended, if a decode engine will read them.

        Returns:
            ``kv_transfer_params`` for the decode request; None if P does not hold the blocks.
        """
        asked, geometry, manager = request.kv_transfer_params, self._context.geometry, self._context.manager
        if not isinstance(asked, dict) or asked.get("do_remote_decode") is not True:
            return None
        remote = None if geometry is None else self._describe_finished(request, tables, geometry)
        self.discard_request(request.request_id)
        if remote is None or geometry is None or manager is None:
            return None
        params, digest = remote.to_params(self._context.secrets, dcp_size=self._context.engine.dcp_size)
        # All blocks of the request, also of groups that are not transferred.
        held = hold_blocks(manager, request, tables, geometry.null_block, self._context.may_take)
        self._context.leases.hold(remote.lease_key, digest, *held)
        for on_request_held in self._context.rooms.on_request_held:
            on_request_held(request.request_id, params, LeaseClaim(remote.lease_key, 0, digest))
        return params

    def _describe_finished(
        self, request: Request, tables: Sequence[Sequence[int]], geometry: Geometry
    ) -> PrefillParams | None:
        """Return the parameters of a request that has ended; None if P cannot hand it off."""
        if request.status.name not in FINISHED_WELL:
            return None
        tokens = self._tokens_to_hand_off(request)
        spans = None if tokens is None else self._spans_to_hand_off(request, tokens, tables, geometry)
        if tokens is None or spans is None:
            return None
        remote: PrefillParams | None = self.describe_request(request, tokens, spans)
        for on_hand_off in self._context.rooms.on_hand_off:
            remote = remote and on_hand_off(request, remote)
        return remote

    def describe_request(self, request: Request, tokens: int, spans: Sequence[Span]) -> PrefillParams:
        """Return the parameters of a request, with a new lease key."""
        engine = self._context.engine
        return PrefillParams(
            address=engine.address,
            engine_id=engine.engine_id,
            incarnation_id=self._incarnation_id,
            lease_key=LeaseKey(request.request_id, random_id()),
            lease=self._context.settings.kv_lease_duration,
            num_tokens=tokens,
            prompt=self._context.prompts.take_digest(request, tokens),
            spans=tuple(spans),
            tp_size=engine.ranks_of_stage,
            pp_size=engine.pp_size,
        )

    def discard_request(self, request_id: str) -> None:
        """Discard what is known of a request that has ended."""
        self._shortened.discard(request_id)
        if self._context.prompts.begun:
            self._context.prompts.cancel_digest(request_id)

    def _tokens_to_hand_off(self, request: Request) -> int | None:
        """Return of how many tokens the caches are handed off; None if the state is not that of a known token."""
        engine = self._context.engine
        tokens: int = request.num_computed_tokens
        if not engine.has_state:
            # D needs no tokens after these, and can use a cache of tokens for fewer of them.
            return min(tokens, self.tokens_of_prompt(request))
        decoded = tokens - request.num_prompt_tokens
        if decoded <= 0 or not engine.drafted_state:
            return tokens
        peer_log.logger.warning(
            "kvhma: cannot hand off request %s: it decoded %d tokens with speculative_config, and the recurrent state "
            "is then at another place, after the accepted drafts; send max_tokens=1 to P",
            request.request_id,
            decoded,
        )
        return None

    def _spans_to_hand_off(
        self, request: Request, tokens: int, tables: Sequence[Sequence[int]], geometry: Geometry
    ) -> list[Span] | None:
        """Return all live blocks of a request; None if the window or chunk of the token after `tokens` lacks a block.

        An option may have them read at other places, or not at all.
        """
        request_id = request.request_id
        try:
            spans: list[Span] | None = live_spans(geometry, None, self._context.transfer_tables(tables))
            for handed_off_spans in self._context.rooms.handed_off_spans:
                spans = None if spans is None else handed_off_spans(request, spans)
            if spans is None:
                return None
            needed = first_entries(geometry.core, tokens, [0] * len(spans))
        except KvhmaError:
            logger.exception("kvhma: cannot hand off the blocks of request %s", request_id)
            return None
        for span, first in zip(spans, needed, strict=True):
            if span.first > first:
                peer_log.logger.warning(
                    "kvhma: cannot hand off request %s: P computed more tokens than D needs, and vLLM has freed a "
                    "block of the window of token %d; D computes the prompt",
                    request_id,
                    tokens,
                )
                return None
        return spans


def _some(ended: Sequence[EndedLease]) -> tuple[int, str]:
    """Return how many requests there are, and the first of their names; clients may have chosen these."""
    more = ", ..." if len(ended) > _MAX_NAMES else ""
    return len(ended), ", ".join(key.request_id for key, *_ in ended[:_MAX_NAMES]) + more
