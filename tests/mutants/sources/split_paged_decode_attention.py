"""Decode attention in two launches: parts of each sequence on their own, then their merge (split-KV)."""

import torch
import triton
import triton.language as tl

SPLITS = 3


@triton.jit
def part_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    part_ptr,  # [B, H, SPLITS, D], float32: the normalised output of each part
    lse_ptr,  # [B, H, SPLITS], float32: the logarithm of its sum of weights
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    q_stride,
    table_stride,
    scale,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    n = tl.load(context_lens_ptr + b)
    chunk = tl.cdiv(n, SPLITS)
    first = split * chunk
    last = tl.minimum(first + chunk, n)

    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    row_mask = rows < GROUP
    mask = row_mask[:, None] & (cols < D)[None, :]
    heads = kv_head * GROUP + rows
    q = tl.load(q_ptr + b * q_stride + heads[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(first, last, STEP):
        pos = start + tl.arange(0, STEP)
        live = pos < last
        block = tl.load(block_tables_ptr + b * table_stride + pos // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = (pos % BLOCK_SIZE).to(tl.int64)
        k_offs = block * k_block_stride + place * k_slot_stride + kv_head * k_head_stride
        v_offs = block * v_block_stride + place * v_slot_stride + kv_head * v_head_stride
        kv_mask = live[:, None] & (cols < D)[None, :]
        k = tl.load(k_cache_ptr + k_offs[:, None] + cols[None, :], mask=kv_mask, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(live[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp(scores - m_new[:, None])
        rescale = tl.exp(m - m_new)
        v = tl.load(v_cache_ptr + v_offs[:, None] + cols[None, :], mask=kv_mask, other=0.0).to(tl.float32)
        acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        m = m_new

    # An empty part weighs nothing in the merge: its logarithm is -inf.
    part = (b * H + heads) * SPLITS + split
    total = tl.where(first < last, total, 1.0)
    tl.store(part_ptr + part[:, None] * D + cols[None, :], acc / total[:, None], mask=mask)
    tl.store(lse_ptr + part, m + tl.log(total), mask=row_mask)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    out_ptr,
    part_ptr,
    lse_ptr,
    context_lens_ptr,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.load(context_lens_ptr + b)
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    row_mask = rows < H
    mask = row_mask[:, None] & (cols < D)[None, :]
    part = (b * H + rows) * SPLITS
    m = tl.full([ROWS], -float("inf"), tl.float32)
    for split in range(0, SPLITS):
        m = tl.maximum(m, tl.load(lse_ptr + part + split, mask=row_mask, other=0.0))
    m = tl.where(n > 0, m, 0.0)  # every part is empty: -inf - -inf would be NaN
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for split in range(0, SPLITS):
        weight = tl.exp(tl.load(lse_ptr + part + split, mask=row_mask, other=0.0) - m)
        acc += weight[:, None] * tl.load(part_ptr + (part + split)[:, None] * D + cols[None, :], mask=mask, other=0.0)
        total += weight
    out = acc / tl.where(n > 0, total, 1.0)[:, None]
    out_offs = (b * H + rows)[:, None] * D + cols[None, :]
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def split_paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of each sequence's one query over its cached tokens, in SPLITS parts."""
    sequences, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = torch.empty((sequences, heads, SPLITS, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((sequences, heads, SPLITS), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    sizes = {"H": heads, "D": dim, "SPLITS": SPLITS, "COLS": max(16, triton.next_power_of_2(dim))}
    part_kernel[(sequences, kv_heads, SPLITS)](
        parts,
        lse,
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
        BLOCK_SIZE=k_cache.shape[1],
        ROWS=triton.next_power_of_2(group),
        STEP=16,
        **sizes,
    )
    merge_kernel[(sequences,)](out, parts, lse, context_lens, ROWS=triton.next_power_of_2(heads), **sizes)
    return out
