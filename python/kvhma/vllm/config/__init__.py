# SPDX-License-Identifier: Apache-2.0
"""What the operator and the engine say: settings, addresses, the model and its ranks."""
