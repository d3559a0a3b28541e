# SPDX-License-Identifier: Apache-2.0
"""The settings in ``kv_connector_extra_config``. docs/vllm.md explains each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvhma.errors import SettingsError
from kvhma.nixl.library import MAX_PROGRESS_DELAY_US, PROGRESS_DELAY_US, READER_PROGRESS_DELAY_US
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, DEFAULT_MAX_DESCRIPTORS
from kvhma.vllm.allow_list import AllowedEngines
from kvhma.vllm.wire.params import Address


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine.

    Attributes:
        kv_lease_duration: seconds that a prefill engine holds a request's blocks after the last lease renewal.
        handshake_timeout: seconds to wait for each answer of another engine.
        load_retries: how often to retry a load after a transient error, before the engine's ``kv_load_failure_policy``
            decides.
        prefill_engines: engines for a handshake before their first request, as ``host:port`` of their side channels.
        allowed_prefill_engines: engines that the parameters of a request may name, beside `prefill_engines`; None for
            any engine.
        secret_file: file with the secrets that engines share, one a line; None for ``KVHMA_SECRET``.
        net_devices: network devices that NIXL's UCX listens on and connects from, as in ``UCX_NET_DEVICES``. None for
            ``lo`` if the side channel is on loopback; otherwise UCX's environment decides.
        max_held_share: share of a prefill engine's blocks that finished requests may hold until they are read.
        bidirectional_kv_xfer: whether a decode engine holds its answers for the next turns of their conversations, and
            a prefill engine reads them.
        kv_recompute_threshold: a prefill engine that lacks fewer tokens of an answer computes them instead.
        decoder_kv_blocks_ttl: longest time in seconds that a decode engine holds an answer.
        max_followed_share: share of a decode engine's blocks for requests whose prompt P still computes.
        piece_tokens: fewest tokens of a piece that is read while P computes the rest of the prompt.
        max_peers: number of engines whose connection and plan are stored.
        engine_ttl: seconds after which an idle engine is evicted; 0 or less for never. None evicts it after an hour,
            but only if it does not answer.
        descriptor_bytes: bytes that a partial last block may move to save a descriptor, see :func:`kvhma.plan`.
        max_descriptors: most descriptors of a request of one rank, see :func:`kvhma.plan`.
        permute_bytes: bytes that D may permute after the read to save a descriptor, see :mod:`kvhma.permute`.
        backends: NIXL's transports, in order of preference.
        num_threads: transport threads of NIXL.
        progress_delay_us: microseconds that NIXL's progress thread sleeps while no event wakes it; 0 for no sleep,
            None for a default, see :meth:`progress_delay`.
        prewarm: whether a worker prewarms its transport when it starts, see :meth:`kvhma.nixl.Agent.prewarm_transport`.
        switch_interval_us: microseconds after which a Python thread of the engine's processes yields to a waiting
            thread, see :func:`sys.setswitchinterval`; None for no change.
        side_channel_host: name or address that this engine's scheduler listens at; None for
            ``VLLM_NIXL_SIDE_CHANNEL_HOST``.
        side_channel_port: its port, plus the data-parallel index; None for ``VLLM_NIXL_SIDE_CHANNEL_PORT``.
        advertised_host: name or address at which other engines reach it; None for `side_channel_host`. If that is every
            address of this machine, vLLM chooses the address.
        advertised_port: its port for other engines, plus the data-parallel index; None for `side_channel_port`.
        kv_cache_layout: layout to ask the engine for; None for ``LBHNC``, or for MLA the engine's own choice.
        model_id: name of the model, for engines that have it under different paths. If both sides set it, it is
            compared instead of path and revision, and adapters are compared by name. None to compare path and revision.
        host_staged: whether to copy through host memory, for devices whose memory cannot be registered. None to do so
            if ``kv_buffer_device`` is ``cpu`` and the device is not.
        mm_items: ``compare`` compares a request's multimodal items with P's. With ``trust_prefill`` a prefill engine
            hands out its items, and a decode engine replaces its items by these.
        case_folder: folder for case files of failed loads; None to write no files.
        content_digests: share of the requests whose blocks a prefill engine sums, from 0 (``off``) to 1 (``all``), see
            :mod:`kvhma.digests`. A decode engine compares loads with these sums, unless the setting is 0 there.
        staging_blocks: number of blocks in host memory for readers, and as many for loads. None for a quarter of the
            engine's blocks, but at least the blocks of the longest request.
        ignored: settings of vLLM's own connector that were given and have no effect here, each with the reason.
    """

    kv_lease_duration: float = 30.0
    handshake_timeout: float = 5.0
    load_retries: int = 1
    prefill_engines: tuple[Address, ...] = ()
    allowed_prefill_engines: tuple[AllowedEngines, ...] | None = None
    secret_file: str | None = None
    net_devices: str | None = None
    max_held_share: float = 0.5
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: int = 64
    decoder_kv_blocks_ttl: float = 480.0
    max_followed_share: float = 0.5
    piece_tokens: int = 512
    max_peers: int = 256
    engine_ttl: float | None = None
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES
    max_descriptors: int = DEFAULT_MAX_DESCRIPTORS
    permute_bytes: int = 0
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 0
    progress_delay_us: int | None = None
    prewarm: bool = False
    switch_interval_us: int | None = None
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    advertised_host: str | None = None
    advertised_port: int | None = None
    kv_cache_layout: str | None = None
    model_id: str | None = None
    host_staged: bool | None = None
    mm_items: str = "compare"
    case_folder: str | None = None
    staging_blocks: int | None = None
    content_digests: float = 0.0
    ignored: tuple[str, ...] = field(default=())
    """Settings of upstream's connector without effect here, each with the reason, for the log."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Read and check ``kv_connector_extra_config``.

        Args:
            extra: from the engine's configuration.

        Returns:
            The checked settings.

        Raises:
            SettingsError: an unknown setting, or a value of the wrong type or out of range. Settings that only
                upstream's connector has are accepted with any value.
        """
        known = {item.name for item in fields(cls)} - {"ignored"}
        unknown = set(extra) - known - _UPSTREAM.keys()
        if unknown:
            raise SettingsError(f"kv_connector_extra_config: unknown {sorted(unknown)}, known are {sorted(known)}")
        given = {name: extra[name] for name in known & set(extra)}
        if "backends" in given:
            given["backends"] = _names(given["backends"])
        if "prefill_engines" in given:
            given["prefill_engines"] = _addresses(given["prefill_engines"])
        if given.get("allowed_prefill_engines") is not None:
            given["allowed_prefill_engines"] = _allowed(given["allowed_prefill_engines"])
        if isinstance(share := given.get("content_digests"), str):
            if share not in _SHARES:
                raise _wrong("content_digests", share, "off, all or a number 0..1")
            given["content_digests"] = _SHARES[share]
        for name, (kind, low, high) in _RANGES.items():
            if (value := given.get(name)) is not None:
                given[name] = _number(name, value, kind, low, high)
        for name, expected in _TYPES.items():
            if (value := given.get(name)) is not None and not isinstance(value, expected):
                raise _wrong(name, value, expected.__name__)
        for name, (form, meaning) in _FORMS.items():
            if (value := given.get(name)) is not None and not (form.fullmatch(value) and value.isprintable()):
                raise _wrong(name, value, meaning)
        if (host := given.get("advertised_host")) is not None and Address(host, 0).is_wildcard:
            raise _wrong("advertised_host", host, "one address, which other engines reach")
        ignored = (f"{name} ({why})" for name, (off, why) in _UPSTREAM.items() if extra.get(name, off) != off)
        return cls(**given, ignored=tuple(ignored))

    @property
    def trusts_items(self) -> bool:
        """Whether D uses P's multimodal items of a prompt."""
        return self.mm_items == "trust_prefill"

    def progress_delay(self, *, copies: bool) -> int:
        """Return the microseconds that NIXL's progress thread sleeps.

        Args:
            copies: whether threads of the engine copy what it reads: it loads, and its caches are in host memory.
        """
        if self.progress_delay_us is not None:
            return self.progress_delay_us
        return READER_PROGRESS_DELAY_US if copies else PROGRESS_DELAY_US

    def allows(self, address: Address) -> bool:
        """Return whether a request may be loaded from the engine at an address. It does not look up names.

        Args:
            address: host and port, as in the parameters.
        """
        if self.allowed_prefill_engines is None:
            return True
        known = map(AllowedEngines.at, self.prefill_engines)
        return any(entry.covers(address) for entry in (*self.allowed_prefill_engines, *known))


_UPSTREAM: dict[str, tuple[Any, str]] = {
    "push_registration_timeout": (None, "nothing is pushed: D reads"),
    "enforce_handshake_compat": (True, "what cannot be read right is refused in any case"),
    "enable_cross_layers_blocks": (False, "kv_cache_layout chooses the layout"),
}
"""Settings that only upstream's connector has: the value without effect there, and why they have no effect here."""

_RANGES: dict[str, tuple[type[int] | type[float], float, float]] = {
    "kv_lease_duration": (float, 1, 86400),
    "handshake_timeout": (float, 0.1, 600),
    "load_retries": (int, 0, 100),
    "max_held_share": (float, 0.01, 1),
    "kv_recompute_threshold": (int, 0, 1 << 31),
    "decoder_kv_blocks_ttl": (float, 1, 86400),
    "max_followed_share": (float, 0, 1),
    "piece_tokens": (int, 1, 1 << 31),
    "max_peers": (int, 1, 4096),
    "engine_ttl": (float, -1, 1 << 31),
    "descriptor_bytes": (int, 0, 1 << 40),
    "max_descriptors": (int, 1, 1 << 40),
    "permute_bytes": (int, 0, 1 << 40),
    "num_threads": (int, 0, 256),
    "progress_delay_us": (int, 0, MAX_PROGRESS_DELAY_US),
    "staging_blocks": (int, 1, 1 << 31),
    "content_digests": (float, 0, 1),
    "switch_interval_us": (int, 10, 1_000_000),
    "side_channel_port": (int, 1, 65535),
    "advertised_port": (int, 1, 65535),
}


_SHARES = {"off": 0.0, "all": 1.0}

_TYPES: dict[str, type[str] | type[bool]] = {
    "secret_file": str,
    "net_devices": str,
    "bidirectional_kv_xfer": bool,
    "prewarm": bool,
    "side_channel_host": str,
    "advertised_host": str,
    "kv_cache_layout": str,
    "model_id": str,
    "mm_items": str,
    "case_folder": str,
    "host_staged": bool,
}

_FORMS: dict[str, tuple[re.Pattern[str], str]] = {
    "secret_file": (re.compile(r"(?s).{1,4096}"), "a path"),
    "case_folder": (re.compile(r"(?s).{1,4096}"), "a path"),
    "net_devices": (
        re.compile(r"[\w.@:-]+(,[\w.@:-]+)*", re.ASCII),
        "names with commas between, as in UCX_NET_DEVICES",
    ),
    "advertised_host": (
        re.compile(r"[A-Za-z0-9_][\w.-]{0,511}|[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f.]{0,15}){2,8}(%[\w.-]+)?", re.ASCII),
        "a name or an address, without a port",
    ),
    "model_id": (re.compile(r"(?s).{1,512}"), "1..512 printable characters"),
    "mm_items": (re.compile(r"compare|trust_prefill"), "compare or trust_prefill"),
}


def _wrong(name: str, value: Any, expected: str) -> SettingsError:
    return SettingsError(f"kv_connector_extra_config: {name} is {value!r}, expected {expected}")


def _number(name: str, value: Any, kind: type[int] | type[float], low: float, high: float) -> float:
    right = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or not low <= value <= high:
        raise _wrong(name, value, f"{kind.__name__} {low}..{high}")
    return kind(value)


def _addresses(value: Any) -> tuple[Address, ...]:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        found = [
            Address(host.removeprefix("[").removesuffix("]"), int(port))
            for host, _, port in (text.rpartition(":") for text in value)
            if host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        ]
        if len(found) == len(value):
            return tuple(found)
    raise _wrong("prefill_engines", value, "a list of host:port")


def _allowed(value: Any) -> tuple[AllowedEngines, ...]:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        found = [entry for text in value if (entry := AllowedEngines.read(text)) is not None]
        if len(found) == len(value):
            return tuple(found)
    expected = "a list of hosts, addresses and networks, each with :port or without"
    raise _wrong("allowed_prefill_engines", value, expected)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise _wrong("backends", value, "a list of names")
    return tuple(value)
