# SPDX-License-Identifier: Apache-2.0
"""The code of docs/torch.md runs and prints what the page shows; importing kvhma does not import torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")

ROOT = Path(__file__).parents[2]


def test_code_prints_what_it_says():
    text = (ROOT / "docs/torch.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    outputs = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(code) == len(outputs) == 2
    run = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=True)
    assert run.stdout == "".join(outputs)


def test_two_processes_hand_over():
    """The program of docs/other-engines.md; it contains the code that the page shows."""
    pytest.importorskip("nixl", reason="needs NIXL")
    program = ROOT / "examples/two_processes.py"
    environment = {**os.environ, "NIXL_LOG_LEVEL": "WARN"}
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout == "286,720 bytes in 2,240 descriptors, 4 ranges zeroed\nright\n"
    (middle,) = re.findall(r"```text\n(payload, .*?)```", (ROOT / "docs/other-engines.md").read_text(), re.DOTALL)
    code = [line.strip() for line in program.read_text().splitlines()]
    assert all(line in code for line in middle.splitlines())
