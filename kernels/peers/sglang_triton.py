"""SGLang's Triton kernels. The stubs say that this is no HIP device, so that what runs is what NVIDIA GPUs run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pagefuzz.kernels.peers import leaf
from pagefuzz.kernels.registry import CACHE_LAYOUTS, kernel

STUBS: leaf.Stubs = {
    "sglang.srt.environ": {"envs": SimpleNamespace()},  # read on HIP only
    "sglang.srt.utils": {
        "get_device_core_count": lambda device=0: 0,
        "is_gfx95_supported": lambda: False,
        "is_gfx1250_supported": lambda: False,
        "is_hip": lambda: False,
    },
}
_write = leaf.load("sglang.kernels.ops.kvcache.cache_ops", STUBS)
_decode = leaf.load("sglang.kernels.ops.attention.decode_attention", STUBS)

KV_SPLITS = 8  # --triton-attention-num-kv-splits


@kernel(
    "reshape_and_cache",
    # "Token and head strides may describe a view of physical HND storage"; a block stride and strides of the values'
    # own are parameters too.
    cache_layouts=CACHE_LAYOUTS,
    # Nothing else: no dtype of slots, key or cache is asked for, sizes are masked, "if slot_idx < 0: return".
)
def sglang_reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    tokens = len(slot_mapping)  # the grid is as long as key, so a caller passes as many rows as slots
    _write.launch_reshape_and_cache_flash(key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping)


def _decoded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The kernel takes slots and no pages: kv_indices[kv_indptr[b] : kv_indptr[b + 1]] are those of sequence b (int64,
    the pointers int32), as `layers/attention/triton_backend.py` makes them."""
    block_size, device = k_cache.shape[1], q.device
    slots = [torch.zeros(0, dtype=torch.int64, device=device)]
    for row, length in zip(block_tables.long(), context_lens.tolist(), strict=True):
        position = torch.arange(length, device=device)
        slots.append(row[position // block_size] * block_size + position % block_size)
    indptr = torch.zeros(len(q) + 1, dtype=torch.int32, device=device)
    indptr[1:] = context_lens.cumsum(0)
    parts = (*q.shape[:2], KV_SPLITS)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _decode.decode_attention_fwd(
        q,
        k_cache.flatten(0, 1),
        v_cache.flatten(0, 1),
        out,
        indptr,
        torch.cat(slots),
        torch.empty((*parts, q.shape[2]), dtype=torch.float32, device=device),
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.full((len(q),), KV_SPLITS, dtype=torch.int32, device=device),
        KV_SPLITS,
        scale,
        1.0,
        1.0,
    )
    return out


DECODE: dict[str, Any] = {
    # A padded row of a batch has one token: layers/attention/triton_backend.py, get_cuda_graph_seq_len_fill_value.
    "empty": "never",
}


@kernel(
    "paged_decode_attention",
    group_sizes=[1],  # "if kv_group_num == 1: # MHA"
    unit_roundoff={"products": "input"},  # "Cast the product, not q and k, to avoid a fp32 [BLOCK_N, D] tile."
    **DECODE,
)
def sglang_decode_attention_normal(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _decoded(q, k_cache, v_cache, block_tables, context_lens, scale)


@kernel(
    "paged_decode_attention",
    group_sizes=lambda size: size > 1,  # "else: # GQA/MQA/MLA"
    head_dims=lambda dim: dim > 8,  # tl.dot sums over 16 at least, and the head dim is padded to a power of two
    # "On other platforms restore the p.to(v.dtype) cast."; tl.dot of float32 is tf32 unless asked for otherwise.
    unit_roundoff={"weights": "input", "products": "tf32"},
    **DECODE,
)
def sglang_decode_attention_grouped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _decoded(q, k_cache, v_cache, block_tables, context_lens, scale)
