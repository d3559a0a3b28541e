# SPDX-License-Identifier: Apache-2.0
"""The cache oracle: vLLM's real schedulers and block pools on both sides, with labels for bytes."""
