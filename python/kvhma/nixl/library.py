# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 - the methods of the protocol are NIXL's
"""The part of NIXL's Python API that kvhma uses, how it is opened, and what its exceptions mean here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import KvhmaError, PeerLostError, TransferError

LOCAL_SIDE = "NIXL_INIT_AGENT"
"""The agent name that makes a prepared list a local one."""

_PROGRESS_MICROSECONDS = 10_000
"""How long a progress thread without events sleeps; an event wakes it at once."""

_REFUSALS = frozenset(
    {"nixlInvalidParamError", "nixlMismatchError", "nixlNotAllowedError", "nixlNotFoundError"}
    | {"KeyError", "TypeError", "ValueError"}  # from the binding, before NIXL sees the arguments
)


class NixlHandle(Protocol):
    """A NIXL object that holds memory of the library until it is released."""

    def release(self) -> None:
        """Give the memory back. For a transfer in flight this does *not* stop the transfer."""


class NixlAgent(Protocol):
    """The methods of ``nixl_agent`` that kvhma calls, and no others; `tests/support/fake_nixl.py` has the same ones."""

    def register_memory(self, reg_list: NDArray[np.uint64], mem_type: str) -> Any: ...
    def deregister_memory(self, dereg_list: Any) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def check_remote_metadata(self, agent: str, descs: Any) -> bool: ...
    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> Any: ...
    def prep_xfer_dlist(self, agent_name: str, xfer_list: NDArray[np.uint64], mem_type: str) -> NixlHandle: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: NDArray[np.int32],
        remote_xfer_side: Any,
        remote_indices: NDArray[np.int32],
        notif_msg: bytes,
    ) -> NixlHandle: ...
    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif_msg: bytes
    ) -> NixlHandle: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def get_xfer_telemetry(self, handle: Any) -> Any: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None: ...


def open_nixl(name: str, backends: Sequence[str], num_threads: int, telemetry: bool) -> NixlAgent:
    """Import NIXL and make an agent.

    Raises:
        ImportError: NIXL is not installed, or lacks something it needs.
        TransferError: NIXL has no such backend, or cannot start it.
    """
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as exc:
        raise ImportError(f"kvhma.nixl needs NIXL: pip install 'kvhma[nixl]' (importing it: {exc})") from exc
    try:
        config = api.nixl_agent_config(
            # The owner of memory that others read makes progress only in this thread.
            enable_prog_thread=True,
            capture_telemetry=telemetry,
            num_threads=num_threads,
            backends=list(backends),
            # NIXL's default is no locking at all. An engine posts from one thread, polls from another and
            # shakes hands in a third. RW lets posts and polls of different transfers run side by side, which
            # a post that copies inline (hundreds of milliseconds) needs; only registration, handshake and
            # reading the notifications exclude the others.
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        agent = _sleeping(api)(name, config)
    except Exception as exc:
        raise translate(exc, f"cannot make NIXL agent {name!r} with backends {list(backends)}") from exc
    # NIXL skips a backend it has no plugin for with a warning, and fails at the first use.
    missing = [backend for backend in backends if backend not in agent.backends]
    if missing:
        raise TransferError(f"NIXL has no plugin for {missing}; it has {agent.get_plugin_list()}")
    return cast(NixlAgent, agent)


def _sleeping(api: ModuleType) -> Callable[[str, Any], Any]:
    """Return NIXL's class of agents, with a progress thread that sleeps while nothing happens.

    NIXL's Python API fixes its delay at zero, and then the thread polls without a pause: it takes a core from the
    engine, and from transfers too where cores are few. The binding can set the delay; the API just never lets anybody.
    So run its constructor with a binding that does, and leave the module itself alone: others may use it.
    """
    plain = api.nixl_agent
    binding: Any = getattr(api, "nixlBind", None)
    init = plain.__init__
    if not hasattr(getattr(binding, "nixlAgentConfig", None), "pthrDelay") or not isinstance(init, FunctionType):
        return cast(Callable[[str, Any], Any], plain)

    class Binding:
        def __getattr__(self, name: str) -> Any:
            return getattr(binding, name)

        def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - NIXL's name
            config.pthrDelay = _PROGRESS_MICROSECONDS
            return binding.nixlAgent(name, config)

    names = vars(api) | {"nixlBind": Binding()}
    made = FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
    made.__kwdefaults__ = init.__kwdefaults__
    return cast(Callable[[str, Any], Any], type(plain.__name__, (plain,), {"__init__": made}))


def takes_strided(nixl: NixlAgent) -> bool:
    """Whether prepared lists can be made of strided rows (NIXL 1.5 and later).

    An older one would log an error and fail; the signatures in the binding's text tell without trying.
    """
    binding = getattr(getattr(nixl, "agent", None), "prepXferDlist", None)
    return "numpy.ndarray" in (getattr(binding, "__doc__", None) or "")


def translate(exc: Exception, what: str, refused: type[KvhmaError] = TransferError) -> KvhmaError:
    """Return our error for one of NIXL's.

    NIXL's exceptions have no common base and carry only a status name, so they are told apart by their class
    name and `what` has to say what was attempted.

    Args:
        exc: what NIXL raised.
        what: start of the message.
        refused: class for "these arguments are no good": not found, invalid, mismatch, not allowed.
    """
    if isinstance(exc, KvhmaError):
        return exc
    name = type(exc).__name__
    kind: type[KvhmaError] = TransferError
    if name == "nixlRemoteDisconnectError":
        kind = PeerLostError
    elif name in _REFUSALS:
        kind = refused
    error = kind(f"{what}: {exc} ({name})")
    error.__cause__ = exc
    return error
