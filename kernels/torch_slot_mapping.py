"""Slot mapping in plain PyTorch: where in a paged KV cache each token lies, by its sequence's block table."""

from typing import Any

import torch

INTS = (torch.int32, torch.int64)

# Every tensor argument: its dims, its dtypes, and what of it must lie contiguously: the whole, or each of its rows (the
# stride of the first dim is free then). The stride of a dim of size 0 or 1 means nothing and is not looked at.
CONTRACT = {
    "block_tables": ("B M", INTS, "rows"),
    "seq_ids": ("T", INTS, "whole"),
    "positions": ("T", INTS, "whole"),
}


def torch_slot_mapping(
    block_tables: torch.Tensor,
    seq_ids: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    *,
    check_values: bool = False,
) -> torch.Tensor:
    """Return the slot of each token: the block that holds its position, times block_size, plus its place in that block.

    Args:
        block_tables: [B, M], int32 or int64: the block of each page of each sequence. Rows may lie any distance apart.
        seq_ids: [T], int32 or int64: the row of `block_tables` that each token belongs to.
        positions: [T], int32 or int64: each token's place in its own sequence. A negative position is padding: its
            slot is -1 and its seq_id may be anything.
        block_size: tokens in a page.
        check_values: also check seq_ids and positions, which waits for the device.

    Returns:
        int64 [T]. Only the table entries that are asked for are read.

    Raises:
        TypeError: an argument that is no tensor, or a block_size that is no int.
        ValueError: dims, sizes, dtypes, strides, devices or values other than the above.
    """
    sizes = _check_tensors({"block_tables": block_tables, "seq_ids": seq_ids, "positions": positions})
    if not isinstance(block_size, int) or isinstance(block_size, bool):
        raise TypeError(f"block_size must be an int, got {type(block_size).__name__}.")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}.")
    if check_values:
        _check_values(seq_ids, positions, sizes["B"], sizes["M"] * block_size)

    slots = torch.full_like(positions, -1, dtype=torch.int64)
    tokens = (positions >= 0).nonzero().squeeze(1)
    # int64 before any product: a slot may pass 2**31 where no id and no position does.
    position = positions[tokens].long()
    block = block_tables[seq_ids[tokens].long(), position // block_size].long()
    slots[tokens] = block * block_size + position % block_size
    return slots


def _check_tensors(arguments: dict[str, Any]) -> dict[str, int]:
    """Hold every tensor against CONTRACT without reading its data; return the size of each dim by its name."""
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    owner = next(iter(CONTRACT))
    first = arguments[owner]
    for name, (dims, dtypes, contiguous) in CONTRACT.items():
        tensor = arguments[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.dim() != len(dims.split()):
            raise ValueError(f"{name} must have the dims [{dims}], got the shape {tuple(tensor.shape)}.")
        for dim, size in zip(dims.split(), tensor.shape, strict=True):
            if size != sizes.setdefault(dim, size):
                known = f"{owners[dim]} has {dim} = {sizes[dim]}"
                raise ValueError(f"{name} has {dim} = {size}, but {known}: make them equal.")
            owners.setdefault(dim, name)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must have one of the dtypes {', '.join(map(str, dtypes))}, got {tensor.dtype}.")
        if contiguous == "whole" and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got the strides {tensor.stride()}.")
        if contiguous == "rows" and tensor.numel() and not tensor[0].is_contiguous():
            raise ValueError(f"{name} must be contiguous after its first dim, got the strides {tensor.stride()}.")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, but {owner} is on {first.device}: use one device.")
    return sizes


def _check_values(seq_ids: torch.Tensor, positions: torch.Tensor, sequences: int, capacity: int) -> None:
    for token, (seq_id, position) in enumerate(zip(seq_ids.tolist(), positions.tolist(), strict=True)):
        if position >= capacity:
            raise ValueError(f"positions[{token}] is {position}, but a row of block_tables covers {capacity} tokens.")
        if position >= 0 and not 0 <= seq_id < sequences:
            raise ValueError(f"seq_ids[{token}] is {seq_id}, but block_tables has {sequences} rows.")
