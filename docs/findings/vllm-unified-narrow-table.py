"""vLLM's unified_attention loads a table entry past the last page, here past the end of the table's memory."""

import ctypes
import mmap
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

killed = []
for columns in (8, 1):  # each in a child, with a table that ends where memory ends
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    table = torch.frombuffer(memory, dtype=torch.int32, count=columns, offset=mmap.PAGESIZE - 4 * columns)[None]
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(table.data_ptr() + 4 * columns), mmap.PAGESIZE, 0)
    if not (child := os.fork()):
        page, length = torch.ones(1, 16, 1, 32), torch.tensor([1]).int()
        rest = (torch.tensor([0, 1]).int(), 1, length, 1, 1.0, True, (-1, -1), table, 0, None, None, None)
        attention(page[0, :1], page, page, torch.empty(1, 1, 32), *rest)
        os._exit(0)
    killed.append(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
    print(f"1 token, pages of 16, a table of {columns} column(s): {'killed' if killed[-1] else 'well'}")
sys.exit(killed == [False, True])
