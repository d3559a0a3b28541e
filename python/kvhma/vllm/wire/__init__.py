# SPDX-License-Identifier: Apache-2.0
"""What engines send each other beside caches: parameters of a request, and messages of the side channel."""
