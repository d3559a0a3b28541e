# SPDX-License-Identifier: Apache-2.0
"""Pictures: D adopts P's multimodal items, which only P has seen."""
