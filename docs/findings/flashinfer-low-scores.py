"""FlashInfer's decode: zeros where all scores of a row lie below -50000, whatever their differences are."""

import sys

import flashinfer
import torch

HEADS, DIM, SIZE = 1, 64, 16


def attend(scores, tensor_cores):
    """One query over two tokens with these scores and values of 1 and 0."""
    query = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    keys, values = (torch.zeros(1, SIZE, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    query[..., 0] = -256.0
    keys[0, :2, 0, 0] = torch.tensor(scores) / -256.0  # products of powers of two are exact
    values[0, 0] = 1.0
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), use_tensor_cores=tensor_cores, backend="fa2"
    )
    one_page, zero = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 1], [0]))
    last = torch.tensor([2], dtype=torch.int32, device="cuda")
    wrapper.plan(one_page, zero, last, HEADS, HEADS, DIM, SIZE, q_data_type=torch.bfloat16, sm_scale=1.0)
    return wrapper.run(query, (keys, values))[0, 0, 0].item()


shown = []
for tensor_cores in (False, True):
    high, low = attend([-32768.0, -32768.0], tensor_cores), attend([-65536.0, -65536.0], tensor_cores)
    print(f"tensor cores {tensor_cores}: scores -32768 twice {high}, -65536 twice {low}; right is 0.5 in both")
    shown.append(high == 0.5 and low == 0.0)
sys.exit(any(shown))
