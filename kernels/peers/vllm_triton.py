"""vLLM's Triton kernels. The stubs say what a GPU of compute capability 9.0 would: that is what they are tuned for. The
device is not asked, since a process that loads kernels and forks to run them must leave it alone."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from pagefuzz.kernels.peers import leaf
from pagefuzz.kernels.registry import CACHE_LAYOUTS, kernel

FP8 = torch.float8_e4m3fn
CAPABILITY = (9, 0)


def _init_logger(name: str) -> Any:
    logger: Any = logging.getLogger(name)
    logger.warning_once = logger.info_once = logger.debug_once = logger.debug
    return logger


def _not_quantized(kv_cache_dtype: str) -> bool:
    return False  # "auto", the model's own dtype, is the only one asked for here


def _not_rocm(*arguments: Any) -> bool:
    return False


_QUANTIZATION = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"
STUBS: leaf.Stubs = {
    "vllm._custom_ops": {},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.logger": {"init_logger": _init_logger},
    "vllm.platforms": {
        "current_platform": SimpleNamespace(
            fp8_dtype=lambda: FP8,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            is_cuda=lambda: True,
            is_cuda_alike=lambda: True,
            get_device_capability=lambda device_id=0: CAPABILITY,
            has_device_capability=lambda least: divmod(least, 10) <= CAPABILITY,
            is_device_capability_family=lambda family: CAPABILITY[0] == family // 10,
        )
    },
    "vllm.platforms.rocm": {"use_rocm_custom_paged_attention": _not_rocm},
    "vllm.triton_utils": {"tl": tl, "triton": triton},
    "vllm.utils.math_utils": {"RCP_LN2": 1 / math.log(2)},
    "vllm.utils.torch_utils": {"is_quantized_kv_cache": _not_quantized},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": IntEnum("KVQuantMode", _QUANTIZATION, start=0)},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {
        "FP8_DTYPE": FP8,
        "get_fp8_min_max": lambda: (torch.finfo(FP8).min, torch.finfo(FP8).max),
    },
}
OPS = "vllm.v1.attention.ops."
_write = leaf.load(f"{OPS}triton_reshape_and_cache_flash", STUBS)
_unified = leaf.load(f"{OPS}triton_unified_attention", STUBS)
_decode = leaf.load(f"{OPS}triton_decode_attention", STUBS)
_chunked = leaf.load(f"{OPS}chunked_prefill_paged_decode", STUBS)

SEGMENTS = 16  # backends/triton_attn.py, NUM_PAR_SOFTMAX_SEGMENTS
KV_SPLITS = 4  # the engine takes 1 for each 512 tokens, up to the number of multiprocessors; here to merge some at all
TABLE_TOKENS = 128  # kv_cache_interface.py, block_table_token_alignment


@kernel(
    "reshape_and_cache",
    # backends/triton_attn.py hands over views of [N, KVH, bs, 2D]: keys and values have the same strides. The kernel
    # takes those of the keys for both, so no "strided".
    cache_layouts=["contiguous", "hnd", "packed"],
    # Nothing else: "auto" is any float; the tile is masked; slots are widened ("to(tl.int64)"); "if slot_idx < 0:
    # # Padding token that should be ignored."; the grid is as long as slot_mapping; key and value have a stride each.
)
def vllm_triton_reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    one = torch.ones(1, device=key.device)
    asked = patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    with asked if key.device.type == "cpu" else nullcontext():
        _write.triton_reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, "auto", one, one)


# ---- unified_attention: one kernel, in one pass over the keys (2D) or in segments that are merged (3D)

UNIFIED: dict[str, Any] = {
    # backends/triton_attn.py: supported_dtypes are all three; supports_head_size; get_supported_kernel_block_sizes is
    # MultipleOf(16), of which a few are enough.
    "head_dims": lambda dim: dim >= 32,
    "block_sizes": range(16, 97, 16),
    # The same file: views of [N, KVH, bs, 2D], and a stride of the cache's own for each dim of keys and of values.
    "cache_layouts": CACHE_LAYOUTS,
    # Nothing of empty sequences: reduce_segments means to be "returning 0.0 if overall_expsum is 0".
    # "P.to(V.dtype)"; tl.dot of float32 is tf32 unless asked for otherwise.
    "unit_roundoff": {"weights": "input", "products": "tf32"},
}


def _aligned(block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """The table as the engine has it: a row holds a multiple of 128 tokens (worker/block_table.py). The kernel loads
    the entries of a whole tile of keys, so it looks at the entries that are added here; they are garbage."""
    columns = TABLE_TOKENS // math.gcd(TABLE_TOKENS, block_size)
    missing = -block_tables.shape[1] % columns
    return torch.nn.functional.pad(block_tables, (0, missing), value=2**31 - 1) if missing else block_tables


def _attended(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    **more: Any,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _unified.unified_attention(
        q=q,
        k=k_cache,
        v=v_cache,
        out=out,
        cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
        max_seqlen_q=1,
        seqused_k=context_lens,
        max_seqlen_k=int(context_lens.max()) if len(q) else 0,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1),
        block_table=block_tables,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        **more,
    )
    return out


@kernel("paged_decode_attention", table_reads="row", **UNIFIED)  # "row": see _aligned; pages are only read if owned
def vllm_triton_unified_attention_2d(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _attended(q, k_cache, v_cache, _aligned(block_tables, k_cache.shape[1]), context_lens, scale)


@kernel("paged_decode_attention", table_reads="row", **UNIFIED)
def vllm_triton_unified_attention_3d(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    parts = (tokens, heads, SEGMENTS)
    return _attended(
        q,
        k_cache,
        v_cache,
        _aligned(block_tables, k_cache.shape[1]),
        context_lens,
        scale,
        seq_threshold_3D=max(tokens, 1),
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.empty((*parts, triton.next_power_of_2(dim)), dtype=torch.float32, device=q.device),
        softmax_segm_max=torch.empty(parts, dtype=torch.float32, device=q.device),
        softmax_segm_expsum=torch.empty(parts, dtype=torch.float32, device=q.device),
    )


# The operator itself says nothing of how wide a table must be. Apart from the other two, since what it does with one
# that is as wide as its longest sequence would hide all else.
@kernel("paged_decode_attention", **UNIFIED)
def vllm_triton_unified_attention_narrow_table(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _attended(q, k_cache, v_cache, block_tables, context_lens, scale)


# ---- decode_attention_fwd: two kernels, chosen by the group size


def _decoded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    batch, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, heads), dtype=torch.float32, device=q.device)
    parts = torch.empty((batch, heads, KV_SPLITS, dim + 1), dtype=torch.float32, device=q.device)
    _decode.decode_attention_fwd(
        q, k_cache, v_cache, out, lse, block_tables, context_lens, parts, KV_SPLITS, scale, page_size=k_cache.shape[1]
    )
    return out


DECODE: dict[str, Any] = {
    # "Read the real stride (a cross-layer view has gaps)", and strides of the values' own.
    "cache_layouts": CACHE_LAYOUTS,
    # backends/mla/triton_mla.py: "Clamp holds padding rows at extent 0; the kernel skips them either way".
    "empty": "untouched",
    # Nothing of dtypes and block sizes: "It supports page size >= 1."
}


@kernel("paged_decode_attention", group_sizes=[1], **DECODE)  # "if kv_group_num == 1: # MHA"
def vllm_triton_decode_attention_normal(
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
    unit_roundoff={"weights": "input", "products": "tf32"},  # "p.to(v.dtype)"; tl.dot of float32 as above
    **DECODE,
)
def vllm_triton_decode_attention_grouped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _decoded(q, k_cache, v_cache, block_tables, context_lens, scale)


# ---- chunked_prefill_paged_decode, of which a batch of single queries takes the decode


@kernel(
    "paged_decode_attention",
    # backends/rocm_attn.py: supported_dtypes are all three; get_supported_head_sizes, as far as cases go; and
    # MultipleOf(16), of which a few are enough, powers of two ("is_pow2") and others.
    head_dims=[32, 64, 80, 96, 128],
    block_sizes=range(16, 97, 16),
    # "stride-padded hybrid layouts" have this path, and every dim of keys and of values a stride.
    cache_layouts=CACHE_LAYOUTS,
    unit_roundoff={"weights": "input", "products": "tf32"},  # "p.to(V.dtype)"; tl.dot of float32 as above
)
def vllm_triton_chunked_prefill_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Keys go as [N, KVH, D / x, bs, x] and values as [N, KVH, D, bs]: views of the contract's caches, so that nothing
    is copied. x is 16 bytes (ops/paged_attn.py, split_kv_cache)."""
    x = 16 // k_cache.element_size()
    one = torch.ones(1, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _chunked.chunked_prefill_paged_decode(
        query=q,
        key=None,
        value=None,
        output=out,
        kv_cache_dtype="auto",
        key_cache=k_cache.view(*k_cache.shape[:3], -1, x).permute(0, 2, 3, 1, 4),
        value_cache=v_cache.permute(0, 2, 3, 1),
        block_table=block_tables,
        query_start_loc=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
        seq_lens=context_lens,
        max_seq_len=int(context_lens.max()) if len(q) else 0,
        max_query_len=1,
        k_scale=one,
        v_scale=one,
        sm_scale=scale,
    )
    return out
