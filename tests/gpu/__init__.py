# SPDX-License-Identifier: Apache-2.0
"""Checks that need a device. ``make gpu`` runs thirteen steps with torch, NIXL and kvhma, without vLLM. ``make
gpu-engines`` runs six with engines.

Each step is a separate process with a time limit. With ``--device cpu`` they use host memory, which proves that the
steps work, and nothing about devices.
"""
