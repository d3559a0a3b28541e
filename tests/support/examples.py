# SPDX-License-Identifier: Apache-2.0
"""The commands that the files of examples/ run: the arguments of `vllm` and `vllm-router`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
COMPOSE = EXAMPLES / "compose" / "compose.yaml"
KUBERNETES = EXAMPLES / "kubernetes"
OVERLAYS = ("router", "llm-d")
GIVEN = {"IMAGE": "image", "MODEL": "org/model", "SIDE_HOST": "10.0.0.7", "ALLOWED": '["10.0.0.7:5600"]'}
GIVEN |= {"ENGINES": "--prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200", "VLLM_ARGS": ""}
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
    words = shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda name: GIVEN[name[1]], line))
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


def kubernetes_files() -> list[Path]:
    """The files with objects of Kubernetes, without what kustomize changes."""
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")


def kubernetes_objects(overlay: str | Path | None = None) -> list[dict[str, Any]]:
    """The objects of all files, or those that kustomize makes of an overlay, which may be in another folder."""
    if overlay is None:
        return [made for path in kubernetes_files() for made in yaml.safe_load_all(path.read_text())]
    command = [str(shutil.which("kubectl")), "kustomize", str(KUBERNETES / overlay)]
    return list(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def pod_commands(made: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The commands of the deployments' pods, with the variables that Kubernetes fills in."""
    named = {one["metadata"]["name"]: one for one in made if one["kind"] == "ConfigMap"}
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["configMapGenerator"]
    found = {}
    for one in made:
        if one["kind"] != "Deployment":
            continue
        (container,) = one["spec"]["template"]["spec"]["containers"]
        values = {"NAMESPACE": "kvhma"}
        for source in container.get("envFrom", ()):
            name = source["configMapRef"]["name"]
            literals = next((entry["literals"] for entry in base if entry["name"] == name), ())
            values |= named[name]["data"] if name in named else dict(text.split("=", 1) for text in literals)
        values |= {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        words = [*container["command"], *container["args"]]
        found[one["metadata"]["name"]] = [
            re.sub(r"\$\((\w+)\)", lambda at, of=values: of.get(at[1], at[0]), word) for word in words
        ]
    return found


def commands(folder: Path) -> dict[str, list[str]]:
    """Every command, by the file that runs it."""
    found = {f"examples/{name}.sh": script_command(f"{name}.sh", folder) for name in ("prefill", "decode")}
    found |= {f"systemd/{unit.stem}": unit_command(unit, folder) for unit in UNITS}
    for name, service in compose_services()["services"].items():
        found[f"compose/{name}"] = [*service["entrypoint"], *service["command"]]
    return found | {f"kubernetes/{name}": words for name, words in pod_commands(kubernetes_objects()).items()}


def transfer_config(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return found
