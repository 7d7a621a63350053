"""PyTorch's PagedAttention.convert_logical_block_mask raises for an empty batch, which create_block_mask accepts."""

import sys

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

paged = PagedAttention(2, 16, 1, device="cpu")
mask = create_block_mask(noop_mask, 0, None, 1, 16, device="cpu", BLOCK_SIZE=(1, 16))
print("create_block_mask for a batch of 0:", tuple(mask.kv_indices.shape))
none = torch.zeros(0, dtype=torch.int64)
try:
    paged.convert_logical_block_mask(mask, batch_idx=none, kv_len=none)
except RuntimeError as error:
    print("convert_logical_block_mask:", error)
    sys.exit("cannot reshape tensor of 0 elements" in str(error))
