"""FlagGems' reshape_and_cache_flash writes 2^31 elements before the cache when slots are int32."""

import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "1"
import torch

root = Path(importlib.util.find_spec("flag_gems").origin).parent
# The one file that holds the kernel, without the devices and caches of compiled kernels around it.
sys.modules["flag_gems"] = sys.modules["flag_gems.runtime"] = MagicMock()
sys.modules["flag_gems.config"] = MagicMock(use_c_extension=False)
sys.modules["flag_gems.utils"] = MagicMock(libentry=lambda: lambda jitted: jitted)
spec = importlib.util.spec_from_file_location("write", root / "fused/reshape_and_cache_flash.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

HALF = 1 << 31
pool = torch.empty(2 * HALF + 16, dtype=torch.uint8)  # only the pages that are touched take memory
cache = pool[HALF:].view(-1, 1, 1, 16)  # [blocks, block size, heads, head dim]
slot = HALF // 16  # the element 2^31 of the cache, and its last block
key = torch.full((1, 1, 16), 42, dtype=torch.uint8)
wrong = []
for dtype in (torch.int64, torch.int32):
    cache[slot], pool[:16] = 0, 0
    slots = torch.tensor([slot], dtype=dtype)
    module.reshape_and_cache_flash(key, key, cache, cache, slots, "auto", None, None)
    print(f"{dtype}: in the slot {cache[slot, 0, 0, 0]} of 42, 2^31 elements before the cache {pool[0]} of 0")
    wrong.append(bool((cache[slot] != 42).any()))
sys.exit(wrong == [False, True])
