"""vLLM's unified_attention: NaN for a context of length 0 in the 3D form, 0 in the 2D form."""

import os
import sys
from enum import IntEnum
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
sys.modules["vllm"].envs = sys.modules["vllm.envs"] = sys.modules["vllm.logger"] = Mock(VLLM_BATCH_INVARIANT=False)
modes = IntEnum(
    "KVQuantMode", "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD", start=0
)
sys.modules["vllm.v1.kv_cache_interface"] = Mock(KVQuantMode=modes)
attention = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention

values, seen = torch.ones(1, 16, 1, 32), []
starts, length, table = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [0], [[0] * 8]))
segments = {"seq_threshold_3D": 1, "num_par_softmax_segments": 16, "softmax_segm_output": torch.zeros(1, 1, 16, 32)}
segments |= {f"softmax_segm_{each}": torch.zeros(1, 1, 16) for each in ("max", "expsum")}
for form, more in (("2D", {}), ("3D", segments)):
    q, out = torch.ones(1, 1, 32), torch.full((1, 1, 32), 7.0)
    rest = (starts, 1, length, 0, 1.0, True, (-1, -1), table, 0, None, None, None)
    attention(q, values, values, out, *rest, **more)
    print(f"{form}: output {out[0, 0, 0].item()} for length 0")
    seen.append(bool(out.isnan().any()))
sys.exit(seen == [False, True])
