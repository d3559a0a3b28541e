# SPDX-License-Identifier: Apache-2.0
"""vLLM's HTTP server, in a fork of the zygote."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from support.engines.engine_core import install


def main(connection: Connection, arguments: list[str]) -> None:
    """Serve until killed."""
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.platforms import current_platform

    install()
    # vLLM's CPU platform asks for spawn while the configuration is checked; see engine_process.
    check = type(current_platform).check_and_update_config

    def check_and_fork(cls: type, config: object) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    type(current_platform).check_and_update_config = classmethod(check_and_fork)  # type: ignore[method-assign]
    sys.argv = ["vllm", *arguments]
    serve()
