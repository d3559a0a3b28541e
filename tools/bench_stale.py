# SPDX-License-Identifier: Apache-2.0
"""Print which results of benchmarks were measured with other sources than today's.

python tools/bench_stale.py                    # exit code 0

python tools/bench_stale.py --fail             # exit code 1 if a result is stale: a release runs this

python tools/bench_stale.py --record NAME      # store the commit and the digest in a result
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ("python/kvhma/*.py", "python/kvhma/nixl", "python/kvhma/tensors", "rust")
CONNECTOR = (*CORE, "python/kvhma/vllm")
MEASURED = {
    "RESULTS.md": (*CORE, "benches/ratios.py"),
    "RESULTS_COPIES.md": (*CORE, "python/kvhma/vllm/options/copies", "benches/copies.py"),
    "RESULTS_DIGESTS.md": ("python/kvhma/digests.py", "benches/digests.py"),
    "RESULTS_E2E.md": (*CONNECTOR, "benches/connectors.py", "benches/handoffs"),
    "RESULTS_FOLLOWING.md": (*CONNECTOR, "benches/following.py"),
    "RESULTS_GPU.md": (*CORE, "python/kvhma/vllm/device", "tests/gpu"),
    "RESULTS_LISTENER.md": ("python/kvhma/vllm/peers", "python/kvhma/vllm/wire", "benches/listener.py"),
    "RESULTS_REPLAY.md": ("python/kvhma/replay", "python/kvhma/costs.py", "rust/core/src/replay*", "benches/replay.py"),
    "RESULTS_SCHEDULER.md": (*CONNECTOR, "benches/scheduler_time.py"),
    "RESULTS_SERVE.md": (*CONNECTOR, "python/kvhma/proxy", "benches/serve.py"),
    "RESULTS_SGLANG.md": ("python/kvhma/tensors", "rust/core/src", "benches/sglang_slices.py"),
    "RESULTS_SHAPES.md": (*CORE, "benches/shapes.py"),
    "RESULTS_WINDOW.md": ("python/kvhma/nixl", "benches/window.py"),
}
"""The sources that each result measures, as patterns of git."""
_MARK = re.compile(r"\n<!-- measured at (\w+), sources (\w+) -->\n$")


def digest(patterns: tuple[str, ...]) -> str:
    """Return a digest of all files that match, as they are now."""
    names = subprocess.check_output(["git", "ls-files", "-z", *patterns], cwd=ROOT).decode().split("\0")
    summed = hashlib.sha256()
    for name in sorted(name for name in names if name and (ROOT / name).is_file()):
        summed.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return summed.hexdigest()[:16]


def main(arguments: list[str]) -> int:
    """Record one result, or compare all."""
    if arguments[:1] == ["--record"]:
        path = ROOT / "benches" / arguments[1]
        commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
        text = _MARK.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
        mark = f"\n\n<!-- measured at {commit}, sources {digest(MEASURED[arguments[1]])} -->\n"
        path.write_text(text + mark, encoding="utf-8")
        return 0
    stale = []
    for name, patterns in MEASURED.items():
        found = _MARK.search((ROOT / "benches" / name).read_text(encoding="utf-8"))
        if found is None or found[2] != digest(patterns):
            stale.append(name)
            print(f"{name}: its sources have changed since {found[1] if found else 'before results had a commit'}")
    return int(bool(stale) and arguments == ["--fail"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
