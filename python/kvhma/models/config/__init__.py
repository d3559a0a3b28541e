# SPDX-License-Identifier: Apache-2.0
"""What a model caches, read from its Hugging Face ``config.json``. No other package and no network is needed."""

from __future__ import annotations

from kvhma.models.config.files import MAX_BYTES, load_config, load_json, parse_json, read_config
from kvhma.models.config.model import kv_dtype_of, model_from_config

__all__ = ["MAX_BYTES", "kv_dtype_of", "load_config", "load_json", "model_from_config", "parse_json", "read_config"]
