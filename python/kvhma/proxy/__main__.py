# SPDX-License-Identifier: Apache-2.0
"""Runs the proxy."""

from kvhma.proxy.app import main

if __name__ == "__main__":
    main()
