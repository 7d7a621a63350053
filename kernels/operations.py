"""The operations: the contracts that a kernel is fuzzed against.

Shapes: T tokens, B sequences, H query heads, KVH kv heads, D head dim, N blocks, bs block size, M table width.
Index tensors are int32 or int64; the others are float32, float16 or bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One contract.

    `parameters` are passed by position, in this order. `result` names what is returned ("" for an operation that
    only writes). `shapes` says it all in one line, for messages. `share`: one in so many of a profile's cases is its.
    """

    name: str
    parameters: tuple[str, ...]
    result: str
    shapes: str
    share: int = 1


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "slot_mapping",
            ("block_tables", "seq_ids", "positions", "block_size"),
            result="slots",
            shapes="slot_mapping(block_tables[B, M], seq_ids[T], positions[T], block_size) -> int64[T]",
        ),
        Operation(
            "reshape_and_cache",
            ("key", "value", "k_cache", "v_cache", "slot_mapping"),
            result="",
            shapes="reshape_and_cache(key[T', KVH, D], value[T', KVH, D], k_cache[N, bs, KVH, D], v_cache, "
            "slot_mapping[T]) -> None",
        ),
        Operation(
            "paged_decode_attention",
            ("q", "k_cache", "v_cache", "block_tables", "context_lens", "scale"),
            result="out",
            shapes="paged_decode_attention(q[B, H, D], k_cache[N, bs, KVH, D], v_cache, block_tables[B, M], "
            "context_lens[B], scale) -> out[B, H, D]",
        ),
        Operation(
            "write_then_decode",
            (
                *("key", "value", "k_cache", "v_cache", "slot_mapping"),
                *("q", "block_tables", "context_lens", "scale"),
            ),
            result="out",
            shapes="write_then_decode(key[T', KVH, D], value[T', KVH, D], k_cache[N, bs, KVH, D], v_cache, "
            "slot_mapping[T], q[B, H, D], block_tables[B, M], context_lens[B], scale) -> out[B, H, D]",
            share=4,  # both of its halves are fuzzed on their own too
        ),
    )
}
