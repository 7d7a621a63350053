"""vLLM's CPU attention: the output row of a context of length 0 is not written."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

# The operators register themselves with torch; nothing of vLLM is imported.
library = "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
torch.ops.load_library(str(Path(find_spec("vllm").origin).parent / library))
ops = torch.ops._C


def attend(values, length, out):
    """One query of zeros, so that all weights are equal, over a page of 32 tokens with these values."""
    cache, heads, dim, dtype = torch.zeros(1, 1, 64, 32, dtype=values.dtype), 1, 32, values.dtype
    keys, held = cache.chunk(2, 2)
    ops.cpu_attn_reshape_and_cache(
        torch.zeros_like(values), values, keys, held, torch.arange(32), "vec", 1.0, 1.0, "auto"
    )
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [length]))
    plan = ops.get_scheduler_metadata(1, heads, heads, dim, lengths, dtype, starts, True, -1, "vec", True, None, "auto")
    query, table = torch.zeros(1, 1, 32, dtype=dtype), torch.zeros(1, 1, dtype=torch.int32)
    rest = (1.0, True, None, -1, table, 0.0, plan, None, None, 1.0, 1.0, "auto")
    ops.cpu_attention_with_kv_cache(query, keys, held, out, starts, lengths, *rest)
    return out.flatten()


out = attend(torch.ones(32, 1, 32), 0, torch.full((1, 1, 32), 7.0))
print("length 0: the row held 7.0 before, and holds", out[0].item(), "after; zeros, or an error, would be defined")
sys.exit(bool((out == 7).all()))
