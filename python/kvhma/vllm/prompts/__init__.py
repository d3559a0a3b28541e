# SPDX-License-Identifier: Apache-2.0
"""What a prompt is: tokens, adapters, multimodal items, and its digest."""
