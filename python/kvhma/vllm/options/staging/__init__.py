# SPDX-License-Identifier: Apache-2.0
"""Staging: a bounded pool in host memory is registered instead of caches on a device."""
