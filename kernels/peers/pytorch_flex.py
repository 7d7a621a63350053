"""PyTorch's `PagedAttention` with `flex_attention`, which runs uncompiled here: any shape and device has that form."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

from pagefuzz.kernels.registry import kernel

SHARED: dict[str, Any] = {
    # Its own tables hold an entry for each page of the pool and sequence ("page_table", "physical_to_logical"), and "an
    # unfused implementation that materializes the full scores matrix" a score for each slot of the pool.
    "most_slots": 1 << 12,
}


def _as_one(cache: torch.Tensor) -> torch.Tensor:
    """[N, bs, KVH, D] as the [1, KVH, N * bs, D] that PagedAttention keeps."""
    return cache.flatten(0, 1).permute(1, 0, 2)[None]


@kernel(
    "reshape_and_cache",
    negative_slots="never",  # assign takes positions of sequences and knows no padding
    **SHARED,
)
def pytorch_flex_assign(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """One sequence owns all pages in their order, so that its positions are slots."""
    pages, page_size = k_cache.shape[:2]
    paged = PagedAttention(pages, page_size, 1, device=str(key.device))
    paged.empty_pages = list(range(pages))
    zero = torch.zeros(1, dtype=torch.int64, device=key.device)
    paged.reserve(zero, torch.full_like(zero, pages * page_size))
    tokens = len(slot_mapping)
    new_key, new_value = (each[:tokens].transpose(0, 1)[None] for each in (key, value))
    paged.assign(zero, slot_mapping[None], new_key, new_value, _as_one(k_cache), _as_one(v_cache))


@kernel(
    "paged_decode_attention",
    # Its sums run over the pool, in the order of the pages there; "Numerical accuracy" in PyTorch's notes promises no
    # bits across such differences.
    deterministic=False,
    table_reads="row",  # the scores of the whole pool are computed and masked, see above
    unit_roundoff={"weights": "input"},  # "post_mod_scores.to(query.dtype) @ value"
    **SHARED,
)
def pytorch_flex_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`reserve` takes pages from the end of `empty_pages`, so that is where those of our table are put before."""
    pages, page_size = k_cache.shape[:2]
    paged = PagedAttention(pages, page_size, len(q), device=str(q.device))
    lengths = context_lens.long()
    for b, length in enumerate(lengths.tolist()):
        paged.empty_pages = block_tables[b, : -(-length // page_size)].tolist()
        paged.reserve(torch.tensor([b], device=q.device), lengths[b : b + 1])
    longest = int(-(-lengths.max() // page_size)) * page_size if len(q) else 0
    with torch.compiler.set_stance("force_eager"):
        mask = create_block_mask(noop_mask, len(q), None, 1, longest, device=q.device, BLOCK_SIZE=(1, page_size))
        return flex_attention(
            q[:, :, None],
            _as_one(k_cache),
            _as_one(v_cache),
            score_mod=paged.get_score_mod(None, lengths),
            block_mask=paged.convert_logical_block_mask(mask, kv_len=lengths),
            scale=scale,
            enable_gqa=True,
        )[:, :, 0]
