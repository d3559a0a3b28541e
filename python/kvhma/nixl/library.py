# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 - the methods of the protocol are NIXL's
"""The part of NIXL's Python API that kvhma uses: how it is opened, its version, and its exceptions as kvhma's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvhma.errors import KvhmaError, PeerLostError, RequestError, TransferError
from kvhma.geometry import Memory
from kvhma.versions import NIXL_INSTALL, NIXL_STRIDED, series

LOCAL_SIDE = "NIXL_INIT_AGENT"
"""The agent name that makes a prepared list local."""

PROGRESS_DELAY_US = 1000
"""Default of :attr:`AgentOptions.progress_delay_us`; docs/nixl.md has the measurements."""

READER_PROGRESS_DELAY_US = 100_000
"""Delay for agents whose own threads copy what they read. Such a copy holds UCX's lock. A progress thread that wakes
during the copy competes for the lock until nothing is in flight, and both threads spin."""

MAX_PROGRESS_DELAY_US = 1_000_000
"""The longest delay; an event that the thread misses may cost as much."""

PACKAGES = ("nixl", "nixl_rocm")
"""NIXL's packages: for CUDA and for hosts without a GPU, and for ROCm."""

_ENVIRONMENT = {"UCX_RCACHE_MAX_UNRELEASED": "1024"}
"""UCX's environment, unless it is already set. vLLM's connector sets it too, against a leak in UCX."""

_CUDA_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""The same, with a driver for CUDA. Without NVLink, UCX would read device memory of another process over TCP
(docs/nics.md). Elsewhere UCX warns of a variable that no transport uses."""

_CUDA_DRIVER = Path("/proc/driver/nvidia/version")

_THREADS_OPTION = {
    "UCX": "num_threads",
    "LIBFABRIC": "num_threads",
    "OBJ": "num_threads",
    "GDS_MT": "thread_count",
    "UCCL": "num_cpus",
}
"""The backends' options for the number of threads; other backends have no such option."""

_REFUSALS = frozenset(
    {"nixlInvalidParamError", "nixlMismatchError", "nixlNotAllowedError", "nixlNotFoundError"}
    | {"KeyError", "TypeError", "ValueError"}  # from the binding, before NIXL sees the arguments
)


class NixlHandle(Protocol):
    """A NIXL object that holds memory of the library until it is released."""

    def release(self) -> None:
        """Release the memory. For a transfer in flight this does *not* stop the transfer."""


class NixlAgent(Protocol):
    """The methods of ``nixl_agent`` that kvhma calls; `tests/support/fake_nixl.py` has the same methods."""

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


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of an agent.

    Attributes:
        backends: NIXL's transports, in order of preference.
        num_threads: transport threads of each backend that has such an option. NIXL uses them only for transfers of at
            least 1,024 descriptors. With 0 a transport that copies inline copies in the calling thread.
        progress_delay_us: microseconds that NIXL's progress thread sleeps without an event, from 0 to 1,000,000. With 0
            it polls without a pause, as in NIXL's own Python API, and occupies a processor core.
        strided: False to write views out even if NIXL accepts strided rows; None to decide by NIXL's version.
        package: which of `PACKAGES` to import; None for the first installed package.
    """

    backends: Sequence[str] = ("UCX",)
    num_threads: int = 0
    progress_delay_us: int = PROGRESS_DELAY_US
    strided: bool | None = None
    package: str | None = None

    def check(self) -> None:
        """Check options that NIXL would ignore or misuse.

        Raises:
            RequestError: the delay is out of range, no backend has a number of threads, or NIXL has no such package.
        """
        if self.package is not None and self.package not in PACKAGES:
            raise RequestError(f"package is {self.package!r}, expected one of {list(PACKAGES)}")
        if not 0 <= self.progress_delay_us <= MAX_PROGRESS_DELAY_US:
            raise RequestError(f"progress_delay_us is {self.progress_delay_us}, expected 0 to {MAX_PROGRESS_DELAY_US}")
        if self.num_threads and not _THREADS_OPTION.keys() & set(self.backends):
            raise RequestError(
                f"num_threads is {self.num_threads}, but no backend of {list(self.backends)} has such an option; use 0"
            )


def open_nixl(name: str, options: AgentOptions) -> NixlAgent:
    """Import NIXL and make an agent with a progress thread.

    Raises:
        ImportError: NIXL is not installed, or lacks a needed part.
        RequestError: an option that :meth:`AgentOptions.check` refuses.
        TransferError: NIXL has no such backend, or cannot start it.
    """
    options.check()
    try:
        api = import_nixl(options.package)
    except ImportError as exc:
        raise ImportError(f"kvhma.nixl needs NIXL: {NIXL_INSTALL} (importing it: {exc})") from exc
    # NIXL's default is no locking. An engine posts from one thread, polls from a second and connects in a third. With
    # RW, posts and polls of different transfers run in parallel. A post that copies inline needs that, because it can
    # take hundreds of milliseconds. Only registration, handshake and reading the notifications exclude the others.
    lock = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    try:
        # The owner of memory that peers read makes progress only in the progress thread.
        config = api.nixl_agent_config(enable_prog_thread=True, capture_telemetry=True, backends=[], sync_mode=lock)
        agent = api.nixl_agent(name, config)
        if options.progress_delay_us:
            _delay_progress(agent, lock, options.progress_delay_us)
        _create_backends(agent, options)
    except ImportError:
        raise
    except Exception as exc:
        raise translate(exc, f"cannot make NIXL agent {name!r} with backends {list(options.backends)}") from exc
    return cast(NixlAgent, agent)


def import_nixl(package: str | None = None) -> Any:
    """Return the module with ``nixl_agent``. UCX's environment is completed before the first import.

    Args:
        package: which of `PACKAGES`; None for the first installed package.

    Raises:
        ImportError: no package is installed, or it cannot be imported.
    """
    if not any(name in sys.modules for name in PACKAGES):
        for name, value in (_ENVIRONMENT | (_CUDA_ENVIRONMENT if _CUDA_DRIVER.exists() else {})).items():
            os.environ.setdefault(name, value)
    first, *others = PACKAGES if package is None else (package,)
    try:
        return importlib.import_module(f"{first}._api")
    except ModuleNotFoundError as missing:
        for fallback in others if missing.name == first else ():
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(f"{fallback}._api")
        raise


def _delay_progress(agent: Any, lock: Any, delay_us: int) -> None:
    """Replace the inner NIXL agent of a ``nixl_agent`` without backends by one whose progress thread sleeps.

    NIXL's Python API fixes the delay at zero; its binding has a field for it.
    """
    try:
        bindings = importlib.import_module(type(agent.agent).__module__)
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.captureTelemetry = True
        config.syncMode = lock.value
        config.pthrDelay = delay_us
        del agent.agent  # first, because both would have the same name in NIXL's telemetry
        agent.agent = bindings.nixlAgent(agent.name, config)
    except AttributeError as exc:
        raise ImportError(f"this NIXL cannot delay its progress thread ({exc}); use progress_delay_us=0") from exc


def _create_backends(agent: Any, options: AgentOptions) -> None:
    # NIXL's constructor skips a backend without a plugin with a warning, and its first use fails.
    plugins = agent.get_plugin_list()
    if missing := [backend for backend in options.backends if backend not in plugins]:
        raise TransferError(f"NIXL has no plugin for {missing}; it has {plugins}")
    for backend in options.backends:
        threads = _THREADS_OPTION.get(backend) if options.num_threads else None
        agent.create_backend(backend, {threads: str(options.num_threads)} if threads else {})


def takes_strided(nixl: NixlAgent) -> bool:
    """Whether prepared lists can be made of strided rows.

    An agent of a package without a version counts as older, because every version accepts written-out rows.
    """
    package = type(nixl).__module__.partition(".")[0]  # nixl_cu12, nixl_cu13
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return series(version) >= series(NIXL_STRIDED)


def make_descriptors(nixl: NixlAgent, rows: NDArray[np.uint64], memory: Memory) -> Any:
    """Return NIXL's descriptors for rows ``(addr, len, device)``, uint64 of shape (n, 3).

    Raises:
        RequestError: NIXL refuses the form of the rows.
    """
    made = nixl.get_xfer_descs(rows, memory)
    if made is None:  # NIXL refuses a form with a log line and no exception
        raise RequestError(f"NIXL makes no descriptors of {rows.dtype} of shape {rows.shape}, {memory}")
    return made


def translate(exc: Exception, what: str, refused: type[KvhmaError] = TransferError) -> KvhmaError:
    """Return kvhma's error for an exception of NIXL.

    NIXL's exceptions have no common base class and carry only a status name. So they are distinguished by their class
    name, and `what` must say what was attempted.

    Args:
        exc: the exception.
        what: start of the message.
        refused: class for arguments that NIXL refuses: not found, invalid, mismatch, not allowed.
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
