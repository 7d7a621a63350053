"""Kernels written by hand, each for something that the memoised interpreter could get wrong."""

# The parameters of kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SCALE = 2.0
SHIFT = tl.constexpr(1)


@triton.jit
def operands(x, y, out, N: tl.constexpr):
    """Equal types and other aliasing: each line must be its own. What is one object comes first, and last once."""
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + a)
    tl.store(out + N + i, a + b)
    tl.store(out + 2 * N + i, b - a)
    tl.store(out + 3 * N + i, a - a)
    tl.store(out + 4 * N + i, tl.where(a > b, b, b))
    tl.store(out + 5 * N + i, tl.where(a > b, a, b))
    tl.store(out + 6 * N + i, tl.where(a > a, a, b))
    c = a
    tl.store(out + 7 * N + i, c * b + tl.maximum(c, a))


@triton.jit
def scalars(x, out, N: tl.constexpr):
    """Values of equal hash and other type, and of equal type that only their bits tell apart."""
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, v * 1)
    tl.store(out + N + i, v * True)
    tl.store(out + 2 * N + i, v * 1.0)
    tl.store(out + 3 * N + i, v * 2.0)
    tl.store(out + 4 * N + i, v * 0.0)
    tl.store(out + 5 * N + i, v * -0.0)
    tl.store(out + 6 * N + i, tl.where(v > 0, 0.0, v))
    tl.store(out + 7 * N + i, tl.where(v > 0, -0.0, v))
    tl.store(out + 8 * N + i, tl.where(v > 0, float("nan"), v))
    tl.store(out + 9 * N + i, tl.where(v > 0, -float("nan"), v))
    tl.store(out + 10 * N + i, v + SHIFT)
    tl.store(out + 11 * N + i, v + 2147483647)
    tl.store(out + 12 * N + i, v + 2147483648)
    tl.store(out + 13 * N + i, v - 4294967295)


@triton.jit
def masks(x, out, other, N: tl.constexpr):
    i = tl.arange(0, N)
    none = None
    tl.store(out + i, tl.load(x + i, mask=i < 3, other=0))
    tl.store(out + N + i, tl.load(x + i, mask=None))
    tl.store(out + 2 * N + i, tl.load(x + i, mask=i < 2))
    tl.store(out + 3 * N + i, tl.load(x + i, mask=i >= 0, other=7))
    tl.store(out + 4 * N + i, tl.load(x + i, none))
    tl.store(out + 5 * N + i, tl.load(x + i, i < 1))
    tl.store(out + 6 * N + i, tl.load(x + i, mask=i < 3, other=other))
    tl.store(out + 7 * N + i, i, mask=none)
    tl.store(out + 8 * N + i, i, mask=i > 2)
    # A scalar `other` of a scalar pointer decides by its value whether it counts.
    tl.store(out + 9 * N, tl.load(x + 1, mask=other == 0, other=other))
    tl.store(out + 9 * N + 1, tl.load(x + 1, mask=other != 0, other=3))


@triton.jit
def integers(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, v * v)
    tl.store(out + N + i, (v << 1) ^ (v >> 2))
    tl.store(out + 2 * N + i, (v // 3) * 1000 + v % 3)
    u = v.to(tl.uint32, bitcast=False)
    tl.store(out + 3 * N + i, (u >> 3).to(tl.int32))
    tl.store(out + 4 * N + i, ((u ^ 5) >> 1).to(tl.int64) + (u >> (i & 3)).to(tl.int64))
    tl.store(out + 5 * N + i, tl.sum(v, 0) + tl.max(v, 0) - tl.min(v, 0) + tl.xor_sum(v, 0))
    tl.store(out + 6 * N + i, tl.cdiv(v, 3) + tl.umulhi(v.to(tl.int32), v.to(tl.int32)))
    w = v + 2147483647
    tl.store(out + 7 * N + i, w - 1)


@triton.jit
def shift_changes_its_operand(x, out, N: tl.constexpr):
    """Up to triton 3.7 `>>` makes its unsigned operands signed, which what comes after sees."""
    i = tl.arange(0, N)
    u = tl.load(x + i)
    tl.store(out + i, u.to(tl.float32))
    tl.store(out + N + i, (u >> 1).to(tl.float32))
    tl.store(out + 2 * N + i, u.to(tl.float32))
    tl.store(out + 3 * N + i, (u > 5).to(tl.float32) + (u // 3).to(tl.float32))
    three = tl.full([N], 3, u.dtype)
    tl.store(out + 4 * N + i, (u >> three).to(tl.float32) + three.to(tl.float32))
    large = tl.full([N], 4294967293, u.dtype)
    tl.store(out + 5 * N + i, large.to(tl.float32))
    tl.store(out + 6 * N + i, (large >> (u & 3)).to(tl.float32))
    tl.store(out + 7 * N + i, large.to(tl.float32) + large // 3)


@triton.jit
def floats(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i).to(tl.float32), tl.load(y + i).to(tl.float32)
    tl.store(out + i, tl.maximum(a, b))
    tl.store(out + N + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 2 * N + i, tl.minimum(a, b))
    tl.store(out + 3 * N + i, tl.clamp(a, -1.0, 1.0))
    tl.store(out + 4 * N + i, tl.exp(a) / tl.sqrt(b) + tl.sigmoid(a) * tl.rsqrt(tl.abs(b)))
    tl.store(out + 5 * N + i, tl.fma(a, b, -a) + tl.fdiv(a, b))
    tl.store(out + 6 * N + i, tl.softmax(a, 0) + tl.cumsum(b, 0))
    tl.store(out + 7 * N + i, (a == a).to(tl.float32) - (a != b).to(tl.float32))
    tl.store(out + 8 * N + i, a.to(tl.float16).to(tl.float32) + b.to(tl.bfloat16).to(tl.float32))
    tl.store(out + 9 * N + i, a % b)
    tl.store(out + 10 * N + i, -a)


@triton.jit
def atomics(out, x, INTEGERS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    a = tl.atomic_add(out + i // 2, v, mask=i > 0)
    b = tl.atomic_add(out + i // 2, 1)
    c = tl.atomic_max(out + N + i, v)
    d = tl.atomic_xchg(out + 2 * N + i, v, mask=None) if INTEGERS else v
    e = tl.atomic_cas(out + 3 * N, tl.load(out + 3 * N + 1), tl.load(x))
    tl.store(out + 4 * N + i, tl.where(i > 0, a, 0) + b + c + d + e)  # a masked lane gives whatever was in memory


@triton.jit
def races(x, out, N: tl.constexpr):
    """Programs see each other's stores, and their own after their loads."""
    i = tl.arange(0, N)
    before = tl.load(out + i)
    tl.store(out + i, tl.load(x + i) + before * 2)
    tl.store(out + i, tl.load(out + i) + before)
    tl.debug_barrier()


@triton.jit
def raising(x, out, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, v + 1)
    if tl.program_id(0) == 1:
        if KIND == 0:
            v = v + tl.arange(0, 2 * N)
        elif KIND == 1:
            v = tl.exp(i)
        elif KIND == 2:
            tl.device_assert(tl.sum(v, 0) > 1e9, "too small")
        elif KIND == 3:
            tl.static_assert(N > 1000, "too few")
        elif KIND == 4:
            v = tl.sum(v, 3)
        elif KIND == 5:
            v = tl.load(v)
        elif KIND == 6:
            v = undefined_name  # type: ignore[name-defined]  # noqa: F821  # a kernel that raises NameError
        elif KIND == 7:
            v = nested_raise(v, N)
        elif KIND == 8:
            v = tl.softmax(i, 0) & v
        elif KIND == 9:
            v = tl.arange(0, 3)
        elif KIND == 10:
            v = tl.reshape(v, (3, N))
        elif KIND == 11:
            tl.assume(v > 1e9)
        elif KIND == 12:
            v = v.to(tl.int32, fp_downcast_rounding="up")
        elif KIND == 13:
            v = tl.dot(v[:, None], v[None, :], input_precision="seven")
        elif KIND == 14:
            v = tl.where(v, v, 1)
        elif KIND == 15:
            v = v[0]
        elif KIND == 16:
            v = tl.zeros([N], v)
    tl.store(out + N + i, v)


@triton.jit
def nested_raise(x, N: tl.constexpr):
    return nested_deeper(x, N) + 1


@triton.jit
def nested_deeper(x, N: tl.constexpr):
    return tl.view(x, (N, 2))


@triton.jit
def fibonacci(n):
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


@triton.jit
def recursion(x, out):
    tl.store(out + tl.program_id(0), fibonacci(tl.load(x + tl.program_id(0))))


@triton.jit
def collatz(x, out):
    n = tl.load(x + tl.program_id(0))
    if n <= 0:
        return
    steps = 0
    while n > 1:
        if n % 2 == 0:  # noqa: SIM108  # the branch is what is tried
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    tl.store(out + tl.program_id(0), steps)


@triton.jit
def globals_count(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * SCALE)


@triton.jit
def shapes(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    m = tl.trans(tl.reshape(v, (2, N // 2)))
    s, t = tl.sum(m, 1), tl.sum(m, axis=0, keep_dims=True)
    low, high = tl.split(tl.join(v, v * 2))
    r = tl.reshape(m * t + s[:, None] + tl.sum(m), (N,))
    tl.store(out + i, r + low - high + tl.sort(v) + tl.flip(v, 0))
    q = tl.ravel(tl.dot(m.to(tl.float32), tl.trans(m).to(tl.float32)))
    tl.store(out + N + i, tl.sum(q, 0) + tl.gather(v, (i + 1) % N, 0).to(tl.float32))
    tl.store(out + 2 * N + i, tl.histogram(i % 3, N) + tl.argmax(v, 0) - tl.argmin(v, 0))
    tl.store(out + 3 * N + i, tl.cat(i, i, can_reorder=True).sum() + m.T.sum() + tl.interleave(i, i).sum())
    top, where = tl.max(v, 0, return_indices=True)
    tl.store(out + 4 * N + i, top + where + tl.rand(3, i) + tl.randint(4, i) % 5)


@triton.jit
def types_from_arguments(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, v.to(y.dtype.element_ty).to(out.dtype.element_ty))
    tl.store(out + N + i, tl.zeros_like(v) + tl.full(v.shape, 3, y.dtype.element_ty).to(v.dtype))
    p = tl.where(i < 2, x + i, x + 2 * i)
    tl.store(out + 2 * N + i, tl.load(p, mask=2 * i < N))
    tl.store(out + 3 * N + i, tl.load((y + i).to(x.dtype)) if N == 0 else v)
    q = (x + i).to(tl.int64).to(x.dtype)
    tl.store(out + 3 * N + i, tl.load(q))


@triton.jit
def wild(x, places, out, scale, N: tl.constexpr):
    """Writes to places that the tensor may not have; the tracer refuses those."""
    i = tl.arange(0, N)
    place = tl.load(places + tl.program_id(0) * N + i)
    v = tl.load(x + place, mask=place < 100, other=0)
    tl.store(out + place * scale, v + i, mask=place >= 0)
    tl.atomic_add(out + place, v, mask=place < 3)


@triton.jit
def wild_origins(x, y, out, index, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.where(i < 2, x + i, y + i + index)
    tl.store(out + i, tl.load(p))
    q = ((x + i).to(tl.int64) + index).to(y.dtype)
    tl.store(out + i, tl.load(q + index))
    tl.store(tl.broadcast_to(out[None], (N,)) if N == 0 else tl.broadcast_to(out + index, (N,)), tl.load(y + i))


@triton.jit
def descriptor(block, x, out, rows, N: tl.constexpr):
    v = block.load([0, 16])
    block.store([2, 16], v)
    made = tl.make_tensor_descriptor(x, shape=[rows, 20], strides=[32, 1], block_shape=[8, N])
    v += made.load([0, 16])
    tl.store(out + tl.arange(0, 8)[:, None] * N + tl.arange(0, N)[None, :], v)


def first_is_best(call: Any, quantiles: Any = None) -> list[float]:
    call()
    return [1.0, 1.0, 1.0]


@triton.autotune([triton.Config({"N": 4}), triton.Config({"N": 8})], key=["n"], do_bench=first_is_best)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def tuned(x, out, n, N: tl.constexpr, EVEN: tl.constexpr):
    for start in range(0, n, N):
        i = start + tl.arange(0, N)
        tl.store(out + i, tl.load(x + i, mask=i < n) * (2 if EVEN else 3), mask=i < n)


@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def heuristic(x, out, n, N: tl.constexpr, EVEN: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < n) * (2 if EVEN else 3), mask=i < n)


@triton.jit
def defaults(x, out, n=3, scale=2.0, N: tl.constexpr = 4):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * scale, mask=i < n)


@triton.jit
def matmul(a, b, out, PRECISION: tl.constexpr, N: tl.constexpr):
    p = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(a + p), tl.load(b + p)
    acc = tl.dot(x, y, input_precision=PRECISION)
    tl.store(out + p, tl.dot(x, tl.trans(x), acc))
    tl.store(out + N * N + p, tl.dot(x, x).to(out.dtype.element_ty))


@triton.jit
def fp8(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i).to(tl.float32)
    tl.store(out + i, (v * 0.5).to(tl.float8e5).to(tl.float32))
    tl.store(out + N + i, (v * 0.5).to(tl.float8e4nv).to(tl.float32))


def redefined(scale: str) -> Any:
    """A kernel of one name and place whose text changes."""
    namespace: dict[str, Any] = {"triton": triton, "tl": tl}
    exec(f"def same(x, out):\n    tl.store(out, tl.load(x) * {scale})\n", namespace)
    return triton.jit(namespace["same"])


Launch = tuple[str, Any, tuple[int, ...], list[Any], dict[str, Any]]


def launches() -> Iterator[Launch]:
    """Name, kernel, grid, arguments, keyword arguments."""
    random = torch.Generator().manual_seed(11)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 3e38, 1.5])
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8]
    dtypes += [torch.uint8, torch.int16, torch.uint32, torch.bool]

    def some(count: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(count, generator=random) * 20).to(dtype)

    def odds(dtype: torch.dtype) -> torch.Tensor:
        return odd[torch.randperm(8, generator=random)].to(dtype)

    for dtype in dtypes:
        for N in (4, 8):
            x, y = some(N, dtype), some(N, dtype)
            yield f"operands {dtype}", operands, (1,), [x, y, torch.zeros(8 * N, dtype=dtype), N], {}
            yield f"operands, one {dtype}", operands, (1,), [x, x, torch.zeros(8 * N, dtype=dtype), N], {}
            yield f"scalars {dtype}", scalars, (1,), [x, torch.zeros(14 * N, dtype=dtype), N], {}
            yield f"scalars {dtype} to float", scalars, (1,), [x, torch.zeros(14 * N), N], {}
            for other in (0, 1.5, 7):
                yield f"masks {dtype} {other}", masks, (1,), [x, torch.zeros(10 * N, dtype=dtype), other, N], {}
            yield f"integers {dtype}", integers, (2,), [x, torch.zeros(8 * N, dtype=torch.int64), N], {}
            yield f"shift {dtype}", shift_changes_its_operand, (2,), [x.to(torch.uint32), torch.zeros(8 * N), N], {}
            yield f"races {dtype}", races, (3,), [x, torch.zeros(N, dtype=dtype), N], {}
            yield f"shapes {dtype}", shapes, (1,), [x, torch.zeros(5 * N), N], {}
            yield f"types {dtype}", types_from_arguments, (1,), [x, some(N, torch.float16), torch.zeros(4 * N), N], {}
            yield f"redefined {dtype}", redefined(str(N)), (1,), [x, torch.zeros(1, dtype=dtype)], {}
            global SCALE
            SCALE = N / 3
            yield f"globals {dtype}", globals_count, (1,), [x, torch.zeros(N), N], {}
        for target in (torch.float32, dtype):
            yield f"floats {dtype}", floats, (1,), [odds(dtype), odds(dtype), torch.zeros(88).to(target), 8], {}
        yield f"scalars, odd {dtype}", scalars, (1,), [odds(dtype), torch.zeros(112), 8], {}
        yield f"shapes, odd {dtype}", shapes, (2,), [odds(dtype), torch.zeros(40), 8], {}
        yield (
            f"atomics {dtype}",
            atomics,
            (3,),
            [torch.zeros(20, dtype=dtype), some(4, dtype), not dtype.is_floating_point, 4],
            {},
        )
        yield f"matmul {dtype}", matmul, (1,), [some(16, dtype), some(16, dtype), torch.zeros(32), "ieee", 4], {}
        yield f"matmul, default {dtype}", matmul, (1,), [some(16, dtype), odds(dtype), torch.zeros(32), None, 2], {}
        yield f"fp8 {dtype}", fp8, (1,), [some(8, dtype), torch.zeros(16), 8], {}
        yield f"tuned {dtype}", tuned, (1,), [some(8, dtype), torch.zeros(8, dtype=dtype), 7], {}
        yield f"heuristic {dtype}", heuristic, (1,), [some(8, dtype), torch.zeros(8, dtype=dtype), 6, 8], {}
        yield f"defaults {dtype}", defaults, (1,), [some(8, dtype), torch.zeros(8, dtype=dtype)], {}
        yield f"keywords {dtype}", defaults, (1,), [some(8, dtype)], {"out": torch.zeros(8), "N": 8, "scale": -0.0}
        yield f"missing {dtype}", defaults, (1,), [some(8, dtype)], {}
        yield f"twice {dtype}", defaults, (1,), [some(8, dtype)], {"x": some(8, dtype), "out": torch.zeros(8)}
    extremes = torch.tensor([2**31 - 1, -(2**31), -1, 0, 1, 65536, -65537, 7], dtype=torch.int32)
    for dtype in (torch.int32, torch.int64, torch.uint32, torch.int16):
        yield f"integers, extreme {dtype}", integers, (1,), [extremes.to(dtype), torch.zeros(64).long(), 8], {}
        yield f"scalars, extreme {dtype}", scalars, (1,), [extremes.to(dtype), torch.zeros(112, dtype=dtype), 8], {}
    for repeat in range(2):
        for kind in range(17):
            yield f"raising {kind} {repeat}", raising, (3,), [some(4, torch.float32), torch.zeros(8), kind, 4], {}
        for n in (0, 1, 6, 27):
            yield f"collatz {n}", collatz, (3,), [torch.tensor([n, 3, -1]), torch.zeros(3).int()], {}
        yield f"recursion {repeat}", recursion, (3,), [torch.tensor([1, 5, 7]), torch.zeros(3).int()], {}
        for places in ([0, 1, 2, 3], [3, 9, 0, 1], [-1, 2, 2, 2], [0, 0, -2, 40], [200, 1, 1, 1]):
            place = torch.tensor(places, dtype=[torch.int32, torch.int64][repeat])
            for scale in (1, 3):
                yield f"wild {places}", wild, (1,), [some(8, torch.float32), place, torch.zeros(8), scale, 4], {}
        for index in (0, 2, 5, -3):
            x, y, out = some(4, torch.float32), some(4, torch.float32), torch.zeros(4)
            yield f"origins {index}", wild_origins, (1,), [x, y, out, index, 4], {}
        for rows in (4, 5):
            x, out = some(128, torch.float32).view(4, 32), torch.zeros(8, 16)
            yield (
                f"descriptor {rows}",
                descriptor,
                (1,),
                [TensorDescriptor(x, [4, 20], [32, 1], [8, 16]), x, out, rows, 16],
                {},
            )
