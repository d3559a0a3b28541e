# SPDX-License-Identifier: Apache-2.0
"""Decides what a model caches: kvhma's table, or vLLM's own classes in a separate process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.model_names import find_model, geometry, is_there, parse_geometry
from kvhma.cli.subprocess import process, receive
from kvhma.errors import ConfigError, KvhmaError, LayoutError, RequestError
from kvhma.geometry import Geometry
from kvhma.models import Model
from kvhma.models.config import MAX_BYTES, kv_dtype_of, load_config, load_json, model_from_config, parse_json

Layout: TypeAlias = Literal["auto", "vllm", "table"]

TABLE = "table"
STDIN = "-"
"""As MODEL: a ``config.json`` or a geometry from the standard input."""

_SECONDS = 120.0

_MAX_REASON = 300
"""Most characters of vLLM's reason."""


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model, and the source of its cache layout.

    Attributes:
        model: the model with its layers.
        layout: ``"table"``, or ``"vLLM"`` with its version.
        refused: tensor-parallel sizes that vLLM refuses, or at which its ranks hold other caches, and why.
        is_staged: whether its layers can be divided among pipeline stages.
    """

    model: Model
    layout: str = TABLE
    refused: Mapping[int, str] | None = None
    is_staged: bool = True

    def check(self, *engines: EngineOptions) -> None:
        """Refuse engines that vLLM cannot make of this model.

        Raises:
            LayoutError: the text has the refused size.
        """
        for engine in engines:
            if reason := (self.refused or {}).get(engine.tp_size):
                raise LayoutError(reason)
            if engine.pp_size > 1 and not self.is_staged:
                raise LayoutError(
                    f"pp_size {engine.pp_size}: vLLM makes the caches of {self.model.name} in another order than its "
                    "layers"
                )


def ask_layout(
    text: str, layout: Layout, kv_dtype: str | None, ssm_dtype: str | None, tp_sizes: Iterable[int]
) -> AskedModel | Geometry:
    """Return what MODEL caches, from the table or from vLLM.

    Args:
        text: MODEL; ``-`` for the standard input.
        layout: ``"auto"`` asks the table first, and vLLM where the table refuses.
        kv_dtype: dtype of the KV cache; None for the checkpoint's.
        ssm_dtype: dtype of the recurrent state; None for the model's.
        tp_sizes: tensor-parallel sizes of the engines.

    Raises:
        KvhmaError: MODEL cannot be read, or neither the table nor vLLM supports it.
    """
    if text != STDIN and not is_there(text):
        if layout == "vllm":
            raise RequestError(f"--layout vllm: MODEL {text!a} must be a config.json or its directory")
        return AskedModel(_built_in(text, kv_dtype, ssm_dtype))
    path = Path(text)
    if text == STDIN:
        raw = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)  # None: it was closed
        file, name, form = path, "stdin", parse_json(raw, text)
        if "kvhma" in form:
            return parse_geometry(raw, text)
    elif path.is_file() and "kvhma" in load_json(path):
        return geometry(path)
    else:
        file, name, form = load_config(path)
    if layout == "vllm":
        return _ask_vllm(file, name, form, kv_dtype, ssm_dtype, tp_sizes)
    try:
        model = model_from_config(form, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype)
    except ConfigError as error:
        if layout == "table":
            raise ConfigError(f"{file}: {error}") from error
        if find_spec("vllm") is None:
            raise ConfigError(f"{file}: {error}; install vLLM to use its own classes") from error
        try:
            return _ask_vllm(file, name, form, kv_dtype, ssm_dtype, tp_sizes)
        except KvhmaError as vllm_error:
            raise ConfigError(f"{file}: {error}; {str(vllm_error).removeprefix(f'{file}: ')}") from vllm_error
    return AskedModel(replace(model, name=name))


def _built_in(text: str, kv_dtype: str | None, ssm_dtype: str | None) -> Model:
    found = find_model(text)
    try:
        return EngineOptions(kv_dtype=kv_dtype, ssm_dtype=ssm_dtype).model(found)
    except KvhmaError as error:
        raise RequestError(f"MODEL {text!a}: {error}") from error


def _ask_vllm(
    file: Path,
    name: str,
    form: Mapping[str, Any],
    kv_dtype: str | None,
    ssm_dtype: str | None,
    tp_sizes: Iterable[int],
) -> AskedModel:
    if find_spec("vllm") is None:
        raise RequestError("--layout vllm: vLLM is not installed here")
    with process(_answer, name, dict(form), sorted(set(tp_sizes))) as pipe:
        try:
            found: AskedModel = receive(pipe, "vLLM", _SECONDS)
        except KvhmaError as error:
            raise ConfigError(f"{file}: {error}") from error
    try:
        model = replace(found.model, dtype=kv_dtype or kv_dtype_of(form, found.model.dtype))
        if ssm_dtype and model.state is not None:
            model = replace(model, state=replace(model.state, ssm_dtype=ssm_dtype))
    except KvhmaError as error:
        raise ConfigError(f"{file}: {error}") from error
    return replace(found, model=model)


def _answer(pipe: Connection, name: str, form: dict[str, Any], tp_sizes: list[int]) -> None:
    """Ask vLLM in a separate process, and send its answer or the error."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    logging.disable(logging.ERROR)  # the log lines of an engine
    try:
        from kvhma.vllm.caches.meta_model import ask, version

        model, refused, num_layers = ask(name, form, tp_sizes)
        pipe.send(AskedModel(model, f"vLLM {version()}", refused, len(model.layers) == num_layers))
    except KvhmaError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(ConfigError(f"vLLM does not make this model: {_reason(error)}"))


def _reason(error: Exception) -> str:
    """Return vLLM's reason in one short line, without the input and the list of models that its errors repeat."""
    details = error.errors() if hasattr(error, "errors") else []
    text = details[0]["msg"].removeprefix("Value error, ") if details else f"{type(error).__name__}: {error}"
    line = " ".join(text.split()).partition(" Supported architectures:")[0]
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON].rpartition(" ")[0] + " ..."
