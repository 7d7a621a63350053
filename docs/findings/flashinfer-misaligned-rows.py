"""FlashInfer's decode and append: an illegal access where rows do not begin at multiples of 16 bytes."""

import multiprocessing
import sys

import flashinfer
import torch

DIM, SIZE = 64, 16


def decode(gap):
    """Two sequences of one token each; their queries lie `gap` elements apart."""
    query = torch.ones(2, DIM + gap, dtype=torch.float16, device="cuda")[:, None, :DIM]
    cache = torch.ones(2, SIZE, 1, DIM, dtype=torch.float16, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"))
    indptr, pages, last = (torch.tensor(each, device="cuda").int() for each in ([0, 1, 2], [0, 1], [1, 1]))
    wrapper.plan(indptr, pages, last, 1, 1, DIM, SIZE, q_data_type=torch.float16)
    wrapper.run(query, (cache, cache))
    torch.cuda.synchronize()


def append(gap):
    """Two tokens whose keys and values lie `gap` elements apart."""
    rows = torch.ones(2, DIM + gap, dtype=torch.float16, device="cuda")[:, None, :DIM]
    cache = tuple(torch.zeros(1, SIZE, 1, DIM, dtype=torch.float16, device="cuda") for _ in range(2))
    zeros, places, ends, size = (torch.tensor(each, device="cuda").int() for each in ([0, 0], [0, 1], [0, 1], [SIZE]))
    flashinfer.append_paged_kv_cache(rows, rows, zeros, places, cache, zeros[:1], ends, size)
    torch.cuda.synchronize()


if __name__ == "__main__":
    ended = []
    for call, gap in ((decode, 8), (decode, 2), (append, 8), (append, 2)):
        process = multiprocessing.get_context("spawn").Process(target=call, args=(gap,))
        process.start(), process.join()
        print(f"{call.__name__}, rows {2 * (DIM + gap)} bytes apart: exit status {process.exitcode}")
        ended.append(process.exitcode)
    sys.exit(ended == [0, 1, 0, 1])
