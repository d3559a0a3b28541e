# SPDX-License-Identifier: Apache-2.0
"""Every sentence of the README has a test that runs it, or a file that has its measurement."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.cli_configs import NEMOTRON_3_NANO
from support.cli_run import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")

SHOWN_BY = {
    "kvhma is a KV connector for vLLM": "tests/e2e/test_hand_off.py: test_equal_ranks",
    "It moves a request's cache": "tests/e2e/test_hand_off.py: test_one_rank_to_two_and_back",
    "The model may mix": "tests/e2e/test_families.py: test_family",
    "In such a model every group": "tests/golden/test_models.py: test_one_request",
    "A read of the right length": "tests/e2e/test_oracle.py: test_one_wrong_block_shows",
    "D answers from other tokens": "tests/e2e/test_oracle.py: test_one_wrong_block_shows",
    "In 35 of 210 recorded hand-offs with equal blocks vLLM's own `NixlConnector` leaves wrong or missing bytes where "
    "D reads next, and refuses 27.": "docs/audit-results.md: refuses 27 of 210 hand-offs, and 35 are wrong",
    "Engines with tiny models confirm": "docs/audit-results.md: Real engines confirm each",
    "With kvhma they are equal": "tests/e2e/test_audit_kinds.py: test_a_kind",
    "`kvhma audit docs/assets/": "tests/unit/test_readme.py: test_the_trace_shows_a_wrong_byte",
    "kvhma checks a pair before": "tests/unit/test_plan.py: test_a_layer_of_one_side_is_a_finding_and_the_rest_works",
    "In tests a byte oracle": "docs/architecture.md: 2,400 generated pairs of geometries",
    "Proxies and routers for": "tests/connector/test_routers.py: test_decode_engines_read_what_a_router_hands_on",
    "`kvhma serve-pair MODEL`": "tests/e2e/test_serve_pair.py: test_one_command_serves_a_pair",
    "The command line reads": "tests/unit/test_readme.py: test_commands_need_no_engine_gpu_or_network",
    "Most commands need no engine": "tests/unit/test_readme.py: test_commands_need_no_engine_gpu_or_network",
    "The library needs numpy": "tests/unit/test_docs.py: test_import_needs_numpy_only",
    "It gives descriptors as arrays": "tests/unit/test_nixl_arrays.py: test_what_fits_is_taken_as_it_is",
    "A sliding group needs 65": "tests/unit/test_docs.py: test_code_prints_what_it_says",
    "Measured with vLLM 0.32": "benches/RESULTS_E2E.md: 2 cores for all engines, vLLM 0.32",
    "In 1,092 audited hand-offs both": "benches/audit/results-versions.md: 1092 of pull and push",
    "Their times are not measured": "benches/RESULTS_E2E.md: vLLM 0.32.0 on CPUs, kvhma",
    "Nothing is on a package index": "tests/unit/test_versions.py: test_nothing_is_installed_from_an_index",
    "To build it you need Python": "tests/unit/test_versions.py: test_classifiers_name_the_pythons_that_are_tested",
    "The glossary defines our words": "tests/unit/test_docs.py: test_links_of_the_readme_lead_to_the_repository",
    "Tests run the Python and": "tests/unit/test_docs.py: test_commands_end_well_and_print_what_it_says",
}
"""The start of a sentence: the file, and a text in it."""
LEADS = ("It is for engineers", "The connector's page leads", "The connector, for vLLM")
"""Sentences that name readers or pages."""


def sentences() -> list[str]:
    """The prose: no code, tables, headings, nor what is a link alone."""
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^[|#].*$", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose).replace("**", "")
    found = []
    for paragraph in prose.split("\n\n"):
        found += re.split(r"(?<=[.:])\s+(?=[A-Z`]|kvhma)", " ".join(paragraph.split()))
    return [sentence for sentence in found if len(sentence.split()) > 3]


def test_every_sentence_is_shown() -> None:
    """A new sentence needs a name in the table above."""
    starts = [*SHOWN_BY, *LEADS]
    for sentence in sentences():
        assert any(map(sentence.startswith, starts)), f"no test and no file shows: {sentence}"
    assert [start for start in starts if not any(s.startswith(start) for s in sentences())] == [], "not in the README"
    for place in SHOWN_BY.values():
        file, _, text = place.partition(": ")
        assert text in (ROOT / file).read_text(encoding="utf-8"), place


def test_the_first_screen_has_the_two_commands() -> None:
    """The job and the tests, each one command, and how a pair is served; `.ci/run` reads the two from here."""
    first = TEXT.splitlines()[:15]
    assert [line.split("#")[0].strip() for line in first if line.startswith("make ")] == ["make demo", "make test"]
    served = [line for line in first if line.startswith("vllm serve MODEL ")]
    assert [re.findall(r'"kv_role": "(\w+)"', line) for line in served] == [["kv_producer"], ["kv_consumer"]]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (reads,) = re.findall(r"< <\((.*)\)$", script, re.MULTILINE)
    read = subprocess.run(["bash", "-c", reads], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert read.splitlines() == ["make demo", "make test"]
    assert 'for command in "${commands[@]}"; do $command; done' in script


def test_the_trace_shows_a_wrong_byte() -> None:
    (command,) = re.findall(r"`kvhma (audit [^`]+)`", TEXT)
    name, path = command.split()
    done = cli(name, ROOT / path)
    assert done.code == 1
    assert done.out.startswith("wrong")


def test_commands_need_no_engine_gpu_or_network(tmp_path: Path) -> None:
    """The command that the README shows, where packages of engines are missing and every socket is refused."""
    line = next(line for line in TEXT.splitlines() if line.startswith("$ kvhma plan"))
    words = line.split()[2:]
    (tmp_path / words[1]).mkdir()
    (tmp_path / words[1] / "config.json").write_text(json.dumps(NEMOTRON_3_NANO))
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise OSError('no network')\n"
        "socket.socket.connect = socket.socket.bind = socket.getaddrinfo = refuse\n"
        "for name in ('torch', 'vllm', 'nixl', 'nixl_cu12', 'transformers'): sys.modules[name] = None\n"
        "from kvhma.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "what is read" in done.stdout
