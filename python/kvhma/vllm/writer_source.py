# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of the source that decides the bytes of a cache, for formats that were not read.

It is of all files of vLLM that the classes of a layer and of its backend are in, and of those that these import, as far
as they have to do with attention: the rest of vLLM only schedules. Compiled kernels are not in it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

_START = "vllm.v1.kv_cache_interface"
_FOLLOWED = ("vllm.models.", "vllm.model_executor.layers.attention", "vllm.v1.attention.")
"""Where caches are written: the packages whose modules are followed."""


def source_fingerprint(classes: Sequence[type]) -> str:
    """Return 16 hexadecimal digits of the source that these classes and what they import are made of.

    Two engines have the same one if these files are equal, byte for byte. Empty where a file is missing, and for a
    class of somebody else's.

    Args:
        classes: of the layer and of its backend.
    """
    modules = [base.__module__ for each in classes for base in each.__mro__ if _is_vllm(base)]
    return _fingerprint_of(frozenset(modules)) if all(map(_is_vllm, classes)) else ""


def _is_vllm(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "vllm"


@cache
def _fingerprint_of(modules: frozenset[str]) -> str:
    import vllm  # of a live engine; plans are made without it

    files = files_of(modules | {_START}, Path(vllm.__file__).parent)
    if modules - files.keys():
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for module, file in sorted(files.items()):
        text = file.read_bytes()
        digest.update(f"{module}:{len(text)}:".encode() + text)
    return digest.hexdigest()


def files_of(modules: Iterable[str], root: Path) -> dict[str, Path]:
    """Return the file of each module, and of each that these import and that is followed, in vLLM's folder."""
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
    """Yield the modules that a file imports, anywhere in it, and names that may be modules."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)
