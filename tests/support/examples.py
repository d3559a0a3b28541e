# SPDX-License-Identifier: Apache-2.0
"""The commands that the files of examples/ run: the arguments of `vllm` and `python`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
COMPOSE = EXAMPLES / "compose" / "compose.yaml"
KUBERNETES = EXAMPLES / "kubernetes" / "kvhma.yaml"
GIVEN = {"IMAGE": "image", "MODEL": "org/model", "SIDE_HOST": "10.0.0.7", "ALLOWED": '["10.0.0.7:5600"]'}
GIVEN |= {"PREFILL_URL": "http://10.0.0.7:8100", "DECODE_URL": "http://10.0.0.8:8200"}
"""The values that the files leave to their user."""


def script_command(script: str, folder: Path, **environment: str) -> list[str]:
    """Run a script with a `vllm` that only prints its arguments."""
    (folder / "vllm").write_text('#!/usr/bin/env bash\nprintf "%s\\0" vllm "$@"\n')
    (folder / "vllm").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    command = [str(EXAMPLES / script), "org/model", "--max-model-len", "1024"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path} | environment)
    return ended.stdout.rstrip("\0").split("\0")


def unit_command(unit: Path, folder: Path) -> list[str]:
    """The command that a unit starts, from its script if it has one."""
    text = unit.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = shlex.split(re.sub(r"\$\{(\w+)\}", lambda name: GIVEN[name[1]], line).replace("$VLLM_ARGS", ""))
    if not words[0].endswith(".sh"):
        return words
    own = (
        word.split("=", 1) for found in re.findall(r"^Environment=(.*)$", text, re.MULTILINE) for word in found.split()
    )
    return script_command(Path(words[0]).name, folder, **(GIVEN | dict(own)))


def compose_services() -> dict[str, Any]:
    """The services with variables filled in."""
    text = re.sub(r"\$\{(\w+):[?-][^}]*\}", lambda name: GIVEN.get(name[1], ""), COMPOSE.read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def kubernetes_objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


def commands(folder: Path) -> dict[str, list[str]]:
    """Every command, by the file that runs it."""
    found = {f"examples/{name}.sh": script_command(f"{name}.sh", folder) for name in ("prefill", "decode")}
    found |= {f"systemd/{unit.stem}": unit_command(unit, folder) for unit in UNITS}
    for name, service in compose_services()["services"].items():
        found[f"compose/{name}"] = [*service["entrypoint"], *service["command"]]
    for made in kubernetes_objects():
        if made["kind"] == "Deployment":
            (container,) = made["spec"]["template"]["spec"]["containers"]
            found[f"kubernetes/{made['metadata']['name']}"] = [*container["command"], *container["args"]]
    return found


def transfer_config(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return found
