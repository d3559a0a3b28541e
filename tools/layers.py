# SPDX-License-Identifier: Apache-2.0
"""Dependencies between files point downwards, and no files form a cycle.

    python tools/layers.py    # prints each error in one line; exit code 1 if there is an error

A dependency is an import in Python, anywhere in a file (in a function, for types only), and a path into another module
in Rust, tests left out. The imports of the compiled module are in Rust, so its stub is not read. Files are read, never
imported: nothing has to be installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = {
    "python/kvhma": """
        __main__
        cli | proxy
        vllm | torch | oracle
        nixl | tensors | models | replay
        __init__
        costs
        planning | lowlevel | pieces | digests | permute
        geometry
        _kvhma
        types | errors | versions | text
    """,
    "python/kvhma/vllm": """
        __init__ | drop_in
        connector
        options
        scheduler | worker
        loads | reads
        holds
        peers
        options/doors
        metadata | prompts
        config
        caches | telemetry | *
        device
        wire
        threads
        counters | callers
    """,
    "rust/core/src": """
        lib
        report | replay
        request
        pairing | form | lowlevel
        bytes
        geometry | digest | id_text | block_users
        error
        finding
    """,
    "rust/py/src": """
        lib
        functions | digest | block_users | replay
        ids | spans
        plan | block_tables
        results | geometry
        output
        values
        convert
        error
    """,
}
"""Which may use which: a name, a file or a folder uses those in the lines below its own; `*` is every other name.

`__init__` is low in the package because importing any part of it runs it: it may not bring in the heavy parts.
"""

BINDINGS = "rust/py/src"
_IMPORT = re.compile(r"\bimport\((?:\s*py\s*,)?\s*\"(kvhma[.\w]*)\"")


@dataclass(frozen=True)
class Arrow:
    """A line of a file that uses another file; paths begin at the repository."""

    file: str
    line: int
    target: str


@dataclass(frozen=True)
class House:
    """The dependencies of one source tree."""

    files: list[str]
    arrows: list[Arrow]
    wrong: list[str]


def imports(path: Path, above: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the imports of a file: line, module, and the imported name, if there is one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # Without `as` the package gets a name, and everything is reachable through it.
                yield node.lineno, alias.name if alias.asname else alias.name.split(".")[0], ""
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(above).parts[: -node.level] if node.level else ()
            module = ".".join((*package, *([node.module] if node.module else [])))
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def compiled_imports(root: Path) -> Iterator[tuple[int, str, str]]:
    """Yield what the compiled module imports."""
    for path in sorted((root / BINDINGS).rglob("*.rs")):
        yield from ((1, module, "") for module in _IMPORT.findall(path.read_text(encoding="utf-8")))


def read_python(root: Path, folder: str) -> House:
    """Read the imports of a package, and refuse those through its own ``__init__``."""
    above, package = (root / folder).parent, Path(folder).name
    house = House([], [], [])
    paths = sorted(path for path in (root / folder).rglob("*.py*") if path.suffix in (".py", ".pyi"))
    names = (".".join(path.relative_to(above).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    modules = dict(zip(names, paths, strict=True))
    for path in paths:
        file = path.relative_to(root).as_posix()
        house.files.append(file)
        for line, module, name in compiled_imports(root) if path.suffix == ".pyi" else imports(path, above):
            target = modules.get(f"{module}.{name}") or modules.get(module)
            if module == package:
                better = f"from {package}.MODULE import NAME"
                house.wrong.append(f"{file}:{line}: import through the package's own __init__, better: {better}")
            if target not in (None, path, modules[package]):
                house.arrows.append(Arrow(file, line, target.relative_to(root).as_posix()))
    return house


_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|r#".*?"#|"(?:\\.|[^"\\])*"|\'(?:\\.[^\']*|[^\\\'])\'', re.DOTALL)
_TEST = re.compile(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*(\{|;)")
_USE = re.compile(r"\buse\s+([^;]+);")
_PATH = re.compile(r"(?<![\w:])((?:crate|self|super|[a-z]\w*)(?:::\w+)+)")


def plain_rust(text: str) -> str:
    """Return Rust without comments, texts and test modules, with every line where it was."""
    text = _COMMENT_OR_TEXT.sub(lambda found: "\n" * found[0].count("\n"), text)
    while test := _TEST.search(text):
        end = test.end()
        depth = int(test[1] == "{")
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: test.start()] + "\n" * text.count("\n", test.start(), end) + text[end:]
    return text


def flat(use: str) -> Iterator[str]:
    """Yield the paths of a `use`: ``a::{b, c::{d}}`` is ``a::b`` and ``a::c::d``."""
    head, brace, rest = use.partition("{")
    if not brace:
        yield use.split(" as ")[0].strip()
        return
    depth, start = 0, 0
    inner = rest[: rest.rindex("}")]
    for at, letter in enumerate(f"{inner},"):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            if inner[start:at].strip():
                yield from flat(f"{head.strip()}{inner[start:at].strip()}")
            start = at + 1


def read_rust(root: Path, folder: str) -> House:
    """Read the paths of a crate that lead into its other files."""
    house = House([], [], [])
    modules: dict[tuple[str, ...], str] = {}
    for path in sorted((root / folder).rglob("*.rs")):
        parts = path.relative_to(root / folder).with_suffix("").parts
        modules[() if parts == ("lib",) else parts[:-1] if parts[-1] == "mod" else parts] = path.relative_to(
            root
        ).as_posix()
    for module, file in modules.items():
        house.files.append(file)
        text = plain_rust((root / file).read_text(encoding="utf-8"))
        paths = [(use.start(), way) for use in _USE.finditer(text) for way in flat(use[1])]
        rest = _USE.sub(lambda use: " " * len(use[0]), text)
        paths += [(found.start(), found[1]) for found in _PATH.finditer(rest)]
        for at, way in paths:
            target = module_of(way.split("::"), module, modules)
            if target not in (None, file):
                house.arrows.append(Arrow(file, text.count("\n", 0, at) + 1, str(target)))
    return house


def module_of(path: list[str], module: tuple[str, ...], modules: dict[tuple[str, ...], str]) -> str | None:
    """Return the file that a path in a module leads to, or None if it leads out of the crate."""
    base = module
    if path[0] == "crate":
        base, path = (), path[1:]
    elif path[0] in ("self", "super"):
        while path and path[0] in ("self", "super"):
            base = base[:-1] if path[0] == "super" else base
            path = path[1:]
    elif not any(name[: len(module) + 1] == (*module, path[0]) for name in modules):
        return None
    # A folder may be a module without a separate file.
    ways = ((*base, *path[:length]) for length in range(len(path), -1, -1))
    return next((modules[way] for way in ways if way in modules), None)


def rows_of(picture: str) -> dict[str, int]:
    """Return the line of each name of a picture, counted from the top."""
    lines = [line for line in picture.splitlines() if line.strip()]
    return {name.strip(): row for row, line in enumerate(lines) for name in line.split("|")}


def room_of(file: str, folder: str, rows: Container[str] = ()) -> str:
    """Return the name in a folder that a file belongs to: its path if that has a row, else the path's first part."""
    path = file.removeprefix(f"{folder}/").split(".")[0]
    return path if path in rows else path.split("/")[0]


def upward(house: House, folder: str, picture: str) -> Iterator[str]:
    """Yield the dependencies that a picture does not allow, and names that only the picture or only the folder has."""
    rows = rows_of(picture)
    inside = [file for file in house.files if file.startswith(f"{folder}/")]
    first = {room_of(file, folder, rows): file for file in reversed(inside)}
    for name in sorted(rows.keys() - first.keys() - {"*"}):
        yield f"{folder}: the picture in tools/layers.py names {name}, which does not exist"
    if "*" not in rows:
        for name in sorted(first.keys() - rows.keys()):
            yield f"{first[name]}:1: {name} has no line in the picture in tools/layers.py"
    for arrow in house.arrows:
        if not (arrow.file.startswith(f"{folder}/") and arrow.target.startswith(f"{folder}/")):
            continue
        user, used = room_of(arrow.file, folder, rows), room_of(arrow.target, folder, rows)
        above, below = (rows.get(name, rows.get("*")) for name in (user, used))
        if user == used or above is None or below is None or above < below:
            continue
        if above == below and user not in rows and used not in rows:
            continue
        where = "above" if below < above else "beside"
        yield f"{arrow.file}:{arrow.line}: {user} uses {used}, which is {where} it"


def circles(house: House) -> Iterator[str]:
    """Yield each shortest circle of files once, at the first arrow that is part of it."""
    lines = {(arrow.file, arrow.target): arrow.line for arrow in reversed(house.arrows)}
    targets: dict[str, list[str]] = {}
    for file, target in sorted(lines):
        targets.setdefault(file, []).append(target)
    seen: set[frozenset[str]] = set()
    for file, target in sorted(lines):
        before = {target: ""}
        queue = deque([target])
        while queue and file not in before:
            at = queue.popleft()
            for following in targets.get(at, []):
                if following not in before:
                    before[following] = at
                    queue.append(following)
        if file not in before:
            continue
        way, at = [], file
        while at:
            way.append(at)
            at = before[at]
        if frozenset(way) not in seen:
            seen.add(frozenset(way))
            yield f"{file}:{lines[file, target]}: in a circle: {' -> '.join((file, *reversed(way)))}"


def main(root: Path = ROOT, pictures: dict[str, str] = PICTURES) -> int:
    """Print the errors, and the size of each tree."""
    found: list[str] = []
    trees = [folder for folder in pictures if not any(folder.startswith(f"{other}/") for other in pictures)]
    for tree in trees:
        house = read_rust(root, tree) if tree.startswith("rust/") else read_python(root, tree)
        wrong = [*house.wrong, *circles(house)]
        for folder, picture in pictures.items():
            if folder == tree or folder.startswith(f"{tree}/"):
                wrong += upward(house, folder, picture)
        print(f"{tree}: {len(house.files)} files, {len(house.arrows)} arrows, {len(wrong)} wrong")
        found += dict.fromkeys(wrong)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
