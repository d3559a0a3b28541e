#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: safetensors 0.8.0 (numpy), beside 0.7.0.
# Behaviour: `safetensors.numpy.save` of a transposed array writes the new shape with the old order of bytes. Nothing is
#   raised, and the values come back in wrong places. 0.7.0 wrote them in the right order.
#   The docstring of both says that tensors need to be contiguous; only the functions for torch check it.
# One would guess: the array is copied in order, as before, or refused.
# Bites: whoever stores a cache, of which heads or tokens were brought to the front by a view. Equal dimensions and
#   equal sizes pass each check.
# Downloads: safetensors and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
old=$(python_with safetensors==0.7.0 numpy==2.3.5)
new=$(python_with safetensors==0.8.0 numpy==2.3.5)
for python in "$old" "$new"; do
    "$python" - <<'EOF'
import numpy as np
import safetensors
from safetensors.numpy import load, save

cache = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)  # (heads, tokens, dim)
by_token = cache.transpose(1, 0, 2)
loaded = load(save({"k": by_token}))["k"]
assert loaded.shape == by_token.shape
same = bool((loaded == by_token).all())
print(safetensors.__version__, "values are right:", same)
if safetensors.__version__ == "0.7.0":
    assert same
else:
    assert not same and (loaded.ravel() == cache.ravel()).all()
    copied = load(save({"k": np.ascontiguousarray(by_token)}))["k"]
    assert (copied == by_token).all()
EOF
done
