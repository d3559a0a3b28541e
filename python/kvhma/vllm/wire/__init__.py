# SPDX-License-Identifier: Apache-2.0
"""What engines say to each other: parameters of a request, and the side channel."""
