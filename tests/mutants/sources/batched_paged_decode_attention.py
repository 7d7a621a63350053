"""Decode attention in plain PyTorch, all sequences at once: gathered to the longest context, then masked."""

import torch


def batched_paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of each sequence's one query over its cached tokens."""
    sequences, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    if q.numel() == 0:
        return torch.empty_like(q)
    lengths = context_lens.long()
    longest = int(lengths.max())
    if longest == 0:
        return torch.zeros_like(q)
    position = torch.arange(longest, device=q.device)
    live = position < lengths[:, None]  # [B, n]
    # What a row does not own is not looked up: its garbage is not an index.
    pages = block_tables[:, : -(-longest // block_size)].long().repeat_interleave(block_size, dim=1)[:, :longest]
    blocks = torch.where(live, pages, 0)
    places = (position % block_size).expand_as(blocks)
    # [B, n, KVH, D]. What the mask leaves out may be NaN, and 0 * NaN is NaN: it is not weighed with 0, it becomes 0.
    k = k_cache[blocks, places].float().masked_fill(~live[:, :, None, None], 0.0)
    v = v_cache[blocks, places].float().masked_fill(~live[:, :, None, None], 0.0)
    grouped = q.float().reshape(sequences, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("bkgd,bnkd->bkgn", grouped, k) * scale
    scores = scores.masked_fill(~live[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    weights = weights.masked_fill((lengths == 0)[:, None, None, None], 0.0)  # all -inf: NaN
    return torch.einsum("bkgn,bnkd->bkgd", weights, v).reshape(sequences, heads, dim).to(q.dtype)
