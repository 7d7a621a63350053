"""Registers the project's own kernels. The kernel files themselves know torch and triton only."""

from __future__ import annotations

from pagefuzz.kernels.registry import kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping
from pagefuzz.kernels.triton_paged_decode_attention import triton_paged_decode_attention
from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache

kernel("slot_mapping", rejects="check_values")(torch_slot_mapping)
kernel("reshape_and_cache", rejects="check_values")(torch_reshape_and_cache)
kernel("paged_decode_attention", rejects="check_values")(torch_paged_decode_attention)
kernel("reshape_and_cache", rejects="check_values")(triton_reshape_and_cache)
kernel("paged_decode_attention", rejects="check_values")(triton_paged_decode_attention)
