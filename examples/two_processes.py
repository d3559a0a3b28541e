"""Two engines in two processes: separate tensors, one hand-off over NIXL, every value compared.

    python examples/two_processes.py

Needs torch and NIXL. The prefill engine has blocks of 32 tokens with heads outermost, the decode engine blocks of 16
with tokens outermost, as two kernels might require.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

from kvhma import Geometry, Span, plan
from kvhma.geometry import Group
from kvhma.nixl import Agent, load
from kvhma.tensors import LayerTensors, TensorPart, clear, geometry_from_tensors

LAYERS, HEADS, SIZE, TOKENS = 4, 8, 64, 70
P_BLOCKS, D_BLOCKS = [3, 7, 5], [9, 2, 4, 11, 6]
"""The request's blocks at P and at D, as their block managers allocated them."""


def values(layer: int) -> torch.Tensor:
    """The layer's result for the prompt: a value for each token, head and place."""
    return torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(layer)).bfloat16()


def describe(caches: list[torch.Tensor], names: tuple[str, ...], block: int) -> Geometry:
    """Name each dimension of the caches."""
    layers = {
        f"layer.{index}": LayerTensors(0, (TensorPart("kv", cache, names),)) for index, cache in enumerate(caches)
    }
    return geometry_from_tensors([Group("full", block)], layers)


def prefill(pipe: Connection) -> None:
    """Hold a prompt's cache until D has read it."""
    caches = [torch.zeros(20, HEADS, 32, SIZE, dtype=torch.bfloat16) for _ in range(LAYERS)]
    for layer, cache in enumerate(caches):
        for index, block in enumerate(P_BLOCKS):
            part = values(layer)[32 * index : 32 * index + 32]
            cache[block, :, : len(part)] = part.transpose(0, 1)
    geometry = describe(caches, ("blocks", "heads", "tokens", "content"), 32)
    with Agent("prefill-0") as agent:
        agent.register(geometry)
        pipe.send((agent.handshake_payload(geometry), [Span(0, P_BLOCKS)]))
        pipe.recv()  # D has read; until then the memory has to stay


def decode(pipe: Connection) -> bool:
    """Read the request; return whether each value is right, and zero after the last token."""
    caches = [torch.full((20, 16, HEADS, SIZE), 9.0, dtype=torch.bfloat16) for _ in range(LAYERS)]
    geometry = describe(caches, ("blocks", "tokens", "heads", "content"), 16)
    payload, remote = pipe.recv()
    with Agent("decode-0") as agent:
        agent.register(geometry)
        peer = agent.connect(payload)
        moved = plan(geometry, peer.geometry).transfer(TOKENS, [Span(0, D_BLOCKS)], remote)
        load(agent, [peer], moved, clear=lambda rows: clear(rows, caches))
    print(f"{moved.bytes:,} bytes in {moved.descriptors:,} descriptors, {len(moved.zero)} ranges zeroed")
    found = [cache[D_BLOCKS].flatten(0, 1) for cache in caches]
    return all(torch.equal(one[:TOKENS], values(layer)) and not one[TOKENS:].any() for layer, one in enumerate(found))


def main() -> None:
    """Start P as a separate process; be D."""
    processes = multiprocessing.get_context("spawn")  # NIXL has threads, which a fork would not survive
    here, there = processes.Pipe()
    other = processes.Process(target=prefill, args=(there,))
    other.start()
    try:
        print("right" if decode(here) else "wrong")
    finally:
        here.send(None)
        other.join()


if __name__ == "__main__":
    main()
