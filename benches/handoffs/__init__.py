# SPDX-License-Identifier: Apache-2.0
"""The parts of benches/connectors.py. `in_engine` runs in the engines, everything else in the measuring process."""

MODULE = "handoffs.in_engine"
"""Where engines find the connectors."""

DELAY = "bench_progress_delay_us"
"""Key of `kv_connector_extra_config`: the delay of the progress thread in vLLM's connector, in microseconds."""
