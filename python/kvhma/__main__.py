# SPDX-License-Identifier: Apache-2.0
"""``python -m kvhma`` is the command ``kvhma``."""

from kvhma.cli import main

if __name__ == "__main__":
    main()
