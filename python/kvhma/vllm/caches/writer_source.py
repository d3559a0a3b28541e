# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of the source that decides the bytes of a cache, for unknown formats.

It covers the files of vLLM that define the classes of a layer and of its backend. It also covers the files that these
import, as far as they belong to attention: the rest of vLLM only schedules. It does not cover compiled kernels.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

_START = "vllm.v1.kv_cache_interface"
_FOLLOWED = ("vllm.models.", "vllm.model_executor.layers.attention", "vllm.v1.attention.")
"""The packages that write caches: imports of their modules are followed."""


def source_fingerprint(classes: Sequence[type]) -> str:
    """Return 16 hexadecimal digits of the source of these classes and of what they import.

    Two engines have the same digits if these files are equal, byte for byte. Empty if a file is missing, or a class is
    not vLLM's.

    Args:
        classes: of the layer and of its backend.
    """
    modules = [base.__module__ for each in classes for base in each.__mro__ if _is_vllm(base)]
    return _fingerprint_of(frozenset(modules)) if all(map(_is_vllm, classes)) else ""


def _is_vllm(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "vllm"


@cache
def _fingerprint_of(modules: frozenset[str]) -> str:
    import vllm  # only a live engine needs it

    files = files_of(modules | {_START}, Path(vllm.__file__).parent)
    if modules - files.keys():
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for module, file in sorted(files.items()):
        text = file.read_bytes()
        digest.update(f"{module}:{len(text)}:".encode() + text)
    return digest.hexdigest()


def files_of(modules: Iterable[str], root: Path) -> dict[str, Path]:
    """Return the file in vLLM's folder of each module, and of each followed module that these import."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        file = _file_of(module, root)
        if file is None or module in found:
            continue
        found[module] = file
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        waiting += [each for each in _imported_by(file, package) if each.startswith(_FOLLOWED)]
    return found


def _file_of(module: str, root: Path) -> Path | None:
    path = root.joinpath(*module.split(".")[1:])
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imported_by(file: Path, package: str) -> Iterator[str]:
    """Yield the modules that a file imports, anywhere in it, and imported names that may be modules."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)
