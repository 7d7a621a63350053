"""vLLM's chunked_prefill_paged_decode loads an entry past the end of the table when blocks hold 48 tokens."""

import ctypes
import mmap
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
for name in ("_custom_ops", "logger", "platforms.rocm", "v1.attention.ops.prefix_prefill", "utils.torch_utils"):
    sys.modules[f"vllm.{name}"] = Mock(is_quantized_kv_cache=bool, use_rocm_custom_paged_attention=lambda *_: False)
attention = import_module("vllm.v1.attention.ops.chunked_prefill_paged_decode").chunked_prefill_paged_decode

killed = []
for columns in (2, 1):  # each in a child, with a table that ends where memory ends
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    table = torch.frombuffer(memory, dtype=torch.int32, count=columns, offset=mmap.PAGESIZE - 4 * columns)[None]
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(table.data_ptr() + 4 * columns), mmap.PAGESIZE, 0)
    if not (child := os.fork()):
        starts, length, one = torch.tensor([0, 1]).int(), torch.tensor([33]).int(), torch.ones(1)
        caches, q = (torch.ones(1, 1, 8, 48, 4), torch.ones(1, 1, 32, 48)), torch.ones(1, 1, 32)
        rest = (*caches, table, starts, length, 33, 1, one, one)
        attention(q, None, None, torch.empty_like(q), "auto", *rest, sm_scale=1.0)
        os._exit(0)
    killed.append(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
    print(f"33 tokens, pages of 48, a table of {columns} column(s): {'killed' if killed[-1] else 'well'}")
sys.exit(killed == [False, True])
