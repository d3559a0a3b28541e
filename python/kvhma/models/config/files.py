# SPDX-License-Identifier: Apache-2.0
"""Reads a model from a path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvhma.errors import ConfigError
from kvhma.models.config.model import model_from_config
from kvhma.models.table import Model

MAX_BYTES = 16 << 20
"""Most bytes of a file that is read."""

_FILE = "config.json"
_QUANTIZATION_FILE = "hf_quant_config.json"


def read_config(path: Path, *, kv_dtype: str | None = None, ssm_dtype: str | None = None) -> Model:
    """Read a model from a ``config.json``.

    Args:
        path: the file, or its directory. A ``hf_quant_config.json`` next to it is read too, as engines do.
        kv_dtype: dtype of the KV cache; None for the checkpoint's.
        ssm_dtype: dtype of the recurrent state; None for the dtype of the architecture and the configuration.

    Returns:
        The model, named after its directory, or after its file if that has another name than ``config.json``.

    Raises:
        ConfigError: no such file, no JSON, an unknown architecture, or a field that is missing or wrong.
    """
    file, name, form = load_config(path)
    try:
        return replace(model_from_config(form, kv_dtype=kv_dtype, ssm_dtype=ssm_dtype), name=name)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def load_config(path: Path) -> tuple[Path, str, Mapping[str, Any]]:
    """Read a ``config.json``, and a ``hf_quant_config.json`` next to it.

    Args:
        path: the file, or its directory.

    Returns:
        The file, the model's name, and its fields.

    Raises:
        ConfigError: no such file, or no JSON.
    """
    file = path / _FILE if path.is_dir() else path
    form = load_json(file)
    beside = file.with_name(_QUANTIZATION_FILE)
    if "quantization_config" not in form and beside.is_file():
        quantization = load_json(beside).get("quantization")
        form = {**form, "quantization_config": quantization}
    folder = file.resolve().parent.name
    return file, folder if file.name == _FILE and folder else file.stem, form


def load_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON object from a file of reasonable size.

    Args:
        file: its path.

    Returns:
        Its fields.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    return parse_json(raw, str(file))


def parse_json(raw: bytes, name: str) -> Mapping[str, Any]:
    """Parse a JSON object of reasonable size.

    Args:
        raw: the text.
        name: its source, with which errors begin.

    Returns:
        Its fields.

    Raises:
        ConfigError: it is too long, or something else.
    """
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name}: more than {MAX_BYTES >> 20} MiB")
    try:
        form = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not JSON: {error}") from error
    if not isinstance(form, dict):
        raise ConfigError(f"{name}: a {type(form).__name__}, expected a JSON object")
    return form
