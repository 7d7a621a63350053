"""FlashInfer's CUDA kernels. It compiles them with nvcc when they are first called, which takes a minute or two."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pagefuzz.kernels.registry import kernel

_flashinfer: Any = importlib.import_module("flashinfer")

WORKSPACE = 128 << 20  # bytes: "The recommended size is 128MB"
DECLARED: dict[str, Any] = {
    "dtypes": ["float16", "bfloat16"],  # float32 is no dtype of a cache there
    "head_dims": [64, 128, 256],
    "devices": ["cuda"],
}


@kernel(
    "reshape_and_cache",
    negative_slots="never",  # append_paged_kv_cache takes positions of requests and knows no padding
    **DECLARED,
)
def flashinfer_append_paged_kv_cache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """One request owns the pages that slots name, in their order."""
    page_size, slots = k_cache.shape[1], slot_mapping.long()
    pages, nth = torch.unique(slots // page_size, return_inverse=True)
    zeros = torch.zeros_like(slots, dtype=torch.int32)
    _flashinfer.append_paged_kv_cache(
        key[: len(slots)],
        value[: len(slots)],
        zeros,
        (nth * page_size + slots % page_size).int(),
        (k_cache, v_cache),
        pages.int(),
        torch.tensor([0, len(pages)], dtype=torch.int32, device=key.device),
        torch.tensor([page_size], dtype=torch.int32, device=key.device),
        kv_layout="NHD",
    )


@kernel(
    "paged_decode_attention",
    unit_roundoff={"weights": "input"},  # tensor cores take the weights in the dtype of the values
    **DECLARED,
)
def flashinfer_batch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Pages go as indices[indptr[b] : indptr[b + 1]], and how many tokens the last one of each sequence holds."""
    page_size, device, lengths = k_cache.shape[1], q.device, context_lens.long()
    pages = -(-lengths // page_size)
    indptr = torch.zeros(len(q) + 1, dtype=torch.int32, device=device)
    indptr[1:] = pages.cumsum(0)
    owned = torch.arange(block_tables.shape[1], device=device) < pages[:, None]
    wrapper = _flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        indptr,
        block_tables[owned].int(),
        (lengths - (pages - 1).clamp(min=0) * page_size).int(),
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        page_size,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
        sm_scale=scale,
    )
    return wrapper.run(q.contiguous(), (k_cache, v_cache))
