# SPDX-License-Identifier: Apache-2.0
"""The signed text of ``kv_transfer_params``: reads it, and writes another one as a client without a secret may."""

import copy
import hashlib
import json


def text_of(params):
    """The fields of the text."""
    return json.loads(params["kvhma"]["text"])


def with_text(params, text, secrets=None):
    """The same parameters with another text, given as its fields or as it is, and a digest that is right for it."""
    changed = copy.deepcopy(params)
    if not isinstance(text, str):
        text = json.dumps(text, separators=(",", ":"), ensure_ascii=False)
    data = text.encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, digest_size=16).digest() if secrets is None else secrets.sign(data)
    changed["kvhma"] |= {"text": text, "digest": digest.hex()}
    return changed


def with_fields(params, secrets=None, **fields):
    """The same parameters with other fields of the text, each at its place if it was there."""
    return with_text(params, text_of(params) | fields, secrets)
