# SPDX-License-Identifier: Apache-2.0
"""The arguments of every command that looks at a hand-off, and how they become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from kvhma.cli.compare.engines import Engines
from kvhma.cli.engine_options import EngineOptions, dtype, parse_engine
from kvhma.cli.hand_off import MAX_TOKENS, HandOff, PlanOptions, RequestOptions, of_geometries, of_model
from kvhma.errors import GeometryError, KvhmaError, RequestError
from kvhma.geometry import Geometry
from kvhma.models import Model, models
from kvhma.models.config import load_json, read_config
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, DEFAULT_MAX_DESCRIPTORS

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_DEFAULT_ENGINE = EngineOptions()
_ENGINE_HELP = "keys: tp, block, kernel (tokens, flashinfer, logical), kv, ssm (dtypes), layout, conv (DS, SD), spec."


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete MODEL from the built-in table, else from files."""
    return [CompletionItem(name) for name in models() if name.startswith(incomplete)] or [
        CompletionItem(incomplete, type="file")
    ]


def _dtype_option(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return dtype(value)
    except ValueError as error:
        raise click.BadParameter(f"{value}: {error}", ctx, param) from error


def _engine_option(name: str, text: str) -> Callable[[F], F]:
    return click.option(name, metavar="KEY=VALUE,…", default="tp=1", callback=parse_engine, help=text)


def hand_off_options(command: F) -> F:
    """Add MODEL and the options that say what is handed over; the command makes :class:`Arguments` of them."""
    options = (
        _engine_option("--prefill", f"The prefill engine; {_ENGINE_HELP}"),
        _engine_option("--decode", "The decode engine; the same keys."),
        click.option(
            "--tokens", type=click.IntRange(1, MAX_TOKENS), default=8192, show_default=True, help="Tokens P computed."
        ),
        click.option(
            "--cached", type=click.IntRange(0, MAX_TOKENS), default=0, show_default=True, help="Leading tokens D has."
        ),
        click.option("--kv-dtype", callback=_dtype_option, help="KV cache of both engines: bf16, fp16, fp8."),
        click.option("--ssm-dtype", callback=_dtype_option, help="Recurrent state of both engines: bf16, fp16, fp32."),
        click.option(
            "--pool",
            type=click.Choice(["fresh", "used"]),
            default="fresh",
            show_default=True,
            help="Block ids that count up, or scattered ones as after many requests.",
        ),
        click.option("--seed", type=click.IntRange(0, 2**31), default=0, help="Another seed, another used pool."),
        click.option("--local", type=FILE, help="In place of MODEL: geometry of the rank that reads."),
        click.option("--remote", type=FILE, multiple=True, help="With --local: a rank it may read from; repeatable."),
        click.option(
            "--descriptor-bytes",
            type=click.IntRange(0, 2**62),
            default=DEFAULT_DESCRIPTOR_BYTES,
            show_default=True,
            help="Bytes more that a partial last block may move to save one descriptor.",
        ),
        click.option(
            "--max-descriptors",
            type=click.IntRange(1, 2**62),
            default=DEFAULT_MAX_DESCRIPTORS,
            show_default=True,
            help="Descriptors that one rank may have; 48 bytes each.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return click.argument("model", required=False, shell_complete=_complete)(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(RequestOptions):
    """Values of MODEL and of the options that :func:`hand_off_options` adds."""

    model: str | None = None
    prefill: EngineOptions = _DEFAULT_ENGINE
    decode: EngineOptions = _DEFAULT_ENGINE
    kv_dtype: str | None = None
    ssm_dtype: str | None = None
    local: Path | None = None
    remote: tuple[Path, ...] = ()
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES
    max_descriptors: int = DEFAULT_MAX_DESCRIPTORS

    @property
    def plan_options(self) -> PlanOptions:
        """Options of the plan."""
        return PlanOptions(self.descriptor_bytes, self.max_descriptors)

    def hand_off(self) -> HandOff:
        """Make the hand-off that the arguments ask for.

        Raises:
            click.UsageError: arguments that do not go together.
            KvhmaError: a file, model or request that is wrong.
        """
        if self.local or self.remote:
            if self.model or not self.local or not self.remote:
                raise click.UsageError("give MODEL, or --local and --remote")
            self._check_defaults()
            engines = Engines([geometry(self.local)], [geometry(file) for file in self.remote])
            return of_geometries(self.local.stem, engines, self)
        if self.model is None:
            raise click.UsageError("Missing argument 'MODEL': a config.json or its directory, a name, or a geometry")
        found = model_or_geometry(self.model, self.kv_dtype, self.ssm_dtype)
        if isinstance(found, Geometry):
            self._check_defaults()
            return of_geometries(Path(self.model).stem, Engines([found], [found]), self)
        return of_model(found, self.prefill, self.decode, self)

    def _check_defaults(self) -> None:
        if (self.prefill, self.decode) != (_DEFAULT_ENGINE, _DEFAULT_ENGINE) or self.kv_dtype or self.ssm_dtype:
            raise click.UsageError("a geometry says all of an engine: --prefill, --decode and dtypes are for models")


def model_or_geometry(text: str, kv_dtype: str | None = None, ssm_dtype: str | None = None) -> Model | Geometry:
    """Read what MODEL names: a file or directory first, else a model of the table.

    Raises:
        KvhmaError: it is none of them; the text says what was looked for.
    """
    path = Path(text)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # too long for a path, or with a null character
        exists = False
    if exists:
        if path.is_file() and "kvhma" in load_json(path):
            return geometry(path)
        return read_config(path, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype)
    name = text.rpartition("/")[2]
    if name not in models():
        raise RequestError(f"MODEL {text!a}: no such file or directory, and not of the table: {', '.join(models())}")
    found = models()[name]
    try:
        return EngineOptions(kv_dtype=kv_dtype, ssm_dtype=ssm_dtype).model(found)
    except KvhmaError as error:
        raise RequestError(f"MODEL {text!a}: {error}") from error


def geometry(path: Path) -> Geometry:
    """Read a geometry from a file.

    Raises:
        KvhmaError: it is not one; the text starts with the file.
    """
    try:
        return Geometry.from_json(path.read_bytes())
    except OSError as error:
        raise GeometryError(f"{path}: {error.strerror or error}") from error
    except KvhmaError as error:
        raise type(error)(f"{path}: {error}") from error
