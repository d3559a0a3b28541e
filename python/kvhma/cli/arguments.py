# SPDX-License-Identifier: Apache-2.0
"""The arguments of every command about a hand-off, and how they become a `HandOff`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from kvhma.cli.asked_layout import Layout, ask_layout
from kvhma.cli.engine_options import EngineOptions, parse_engine
from kvhma.cli.hand_off import HandOff, PlanOptions, RequestOptions, of_geometries, of_model
from kvhma.cli.model_names import complete_model, geometry
from kvhma.cli.values import Dtype, Tokens
from kvhma.geometry import Geometry
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, DEFAULT_MAX_DESCRIPTORS

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_DEFAULT_ENGINE = EngineOptions()
ENGINE_HELP = (
    "tp=, pp=, dp=, dcp= (ranks), block= (--block-size), kv= (--kv-cache-dtype), ssm= (--mamba-ssm-cache-dtype), "
    "layout= (HND, NHD, LBHNC, …), kernel= (tokens, flashinfer, logical), conv= (DS, SD), spec= (draft tokens), "
    "with commas between. vLLM's long names are known too."
)
"""The help text for the keys of an engine; docs/cli.md has a table."""


def engine_option(name: str, text: str) -> Callable[[F], F]:
    """Return an option that describes an engine."""
    return click.option(name, metavar="KEY=VALUE,…", default="tp=1", callback=parse_engine, help=text)


_MODEL_OPTIONS = (
    engine_option("--prefill", f"The prefill engine (P): {ENGINE_HELP}"),
    engine_option("--decode", "The decode engine (D): the same keys."),
    click.option(
        "--kv-dtype",
        "--kv-cache-dtype",
        "kv_dtype",
        type=Dtype(),
        help="KV cache of both engines: auto, bf16, fp16, fp32, fp8_e4m3.",
    ),
    click.option(
        "--ssm-dtype",
        "--mamba-ssm-cache-dtype",
        "ssm_dtype",
        type=Dtype(),
        help="Recurrent state of both engines: the same.",
    ),
    click.option(
        "--layout",
        type=click.Choice(get_args(Layout)),
        default="auto",
        show_default=True,
        help="Who says what a config.json caches: kvhma's table, vLLM's classes, or vLLM where the table refuses.",
    ),
)
_REQUEST_OPTIONS = (
    click.option(
        "--tokens", type=Tokens(), default=8192, show_default=True, help="Tokens of the prompt: 8192, 8k, 8K."
    ),
    click.option("--cached", type=Tokens(0), default=0, show_default=True, help="Leading tokens that D has."),
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


def model_options(command: F, *, required: bool = True) -> F:
    """Add MODEL and the options that describe two engines; the command makes :class:`Arguments` of them."""
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return click.argument("model", required=required, shell_complete=complete_model)(command)


def hand_off_options(command: F) -> F:
    """Add MODEL and the options that describe a hand-off; the command makes :class:`Arguments` of them."""
    for option in reversed(_REQUEST_OPTIONS):
        command = option(command)
    return model_options(command, required=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(RequestOptions):
    """Values of MODEL and of the options that :func:`hand_off_options` adds."""

    model: str | None = None
    prefill: EngineOptions = _DEFAULT_ENGINE
    decode: EngineOptions = _DEFAULT_ENGINE
    kv_dtype: str | None = None
    ssm_dtype: str | None = None
    layout: Layout = "auto"
    local: Path | None = None
    remote: tuple[Path, ...] = ()
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES
    max_descriptors: int = DEFAULT_MAX_DESCRIPTORS

    @property
    def plan_options(self) -> PlanOptions:
        """Options of the plan."""
        return PlanOptions(self.descriptor_bytes, self.max_descriptors)

    def hand_off(self, room: int = 0) -> HandOff:
        """Make the hand-off that the arguments ask for; caches of a model have room for at least `room` tokens.

        Raises:
            click.UsageError: arguments that exclude each other.
            KvhmaError: a file, model or request is invalid.
        """
        if self.local or self.remote:
            if self.model or not self.local or not self.remote:
                raise click.UsageError("give MODEL, or --local and --remote")
            self._check_defaults()
            remotes = [geometry(file) for file in self.remote]
            return of_geometries(self.local.stem, [geometry(self.local)], remotes, self)
        if self.model is None:
            raise click.UsageError(
                "Missing argument 'MODEL': a Hugging Face id or name of `kvhma models`, a config.json or its "
                "directory, or a geometry"
            )
        sizes = (self.prefill.tp_size, self.decode.tp_size)
        found = ask_layout(self.model, self.layout, self.kv_dtype, self.ssm_dtype, sizes)
        if isinstance(found, Geometry):
            self._check_defaults()
            return of_geometries(Path(self.model).stem, [found], [found], self)
        found.check(self.prefill, self.decode)
        return replace(of_model(found.model, self.prefill, self.decode, self, room), layout=found.layout)

    def _check_defaults(self) -> None:
        if (self.prefill, self.decode) != (_DEFAULT_ENGINE, _DEFAULT_ENGINE) or self.kv_dtype or self.ssm_dtype:
            raise click.UsageError("a geometry says all of an engine: --prefill, --decode and dtypes are for models")
