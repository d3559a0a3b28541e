# SPDX-License-Identifier: Apache-2.0
"""The alerts, and what is scraped: checked by Prometheus' own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from kvhma.cli.serve_pair import _scrapes
from support.monitoring import EXAMPLES, alert_queries

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")


def promtool(*arguments: str) -> str:
    ended = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=EXAMPLES / "prometheus", capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_promtool
def test_prometheus_takes_the_files() -> None:
    assert f"{len(alert_queries())} rules found" in promtool("check", "rules", "kvhma-alerts.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_prometheus_takes_what_serve_pair_writes(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(_scrapes({"prefill": 1, "decode": 2, "router": 3}))
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


@needs_promtool
def test_every_alert_fires_when_it_should() -> None:
    promtool("test", "rules", "kvhma-alerts.test.yml")
    tested = set(re.findall(r'alertname="(\w+)"', (EXAMPLES / "prometheus/kvhma-alerts.test.yml").read_text()))
    assert tested == {name for name, _ in alert_queries()}
