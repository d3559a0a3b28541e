# SPDX-License-Identifier: Apache-2.0
"""What the requests of a trace cost to hand off, one after the other: bytes, prefix caches and links."""
