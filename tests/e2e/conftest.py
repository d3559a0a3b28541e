# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests with real engines. They run only when asked for by path (`make e2e`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engines import Zygote, make_models

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    asked = (Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args)
    return None if any(path.is_relative_to(HERE) for path in asked) else True


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process from which all engines of the session are forked."""
    with Zygote(tmp_path_factory.mktemp("zygote") / "log", {"KVHMA_E2E_SPIN_SECONDS": "0.01"}) as process:
        yield process


@pytest.fixture(scope="session")
def model(zygote: Zygote, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Directory of a tiny model by its name; kept between runs."""
    folder = Path(request.config.cache.mkdir("e2e-models"))
    return lambda name: make_models(zygote, folder, name)[0]
