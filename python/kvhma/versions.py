# SPDX-License-Identifier: Apache-2.0
"""The versions that kvhma supports. `make` reads them from this file, and tests compare the pages with it."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

VLLM = ("0.31.0", "0.32.0", "0.33.0")
"""Versions of vLLM with which ``make e2e`` is run."""

VLLM_DEFAULT = "0.32.0"
"""The default version of ``make e2e``."""

VLLM_COMPILED = {"0.33.0": "0.32.0"}
"""Versions without a wheel for CPUs, and the version whose compiled files they use (tools/cpu_wheel.py)."""

VLLM_READ = ("0.31", "0.32", "0.33")
"""Series of vLLM from whose specs and kernels the cache formats were read."""

NIXL = "1.5.1"
"""The version of NIXL that tests install."""

NIXL_INSTALL = "pip install --no-deps nixl nixl-cu12"
"""Installs NIXL without torch and CUDA, which its metadata require and kvhma does not use."""

NIXL_LEAST = "1.4"
"""The first series of NIXL that can be imported without torch."""

NIXL_STRIDED = "1.5"
"""The first series of NIXL that accepts strided views; earlier series need them written out row by row."""


SGLANG = {
    "sglang": "0.5.23",
    "lmcache": "0.5.6",
    "torchvision": "0.29.2",
    "ipython": "9.18.1",
    "traitlets": "5.16.1",
    "orjson": "3.13.0",
    "gguf": "0.19.0",
}
"""SGLang and LMCache, whose pools and memory objects tests fill, and what SGLang imports beside vLLM's packages."""


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of kvhma needs, wherever kvhma itself comes from.

    The metadata of the installed kvhma names the packages. A kvhma that is only on the path has no metadata.
    """
    needed = requirements(extra)
    return f"pip install {shlex.join(needed)}" if needed else f"pip install '.[{extra}]' in a checkout of kvhma"


def requirements(extra: str = "") -> list[str]:
    """Return what the installed kvhma requires for an extra, or always; nothing if it has no metadata."""
    try:
        rows = [row.partition(";") for row in requires("kvhma") or []]
    except PackageNotFoundError:
        return []
    of = [(name.strip(), re.search(r"extra == ['\"](\w+)['\"]", marker)) for name, _, marker in rows]
    return [name for name, marked in of if (marked[1] if marked else "") == extra]


def is_newer_than_tested(vllm: str) -> bool:
    """Return whether a version of vLLM belongs to a later series than the tested ones."""
    return series(vllm) > series(VLLM[-1])


def series(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros without such numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def numbers(version: str) -> list[int]:
    """Return all numbers of a version, which do not depend on how it writes a candidate."""
    return [int(number) for number in re.findall(r"\d+", version)]
