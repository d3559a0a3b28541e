# SPDX-License-Identifier: Apache-2.0
"""Records what vLLM's NixlConnector asks of NIXL, and judges it: ``make audit``, docs/audit.md."""
