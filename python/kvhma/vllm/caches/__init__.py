# SPDX-License-Identifier: Apache-2.0
"""From vLLM's cache specs and tensors to a geometry."""
