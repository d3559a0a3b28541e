# SPDX-License-Identifier: Apache-2.0
"""The secrets change while engines run: in each way that examples/ deliver them, and if the new ones are unusable."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhma.vllm.wire.secrets import Secrets
from support.examples import EXAMPLES, commands, compose_services, kubernetes_objects, transfer_config
from support.rotating_pair import used
from support.rotation import replace
from support.waiting import until

OLD, NEW = b"o" * 32, b"n" * 32
STEPS = ((OLD, NEW), (NEW, OLD), (NEW,))
"""The three steps of docs/security.md."""

MOUNT = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2'
"""What containers, and systemd's ProtectSystem, do with a folder or a file of the host."""


class Folder:
    """A folder of the host in which a file takes the place of another: systemd's host, or Compose's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def write(self, lines: tuple[bytes, ...]) -> None:
        replace(self.folder / "secret", *lines)


class Volume(Folder):
    """A volume of Kubernetes. Its agent writes a new folder and lets `..data` point to it, in one step."""

    versions = 0

    def write(self, lines: tuple[bytes, ...]) -> None:
        self.versions += 1
        version = self.folder / f"..version_{self.versions}"
        version.mkdir()
        (version / "secret").write_bytes(b"\n".join(lines))
        (self.folder / "..data_tmp").symlink_to(version.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")
        if self.versions == 1:
            (self.folder / "secret").symlink_to("..data/secret")
        else:
            before = self.folder / f"..version_{self.versions - 1}"
            (before / "secret").unlink()
            before.rmdir()


class Pair:
    """Both engines in a separate process, which sees the host's folders as a container does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self) -> dict[str, object]:
        """Let it hand off a request; what secrets its engines use now."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        assert found["wrong"] == []
        return found

    def use(self, role: str, lines: tuple[bytes, ...]) -> bool:
        return self.ask()[role] == list(used(Secrets(lines)))


@contextlib.contextmanager
def running_pair(mounts, files):
    """The pair with some mounts, from the host's path to its own, and the files that it reads there."""
    words = [word for pair in mounts for word in map(str, pair)]
    script = " && ".join([MOUNT] * len(mounts)) + ' && exec "$@"'
    command = ["unshare", "-rm", "sh", "-ec", script, "sh", *words, sys.executable, "-m", "support.rotating_pair"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*command, *map(str, files)], env=environment, **pipes) as it:
        try:
            yield Pair(it)
        finally:
            it.kill()


@pytest.fixture(scope="module", autouse=True)
def _has_namespaces():
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs namespaces of mounts: unshare -rm")


def unit_folder(folder):
    for unit in ("kvhma-prefill", "kvhma-decode"):
        text = (EXAMPLES / "systemd" / f"{unit}.service").read_text()
        assert "LoadCredential=" not in text, "a copy of the file, made when the unit starts"
        assert "ProtectSystem=full" in text, "/etc is mounted again, without permission to write"
    return {transfer_secret(commands(folder)[f"systemd/kvhma-{role}"]) for role in ("prefill", "decode")}, "/etc/kvhma"


def compose_folder(folder):
    services = [compose_services()["services"][role] for role in ("prefill", "decode")]
    (target,) = {mount["target"] for one in services for mount in one["volumes"] if isinstance(mount, dict)}
    assert not any("secrets" in one for one in services), "a mount of the file itself"
    return {transfer_secret(one["command"]) for one in services}, target


def kubernetes_folder(folder):
    made = [one for one in kubernetes_objects() if one["metadata"]["name"] in ("prefill", "decode")]
    containers = [one["spec"]["template"]["spec"]["containers"][0] for one in made if one["kind"] == "Deployment"]
    (mount,) = {json.dumps(mount) for one in containers for mount in one["volumeMounts"] if mount["name"] == "secret"}
    assert "subPath" not in mount, "a mount of the file itself"
    return {transfer_secret(one["args"]) for one in containers}, json.loads(mount)["mountPath"]


def transfer_secret(command):
    return transfer_config(command)["kv_connector_extra_config"]["secret_file"]


@pytest.mark.parametrize(
    ("delivery", "read"),
    [(Folder, unit_folder), (Folder, compose_folder), (Volume, kubernetes_folder)],
    ids=["systemd", "compose", "kubernetes"],
)
def test_a_running_pair_gets_new_secrets_as_the_examples_deliver_them(delivery, read, tmp_path):
    """Each of the three steps at P first, then at D, with questions and hand-offs all the time: none is refused."""
    files, folder = read(tmp_path)
    assert files == {f"{folder}/secret"}
    sides = {role: delivery(tmp_path / f"host-{role}") for role in ("p", "d")}
    inside = {role: tmp_path / role for role in sides}
    for role, side in sides.items():
        side.write((OLD,))
        inside[role].mkdir()
    mounts = [(side.folder, inside[role]) for role, side in sides.items()]
    with running_pair(mounts, [path / "secret" for path in inside.values()]) as pair:
        assert pair.use("p", (OLD,))
        assert pair.use("d", (OLD,))
        for lines in STEPS:
            for role, side in sides.items():
                side.write(lines)
                until(lambda role=role, lines=lines: pair.use(role, lines))
                for _ in range(20):
                    pair.ask()


def test_a_file_that_is_mounted_alone_never_changes(tmp_path):
    """Why the examples mount folders: Compose's `secrets:`, and a subPath of Kubernetes, mount the file."""
    for name in ("host", "p"):
        (tmp_path / name).mkdir()
    replace(tmp_path / "host" / "secret", OLD)
    (tmp_path / "d").touch()
    mounts = [(tmp_path / "host", tmp_path / "p"), (tmp_path / "host" / "secret", tmp_path / "d")]
    with running_pair(mounts, [tmp_path / "p" / "secret", tmp_path / "d"]) as pair:
        assert pair.use("d", (OLD,))
        replace(tmp_path / "host" / "secret", OLD, NEW)
        until(lambda: pair.use("p", (OLD, NEW)))
        assert all(pair.use("d", (OLD,)) for _ in range(20))
