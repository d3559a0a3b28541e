# SPDX-License-Identifier: Apache-2.0
"""What has to be tried on a device: ten steps with torch, NIXL and kvhma, without vLLM. ``make gpu`` runs them.

Each is a process of its own with a time limit. They take host memory too (``--device cpu``), where they show that they
work, and nothing about devices.
"""
