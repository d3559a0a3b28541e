# SPDX-License-Identifier: Apache-2.0
"""Numbers of generated cases. `KVHMA_TRIES` multiplies all of it: 1 in `make test`, more in `make test-long`."""

import os

TRIES = int(os.environ.get("KVHMA_TRIES", "1"))
PAIRS = 2_400 * TRIES
"""Generated pairs of engines: among them each combination of two axes of `recipe` occurs at least 35 times."""
SEQUENCES = 600 * TRIES
"""Sequences of requests through vLLM's schedulers."""
RUNS = 20 * TRIES
"""Random walks through the states of a followed prompt."""
TICKS = 3 if TRIES == 1 else 4
"""Ticks of a prefill engine's clock for which every interleaving is explored."""
