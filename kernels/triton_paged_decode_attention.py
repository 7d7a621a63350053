"""Decode attention over a paged KV cache in Triton: one query token for each sequence."""

from typing import Any

import torch
import triton
import triton.language as tl

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


@triton.jit
def paged_decode_attention_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    q_stride,
    table_stride,
    scale,
    # The caches' strides are fixed at compile time, like the sizes: else their 64-bit products in the loop take 4 % of
    # the time. Those of contiguous caches follow from the sizes, so nothing more is compiled for them.
    K_BLOCK_STRIDE: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_BLOCK_STRIDE: tl.constexpr,
    V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    # One program per (sequence, kv head): the query heads that share this kv head are the rows of one small matrix.
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    n = tl.load(context_lens_ptr + b)

    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    steps = tl.arange(0, STEP)
    head_offs = (kv_head * GROUP + rows)[:, None] * D + cols[None, :]
    head_mask = (rows < GROUP)[:, None] & (cols < D)[None, :]

    k_head_ptr = k_cache_ptr + kv_head * K_HEAD_STRIDE
    v_head_ptr = v_cache_ptr + kv_head * V_HEAD_STRIDE
    q = tl.load(q_ptr + b * q_stride + head_offs, mask=head_mask, other=0.0).to(tl.float32) * scale

    # Online softmax: a running maximum, and sums that are scaled down whenever it grows. It starts at the lowest finite
    # number: from -inf, a first step whose scores are all -inf would compute -inf - -inf = NaN.
    m = tl.full([ROWS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n, STEP):
        pos = start + steps
        live = pos < n
        # Masked: entries past the sequence's last page are garbage and are not even loaded.
        block = tl.load(block_tables_ptr + b * table_stride + pos // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = (pos % BLOCK_SIZE).to(tl.int64)  # any product with a stride may pass 2**31
        k_offs = block * K_BLOCK_STRIDE + place * K_SLOT_STRIDE
        v_offs = block * V_BLOCK_STRIDE + place * V_SLOT_STRIDE
        kv_mask = live[:, None] & (cols < D)[None, :]

        k = tl.load(k_head_ptr + k_offs[:, None] + cols[None, :], mask=kv_mask, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(live[None, :], scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp(scores - m_new[:, None])
        rescale = tl.exp(m - m_new)
        v = tl.load(v_head_ptr + v_offs[:, None] + cols[None, :], mask=kv_mask, other=0.0).to(tl.float32)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")
        m = m_new

    # An empty context gives 0 / 1 = 0.
    out = acc / tl.where(n > 0, total, 1.0)[:, None]
    tl.store(out_ptr + b * (KVH * GROUP * D) + head_offs, out.to(out_ptr.dtype.element_ty), mask=head_mask)


def triton_paged_decode_attention(
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

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    group = sizes["H"] // sizes["KVH"]
    # Compiled, tl.dot needs at least 16 values along the dim that it sums: the head dim, then the keys of a step.
    rows, cols = triton.next_power_of_2(group), max(16, triton.next_power_of_2(sizes["D"]))
    # Keys a step: the float32 tiles of keys and values lie in shared memory, the sums in registers.
    step = max(16, min(64, 8192 // cols, 32768 // (rows * cols)))
    paged_decode_attention_kernel[(sizes["B"], sizes["KVH"])](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        q.stride(0),
        block_tables.stride(0),
        float(scale),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=group,
        KVH=sizes["KVH"],
        D=sizes["D"],
        BLOCK_SIZE=sizes["bs"],
        ROWS=rows,
        STEP=step,
        COLS=cols,
        num_warps=4 if rows * cols < 512 else 8,
    )
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
