# SPDX-License-Identifier: Apache-2.0
"""Configurations as real models have them, cut down to the fields that say what is cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By the name the built-in table has for the model. Some files leave fields to the defaults of the architecture:
gemma-3-4b its heads and their size, Nemotron-H-8B the dtype of its state.
"""

NEMOTRON_3_NANO = CONFIGS["NVIDIA-Nemotron-3-Nano-30B-A3B"]
