# SPDX-License-Identifier: Apache-2.0
"""The README's code runs and prints what the README says; the documented JSON is a geometry."""

import re
import subprocess
import sys
from pathlib import Path

from kvhma import Geometry

ROOT = Path(__file__).parents[2]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_readme_code_prints_what_it_says():
    code, output = blocks("README.md", "python"), blocks("README.md", "text")
    assert len(code) == len(output) == 1
    run = subprocess.run([sys.executable, "-c", code[0]], capture_output=True, text=True, check=True)
    assert run.stdout == output[0]


def test_documented_geometry_is_one():
    (form,) = blocks("docs/geometry.md", "json")
    geometry = Geometry.from_json(form)
    assert geometry.groups[0].window == 1024
    assert Geometry.from_json(geometry.to_json()) == geometry


def test_import_needs_numpy_only():
    heavy = {"torch", "nixl", "vllm", "click", "rich"}
    code = f"import sys, kvhma; print(sorted({{n.split('.')[0] for n in sys.modules}} & {heavy}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
