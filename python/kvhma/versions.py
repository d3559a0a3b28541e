# SPDX-License-Identifier: Apache-2.0
"""The versions that kvhma runs with. No other file says them: `make` reads this one, tests compare the pages."""

from __future__ import annotations

import re

VLLM = ("0.31.0", "0.32.0", "0.33.0")
"""Versions of vLLM that ``make e2e`` is run with."""

VLLM_DEFAULT = "0.32.0"
"""The one of them that it is run with if none is named."""

VLLM_COMPILED = {"0.33.0": "0.32.0"}
"""Versions that have no wheel for CPUs, and the one whose compiled files they are run with (tools/cpu_wheel.py)."""

VLLM_READ = ("0.31", "0.32", "0.33")
"""Series of vLLM whose specs and kernels the cache formats were read from."""

NIXL = "1.5.1"
"""The version of NIXL that tests install."""

NIXL_INSTALL = "pip install --no-deps nixl nixl-cu12"
"""Gets NIXL without torch and CUDA, which its metadata ask for and kvhma does not use."""

NIXL_LEAST = "1.4"
"""The first series of NIXL that can be imported without torch."""

NIXL_STRIDED = "1.5"
"""The first series of NIXL that takes strided views; before it they are written out row by row."""


def is_newer_than_tested(vllm: str) -> bool:
    """Return whether a version of vLLM is of a later series than those that were tested."""
    return series(vllm) > series(VLLM[-1])


def series(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
