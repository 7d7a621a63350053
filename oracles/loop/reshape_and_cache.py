"""What the addressed slots hold after a write, element by element from the arguments."""

from __future__ import annotations

from pagefuzz.strategies.case import arguments_of
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.tensors import Tensor


def right_answer(case: ReshapeAndCacheCase) -> dict[str, list[list[int]]]:
    """k_cache, v_cache: for each addressed token, in order, its KVH * D bit patterns as ints."""
    tensors = arguments_of(case).tensors
    slots = tensors["slot_mapping"].buffer.pieces[0][1].tolist() if case.slots else []
    written: dict[str, list[list[int]]] = {"k_cache": [], "v_cache": []}
    for name, source in (("k_cache", tensors["key"]), ("v_cache", tensors["value"])):
        for t, slot in enumerate(slots):
            if slot >= 0:
                written[name].append(_token(source, t))
    return written


def _token(source: Tensor, t: int) -> list[int]:
    (start, bits), heads, dims = source.buffer.pieces[0], source.shape[1], source.shape[2]
    base = source.offset - start + t * source.strides[0]
    return [int(bits[base + h * source.strides[1] + d * source.strides[2]]) for h in range(heads) for d in range(dims)]
