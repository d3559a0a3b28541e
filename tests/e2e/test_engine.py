# SPDX-License-Identifier: Apache-2.0
"""The harness: what engines leave behind, for every way in which they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Engine, EngineFailed, Zygote
from support.waiting import runs, until

TESTS = Path(__file__).resolve().parents[1]
PROMPT = list(range(100))


@pytest.mark.smoke
def test_ends(zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    llama = model("llama")
    with Engine(zygote, llama, tmp_path / "stopped.log") as engine:
        long = engine.generate(PROMPT, max_tokens=2000, request_id="long")
        assert len(engine.generate(PROMPT, max_tokens=3).result().token_ids) == 3
        assert len(engine.core("e2e_blocks", "long")[0]) > 3
        engine.abort("long")
        assert long.result().finish_reason == "abort"
        late = engine.generate(PROMPT, max_tokens=2000, timeout=0.2).result()
        assert "TimeoutError" in str(late.error)
        engine.idle(free=engine.state()["all_blocks"] - 1)  # block 0 is never allocated
        refused = engine.generate([10**9], max_tokens=1).result()
        assert refused.error, refused
    assert engine.pids() == []

    with Engine(zygote, llama, tmp_path / "killed.log") as engine:
        pending = engine.generate(PROMPT, max_tokens=2000)
        engine.kill()
        with pytest.raises(EngineFailed):
            pending.result(10)
        with pytest.raises(EngineFailed):
            engine.generate(PROMPT, max_tokens=1).result(10)
        assert engine.pids() == []

    with Engine(zygote, llama, tmp_path / "orphans.log") as engine:
        os.kill(engine.pid, signal.SIGKILL)  # the front end only: the others follow it
        until(lambda: not engine.pids())

    broken = Engine(zygote, llama, tmp_path / "broken.log", engine_args={"dtype": "no such"}).start()
    with pytest.raises(EngineFailed, match="no such"):
        broken.ready(60)
    broken.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_test_leaves_no_process(how: int, model: Callable[[str], Path], tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from support.waiting import until
from support.engines import Engine, Zygote
zygote = Zygote(Path({str(tmp_path / "zygote.log")!r}))
engine = Engine(zygote, Path({str(model("llama"))!r}), Path({str(tmp_path / "engine.log")!r})).start().ready()
engine.generate(list(range(100)), max_tokens=2000)
print(*engine.pids(), zygote._process.pid, flush=True)
import signal
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True
    ) as test:
        pids = [int(pid) for pid in test.stdout.readline().split()]
        assert len(pids) >= 4
        assert all(map(runs, pids))
        test.send_signal(how)
    until(lambda: not any(map(runs, pids)))
