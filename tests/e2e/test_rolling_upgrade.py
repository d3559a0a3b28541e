# SPDX-License-Identifier: Apache-2.0
"""Engines of two versions of vLLM hand off to each other, as in a rolling upgrade (`make rolling`).

Each version has a separate environment, which `make .venv-e2e-0.31.0/.ready VLLM=0.31.0` sets up.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvhma.versions import VLLM, VLLM_DEFAULT
from support.engines import Engine, EngineFailed, Zygote, engines
from support.engines.zygote import REPO
from support.handoff import all_free, arguments, compare, kvhma, loads

Models = Callable[[str], Path]


def python_of(version: str) -> Path:
    folder = ".venv-e2e" if version == VLLM_DEFAULT else f".venv-e2e-{version}"
    return REPO / folder / "bin" / "python"


@pytest.fixture(scope="module")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Zygote]]:
    """One of each version that is installed."""
    folder = tmp_path_factory.mktemp("zygotes")
    found = {version: python for version in VLLM if (python := python_of(version)).exists()}
    if os.environ.get("KVHMA_E2E_ALL_VERSIONS") and len(found) < len(VLLM):
        pytest.fail(f"of vLLM {', '.join(VLLM)} there is {', '.join(found)} only")
    if len(found) < 2:
        pytest.skip(f"there is {', '.join(found) or 'no version'} of vLLM only: make rolling")
    with ExitStack() as stack:
        yield {
            version: stack.enter_context(Zygote(folder / version, python=str(python)))
            for version, python in found.items()
        }


def start(stack: ExitStack, zygotes: dict[str, Zygote], name: str, model: Path, logs: Path) -> dict[str, Engine]:
    """An engine of each version that runs a model here."""
    started = {}
    for version, zygote in zygotes.items():
        try:
            (engine,) = stack.enter_context(engines(zygote, model, logs, **{version: kvhma(name)}))
        except EngineFailed:
            # With AMX, vLLM 0.31 packs the weights of convolutions, and has no kernel to do it in float32.
            if "not implemented for 'Float'" not in (logs / f"{version}.log").read_text():
                raise
            print(f"{version} does not run {name} on this processor")
        else:
            assert f"(v{version}" in (logs / f"{version}.log").read_text()
            started[version] = engine
    return started


@pytest.mark.parametrize("name", ["llama", "gemma3", "nemotron_h"])
def test_every_mixture(name: str, zygotes: dict[str, Zygote], model: Models, tmp_path: Path) -> None:
    with ExitStack() as stack:
        started = start(stack, zygotes, name, model(name), tmp_path)
        if len(started) < 2:
            pytest.skip(f"{name} runs with {', '.join(started)} only")
        some = zygotes[next(iter(started))]
        (plain,) = stack.enter_context(engines(some, model(name), tmp_path, plain=arguments(name)))
        for p, d in itertools.permutations(started, 2):
            print(f"P of {p}, D of {d}: ", end="")
            compare(name, started[p], started[d], plain, [33, 301, 1200])
        for engine in started.values():
            assert loads(engine) == 3 * (len(started) - 1)
            all_free(engine)
