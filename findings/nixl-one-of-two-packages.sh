#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nixl 1.5.1: the package `nixl` installs nixl-cu12 and nixl-cu13, and imports one of them, by torch's CUDA version. A
# process that has imported one cannot import the other: their pybind11 modules register types of the same names.
# The same is true for 1.5.1 beside 1.4.1. After the older one the newer one finds the older library under its name.
# One would have guessed: two packages with names of their own can be imported side by side, as their libraries can be.
# Bites: a process where vLLM imports `nixl` and other code nixl_cu12 by name. Who comes second gets an ImportError,
# and code that takes this for "NIXL is not installed" goes on without it.
# Downloads: nixl-cu12, nixl-cu13 in two versions and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
for old in 1.5.1 1.4.1; do
    python=$(python_with --no-deps numpy==2.3.5 nixl-cu12==1.5.1 nixl-cu13==$old)
    "$python" - <<'END'
import subprocess
import sys

TWO = """
import {} as first
try:
    import {}
    print("both")
except ImportError as error:
    print(error)
"""
for names in (("nixl_cu12", "nixl_cu13"), ("nixl_cu13", "nixl_cu12")):
    for alone in names:
        subprocess.run([sys.executable, "-c", f"import {alone}"], check=True, timeout=60)
    run = subprocess.run([sys.executable, "-c", TWO.format(*names)], capture_output=True, text=True, timeout=60)
    assert "is already registered" in run.stdout or "undefined symbol" in run.stdout, (names, run)
print(run.stdout.strip())
END
done
