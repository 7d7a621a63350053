"""The tokens go to their slots element by element, then decode attention walks the pages."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.oracles.loop import paged_decode_attention
from pagefuzz.strategies.case import arguments_of
from pagefuzz.strategies.tensors import Tensor
from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase


def right_answer(case: WriteThenDecodeCase) -> list[list[list[float]]]:
    """out[b][h][d]; zeros for a context length of 0."""
    tensors = dict(arguments_of(case).tensors)
    slots = tensors["slot_mapping"].buffer.pieces[0][1].tolist() if tensors["slot_mapping"].shape[0] else []
    for name, source in (("k_cache", "key"), ("v_cache", "value")):
        cache = tensors[name]
        pieces = [(start, bits.copy()) for start, bits in cache.buffer.pieces]
        tensors[name] = replace(cache, buffer=replace(cache.buffer, pieces=pieces))
        for t, slot in enumerate(slots):
            block, offset = divmod(slot, case.block_size)
            for h in range(case.num_kv_heads):
                for d in range(case.head_dim):
                    _store(tensors[name], (block, offset, h, d), _load(tensors[source], (t, h, d)))
    return paged_decode_attention.attention(case, tensors)


def _element(tensor: Tensor, index: tuple[int, ...]) -> int:
    return tensor.offset + sum(place * stride for place, stride in zip(index, tensor.strides, strict=True))


def _load(tensor: Tensor, index: tuple[int, ...]) -> int:
    return int(tensor.buffer.pieces[0][1][_element(tensor, index)])


def _store(tensor: Tensor, index: tuple[int, ...], bits: int) -> None:
    element = _element(tensor, index)
    for start, piece in tensor.buffer.pieces:
        if start <= element < start + len(piece):
            piece[element - start] = bits
