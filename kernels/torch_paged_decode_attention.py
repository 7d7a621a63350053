"""Decode attention over a paged KV cache in plain PyTorch, one sequence at a time: the reference for Triton."""

from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)

# Every tensor argument: its dims, its dtypes, and what of it must lie contiguously: the whole, each of its rows (the
# stride of the first dim is free then), or its last dim (all other strides are free, and each tensor has its own). The
# stride of a dim of size 0 or 1 means nothing and is not looked at.
CONTRACT = {
    "q": ("B H D", FLOATS, "rows"),
    "k_cache": ("N bs KVH D", FLOATS, "last dim"),
    "v_cache": ("N bs KVH D", FLOATS, "last dim"),
    "block_tables": ("B M", INTS, "rows"),
    "context_lens": ("B", INTS, "whole"),
}


def torch_paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    check_values: bool = False,
) -> torch.Tensor:
    """Return softmax(scale * q k^T) v of each sequence's one query token over its cached tokens, computed in float32.

    Args:
        q: [B, H, D], float32, float16 or bfloat16. Sequences may lie any distance apart (a view of a fused QKV
            projection); inside one, [H, D] is contiguous. H is a multiple of KVH: query head h reads kv head
            h // (H / KVH).
        k_cache, v_cache: [N, bs, KVH, D], of q's dtype. Each may have any strides of block, slot and kv head (a view of
            [N, KVH, bs, D], or of one tensor that holds both); the last dim is contiguous.
        block_tables: [B, M], int32 or int64: token j of sequence b lies at place j % bs of block
            `block_tables[b, j // bs]`. Rows may lie any distance apart. Only the first ceil(context_lens[b] / bs)
            entries of a row are read.
        context_lens: [B], int32 or int64: the tokens that each sequence sees. 0 gives zeros.
        scale: a finite number that multiplies q k^T.
        check_values: also check the values of context_lens and block_tables, which waits for the device.

    Returns:
        [B, H, D], contiguous, in q's dtype.

    Raises:
        TypeError: an argument that is no tensor, or a scale that is no number.
        ValueError: dims, sizes, dtypes, strides, devices or values other than the above.
    """
    sizes = _check_tensors(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables, "context_lens": context_lens}
    )
    if sizes["bs"] == 0 or sizes["KVH"] == 0:
        raise ValueError(f"k_cache must have bs and KVH of at least 1, got the shape {tuple(k_cache.shape)}.")
    if sizes["H"] % sizes["KVH"]:
        raise ValueError(f"q must have a multiple of the {sizes['KVH']} heads of k_cache, got {sizes['H']}.")
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}.")
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be finite in float32, got {scale}.")
    if check_values:
        _check_values(block_tables, context_lens, sizes["N"], sizes["bs"])

    block_size, group = sizes["bs"], sizes["H"] // sizes["KVH"]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, n in enumerate(context_lens.tolist()):
        if n == 0:
            continue
        pages = block_tables[b, : -(-n // block_size)].long()  # the rest of the row is garbage
        # [pages, bs, KVH, D] -> [n, KVH, D] -> [n, H, D]. The rest of the last page is cut off: it is garbage too.
        k = k_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)
        v = v_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)
        # A copy of its own: how q[b] happens to be aligned must not choose the order of the sums.
        query = q[b].to(torch.float32, copy=True)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", query, k) * scale, dim=1)
        out[b] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
    return out


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
        if contiguous == "last dim" and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
            raise ValueError(f"{name} must be contiguous in its last dim, got the strides {tensor.stride()}.")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, but {owner} is on {first.device}: use one device.")
        if dtypes is FLOATS and tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but {owner} is {first.dtype}: use one dtype.")
    return sizes


def _check_values(block_tables: torch.Tensor, context_lens: torch.Tensor, blocks: int, block_size: int) -> None:
    capacity = block_tables.shape[1] * block_size
    for b, n in enumerate(context_lens.tolist()):
        if not 0 <= n <= capacity:
            raise ValueError(f"context_lens[{b}] is {n}, but a row of block_tables covers 0 to {capacity} tokens.")
        for page, block in enumerate(block_tables[b, : -(-n // block_size)].tolist()):
            if not 0 <= block < blocks:
                raise ValueError(f"block_tables[{b}, {page}] is {block}, but the caches have {blocks} blocks.")
