"""What the memoised interpreter gains: a launch in stock Triton's interpreter, corrected, and fast; one core.

    python bench/interpreter.py [--rounds N]

Processor time of a launch in milliseconds, the median of many, and how many times as fast as stock. Each mode is a
process of its own, and the processes take turns, so that a busy machine slows all of them.
"""

# The parameters of kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
import triton
import triton.language as tl

MODES = ("stock", "corrected", "fast")
B, H, KVH = 2, 4, 2


@triton.jit
def write(key, value, k_cache, v_cache, slots, key_stride, value_stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """One program copies one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    offs = tl.arange(0, PADDED)
    mask = offs < tl.where(slot >= 0, SIZE, 0)
    k = tl.load(key + token * key_stride + offs, mask=mask)
    tl.store(k_cache + slot * SIZE + offs, k, mask=mask)
    v = tl.load(value + token * value_stride + offs, mask=mask)
    tl.store(v_cache + slot * SIZE + offs, v, mask=mask)


@triton.jit
def decode(
    q,
    k_cache,
    v_cache,
    tables,
    lens,
    out,
    scale,
    table_stride,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    KVH: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    """One program a sequence and query head, page by page, as one writes it first."""
    b, h = tl.program_id(0), tl.program_id(1)
    n = tl.load(lens + b)
    d, j = tl.arange(0, D), tl.arange(0, BLOCK)
    query = tl.load(q + (b * H + h) * D + d).to(tl.float32)
    m, total, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for page in range(0, tl.cdiv(n, BLOCK)):
        block = tl.load(tables + b * table_stride + page).to(tl.int64)
        live = page * BLOCK + j < n
        p = ((block * BLOCK + j) * KVH + h // GROUP)[:, None] * D + d[None, :]
        k = tl.load(k_cache + p, mask=live[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_cache + p, mask=live[:, None], other=0.0).to(tl.float32)
        s = tl.where(live, tl.sum(query[None, :] * k, 1) * scale, -float("inf"))
        new = tl.maximum(m, tl.max(s, 0))
        rescale, weights = tl.exp(m - new), tl.exp(s - new)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
        m = new
    tl.store(out + (b * H + h) * D + d, (acc / total).to(out.dtype.element_ty))


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and launches, of the sizes that a fuzz run has."""
    from pagefuzz.kernels.triton_paged_decode_attention import triton_paged_decode_attention
    from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache

    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    for D, bs in ((8, 4), (32, 16)):
        key, value, caches = some(4, KVH, D), some(4, KVH, D), [some(5, bs, KVH, D) for _ in "kv"]
        slots = torch.tensor([7, -1, 2, 11])
        args = (key, value, *caches, slots, key.stride(0), value.stride(0), KVH * D, KVH * D)
        yield f"write, 4 tokens, D={D}", partial(write[(4,)], *args)
        own: tuple[Any, ...] = (key, value, *caches, slots)
        yield "  the project's own", partial(triton_reshape_and_cache, *own)
    for D, bs, lens in ((8, 4, (3, 9)), (32, 16, (17, 40))):
        blocks = [-(-n // bs) for n in lens]
        caches = [some(sum(blocks), bs, KVH, D) for _ in "kv"]
        tables = torch.full((B, max(blocks) + 1), 99999, dtype=torch.int32)
        ids = torch.randperm(sum(blocks), generator=random).int()
        tables[0, : blocks[0]], tables[1, : blocks[1]] = ids[: blocks[0]], ids[blocks[0] :]
        q, n = some(B, H, D), torch.tensor(lens, dtype=torch.int32)
        args = (q, *caches, tables, n, torch.empty_like(q), D**-0.5, tables.stride(0), H // KVH, H, KVH, bs, D)
        yield f"decode, D={D}, bs={bs}, n={lens}", partial(decode[(B, H)], *args)
        own = (q, *caches, tables, n, D**-0.5)
        yield "  the project's own", partial(triton_paged_decode_attention, *own)


def child(mode: str) -> None:
    """For every line of input: once through all launches, and a line of their times in milliseconds."""
    if mode != "stock":
        from pagefuzz.fuzz.interpreter import install

        install()
    every = list(launches())
    for _ in range(2):
        for _, launch in every:
            launch()
    for _ in sys.stdin:
        times = []
        for _, launch in every:
            started = time.process_time()
            repeats = 5 if mode == "fast" else 1
            for _ in range(repeats):
                launch()
            times.append((time.process_time() - started) * 1e3 / repeats)
        print(json.dumps(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    children = {}
    for mode in MODES:
        environment = os.environ | {"PAGEFUZZ_STOCK_INTERPRETER": "" if mode == "fast" else "1"}
        command = [sys.executable, __file__, "--child", mode]
        children[mode] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    rounds: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        for mode, process in children.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rounds[mode].append(json.loads(process.stdout.readline()))
    for process in children.values():
        process.communicate()
    print(f"triton {triton.__version__}, torch {torch.__version__}, python {sys.version.split()[0]}")
    print(f"{'milliseconds a launch':36}{'stock':>9}{'corrected':>11}{'fast':>9}{'stock / fast':>14}")
    for place, (name, _) in enumerate(launches()):
        stock, corrected, fast = (statistics.median(times[place] for times in rounds[mode]) for mode in MODES)
        print(f"{name:36}{stock:>9.2f}{corrected:>11.2f}{fast:>9.2f}{stock / fast:>14.1f}")


if __name__ == "__main__":
    main()
