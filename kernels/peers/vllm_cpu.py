"""vLLM's compiled CPU operators. Nothing of vLLM is imported: its library registers them with torch.

They keep a cache of their own, [N, KVH, bs, 2D] (backends/cpu_attn.py), in which the keys of a block and head lie as
[D, bs] and the values as [bs, D]. So the adapters copy the contract's cache there, run the operator, and a write copies
back. The copies are ours, move bits and compute nothing; what the operator leaves alone comes back as it was. That keys
lie so is held against the operator once, by writing a page whose elements all differ.

- A write gets every page of a small pool, and what comes back is all of it, so a change anywhere is seen. Of a large
  pool, where nobody can copy all, it gets the pages that slots name.
- Attention gets the pages that its sequences own, each with its whole tail; all others of a small pool are NaN.
- The native caches lie in a sparse region, with room before them for offsets that have wrapped in int32.

Both widen or narrow their indices to what the operators ask for (slots int64, tables and lengths int32), so that the
two of them can make a pair.
"""

from __future__ import annotations

import mmap
from functools import lru_cache
from typing import Any

import torch

from pagefuzz.kernels.peers import leaf
from pagefuzz.kernels.registry import kernel

_library = "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
_torch_ops: Any = torch.ops
_torch_ops.load_library(str(leaf.directory("vllm") / _library))
_ops = _torch_ops._C

BEFORE = 1 << 33  # bytes: 2^31 float32 elements
NORESERVE = 0x4000
SMALL = 1 << 22  # bytes of a native cache that is copied as a whole
_region = mmap.mmap(-1, BEFORE + (1 << 36), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
_BITS = {2: torch.int16, 4: torch.int32}

DECLARED: dict[str, Any] = {
    # backends/cpu_attn.py: supported_dtypes are all three; get_supported_head_sizes, as far as cases go;
    # get_supported_kernel_block_sizes is MultipleOf(32), of which a few are enough.
    "head_dims": [32, 64, 80, 96, 112, 128],
    "block_sizes": range(32, 129, 32),
    "devices": ["cpu"],
}


def _isa(block_size: int, head_dim: int) -> str:
    """backends/cpu_attn.py, _get_attn_isa, without AMX and what is not x86."""
    return "vec" if block_size % 32 == 0 and head_dim % 32 == 0 else "vec16"


class _Native:
    """The operators' cache for one of the contract's. keys, values: [N, KVH, 2 bs, D] as the operators take them."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        blocks, block_size, heads, dim = k_cache.shape
        self.ours = [cache.view(_BITS[cache.element_size()]) for cache in (k_cache, v_cache)]
        self.is_small = 2 * k_cache.numel() * k_cache.element_size() <= SMALL
        whole = torch.frombuffer(_region, dtype=k_cache.dtype, count=2 * k_cache.numel(), offset=BEFORE)
        self.keys, self.values = whole.view(blocks, heads, 2 * block_size, dim).chunk(2, 2)
        if self.is_small:
            whole.fill_(torch.nan)
        bits = whole.view(self.ours[0].dtype).view(blocks, heads, 2, block_size * dim)
        # Both as [N, bs, KVH, D].
        self.theirs = [
            bits[:, :, 0].view(blocks, heads, dim, block_size).permute(0, 3, 1, 2),
            bits[:, :, 1].view(blocks, heads, block_size, dim).permute(0, 2, 1, 3),
        ]

    def lay_out(self, blocks: torch.Tensor) -> None:
        """Copy the numbered blocks there."""
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            theirs[blocks] = ours[blocks]

    def take_back(self, blocks: torch.Tensor) -> None:
        """Copy the numbered blocks back."""
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            ours[blocks] = theirs[blocks]

    @staticmethod
    def forget() -> None:
        _region.madvise(mmap.MADV_DONTNEED)


def _write(native: _Native, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, isa: str) -> None:
    _ops.cpu_attn_reshape_and_cache(key, value, native.keys, native.values, slots, isa, 1.0, 1.0, "auto")


@lru_cache
def _check_layout(dtype: torch.dtype, block_size: int, dim: int) -> None:
    """Raise RuntimeError where the operator lays a page out otherwise than this file says."""
    bits = torch.arange(2 * block_size * dim, dtype=_BITS[dtype.itemsize])
    key, value = bits.view(dtype).view(2, block_size, 1, dim)
    ours = torch.zeros(1, block_size, 1, dim, dtype=dtype)
    native = _Native(ours, ours)
    try:
        _write(native, key, value, torch.arange(block_size), _isa(block_size, dim))
        laid = [theirs[0].flatten() for theirs in native.theirs]
        if not torch.equal(torch.cat(laid), bits):
            raise RuntimeError("this version of vLLM lays its cache out otherwise than the adapter knows")
    finally:
        native.forget()


@kernel("reshape_and_cache", **DECLARED)
def vllm_cpu_reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    blocks, block_size, _, dim = k_cache.shape
    _check_layout(key.dtype, block_size, dim)
    native = _Native(k_cache, v_cache)
    try:
        slots = slot_mapping.long()
        named = torch.arange(blocks) if native.is_small else torch.unique(slots[slots >= 0] // block_size)
        native.lay_out(named)
        # It takes as many tokens as there are keys; nobody pads batches on a CPU.
        _write(native, key[: len(slots)], value[: len(slots)], slots, _isa(block_size, dim))
        native.take_back(named)
    finally:
        native.forget()


# empty: a sequence holds at least its query's token: backends/triton_attn.py, "Definition of context_len, query_len,
# and seq_len".
@kernel("paged_decode_attention", empty="never", **DECLARED)
def vllm_cpu_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As CPUAttentionMetadataBuilder.build and CPUAttentionBackendImpl.forward call it."""
    block_size, heads, dim = k_cache.shape[1:]
    _check_layout(q.dtype, block_size, dim)
    isa, batch = _isa(block_size, dim), len(q)
    native = _Native(k_cache, v_cache)
    try:
        lengths = context_lens.to(torch.int32)
        pages = -(-lengths.long() // block_size)
        owned = torch.arange(block_tables.shape[1]) < pages[:, None]
        native.lay_out(torch.unique(block_tables.long()[owned]))
        starts = torch.arange(batch + 1, dtype=torch.int32)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        plan = _ops.get_scheduler_metadata(
            batch, q.shape[1], heads, dim, lengths, q.dtype, starts, True, -1, isa, True, None, "auto"
        )
        _ops.cpu_attention_with_kv_cache(
            q,
            native.keys,
            native.values,
            out,
            starts,
            lengths,
            scale,
            True,
            None,
            -1,
            block_tables.to(torch.int32),
            0.0,
            plan,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
        return out
    finally:
        native.forget()
