# SPDX-License-Identifier: Apache-2.0
"""Copies: P shares the memory of its caches with processes of its host, and D copies rows from it, without NIXL."""
