# SPDX-License-Identifier: Apache-2.0
"""How the connector calls its options. An option overrides the calls that it needs; the others do nothing.

Each option is a folder beside this file. Its `scheduler.py` has a :class:`SchedulerDoor` with the name ``Room``, and
its `worker.py` a :class:`WorkerDoor` with that name; it may lack one of them. Nothing else of an option is used outside
its folder, and `kvhma.vllm.config.rooms` decides which options an engine has.

What an option sends between the two processes is in the `extras` of
:class:`kvhma.vllm.metadata.ReadCommand`, :class:`kvhma.vllm.metadata.StepMetadata` and
:class:`kvhma.vllm.metadata.WorkerReport`, under the option's name. The values are pickled, so they keep their types.
What it says to other engines is in the `options` of :class:`kvhma.vllm.config.identity.EngineExtra`.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvhma.geometry import Geometry, Span
    from kvhma.nixl import Peer
    from kvhma.vllm.config.identity import EngineExtra
    from kvhma.vllm.config.settings import Settings
    from kvhma.vllm.device.memory import Memory
    from kvhma.vllm.metadata import ReadCommand, StepMetadata, WorkerReport
    from kvhma.vllm.wire.messages import Handler, Question
    from kvhma.vllm.wire.params import LeaseClaim, LeaseKey, PrefillParams


class SchedulerDoor:
    """An option in the scheduler's process. The engine's thread makes all calls.

    Attributes:
        changes_prompts: whether a prompt may be another once D has P's parameters.
        asleep: whether the option needs no calls but those of `WAKING`, until :meth:`Rooms.wake`.
    """

    changes_prompts = False
    asleep = False

    @classmethod
    def facts(cls, config: VllmConfig, caches: KVCacheConfig, settings: Settings) -> Any:
        """Return what the option reads of vLLM's configuration, for the `extras` of `EngineFacts`."""

    def on_request_added(self, request: Request, params: dict[str, Any]) -> bool:
        """Note a new request that has ``kv_transfer_params``; return whether the option handles it alone."""
        return False

    def on_request_rejected(self, request: Request, params: dict[str, Any]) -> bool:
        """Note a request that vLLM has rejected; return whether the option notifies P.

        Raises:
            KvhmaError: P cannot be notified.
        """
        return False

    def on_tokens_asked(self, load: Any) -> None:
        """Note that vLLM asks how much is loaded of a request without blocks: a :class:`Load` of the load machine."""

    def remote_before_hand_off(self, request_id: str) -> PrefillParams | None:
        """Return what is known of a request whose parameters D lacks; None if the option does not know it."""

    def carry_out(self, load: Any, effect: enum.Enum, command: ReadCommand | None) -> None:
        """Carry out a `LoadEffect` of the load's table that is an option's, in the order of the table."""

    def on_params_read(self, request: Request, remote: PrefillParams) -> None:
        """Note P's parameters of a request, before D compares its prompt with P's.

        Raises:
            KvhmaError: the request must not be loaded.
        """

    def why_not_computed(self, request: Request, local: int) -> str:
        """Return why D cannot compute a request whose hit has `local` tokens if nothing is loaded; empty if it can."""
        return ""

    def on_load_refused(self, request: Request) -> None:
        """Note that a request is to fail once vLLM gives it blocks."""

    def on_blocks_wanted(self, request: Request) -> None:
        """Note that vLLM is about to look for blocks for a waiting request."""

    def on_blocks_allocated(self, request: Request) -> None:
        """Note that vLLM has found blocks for a request."""

    def must_hold_until_reported(self, remote: PrefillParams) -> bool:
        """Return whether P must hold the blocks of a load until it was reported, and not only until it was read."""
        return False

    def on_step(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Add the option's commands to those of a step, or change them.

        Returns:
            Whether the option needs the next step in any case. Otherwise a step is left out if vLLM has made no other
            call since the last one, no load is pending and no blocks are held.
        """
        return False

    def wait_for_progress(self) -> None:
        """Wait a little for other engines, in a step that has nothing else to do while loads are pending."""

    def on_results(self, report: WorkerReport) -> None:
        """Note what the workers report."""

    def on_request_loaded(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        """Note that a request was loaded; `first_tokens` as in :class:`kvhma.vllm.metadata.WorkerReport`."""

    def on_request_finished(self, request: Request, tables: Sequence[Sequence[int]] | None) -> dict[str, Any] | None:
        """Note the end of a request; return its ``kv_transfer_params`` if the option holds its blocks.

        `tables` are the blocks; None if the option must not hold them.
        """

    def handed_off_spans(self, request: Request, spans: list[Span]) -> list[Span] | None:
        """Return where other engines read the blocks `spans` of a finished request; None if they cannot."""
        return spans

    def on_hand_off(self, request: Request, remote: PrefillParams) -> PrefillParams | None:
        """Return the parameters of a request that P hands off, with what the option adds; None not to hand it off."""
        return remote

    def on_request_held(self, request_id: str, params: Mapping[str, Any], claim: LeaseClaim) -> None:
        """Note that P holds the blocks of an ended request; `params` are for D, and the claim names no reader."""

    def answer_questions(self) -> Mapping[type[Question], Handler]:
        """Return how the listener answers the option's own questions, by their kind.

        The listener reads and bounds a question by its kind.
        """
        return {}

    def on_lease_ended(self, key: LeaseKey) -> None:
        """Note that this engine no longer holds the blocks of a request that it has handed off."""

    def make_room(self) -> bool:
        """Free blocks for a running request that lacks some; return whether the next step has more."""
        return False

    def on_expendable_ended(self, why: enum.Enum, count: int) -> None:
        """Note that so many leases of expendable requests have ended, and why: a `LeaseEnd`."""

    def needs_step(self) -> bool:
        """Return whether vLLM must make a step with nothing to compute."""
        return False

    def reset_cache(self) -> None:
        """Note that the caches are about to be reset: the leases of all requests end."""

    def close(self) -> None:
        """Stop the option's threads. No more calls follow."""


class WorkerDoor:
    """An option in a worker's process. `read` is always a :class:`kvhma.vllm.reads.active_read.ActiveRead`."""

    @classmethod
    def memory_of(cls, geometry: Geometry, caches: Mapping[str, torch.Tensor], *configured: Any) -> Memory | None:
        """Return the memory that is registered instead of the caches; `configured` is as for `SchedulerDoor.facts`."""

    @classmethod
    def share(cls, caches: Mapping[str, torch.Tensor], *, authenticated: bool) -> Mapping[str, Any]:
        """Return what the worker identity says for the option, by its name, as values that msgspec encodes.

        Called before the caches are described, because it may move them to other addresses. `authenticated` says
        whether only engines that share a secret get the identity.
        """
        return {}

    def reader(self, peer: Peer) -> Callable[[Any], Any] | None:
        """Return how the option reads from a peer: from a `ReadPart` to a `TransferInFlight`; None to leave it to NIXL.

        The thread of reads calls both. The function raises as :meth:`kvhma.nixl.Agent.read`.
        """

    @classmethod
    def check_identity(cls, geometry: Geometry, extra: EngineExtra, *, authenticated: bool) -> None:
        """Check that an engine here could use what a worker identity says for the option; for the doctor.

        Raises:
            KvhmaError: it could not.
        """

    def on_step(self, metadata: StepMetadata) -> None:
        """Carry out the option's commands of a step, in the engine's thread."""

    def on_step_launched(self, metadata: StepMetadata) -> None:
        """Use what a step computes, in the engine's thread, whose stream orders this after the step."""

    def inspect(self, read: Any) -> Iterator[None]:
        """Do the option's part of a read whose bytes are there, while it holds its places and P's engine.

        A `yield` waits. It must not end, even by an error, while anything of the option reads or writes the places.

        Raises:
            Exception: the read has failed.
        """
        return iter(())

    def judge(self, read: Any) -> Iterator[None]:
        """Wait until a read that holds nothing may be reported as loaded; as :meth:`inspect`."""
        return iter(())

    def on_read_reported(self, read: Any) -> None:
        """Note a read that was reported, while the engine continues."""

    def add_to_report(self, report: WorkerReport) -> None:
        """Add the option's results to the report of a step, in the engine's thread."""

    def close(self, timeout: float) -> None:
        """Stop the option's threads. No more calls follow; the caches are still registered."""


WAKING = ("on_request_added", "on_request_rejected", "answer_questions")
"""Calls that an option gets while it is asleep: what comes by them may wake it."""


class Rooms(tuple[Any, ...]):
    """The options of an engine, and for each call of their door a tuple of the methods that override it.

    So a call that no option overrides, or only options that are asleep, costs an empty loop.
    """

    def __new__(cls, door: type, rooms: Iterable[Any] = ()) -> Rooms:
        """Take the options; `door` is their class here."""
        made = super().__new__(cls, rooms)
        for name, default in vars(door).items():
            if inspect.isfunction(default):
                overriding = [room for room in made if getattr(type(room), name) is not default]
                awake = [room for room in overriding if name in WAKING or not getattr(room, "asleep", False)]
                vars(made)[name] = tuple(getattr(room, name) for room in awake)
        return made

    def wake(self, room: SchedulerDoor) -> None:
        """Make all calls of an option from now on."""
        if room.asleep:
            room.asleep = False
            vars(self).update(vars(Rooms(SchedulerDoor, self)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]:
            """Return the methods that override a call."""
