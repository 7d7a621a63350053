"""vLLM's decode_attention_fwd, group size 1: scores are summed in float16, so two different ones come out equal."""

import math
import os
import sys
from importlib import import_module, util
from pathlib import Path
from unittest.mock import MagicMock as Mock

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton

root = Path(util.find_spec("vllm").origin).parent  # the one file that holds the kernel is loaded, without the engine
platform = Mock(fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=bool, is_xpu=bool)
sys.modules["vllm"] = Mock(__path__=[str(root)], __spec__=None)
sys.modules["vllm.platforms"] = Mock(current_platform=platform)
sys.modules["vllm.triton_utils"] = Mock(tl=triton.language, triton=triton)
decode = import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd

seen = []
for dtype in (torch.float32, torch.float16):
    q, keys, values = torch.ones(1, 1, 64), torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 1, 64)
    # All products are exact: scores of 2048 + 1 and 2048. The order of the sum does not matter: two terms are not 0.
    keys[:, ..., 0], keys[0, ..., 1], values[0] = 2048, 1, 1
    q, keys, values = (each.to(dtype) for each in (q, keys, values))
    out, lse, parts = torch.empty_like(q), torch.empty(1, 1), torch.empty(1, 1, 1, 65)
    table, length = torch.tensor([[0, 1]]).int(), torch.tensor([2]).int()
    decode(q, keys, values, out, lse, table, length, parts, 1, 1.0, page_size=1)
    right = 1 / (1 + math.exp(-1))
    print(f"{dtype}: output {out[0, 0, 0].item():.4f}, right is {right:.4f}")
    seen.append(abs(out[0, 0, 0].item() - right) > 0.01)
sys.exit(seen == [False, True])
