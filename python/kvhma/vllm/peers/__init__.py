# SPDX-License-Identifier: Apache-2.0
"""How an engine reaches other engines and lets them reach it: names, TLS, connections, budgets, identities."""
