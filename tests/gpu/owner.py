# SPDX-License-Identifier: Apache-2.0
"""A P that another process reads from: ``python -m gpu.owner DEVICE PAGES``. It prints its payload and exits when its
standard input closes."""

from __future__ import annotations

import os
import sys

from gpu.place import PAGE, Place, Worker


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # NIXL logs to the standard output
    os.dup2(2, 1)
    place = Place(sys.argv[1])
    worker = Worker(place, place.labelled(int(sys.argv[2]) * PAGE))
    place.settle()
    print(worker.payload().hex(), file=answers, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
