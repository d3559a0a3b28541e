# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` in a fork of the engines' zygote, so that no run imports vLLM anew."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from multiprocessing.connection import Connection


def run(connection: Connection, words: Sequence[str]) -> None:
    """Run vLLM's client with the words of its command line, and say that it ended."""
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(words))
    connection.send(None)
