# SPDX-License-Identifier: Apache-2.0
"""Programs of the repository that are not part of a package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def program(path: str) -> ModuleType:
    """Load ``tools/NAME.py`` or ``benches/NAME.py``, and leave it where dataclasses look their module up by name."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / Path(path).parent)  # where a program finds those beside it
        spec.loader.exec_module(module)
    return module
