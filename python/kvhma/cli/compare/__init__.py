# SPDX-License-Identifier: Apache-2.0
"""What other connectors would move for a request: the figures that the commands print beside kvhma's.

* :mod:`.views`: the prepared lists that vLLM 0.32's NIXL connector makes of a rank, region by region.
* :mod:`.selection`: what it takes of them between two ranks; the same with no HMA, every layer as full attention.
* :mod:`.engines`: all ranks of two engines, and what vLLM refuses.
* :mod:`.block_tables`: block tables that requests are counted with.

Private to the command line and the benchmarks. ``tests/golden/nixl_connector.json`` has what vLLM's own functions
moved, and ``make connector`` asks them again.
"""
