# SPDX-License-Identifier: Apache-2.0
"""Names that are pronouns, and prose that has a plainer form, are found.

    python tools/words.py              # prints each place and what to write; exit code 1 if a folder has more than LEFT
    python tools/words.py PATH ...     # prints all that these files or folders have

Prose is pages, comments, and strings with a space in them; code in backticks is one word of it. A sentence ends at a
full stop, an empty line, or where a list or a table's cell ends.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from layers import ROOT

PRONOUNS = "one other whoever nobody most least told"
"""No names of anything: the thing has one."""
PRONOUN_FOLDER = "python/kvhma"
BANNED = {
    "whoever": "name who: the operator, the caller, a client",
    "nobody|no one": "name who does not",
    "whatever": "name the thing, or all, any, each",
    "lie|lies|lay|lain": "is at, is stored in, follow each other",
    "of its own|of their own|of one's own|of his own": "own, separate, dedicated",
    "go on|goes on|went on|going on": "continues, keeps running",
    "(?:is|are|was|were|be) (?-i:none)": "there is no ...; returns None if there is no ...",
    "let go|lets go|letting go": "release, evict, cancel",
    "give up|gives up|gave up|given up|giving up": "evict (memory), cancel (request), stop retrying",
    "behind the|behind it|behind them": "after",
    "strangers?": "unknown peer, untrusted client",
    "hellos?": "worker identity, handshake",
    "shakes? hands|shook hands|shaking hands": "does the handshake",
    "unheard": "not notified",
    "starved": "waited too long for blocks",
    "patience": "maximum wait",
    "news": "progress, event",
    "told": "was notified, received",
    "stood still|stands still|standstill": "stalled, stall",
    "handed over|hands over|hand over|handing over": "transfer, hand off (verb), hand-off (noun)",
    "(?:is|are) none of": "does not match any of, is no",
    "says so": "name what says it",
    "met an error": "failed, raised",
    "looks after": "manages, owns",
    "takes? part|took part": "is used",
    "takes? over|took over|taken over|taking over": "loads, reuses, adopts",
}
"""Words and phrases of no engineer's register, and what to write instead."""
LONGEST_SENTENCE, LONGEST_LINE = 30, 200
PROSE = (
    "docs",
    "README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md",
    "python",
    "rust",
    "tests",
    "tools benches examples conformance findings",
)
LEFT = {"tests": 6}
"""How many places of each folder are still to be rewritten. They only become fewer."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file with its first line: a page whole, comments and strings one by one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield (
            1,
            re.sub(r"^ *```.*?^ *```|<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.S | re.M),
        )
    elif path.suffix == ".rs":
        for found in re.finditer(r"(?:^[ \t]*//[/!]?.*\n)+", text, re.M):
            yield text.count("\n", 0, found.start()) + 1, re.sub(r"^[ \t]*//[/!]?", "", found[0], flags=re.M)
    else:
        yield from _python_texts(text)


def _python_texts(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments that follow each other as one text, and so strings."""
    parts: list[str] = []
    kind, start, last = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            continue
        if parts and (token.type != kind or token.start[0] > last + 1):
            yield start, " ".join(parts) if kind == tokenize.COMMENT else "".join(parts)
            parts = []
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            if not parts:
                kind, start = token.type, token.start[0]
            is_comment = token.type == tokenize.COMMENT
            parts.append(
                token.string.lstrip("# ")
                if is_comment
                else re.sub(r"""^\w*(\"{3}|['"])|(\"{3}|['"])$""", "", token.string)
            )
            last = token.end[0]
    if parts:
        yield start, " ".join(parts)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the places of a file that have a plainer form, with what is wrong there."""
    for first, text in texts(path):
        if " " not in text:
            continue
        plain = re.sub(r"``[^`]+``|`[^`\n]*`|https?://\S+", lambda found: "C" + "\n" * found[0].count("\n"), text)
        for banned, instead in BANNED.items():
            for found in re.finditer(rf"\b(?:{banned})\b", plain, re.IGNORECASE):
                yield first + plain.count("\n", 0, found.start()), f"{found[0]!r}: {instead}"
        at = 0
        for end in re.finditer(r"[.!?]['\")*_]*(?=\s|$)|\n\s*\n|\n\s*(?:[*-]|\d+\.) |:\n|\||\Z|\n +\w+: ", plain):
            words = [word for word in plain[at : end.start()].split() if re.search(r"\w", word)]
            if len(words) > LONGEST_SENTENCE:
                yield first + plain.count("\n", 0, at), f"a sentence of {len(words)} words: {' '.join(words[:6])} ..."
            at = end.end()
        if path.suffix == ".md":
            for row, line in enumerate(plain.splitlines()):
                if len(line) > LONGEST_LINE and not line.lstrip().startswith("|"):
                    yield first + row, f"a line of {len(line)} characters"


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every identifier of a Python file with its line."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def written(root: Path, folders: str) -> set[tuple[str, int, str]]:
    """Return files, lines and reasons of prose in these folders, and of names that are pronouns."""
    found: set[tuple[str, int, str]] = set()
    for path in _files(root, folders):
        file = path.relative_to(root).as_posix()
        if path.suffix in (".md", ".py", ".pyi", ".rs") and file != "tools/words.py":  # it has the words
            found |= {(file, line, reason) for line, reason in prose(path)}
            if path.suffix == ".py" and file.startswith(PRONOUN_FOLDER):
                pronouns = PRONOUNS.split()
                found |= {(file, line, f"the name {name}") for line, name in names(path) if name in pronouns}
    return found


def _files(root: Path, folders: str) -> Iterator[Path]:
    for folder in folders.split():
        path = root / folder
        yield from [path] if path.is_file() else path.rglob("*")


def main(root: Path = ROOT, paths: Sequence[str] = ()) -> int:
    """Print what is wrong, once a line: in these paths, or everywhere but for what is known to be left."""
    found: set[tuple[str, int, str]] = set()
    if paths:
        for path in paths:
            found |= written(root, path)
    else:
        for folders in PROSE:
            places = written(root, folders)
            if len(places) > LEFT.get(folders, 0):
                found |= places
    for file, line, reason in sorted(found):
        print(f"{file}:{line}: {reason}")
    print(f"{len(found)} places to be mended")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(paths=sys.argv[1:]))
