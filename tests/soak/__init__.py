# SPDX-License-Identifier: Apache-2.0
"""Two prefill and two decode engines under load, while everything around them fails: `make soak`."""
