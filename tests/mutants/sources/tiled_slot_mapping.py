"""Slot mapping in Triton: one program maps a tile of tokens."""

import torch
import triton
import triton.language as tl

TILE = 2


@triton.jit
def slot_mapping_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    slots_ptr,
    block_tables_ptr,
    seq_ids_ptr,
    positions_ptr,
    tokens,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = token < tokens
    position = tl.load(positions_ptr + token, mask=inside, other=-1).to(tl.int64)
    seq_id = tl.load(seq_ids_ptr + token, mask=inside, other=0).to(tl.int64)
    # The seq_id of padding is arbitrary: its table entry is not loaded.
    real = position >= 0
    entry_ptr = block_tables_ptr + seq_id * table_stride + position // BLOCK_SIZE
    block = tl.load(entry_ptr, mask=real, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots_ptr + token, tl.where(real, slot, -1), mask=inside)


def tiled_slot_mapping(
    block_tables: torch.Tensor, seq_ids: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """The slot of each token: int64 [T], -1 for a negative position."""
    slots = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
    tokens = positions.numel()
    if tokens:
        slot_mapping_kernel[(triton.cdiv(tokens, TILE),)](
            slots,
            block_tables,
            seq_ids,
            positions,
            tokens,
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            TILE=TILE,
        )
    return slots
