"""PyTorch's PagedAttention with flex_attention, uncompiled: NaN in a page that nobody owns makes the output NaN."""

import sys

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

PAGES, SIZE = 2, 16
paged = PagedAttention(PAGES, SIZE, 1, device="cpu")
zero, length = torch.tensor([0]), torch.tensor([SIZE])
paged.reserve(zero, length)  # one page of the two
keys, values = (torch.zeros(1, 1, PAGES * SIZE, 16) for _ in range(2))
new = torch.ones(1, 1, SIZE, 16)
paged.assign(zero, torch.arange(SIZE)[None], new, new, keys, values)
mask = create_block_mask(noop_mask, 1, None, 1, SIZE, device="cpu", BLOCK_SIZE=(1, SIZE))
mask = paged.convert_logical_block_mask(mask, kv_len=length)
free = paged.empty_pages[0]
seen = []
for poison in (0.0, float("nan")):
    values[:, :, free * SIZE : (free + 1) * SIZE] = poison
    out = flex_attention(
        torch.ones(1, 1, 1, 16), keys, values, score_mod=paged.get_score_mod(None, length), block_mask=mask
    )
    print(f"{poison} in free page {free}: output {out[0, 0, 0, 0].item()}, right is 1.0")
    seen.append(bool(out.isnan().any()))
sys.exit(seen == [False, True])
