# SPDX-License-Identifier: Apache-2.0
"""Records what vLLM's NixlConnector asks of NIXL, and has it judged: ``make audit``, docs/audit.md."""
