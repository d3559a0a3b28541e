#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: safetensors 0.8.0 (numpy).
# Behaviour: a file has its tensors by the size of their dtype, the widest first, and then by name. The order of the
#   dictionary is lost, and layer 10 comes before layer 2.
# One would guess: tensors are stored in the order in which they are given.
# Bites: readers that stream a cache layer by layer, or pair two files by position: K of float32 comes before V of float16.
# Downloads: safetensors and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with safetensors==0.8.0 numpy==2.3.5)
"$python" - <<'EOF'
import json

import numpy as np
from safetensors.numpy import save

given = {f"layers.{layer}.{part}": dtype for layer in (2, 10) for part, dtype in (("v", "f2"), ("k", "f4"))}
data = save({name: np.zeros(4, dtype) for name, dtype in given.items()})
head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
order = sorted(given, key=lambda name: head[name]["data_offsets"])
print("given:", *given, "stored:", *order)
assert order == ["layers.10.k", "layers.2.k", "layers.10.v", "layers.2.v"]
EOF
