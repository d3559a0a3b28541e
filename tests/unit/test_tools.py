# SPDX-License-Identifier: Apache-2.0
"""tools/layers.py, which lint runs, refuses imports that lead up or in a circle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.programs import program

PYTHON = {
    "python/kvhma": "cli\nvllm | torch\n__init__\nplanning\n_kvhma\nerrors",
    "python/kvhma/vllm": "scheduler | worker\nloads | reads\n*",
}


layers = program("tools/layers.py")


def build(root: Path, folder: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


SOUND = {
    "__init__.py": "from kvhma.planning import plan\n",
    "errors.py": "",
    "_kvhma.pyi": "from kvhma.planning import P\n",
    "../../rust/py/src/error.rs": 'fn f() { py.import("kvhma.errors") }\n',
    "planning.py": "from kvhma._kvhma import Plan\nimport kvhma._kvhma as core\n",
    "torch/__init__.py": "from kvhma.torch.cache import Cache\n",
    "torch/cache.py": "import torch\nfrom kvhma.planning import plan\n",
    "vllm/__init__.py": "",
    "vllm/config/settings.py": "from vllm.config import VllmConfig\nfrom kvhma.errors import E\n",
    "vllm/config/identity.py": "",
    "vllm/scheduler.py": "from kvhma.vllm.config.settings import Settings\n",
    "vllm/worker.py": "from .config.settings import Settings\n",
    "vllm/loads/decode.py": "",
    "vllm/reads/read_pump.py": "from ..config.settings import Settings\n",
    "cli/app.py": "from kvhma.vllm.worker import KvhmaWorker\nfrom kvhma.torch import Cache\n",
}


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("", "", ""),
        ("planning.py", "from kvhma.torch import Cache", "planning uses torch, which is above it"),
        ("torch/cache.py", "from kvhma.vllm.config.settings import Settings", "torch uses vllm, which is beside it"),
        ("vllm/reads/read_pump.py", "from ..loads.decode import D", "reads uses loads, which is beside it"),
        ("vllm/config/settings.py", "from kvhma.vllm.worker import W", "config uses worker, which is above it"),
        (
            "errors.py",
            "if TYPE_CHECKING:\n    from kvhma.planning import plan",
            "errors uses planning, which is above it",
        ),
        ("cli/app.py", "from kvhma import __version__", "import through the package's own __init__"),
        ("planning.py", "from kvhma import _kvhma", "import through the package's own __init__"),
        ("newcomer.py", "", "newcomer has no line in the picture"),
        ("cli/app.py", "from kvhma.cli.plan import plan", ""),
        (
            "../../rust/py/src/plan.rs",
            'fn g() { CELL.import(py, "kvhma.planning", "P") }',
            "_kvhma uses planning, which is",
        ),
        ("vllm/config/settings.py", "from kvhma.vllm.config.identity import me", ""),
    ],
)
def test_imports(file, line, reason, tmp_path, capsys):
    build(tmp_path, "python/kvhma", SOUND)
    build(tmp_path, "python/kvhma", {file: SOUND.get(file, "") + line} if file else {})
    code = layers.main(tmp_path, PYTHON)
    printed = capsys.readouterr().out.splitlines()
    assert code == bool(reason), printed
    if reason:
        file = "_kvhma.pyi" if file.endswith(".rs") else file
        assert any(re.match(rf"python/kvhma/{file}:\d+: {re.escape(reason)}", found) for found in printed), printed
    else:
        assert len(printed) == 1


def test_a_circle_of_imports_is_named_once(tmp_path, capsys):
    circle = {
        "cli/a.py": "from kvhma.cli.b import b\n",
        "cli/b.py": "x = 1\n\ndef b():\n    from kvhma.cli.c import c\n",
        "cli/c.py": "if TYPE_CHECKING:\n    from kvhma.cli.a import A\n",
        "cli/d.py": "from kvhma.cli.a import a\n",
    }
    build(tmp_path, "python/kvhma", SOUND | circle)
    assert layers.main(tmp_path, PYTHON) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if "circle" in line]
    way = " -> ".join(f"python/kvhma/cli/{name}.py" for name in "abca")
    assert found == [f"python/kvhma/cli/a.py:1: in a circle: {way}"]
