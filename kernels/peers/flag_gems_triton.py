"""FlagGems' Triton kernel of vLLM's `reshape_and_cache_flash`, which it stands in for on other chips."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from pagefuzz.kernels.peers import leaf
from pagefuzz.kernels.registry import kernel


def _libentry() -> Any:
    return lambda jitted: jitted  # theirs only keeps compiled kernels at hand


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_write = leaf.load(
    "flag_gems.fused.reshape_and_cache_flash",
    {
        "flag_gems.config": {"use_c_extension": False},
        "flag_gems.runtime": {"torch_device_fn": SimpleNamespace(device=_on)},
        "flag_gems.utils": {"libentry": _libentry},
    },
)


# Nothing is declared: the file asks for no dtype (it only says that fp8 is to come), no size and no dtype of slots; "if
# slot_idx < 0: return"; the grid is as long as slot_mapping; rows of key and value lie at stride(0). Only contiguous
# caches: the offset in a block is computed from num_heads * head_size.
@kernel("reshape_and_cache")
def flag_gems_reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    one = torch.ones(1, device=key.device)
    _write.reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, "auto", one, one)
