# SPDX-License-Identifier: Apache-2.0
"""Every block of README and docs is true: code prints what it shows, commands succeed, JSON is of its kind.

Blocks in `sh` start servers or install things, and are the only ones that are not run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from kvhma import Geometry
from kvhma.cli.app import app
from kvhma.oracle import cases
from support.cli_configs import NEMOTRON_3_NANO
from support.cli_run import cli

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
NOT_RUN = {"chmod", "curl", "docker", "eval", "hf", "make", "openssl", "pip", "prometheus", "vllm"}
"""Starts of lines that a block may have which is not run, and files of examples/ and tools/."""
EXAMPLE = re.compile(r"^(?:[A-Z_]+=\S* )*(?:python )?((?:examples|tools)/[\w./-]+)")

PROXY = "python -m kvhma.proxy "

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")


@dataclass
class Block:
    """A block of code: its language, its text, and whether only white space is between it and the previous block."""

    language: str
    text: str
    follows: bool = False


@dataclass
class Command:
    """A line that is run, and the output that the page shows; None if it shows no output."""

    words: list[str]
    output: str | None = None


def blocks(page: str) -> list[Block]:
    """Fenced blocks, and indented ones as `console`, or as `sh` if they start with a line that is not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[tuple[int, int, Block]] = []
    for match in FENCE.finditer(text):
        found.append((*match.span(), Block(*match.groups())))
    hidden = FENCE.sub(lambda match: "-" * len(match[0]), text)
    for match in INDENTED.finditer(hidden):
        lines = "\n".join(line[4:] for line in match[0].rstrip("\n").split("\n"))
        language = "sh" if lines.split()[0] in NOT_RUN else "console"
        found.append((*match.span(), Block(language, f"{lines}\n")))
    found.sort(key=lambda item: item[0])
    end = 0
    for start, stop, block in found:
        block.follows = not text[end:start].strip()
        end = stop
    return [block for _, _, block in found]


def commands(page: str) -> list[Command]:
    """The `kvhma` lines of a page. The other lines are the output of the last command, maybe of a previous block."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language != "console":
            continue
        printed = False
        for line in block.text.rstrip("\n").split("\n"):
            if line.startswith("$ kvhma ") or (line.startswith("kvhma ") and not printed):
                found.append(Command(shlex.split(line.removeprefix("$ "), comments=True)[1:]))
            else:
                printed = True
                assert found, f"{page}: {line!r} is shown as output, but no command is before it"
                last = found[-1]
                last.output = line if last.output is None else f"{last.output}\n{line}"
    return found


def scripts() -> list[str]:
    # docs/torch.md needs torch: tests/tensors/test_docs.py runs it where torch is installed.
    return [page for page in PAGES if page != "docs/torch.md" and any(b.language == "python" for b in blocks(page))]


def form(page: str) -> str:
    (block,) = (block for block in blocks(page) if block.language == "json")
    return block.text


@pytest.fixture
def folder(tmp_path):
    """The folder where a page's commands run, with the files that pages name."""
    (tmp_path / "Nemotron-3-Nano").mkdir()
    (tmp_path / "Nemotron-3-Nano" / "config.json").write_text(json.dumps(NEMOTRON_3_NANO))
    (tmp_path / "case.json").write_text(form("docs/cases.md"))
    (tmp_path / "trace.jsonl").write_text(next(b.text for b in blocks("docs/trace-format.md") if b.language == "text"))
    row = {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": list(range(14))}
    (tmp_path / "requests.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "assets").mkdir()
    for trace in (ROOT / "docs/assets").glob("*.jsonl"):
        shutil.copy(trace, tmp_path / "assets")
    return tmp_path


def run(folder, *command):
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "NIXL_LOG_LEVEL": "WARN"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=240, check=False
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_that_is_tested(page):
    for block in blocks(page):
        assert block.language in {"console", "json", "python", "sh", "text"}, block.text
        if block.language == "sh":
            for line in filter(str.strip, block.text.splitlines()):
                if example := EXAMPLE.match(line):
                    assert (ROOT / example[1]).is_file(), line
                elif line.startswith("kvhma "):
                    name, *arguments = shlex.split(line)[1:]
                    command = app.commands[name]
                    context = click.Context(command, **command.context_settings)
                    command.make_parser(context).parse_args(arguments)  # it needs a live engine
                elif line.startswith("python -c "):
                    compile(shlex.split(line)[2], page, "exec")  # it needs packages that are not installed
                elif line.startswith(PROXY):
                    pytest.importorskip("aiohttp", reason="make dev installs it")
                    from kvhma.proxy import parser

                    assert parser().parse_args(shlex.split(line.removeprefix(PROXY)))
                else:
                    assert line.split()[0] in NOT_RUN, f"{line!r} in a block that is not run"


@pytest.mark.parametrize("page", scripts())
def test_code_prints_what_it_says(page, folder):
    code, printed = ["import numpy"], [""]
    for block in blocks(page):
        if block.language == "python":
            code.append(block.text)
            printed.append("")
        elif block.language == "text" and block.follows:
            printed[-1] = block.text
    if any("kvhma.nixl" in text for text in code):
        pytest.importorskip("nixl", reason="needs NIXL")
    ended = run(folder, sys.executable, "-c", "\nprint(end='\\x1e')\n".join(code))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\x1e") == printed


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_end_well_and_print_what_it_says(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for command in commands(page):
        if command.words[:2] == ["bench", "link"] or command.words[:1] == ["demo"]:
            pytest.importorskip("nixl", reason="needs NIXL")
        ended = cli(*command.words, settings=folder, columns=80)
        found = command.output is not None and command.output.startswith(("refused", "wrong"))
        assert (ended.code, ended.err) == (int(found), ""), command.words
        if command.output is not None:
            got = [line.rstrip() for line in ended.out.strip("\n").splitlines()]
            shown = command.output.strip("\n").splitlines()
            places = range(len(got) - len(shown) + 1)
            assert any(got[at : at + len(shown)] == shown for at in places), (command.words, ended.out)


def test_documented_geometry_is_one():
    geometry = Geometry.from_json(form("docs/geometry.md"))
    assert geometry.groups[0].window == 1024
    assert Geometry.from_json(geometry.to_json()) == geometry


def test_documented_case_is_right(folder):
    verdict = cases.check(cases.load(folder / "case.json"))
    assert verdict.outcome == "right", verdict.text


@pytest.mark.parametrize("module", ["kvhma.tensors", "kvhma.torch"])
def test_a_missing_torch_is_named_with_a_command(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.endswith("ImportError: kvhma.tensors and kvhma.torch need torch: pip install torch\n")


def test_import_needs_numpy_only():
    heavy = {"torch", "nixl", "vllm", "click", "rich"}
    code = f"import sys, kvhma; print(sorted({{n.split('.')[0] for n in sys.modules}} & {heavy}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_each_defect_can_be_inserted() -> None:
    """A text of tests/mutants.yaml is in its file once: `make mutants` replaces it."""
    for defect in yaml.safe_load((ROOT / "tests/mutants.yaml").read_text(encoding="utf-8")):
        assert (ROOT / defect["file"]).read_text(encoding="utf-8").count(defect["find"]) == 1, defect["name"]
