# SPDX-License-Identifier: Apache-2.0
"""Tickets: D reads a prompt in pieces while P computes it."""
