"""FlashInfer's CUDA kernels.

FlashInfer compiles a module for each dtype and head dim with nvcc. All that cases can ask for are compiled when this
file is loaded, once a machine and version (FlashInfer keeps them): a case that waited for nvcc would count as a hang.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import torch

from pagefuzz.kernels.registry import kernel

_flashinfer: Any = importlib.import_module("flashinfer")

WORKSPACE = 128 << 20  # bytes: "The recommended size is 128MB"
DTYPES = ("float16", "bfloat16")  # tvm_ffi_utils.h, DISPATCH_DLPACK_DTYPE_TO_CTYPE: float32 is no dtype of a cache
HEAD_DIMS = (64, 128, 256)  # utils.cuh, DISPATCH_HEAD_DIM; 512 is beyond what cases have
FA3_HEAD_DIMS = (128,)  # it takes all three, but each of its modules takes nvcc ten minutes on two cores
DECLARED: dict[str, Any] = {
    "dtypes": DTYPES,
    "head_dims": HEAD_DIMS,
    # "a tuple (k_cache, v_cache)" in either layout, or "a single 5-D tensor"; page.cu and batch_decode.cu want the same
    # strides for both, which "strided" does not give.
    "cache_layouts": ["contiguous", "hnd", "packed"],
    "devices": ["cuda"],
}
CUDA_CORES: dict[str, Any] = {
    **DECLARED,
    "group_sizes": [1, 2, 3, 4, 8],  # utils.cuh, DISPATCH_GQA_GROUP_SIZE
    "unit_roundoff": {"weights": "input"},  # decode.cuh, tmp_v: parts of a split context lie in the output's dtype
}


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy where rows do not begin at multiples of 16 bytes: they are loaded as vectors of 16 bytes, and
    else that is an illegal access (docs/findings.md#flashinfer-misaligned-rows)."""
    is_aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _compile() -> None:
    """Compile what is not compiled yet."""
    jit: Any = importlib.import_module("flashinfer.jit")
    specs = [importlib.import_module("flashinfer.page").gen_page_module()]
    for name, dim in itertools.product(DTYPES, HEAD_DIMS):
        types = (*[getattr(torch, name)] * 3, torch.int32)
        specs.append(jit.gen_batch_decode_module(*types, dim, dim, 0, False, False))
        specs.append(jit.gen_batch_prefill_module("fa2", *types, dim, dim, 0, False, False, False))
        if _is_hopper() and dim in FA3_HEAD_DIMS:
            specs.append(jit.gen_batch_prefill_module("fa3", *types, dim, dim, 0, False, False, False))
    missing = [spec for spec in specs if not spec.is_compiled]
    if missing:
        said = f"FlashInfer compiles {len(missing)} of its modules, once; this takes minutes."
        print(said, file=sys.stderr, flush=True)
        jit.build_jit_specs(missing)


if torch.cuda.is_available():
    _compile()


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
        _aligned(key[: len(slots)]),
        _aligned(value[: len(slots)]),
        zeros,
        (nth * page_size + slots % page_size).int(),
        (k_cache, v_cache),
        pages.int(),
        torch.tensor([0, len(pages)], dtype=torch.int32, device=key.device),
        torch.tensor([page_size], dtype=torch.int32, device=key.device),
        kv_layout="NHD",
    )


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    **wrapper_options: Any,
) -> torch.Tensor:
    """Pages go as indices[indptr[b] : indptr[b + 1]], and how many tokens the last one of each sequence holds."""
    page_size, device, lengths = k_cache.shape[1], q.device, context_lens.long()
    pages = -(-lengths // page_size)
    indptr = torch.zeros(len(q) + 1, dtype=torch.int32, device=device)
    indptr[1:] = pages.cumsum(0)
    owned = torch.arange(block_tables.shape[1], device=device) < pages[:, None]
    wrapper = _flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", **wrapper_options
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
    return wrapper.run(q, (k_cache, v_cache))


@kernel(
    "paged_decode_attention",
    **CUDA_CORES,
)
def flashinfer_batch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _decode(_aligned(q), k_cache, v_cache, block_tables, context_lens, scale)


@kernel(
    "paged_decode_attention",
    **CUDA_CORES,
)
def flashinfer_batch_decode_any_stride(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same with q as it comes: nothing says how rows must be aligned."""
    return _decode(q, k_cache, v_cache, block_tables, context_lens, scale)


@kernel(
    "paged_decode_attention",
    unit_roundoff={"weights": "input"},  # tensor cores take the weights in the dtype of the values
    **DECLARED,
)
def flashinfer_batch_decode_fa2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    q = _aligned(q)
    return _decode(q, k_cache, v_cache, block_tables, context_lens, scale, use_tensor_cores=True, backend="fa2")


@kernel(
    "paged_decode_attention",
    unit_roundoff={"weights": "input"},  # as above
    # utils.py, is_sm90a_supported: on other cards there is no such backend, and on these "auto" means this one.
    **{**DECLARED, "head_dims": FA3_HEAD_DIMS, "devices": ["cuda"] if _is_hopper() else ["cuda 9.0"]},
)
def flashinfer_batch_decode_fa3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    q = _aligned(q)
    return _decode(q, k_cache, v_cache, block_tables, context_lens, scale, use_tensor_cores=True, backend="fa3")
