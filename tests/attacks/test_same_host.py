# SPDX-License-Identifier: Apache-2.0
"""Other processes of an engine's host: what another user cannot reach, and what the engine's own user can."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nixl", reason="needs NIXL; make dev installs it")

from kvhma.errors import HandshakeError
from kvhma.vllm.wire.lease_board import owner_of
from kvhma.vllm.wire.messages import AskWorkerIdentity, frame
from kvhma.vllm.wire.secrets import Secrets
from support.boards import WorkerProcess
from support.listening import HELLO, NONCE, answers, listening
from support.rotation import Clock, replace

NOBODY = 65534
SECRET = b"the secret of these two engines"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.fixture(scope="module")
def p() -> Iterator[WorkerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVHMA_SECRET", SECRET.decode())
        made = WorkerProcess(1)
    yield made
    made.close()


def seen_by(user: int, *command: str) -> bytes | None:
    """What a command of another user prints; None if it is not permitted."""
    ended = subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True, check=False)
    if ended.returncode == 0:
        return ended.stdout
    assert b"ermission denied" in ended.stderr, ended.stderr
    return None


def private_files(p: WorkerProcess) -> list[str]:
    """The board, the environment with the secret, and all of the worker's memory."""
    of_process = f"/proc/{p.process.pid}"
    return [p.path, f"{of_process}/environ", f"{of_process}/mem", f"{of_process}/maps"]


@needs_root
def test_another_user_gets_neither_board_nor_secret_nor_memory(p: WorkerProcess) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder, "secret")
        file.write_bytes(SECRET)
        file.chmod(0o440)
        for path in [*private_files(p), str(file)]:
            assert seen_by(NOBODY, "head", "-c1", path) is None, path
    assert seen_by(NOBODY, "dd", "if=/dev/zero", f"of={p.path}", "bs=1", "count=1", "conv=notrunc") is None
    arguments = seen_by(NOBODY, "cat", f"/proc/{p.process.pid}/cmdline")
    assert arguments, "every user sees the arguments"
    assert SECRET not in arguments


@needs_root
@pytest.mark.parametrize("has_secret", [False, True])
def test_another_user_reaches_loopback_as_any_host_does(has_secret: bool) -> None:
    with listening(secrets=Secrets([SECRET] if has_secret else [])) as found:
        question = "".join(f"\\x{byte:02x}" for byte in frame(AskWorkerIdentity(0, 0, NONCE)))
        asks = f"exec 3<>/dev/tcp/{found.at.host}/{found.at.port}; printf '{question}' >&3; head -c 60 <&3"
        said = seen_by(NOBODY, "bash", "-c", asks)
        assert said is not None
        assert (HELLO[:16] in said) is not has_secret
        assert (b"this engine has a secret" in said) is has_secret


def test_the_engines_own_user_is_the_engine(p: WorkerProcess) -> None:
    """Also in the same container. It may trace the process; here it is its parent, as Yama wants."""
    board, environ, memory, _ = (Path(path) for path in private_files(p))
    assert SECRET in environ.read_bytes()
    with memory.open("rb") as opened:
        opened.seek(p.private_at)
        assert opened.read(len(p.private)) == p.private
    owner = owner_of(p.said.public_key)
    with board.open("r+b") as opened:
        assert opened.read(len(owner)) == owner
        opened.seek(0)
        opened.write(owner[::-1])
    with board.open("rb") as opened:
        assert opened.read(len(owner)) == owner[::-1]


def test_who_replaces_the_secret_file_is_trusted_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To replace a file, a user needs to write to its folder, not to read it."""
    clock, file = Clock(monkeypatch), tmp_path / "secret"
    replace(file, SECRET)
    with listening(secrets=Secrets.load(SimpleNamespace(secret_file=str(file)))) as found:
        answers(found.at, Secrets([SECRET]))
        replace(file, b"a secret of the attacker's")
        clock.pass_by()
        answers(found.at, Secrets([b"a secret of the attacker's"]))
        with pytest.raises(HandshakeError, match="differ"):
            answers(found.at, Secrets([SECRET]))
