# SPDX-License-Identifier: Apache-2.0
"""Fuzz decode_handshake: whatever the bytes, it raises HandshakeError and nothing else, and soon.

Usage: ``PYTHONPATH=tests python fuzz/handshake.py SECONDS``. With atheris installed it is guided by coverage and keeps
what it finds in fuzz/corpus/handshake; without, the same mutations are drawn at random, and a failing message is named
by its seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["kvhma"]) if atheris else contextlib.nullcontext():
    from kvhma.errors import HandshakeError
    from kvhma.nixl.handshake import decode_handshake, encode_handshake, key_hash
    from support.generate import generate
    from support.recipe import draw
    from support.tiny import tiny_hybrid

HERE = Path(__file__).parent
HEAD = struct.Struct("<8sHHIIIQ32s16s")
NUMBERS = [-1, 0, 1, 2, 3, 16, 17, 2**16, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64 - 1, 2**64, 10**400]
OTHERS = [None, True, "", "x", "DRAM", "\0", "\ud800", "é" * 200, "a" * 257, 1.5, -0.0, [], {}, [1, 2], {"full": None}]
TEXTS = [b"null", b"true", b"1e5", b"-0", b"{}", b"[]", b'"', b"\\u0000", b"\\ud800", b",", b":", b"\xff", b"NaN"]
SECONDS_EACH = 5
"""Longer than that, and a message counts as one that hangs."""


def spoil_form(rng: random.Random, node: Any, chance: float) -> Any:
    """Replace values, drop and add keys, double lists, and write objects as lists."""
    if rng.random() < chance:
        return rng.choice([*NUMBERS, *OTHERS])
    if isinstance(node, list):
        return [spoil_form(rng, item, chance) for item in node] * (2 if rng.random() < chance else 1)
    if isinstance(node, dict):
        made = {key: spoil_form(rng, value, chance) for key, value in node.items() if rng.random() >= chance / 2}
        if rng.random() < chance:
            made[rng.choice(["ratio", "window", "length", "null_block", "more"])] = rng.choice(NUMBERS)
        return list(made.values()) if rng.random() < chance / 4 else made
    return node


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, insert, drop and copy bytes."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randrange(len(spoiled) + 1), rng.randrange(len(spoiled) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            spoiled[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            spoiled[at : at + rng.randint(0, 5)] = rng.choice(TEXTS)
        elif kind == 2:
            del spoiled[at : at + rng.randint(1, 9)]
        else:
            spoiled[at:at] = spoiled[other : other + rng.randint(1, 200)]
    return bytes(spoiled)


def mutate(rng: random.Random, payload: bytes, spoil: Callable[[random.Random, bytes], bytes]) -> bytes:
    """Change one thing of a message. Its digest is mostly made right again: behind it is most of the code."""
    if len(payload) < HEAD.size:
        return spoil(rng, payload)
    magic, version, *sizes, incarnation, key, _ = HEAD.unpack_from(payload)
    parts, at = [], HEAD.size
    for size in sizes:
        parts.append(payload[at : at + size])
        at += size
    kind = rng.randrange(12)
    if kind < 5:
        with contextlib.suppress(ValueError, RecursionError):
            form = json.loads(parts[2])
            parts[2] = json.dumps(spoil_form(rng, form, rng.choice([0.005, 0.02, 0.2]))).encode()
    elif kind < 9:
        parts[2] = spoil(rng, parts[2])
    elif kind == 9:
        place = rng.choice([0, 1, 3])
        key = rng.choice([key, bytes(32), rng.randbytes(32)])
        parts[place] = rng.choice([spoil(rng, parts[place]), b"", "é".encode(), b"a\nb", rng.randbytes(300)])
    sizes = [len(part) for part in parts]
    if kind == 10:
        sizes[rng.randrange(4)] = rng.choice([0, 1, 2**16 - 1])
        version = rng.choice([version, rng.randrange(2**16)])
    body = b"".join(parts)
    head = HEAD.pack(magic, version, min(sizes[0], 2**16 - 1), *sizes[1:], incarnation, key, b"")[:-16]
    payload = head + hashlib.blake2b(head + body, digest_size=16).digest() + body
    return spoil(rng, payload) if kind == 11 else payload


def decode(data: bytes) -> str:
    """Decode a message and what it says once more; return how that went."""
    start = time.process_time()
    try:
        said = decode_handshake(data)
    except HandshakeError as error:
        return type(error.__cause__).__name__ if error.__cause__ else "refused"
    finally:
        taken = time.process_time() - start
        assert taken < SECONDS_EACH, f"{taken:.1f} s for {len(data)} bytes"
    rest = {"name": said.name, "incarnation": said.incarnation, "extra": said.extra, "public_key": said.public_key}
    again = encode_handshake(said.metadata, said.geometry, **rest)
    assert decode_handshake(again) == said, "another payload after a round trip"
    return "decoded"


def seeds() -> list[bytes]:
    """Return good messages."""
    geometries = [tiny_hybrid(10), *(generate(seed, draw(seed)).local for seed in range(60))]
    named = {"name": f"P-0-{key_hash(b'k' * 32)}", "public_key": b"k" * 32}
    return [encode_handshake(b"nixl", geometry, incarnation=7, extra=b"x", **named) for geometry in geometries]


def guided(seconds: int) -> None:
    """Let coverage choose what is mutated further."""
    corpus = HERE / "corpus" / "handshake"
    corpus.mkdir(parents=True, exist_ok=True)
    for index, payload in enumerate(seeds()):
        (corpus / f"seed-{index}").write_bytes(payload)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        return mutate(random.Random(seed), data, lambda _, part: atheris.Mutate(part, len(part) + 64))[:max_size]

    options = [f"-max_total_time={seconds}", "-timeout=1", "-rss_limit_mb=512", "-max_len=16384"]
    artifacts = f"-artifact_prefix={HERE}/artifacts/handshake-"
    atheris.Setup(
        [sys.argv[0], *options, artifacts, "-print_final_stats=1", str(corpus)], decode, custom_mutator=change
    )
    atheris.Fuzz()


def blind(seconds: int) -> None:
    """Mutate good messages up to three times."""
    good, seen = seeds(), Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seed = seen.total()
        rng = random.Random(seed)
        payload = rng.choice(good)
        for _ in range(rng.randint(1, 3)):
            payload = mutate(rng, payload, spoil_bytes)
        try:
            seen[decode(payload)] += 1
        except BaseException:
            print(f"seed {seed}: {payload!r}", flush=True)
            raise
    print(f"{seen.total()} messages: {dict(seen)}")


if __name__ == "__main__":
    (guided if atheris else blind)(int(sys.argv[1]))
