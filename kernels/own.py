"""Registers the project's own kernels. The kernel files themselves know torch and triton only."""

from __future__ import annotations

from pagefuzz.kernels.registry import CACHE_LAYOUTS, kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping
from pagefuzz.kernels.triton_paged_decode_attention import triton_paged_decode_attention
from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache

kernel("slot_mapping", rejects="check_values")(torch_slot_mapping)
kernel("reshape_and_cache", cache_layouts=CACHE_LAYOUTS, rejects="check_values")(torch_reshape_and_cache)
# Not batch_invariant: torch chooses the order of its sums, also by how the operands happen to be aligned.
kernel("paged_decode_attention", cache_layouts=CACHE_LAYOUTS, rejects="check_values")(torch_paged_decode_attention)
kernel("reshape_and_cache", cache_layouts=CACHE_LAYOUTS, rejects="check_values")(triton_reshape_and_cache)
# batch_invariant: a program sees one sequence, and heads and head dim alone choose its tiles, warps and order of sums.
kernel("paged_decode_attention", cache_layouts=CACHE_LAYOUTS, batch_invariant=True, rejects="check_values")(
    triton_paged_decode_attention
)
