# SPDX-License-Identifier: Apache-2.0
"""The steps of ``make gpu-engines`` on a CPU: they work, so that a machine with a device is not needed for that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.engines.zygote import ENVIRONMENT, engine_python

NAMES = (
    "what is there",
    "answers, sliding windows",
    "answers, Mamba2 states",
    "first token beside NixlConnector",
    "a P that is killed",
    "many hand-offs",
)


def test_every_step_passes(tmp_path: Path) -> None:
    ran = subprocess.run(
        [engine_python(), "-m", "gpu", "--engines", "--device", "cpu", "--output", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    page = (tmp_path / "RESULTS_CPU_ENGINES.md").read_text()
    for number, name in enumerate(NAMES, 1):
        assert f"| {number}. {name} | passed | " in page, page
    assert page.count("| passed | ") == len(NAMES)
