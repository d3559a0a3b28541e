# SPDX-License-Identifier: Apache-2.0
"""Counts what other connectors would move for a request: the figures that the commands print next to kvhma's.

* :mod:`.views`: the prepared lists that vLLM 0.32's NIXL connector makes of a rank, region by region.
* :mod:`.selection`: the entries that it selects between two ranks; the same without HMA, all layers as full attention.
* :mod:`.engines`: all ranks of two engines, and what vLLM refuses.

Private to the command line and the benchmarks. ``tests/golden/nixl_connector.json`` has the results of vLLM's own
functions, and ``make connector`` compares them again.
"""
