# SPDX-License-Identifier: Apache-2.0
"""The settings in ``kv_connector_extra_config``: a row for each, of which docs/vllm-settings.md's table is made."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from kvhma.errors import SettingsError
from kvhma.vllm.config.allow_list import ANY, AllowedEngines, AllowedSources
from kvhma.vllm.wire.params import Address


class Kind(NamedTuple):
    """The values that a setting may have.

    Attributes:
        expected: what they are, for errors and for the page.
        read: from a value as JSON has it; raises ValueError for any other value.
    """

    expected: str
    read: Callable[[Any], Any]


class Row(NamedTuple):
    """A setting.

    Attributes:
        kind: its values.
        shown: its default, as the page shows it.
        meaning: what it does, as the page says it.
    """

    kind: Kind
    shown: str
    meaning: str


def _row(default: Any, kind: Kind, meaning: str, shown: str | None = None) -> Any:
    if shown is None:
        shown = str(default).lower() if isinstance(default, bool) else "" if default is None else f"{default:g}"
    return field(default=default, metadata={"row": Row(kind, shown, meaning)})


def _number(kind: type[int] | type[float], low: float, high: float) -> Kind:
    def read(value: Any) -> float:
        right = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not right or not math.isfinite(value) or not low <= value <= high:
            raise ValueError(value)
        return kind(value)

    return Kind(f"{kind.__name__} {low}..{high}", read)


def _instance(kind: type[str] | type[bool]) -> Kind:
    def read(value: Any) -> str | bool:
        if not isinstance(value, kind):
            raise ValueError(value)
        return value

    return Kind(kind.__name__, read)


def _text(form: str, expected: str) -> Kind:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(form, value, re.ASCII) or not value.isprintable():
            raise ValueError(value)
        return value

    return Kind(expected, read)


def _texts(expected: str, read: Callable[[str], Any]) -> Kind:
    def each(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError(value)
        return tuple(map(read, value))

    return Kind(expected, each)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(text)
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def _allowed(text: str) -> AllowedEngines:
    entry = AllowedEngines.read(text)
    if entry is None:
        raise ValueError(text)
    return entry


def _allowed_engines(value: Any) -> tuple[AllowedEngines, ...] | str:
    if value == ANY:
        return ANY
    found: tuple[AllowedEngines, ...] = _texts("", _allowed).read(value)
    return found


def _names(value: Any) -> tuple[str, ...]:
    strings = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    if not strings or not set(value) - {COPY}:  # NIXL still reads what shows that P held the blocks
        raise ValueError(value)
    return tuple(value)


def _share(value: Any) -> float:
    if isinstance(value, str):
        if value not in _SHARES:
            raise ValueError(value)
        return _SHARES[value]
    share: float = _number(float, 0, 1).read(value)
    return share


COPY = "copy"
"""Among the `backends`: rows of peers whose memory can be mapped are copied."""

_SHARES = {"off": 0.0, "all": 1.0}
_FLAG = _instance(bool)
_STRING = _instance(str)
_SECONDS = _number(float, 1, 86400)
_PORT = _number(int, 1, 65535)
_COUNT = _number(int, 0, 1 << 31)
_PATH = _text("(?s).{1,4096}", "a path")
_HOST = r"[A-Za-z0-9_][\w.-]{0,511}|[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f.]{0,15}){2,8}(%[\w.-]+)?"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine. Each field has its `Row`; the page's tables are made of them by ``tools/settings.py``.

    Attributes:
        ignored: settings of vLLM's own connector that were given and have no effect here, each with the reason.
    """

    kv_lease_duration: float = _row(30.0, _SECONDS, "seconds, on P")
    handshake_timeout: float = _row(
        5.0,
        _number(float, 0.1, 600),
        "seconds for each reply of another engine; all replies of a handshake together have four times that, and so "
        "has a digest",
    )
    prefill_engines: tuple[Address, ...] = _row(
        (),
        _texts("a list of host:port", _address),
        '`"host:port"` of the side channels of prefill engines. D does the handshake with each once it '
        "has started, before its first request arrives, and again after the engine was restarted. "
        "Requests may name them by another address",
        shown="`[]`",
    )
    allowed_prefill_engines: tuple[AllowedEngines, ...] | str | None = _row(
        None,
        Kind('a list of hosts, addresses and networks, each with :port or without, or "any"', _allowed_engines),
        "on D, a list of the engines that a request's parameters may name: host names, addresses "
        "(`10.0.0.7`, `2001:db8::7`), networks (`10.0.0.0/8`), each with `:port` or without (IPv6 then in "
        "brackets). D compares names as the parameters write them, ignoring case, and never looks them up "
        "for that. Engines of `prefill_engines` are always allowed; with `[]` only they are. Not "
        "set: with a secret any engine; without one those on loopback and private networks, by what their names "
        'are when D connects. `"any"` allows all ([why](security.md#without-a-secret))',
        shown="any with a secret, else private networks",
    )
    secret_file: str | None = _row(
        None,
        _PATH,
        "a file with the secrets that engines authenticate with, one of at least 16 bytes a line: an "
        "engine uses the first and accepts all",
        shown="`KVHMA_SECRET`",
    )
    net_devices: str | None = _row(
        None,
        _text(r"[\w.@:-]+(,[\w.@:-]+)*", "names with commas between, as in UCX_NET_DEVICES"),
        'network devices on which UCX listens and connects, e.g. `"eth0,mlx5_0:1"`. A D with the default '
        "`side_channel_host` (`localhost`) and a P on another host needs it",
        shown="`UCX_NET_DEVICES`; if that is not set and the side channel is on loopback, `lo`",
    )
    max_held_share: float = _row(
        0.5,
        _number(float, 0.01, 1),
        "on P, the share of its blocks that finished requests may hold while no decode engine claims "
        "them; beyond it P evicts the oldest unclaimed requests",
    )
    bidirectional_kv_xfer: bool = _row(
        False,
        _FLAG,
        "D holds its answers for the next turns of their conversations, and P reads them ([the next turn "
        "of a chat](next-turn.md))",
    )
    kv_recompute_threshold: int = _row(64, _COUNT, "a P that lacks fewer tokens of an answer computes them")
    decoder_kv_blocks_ttl: float = _row(480.0, _SECONDS, "longest time in seconds that D holds an answer")
    max_peers: int = _row(
        256,
        _number(int, 1, 4096),
        "engines, besides those of `prefill_engines`, whose connection and plan this engine stores. A "
        "further engine replaces an idle one, drawn from the least recently used half. While this engine "
        "reads from that many, or does handshakes with them, it refuses a further one "
        "(`vllm:kvhma_refused_engines`)",
    )
    engine_ttl: float | None = _row(
        None,
        _number(float, -1, 1 << 31),
        "seconds after which D disconnects from an engine that it has not read from; 0 for never. Not "
        "set: after an hour, and only if the engine does not answer any more "
        "([why](#engines-that-are-not-used))",
    )
    backends: tuple[str, ...] = _row(
        ("UCX",),
        Kind("a list of names with a transport of NIXL", _names),
        'NIXL\'s transports, in order of preference. With `"copy"` among them engines of one host that share a secret '
        "[copy rows](vllm-devices.md#engines-of-one-host) instead, where memory can be mapped",
        shown='`["UCX"]`',
    )
    num_threads: int = _row(0, _number(int, 0, 256), "transport threads of NIXL")
    side_channel_host: str | None = _row(
        None, _STRING, "where the scheduler listens", shown="`VLLM_NIXL_SIDE_CHANNEL_HOST`"
    )
    side_channel_port: int | None = _row(
        None, _PORT, "its port; kvhma adds the data-parallel index", shown="`VLLM_NIXL_SIDE_CHANNEL_PORT`"
    )
    advertised_host: str | None = _row(
        None,
        _text(_HOST, "a name or an address, without a port"),
        "where other engines reach it, [if that differs](#addresses)",
        shown="`side_channel_host`",
    )
    advertised_port: int | None = _row(
        None, _PORT, "its port for other engines; kvhma adds the data-parallel index", shown="`side_channel_port`"
    )
    kv_cache_layout: str | None = _row(
        None, _STRING, "layout to ask the engine for", shown="`LBHNC`, for MLA the engine's"
    )
    model_id: str | None = _row(
        None,
        _text("(?s).{1,512}", "1..512 printable characters"),
        "the operator's name for the model, if P and D have it under different paths. If both sides set "
        "it, they compare it instead of path and revision. [Weights](weights.md) may then have other tensors, but no "
        "other values",
    )
    mm_items: str = _row(
        "compare",
        _text("compare|trust_prefill", "compare or trust_prefill"),
        '`"trust_prefill"` on both sides: D adopts P\'s multimodal items ([pictures that only P '
        "sees](how-it-works.md#what-a-prompt-is-and-which-model))",
        shown='`"compare"`',
    )
    case_folder: str | None = _row(
        None, _PATH, "a folder for failed loads, written [as cases](cases.md#of-a-load-that-failed)", shown="none"
    )
    staging_blocks: int | None = _row(
        None,
        _number(int, 1, 1 << 31),
        'with `kv_buffer_device: "cpu"` on a device, the number of blocks in host memory, for each role',
        shown="a quarter of the engine's, at least those of the longest request",
    )
    content_digests: float = _row(
        0.0,
        Kind("off, all or a number 0..1", _share),
        'on P, the share of the requests whose blocks it sums: `"off"`, a number up to 1, or `"all"`. D '
        'compares its loads with the sums, unless its setting is `"off"` ([digests](digests.md))',
        shown='`"off"`',
    )
    trace_out: str | None = _row(
        None,
        _PATH,
        "a file to which this engine adds a line for each request that ends: time, lengths, salted hashes of blocks "
        "([traces](replay.md#write-a-trace)). Data-parallel ranks share it; P and D each need another",
        shown="none",
    )
    trace_salt_file: str | None = _row(
        None,
        _PATH,
        "a file with the salt of `trace_out`, at least 16 bytes: traces with the same salt have the same hashes",
        shown="drawn when the engine starts",
    )
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
        known = rows()
        unknown = set(extra) - known.keys() - _UPSTREAM.keys()
        if unknown:
            raise SettingsError(f"kv_connector_extra_config: unknown {sorted(unknown)}, known are {sorted(known)}")
        given = {
            name: _read_value(name, row.kind, extra[name]) for name, row in known.items() if extra.get(name) is not None
        }
        host = given.get("advertised_host")
        if host is not None and Address(host, 0).is_wildcard:
            raise _wrong("advertised_host", host, "one address, which other engines reach")
        ignored = (f"{name} ({why})" for name, (off, why) in _UPSTREAM.items() if extra.get(name, off) != off)
        return cls(**given, ignored=tuple(ignored))

    @property
    def nixl_backends(self) -> tuple[str, ...]:
        """NIXL's transports."""
        return tuple(name for name in self.backends if name != COPY)

    @property
    def trusts_items(self) -> bool:
        """Whether D uses P's multimodal items of a prompt."""
        return self.mm_items == "trust_prefill"

    @property
    def replies_timeout(self) -> float:
        """Seconds for all replies that one exchange with another engine needs, however many that engine makes of it."""
        return 4 * self.handshake_timeout

    def sources(self, *, has_secret: bool) -> AllowedSources:
        """Return which engines D may read from.

        Args:
            has_secret: whether this engine has a secret.
        """
        return AllowedSources(self.allowed_prefill_engines, self.prefill_engines, has_secret)


_UPSTREAM: dict[str, tuple[Any, str]] = {
    "push_registration_timeout": (None, "nothing is pushed: D reads"),
    "enforce_handshake_compat": (True, "what cannot be read right is refused in any case"),
    "enable_cross_layers_blocks": (False, "kv_cache_layout chooses the layout"),
}
"""Settings that only upstream's connector has: the value without effect there, and why they have no effect here."""


def rows() -> dict[str, Row]:
    """Return the settings by name, in the order of the page."""
    found = ((item.name, item.metadata.get("row")) for item in fields(Settings))
    return {name: row for name, row in found if row is not None}


def _read_value(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind.read(value)
    except ValueError:
        raise _wrong(name, value, kind.expected) from None


def _wrong(name: str, value: Any, expected: str) -> SettingsError:
    return SettingsError(f"kv_connector_extra_config: {name} is {value!r}, expected {expected}")
