"""FlashInfer: a batch of no sequences, and a write of no tokens, raise errors of CUDA or of Python's max()."""

import sys

import flashinfer
import torch

DIM, SIZE = 64, 16
zero, one = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0], [0, 1]))
caches = tuple(torch.zeros(1, SIZE, 1, DIM, dtype=torch.float16, device="cuda") for _ in range(2))
row = torch.ones(1, 1, DIM, dtype=torch.float16, device="cuda")


def decode(sequences, tensor_cores):
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_tensor_cores=bool(tensor_cores), backend="fa2"
    )
    pages = zero[:sequences]
    wrapper.plan(one[: sequences + 1], pages, pages + 1, 1, 1, DIM, SIZE, q_data_type=torch.float16)
    return wrapper.run(row[:sequences], caches)


def append(tokens):
    rows, places = row[:tokens], zero[:tokens]
    flashinfer.append_paged_kv_cache(rows, rows, places, places, caches, zero, one, zero + SIZE)


failed = []
for call, *arguments in ((append, 1), (decode, 1, 0), (decode, 1, 1), (append, 0), (decode, 0, 0), (decode, 0, 1)):
    try:
        call(*arguments)
        said = "done"
    except (RuntimeError, ValueError) as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"{call.__name__} of {arguments[0]}: {said}")
    failed.append(said != "done")
sys.exit(failed == [False, False, False, True, True, True])
