# SPDX-License-Identifier: Apache-2.0
"""Trace: when requests came, how long they were and which beginnings they share, in a file for ``kvhma replay``."""
