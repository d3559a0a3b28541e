# SPDX-License-Identifier: Apache-2.0
"""Asks a live engine, as a decode engine would, for its identity and for the caches of its workers.

The rules for a decode engine hold here too: the secret, the allowed addresses, and limits on size and time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from kvhma.cli.values import ParamType
from kvhma.errors import HandshakeError, RequestError
from kvhma.models.config import load_json

if TYPE_CHECKING:  # the connector's packages may not be installed
    from kvhma.nixl import HandshakePayload
    from kvhma.vllm.config.identity import EngineExtra
    from kvhma.vllm.config.settings import Settings
    from kvhma.vllm.peers.client import Client
    from kvhma.vllm.wire.messages import EngineInfo
    from kvhma.vllm.wire.params import Address
    from kvhma.vllm.wire.secrets import Secrets

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MAX_IDENTITIES_BYTES = 256 << 20


class HostPort(ParamType):
    """``HOST:PORT``, with brackets around an IPv6 address."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host and port."""
        if isinstance(value, tuple):
            return value
        try:
            parts = urlsplit(f"//{value}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.netloc != value or "@" in value:
            self.fail(f"{value!a}: must be HOST:PORT of an engine's side channel, as 10.0.0.7:5600", param, ctx)
        return host, port


def access_options(command: F) -> F:
    """Add the options for access to an engine; :func:`read_access` takes their values."""
    options = (
        click.option(
            "--secret-file", type=_FILE, help="File with the engines' secrets; else KVHMA_SECRET, or no secret."
        ),
        click.option(
            "--settings",
            type=_FILE,
            help="JSON with the --kv-transfer-config of this host's engine: its secret_file, allowed_prefill_engines, "
            "net_devices and handshake_timeout hold.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Access:
    """Secrets and settings for access to another engine.

    Attributes:
        settings: settings of an engine of this host.
        secrets: the secrets shared with the other engine.
    """

    settings: Settings
    secrets: Secrets


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker of a live engine.

    Attributes:
        pp_rank: its pipeline stage.
        tp_rank: its tensor-parallel rank.
        data: its signed worker identity, as bytes.
        payload: the same, decoded.
        extra: additions of its engine: model and versions.
    """

    pp_rank: int
    tp_rank: int
    data: bytes
    payload: HandshakePayload
    extra: EngineExtra


def read_access(secret_file: Path | None, settings: Path | None) -> Access:
    """Read the secret, and the settings of an engine of this host.

    Raises:
        RequestError: a package of the connector is not installed.
        KvhmaError: a file is wrong.
    """
    try:
        from kvhma.vllm.config.settings import Settings
        from kvhma.vllm.wire.secrets import Secrets
    except ImportError as error:
        raise RequestError(f"asking an engine needs {error.name}: pip install msgspec cryptography") from error
    extra: dict[str, Any] = {}
    if settings is not None:
        form = load_json(settings)
        inner = form.get("kv_connector_extra_config") if "kv_connector" in form else form
        if not isinstance(inner or {}, dict):
            raise RequestError(f"{settings}: kv_connector_extra_config is no object")
        extra = dict(inner or {})
    if secret_file is not None:
        extra["secret_file"] = str(secret_file)
    read = Settings.read(extra)
    return Access(read, Secrets.load(read))


def look_up(address: tuple[str, int], access: Access) -> Address:
    """Return the numeric address of an engine, if the settings allow access to it.

    Raises:
        HandshakeError: the settings do not allow it.
        HandshakeTimeoutError: the name cannot be resolved.
    """
    from kvhma.vllm.peers.names import resolve
    from kvhma.vllm.wire.params import Address

    asked = Address(*address)
    sources = access.settings.sources(has_secret=access.secrets.enabled)
    refusal = sources.refusal(asked)
    if refusal is None:
        numeric = resolve(asked, access.settings.handshake_timeout)
        refusal = sources.refusal_of_host(asked, numeric)
    if refusal is not None:
        raise HandshakeError(refusal)
    return numeric


def connect(numeric: Address, access: Access) -> Client:
    """Connect to the listener of an engine.

    Raises:
        HandshakeError: only one side has a secret, or they differ.
        HandshakeTimeoutError: no engine listens there.
    """
    from kvhma.vllm.peers.client import Client

    return Client(numeric, access.settings.handshake_timeout, access.secrets)


def ask_engine(client: Client) -> EngineInfo:
    """Ask an engine for its identity.

    Raises:
        HandshakeError: the engine uses another version, or its workers are not a complete engine.
    """
    from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo

    info = client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
    if not info.ranks or len(set(info.ranks)) != len(info.ranks):
        raise HandshakeError(f"an engine with {len(info.ranks)} workers, {len(set(info.ranks))} of them different")
    return info


def ask_workers(client: Client, info: EngineInfo, access: Access) -> list[LiveWorker]:
    """Return the workers of an engine, stage by stage.

    Raises:
        HandshakeError: a worker identity is damaged, has another version or is not signed by its agent; or all together
            are too long.
        HandshakeTimeoutError: they do not arrive in time.
    """
    from kvhma.vllm.config.identity import decode_extra
    from kvhma.vllm.peers.worker_identity import ask_worker_identities

    def note(stored: int) -> None:
        if stored > _MAX_IDENTITIES_BYTES:
            raise HandshakeError(f"worker identities of {stored} bytes: at most {_MAX_IDENTITIES_BYTES} are accepted")

    ranks = sorted(info.ranks)
    deadline = time.monotonic() + access.settings.replies_timeout
    hellos = ask_worker_identities(client, ranks, deadline, note)
    return [
        LiveWorker(pp_rank, tp_rank, hello.data, hello.payload, decode_extra(hello.payload.extra))
        for (pp_rank, tp_rank), hello in zip(ranks, hellos, strict=True)
    ]
