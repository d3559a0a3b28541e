# SPDX-License-Identifier: Apache-2.0
"""How the cases of conformance/ are made: `python -m conformance` with `tests` on the path."""
