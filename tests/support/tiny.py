# SPDX-License-Identifier: Apache-2.0
"""Small geometries written out by hand, for tests that break or inspect one."""

from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region

BLOCK = 16
PAGE = 4096


def attention_page(heads=2, tokens=BLOCK, content=64):
    return Page(
        (
            Part(
                "kv",
                "bfloat16",
                2,
                0,
                (
                    Axis("heads", heads, tokens * content * 2),
                    Axis("tokens", tokens, content * 2),
                    Axis("content", content, 2),
                ),
            ),
        )
    )


def state_page(channels=20, rows=3, heads=4, content=32):
    conv = channels * rows * 2
    return Page(
        (
            Part("x", "bfloat16", 2, 0, (Axis("channels", channels, rows * 2), Axis("rows", rows, 2))),
            Part("ssm", "float32", 4, conv, (Axis("heads", heads, content * 4), Axis("content", content, 4))),
        )
    )


def tiny_hybrid(blocks, *, window=64, speculative=0, base=1 << 20):
    """Full, sliding and state layers that share two regions; state pages are padded."""
    size = blocks * PAGE
    groups = (
        Group("full", BLOCK),
        Group("sliding", BLOCK, window=window),
        Group("ssm", BLOCK, speculative=speculative),
    )
    pages = (attention_page(), attention_page(), state_page())
    layers = tuple(
        Layer(f"layers.{3 * slot + group}", group, slot, 0, blocks, PAGE, pages[group])
        for slot in range(2)
        for group in range(3)
    )
    regions = tuple(Region(base + slot * (size + 4096), size) for slot in range(2))
    return Geometry(regions, groups, layers)
