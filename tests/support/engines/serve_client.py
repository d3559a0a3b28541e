# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` in a fork of the engines' zygote, so that no run imports vLLM anew."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.engines.zygote import Zygote

SAME = {"backend": "openai", "endpoint": "/v1/completions", "model": "tiny", "dataset-name": "random"}


def bench_serve(zygote: Zygote, folder: Path, options: Mapping[str, object], *flags: str) -> dict[str, Any]:
    """Ask a server for completions of random prompts, each as long as it may be; return what the client measured.

    Args:
        zygote: what the client is forked from.
        folder: for the client's log and its results.
        options: of the client, without dashes.
        flags: options without a value.

    Raises:
        RuntimeError: the client failed.
    """
    log, result = folder / "client.log", folder / "result.json"
    for old in (log, result):
        old.unlink(missing_ok=True)
    given = SAME | options | {"result-dir": folder, "result-filename": result.name}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    words += ["--ignore-eos", "--save-result", "--disable-tqdm", *flags]
    _, connection = zygote.fork("support.engines.serve_client:run", log=log, words=words)
    with connection:
        try:
            connection.recv()
        except EOFError:
            raise RuntimeError(log.read_text()[-2000:]) from None
    return dict(json.loads(result.read_text()))


def run(connection: Connection, words: Sequence[str]) -> None:
    """Run vLLM's client with the words of its command line, and say that it ended."""
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(words))
    connection.send(None)
