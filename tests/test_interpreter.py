"""Tests of fuzz/interpreter: bfloat16 against torch and exact fractions, every other dtype against stock.

Stock cannot be had back once `install` has run, so this file is also a program that a fresh process runs:
`python test_interpreter.py stock` or `installed` prints, as JSON, what that process saw.
"""

# The parameters of kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def"

import gc
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
BF16 = torch.bfloat16
FACTS_ARE_OLD = "triton {} no longer {}: drop the correction from fuzz/interpreter"

if type(tl.sum).__name__ != "InterpretedFunction":
    pytest.skip("this process compiles kernels; set TRITON_INTERPRET=1 before it starts", allow_module_level=True)


@triton.jit
def elementwise(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + tl.program_id(0))
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "neg":
        c = -a
    elif OP == "abs":
        c = tl.abs(a)
    elif OP == "maximum":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimum":
        c = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "fmax":
        c = tl.maximum(a, b)
    elif OP == "clamp":
        c = tl.clamp(a, -b, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "lt":
        c = a < b
    elif OP == "le":
        c = a <= b
    elif OP == "gt":
        c = a > b
    elif OP == "ge":
        c = a >= b
    elif OP == "eq":
        c = a == b
    elif OP == "ne":
        c = a != b
    elif OP == "where":
        c = tl.where(a < b, a, 2.7)
    elif OP == "constants":
        c = 1 + a * 1.3 - 0.7
    elif OP == "mask to number":
        c = (a < b).to(tl.bfloat16) + (a > b).to(tl.float32)
    tl.store(out + tl.program_id(0) * N + i, c)


@triton.jit
def fma(x, y, z, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


@triton.jit
def convert(x, out, ROUNDING: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cast(tl.load(x + i), out.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def implicit_convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def reduced(x, out, OP: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        r = tl.sum(v, AXIS)
    elif OP == "max":
        r = tl.max(v, AXIS)
    elif OP == "min":
        r = tl.min(v, AXIS)
    elif OP == "argmax":
        r = tl.argmax(v, AXIS)
    elif OP == "argmin":
        r = tl.argmin(v, AXIS)
    elif OP == "larger":
        r = tl.reduce(v, AXIS, larger)
    elif OP == "product":
        r = tl.reduce(v, AXIS, product)
    if AXIS is None:
        tl.store(out, r)
    elif AXIS == 0:
        tl.store(out + tl.arange(0, N), r)
    else:
        tl.store(out + tl.arange(0, M), r)


@triton.jit
def scanned(x, out, OP: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    p = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + p)
    if OP == "cumsum":
        r = tl.cumsum(v, AXIS, REVERSE)
    elif OP == "cumprod":
        r = tl.cumprod(v, AXIS, REVERSE)
    else:
        r = tl.associative_scan(v, AXIS, larger, REVERSE)
    tl.store(out + p, r)


@triton.jit
def multiplied(a, b, out, N: tl.constexpr):
    p = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.full([N, N], 0.5, tl.float32)
    tl.store(out + p, tl.dot(tl.load(a + p), tl.load(b + p), acc, input_precision="ieee"))


@triton.jit
def memory(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < 3, other=-1.7))
    tl.store(out + N + i, tl.full([N], 1.7, tl.bfloat16) + tl.zeros([N], tl.bfloat16))
    tl.atomic_add(out + 2 * N + i // 2, tl.load(x + i), mask=i != 1)
    tl.store(out + 3 * N + i, tl.sort(tl.load(x + i)))


@triton.jit
def descriptor(x, out, N: tl.constexpr):
    block = tl.make_tensor_descriptor(x, shape=[3, 20], strides=[24, 1], block_shape=[4, N], padding_option="nan")
    tl.store(out + tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :], block.load([0, 8]))


@triton.jit
def block_pointer(x, out, N: tl.constexpr):
    block = tl.make_block_ptr(x, (3, 20), (24, 1), (0, 8), (4, N), (1, 0))
    v = tl.load(block, boundary_check=(0, 1), padding_option="nan")
    tl.store(out + tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :], v)


@triton.jit
def exponential(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.exp(tl.load(x + i)))


@triton.jit
def loop(n, out):
    total = 0
    for i in range(tl.load(n)):
        total += i
    tl.store(out, total)


@triton.jit
def scalar_mask(slot, out, LIMIT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, i, mask=(i < LIMIT) & (tl.load(slot) >= 0))


@triton.jit
def attention(q, k, v, out, D: tl.constexpr, N: tl.constexpr, PAGES: tl.constexpr):
    head = tl.program_id(0)
    d = tl.arange(0, D)
    j = tl.arange(0, N)
    query = tl.load(q + head * D + d).to(tl.float32)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for page in range(PAGES):
        p = (page * N + j)[:, None] * D + d[None, :]
        s = tl.sum(query[None, :] * tl.load(k + p).to(tl.float32), 1) * 0.3
        s = tl.where(page * N + j < PAGES * N - 3, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 0))
        weight = tl.exp(s - new)
        total = total * tl.exp(m - new) + tl.sum(weight, 0)
        acc = acc * tl.exp(m - new) + tl.sum(weight[:, None] * tl.load(v + p, mask=d[None, :] < D - 1, other=0.5), 0)
        m = new
    tl.store(out + head * D + d, (acc / total).to(out.dtype.element_ty))


@triton.jit
def integers(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    w = tl.where((i % 3 == 0) & (v > 0), v // (i + 1), -v)
    w = ((w << 1) ^ (w >> 2)) + tl.sum(v, 0) * 70000 - tl.max(v, 0) + tl.argmax(v, 0)
    w = tl.minimum(w, 100000) + tl.cdiv(w, 3) + (v.to(tl.float32) * 1.5).to(tl.int32)
    tl.store(out + i, tl.cumsum(w, 0))


@triton.jit
def shapes(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    m = tl.trans(tl.reshape(v, (2, N // 2)))
    m = tl.softmax(m.to(tl.float32), 0) * tl.sum(m, axis=0, keep_dims=True) + tl.sqrt(tl.abs(m.to(tl.float32)))
    tl.atomic_add(out + i // 2, tl.reshape(m, (N,)).to(out.dtype.element_ty), mask=i > 1)
    tl.atomic_max(out + i, v)


IN_OTHER_NAMES = """
@triton.jit
def helper(x):
    return lang.maximum(x, 0.25) + lang.sum(x, 0)

@triton.jit
def kernel(x, out, N: core.constexpr):
    i = core.arange(0, N)
    core.store(out + i, helper(core.load(x + i)) * core.full([N], 2, core.float32))
"""


def exec_kernel() -> Any:
    """A kernel without a source file, which sees triton.language only as `core`, and whose helper sees it as `lang`."""
    helper_globals: dict[str, Any] = {"triton": triton, "core": tl.core, "lang": tl}
    exec(IN_OTHER_NAMES, helper_globals)
    kernel_globals: dict[str, Any] = {"triton": triton, "core": tl.core}
    exec(IN_OTHER_NAMES.split("\n\n")[1], kernel_globals)
    kernel_globals["helper"] = helper_globals["helper"]
    return kernel_globals["kernel"]


def digests() -> dict[str, str]:
    """SHA-1 of what kernels write that use no bfloat16, or only move it."""
    random = torch.Generator().manual_seed(7)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn(shape, generator=random) * 4
        return values.to(dtype)

    def run(kernel: Any, grid: tuple[int, ...], *args: Any) -> str:
        kernel[grid](*args)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return hashlib.sha1(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()

    seen: dict[str, str] = {}
    for dtype in (torch.float32, torch.float16):
        for rows in (16, 64):
            q, k, v = some(3, 16, dtype=dtype), some(rows, 16, dtype=dtype), some(rows, 16, dtype=dtype)
            seen[f"attention {dtype} {rows}"] = run(attention, (3,), q, k, v, torch.zeros_like(q), 16, 8, rows // 8)
        a, b = some(16, 16, dtype=dtype), some(16, 16, dtype=dtype)
        seen[f"dot {dtype}"] = run(multiplied, (1,), a, b, torch.zeros(16, 16), 16)
        seen[f"shapes {dtype}"] = run(shapes, (2,), some(16, dtype=dtype), some(16, dtype=torch.float32), 16)
        for op in ("sum", "max", "argmin", "larger", "product"):
            seen[f"{op} {dtype}"] = run(reduced, (1,), some(4, 8, dtype=dtype), torch.zeros(8), op, 0, 4, 8)
        for op in ("cumsum", "cumprod", "larger"):
            x = some(4, 8, dtype=dtype)
            seen[f"scan {op} {dtype}"] = run(scanned, (1,), x, torch.zeros_like(x), op, 1, True, 4, 8)
        for op in ("add", "div", "maximum", "lt", "where", "constants"):
            x, y = some(64, dtype=dtype), some(2, dtype=dtype)
            seen[f"{op} {dtype}"] = run(elementwise, (2,), x, y, torch.zeros(2, 64, dtype=dtype), op, 64)
        for target in (torch.float64, torch.float16, torch.int8, torch.int64, torch.float8_e5m2, torch.float8_e4m3fn):
            if target != dtype:
                x = some(32, dtype=dtype)
                seen[f"{dtype} to {target}"] = run(convert, (1,), x, torch.zeros(32).to(target), None, 32)
    for dtype in (torch.int8, torch.int32, torch.int64):
        seen[f"integers {dtype}"] = run(integers, (1,), some(16, dtype=dtype), torch.zeros(16, dtype=torch.int64), 16)
    seen["bfloat16 copy"] = run(implicit_convert, (1,), some(64, dtype=BF16), torch.zeros(64, dtype=BF16), 64)
    seen["exec"] = run(exec_kernel(), (1,), some(16), torch.zeros(16), 16)
    return seen


def one(kernel: Any, *args: Any) -> list[Any] | str:
    """What a kernel writes into its second argument, or the name and text of what it raises."""
    try:
        kernel[(1,)](*args)
    except Exception as error:
        return f"{type(error.__cause__).__name__}: {error.__cause__}"
    out = args[1]
    return (out.view(torch.uint16) if out.dtype == BF16 else out.float()).nan_to_num(nan=-1).flatten().tolist()


def facts() -> dict[str, Any]:
    int1, bf = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=BF16)
    odd = torch.tensor([1.0, float("nan"), float("inf"), 1e6])
    return {
        "loop": one(loop, torch.tensor([4], dtype=torch.int32), int1.clone()),
        "scalar mask": one(scalar_mask, int1, torch.full((4,), -1, dtype=torch.int32), 2, 4),
        "int32 product": one(integers_product, torch.tensor([65536], dtype=torch.int32), int1.clone()),
        "int64 argument": one(
            integer_argument, torch.tensor([65536], dtype=torch.int32), torch.ones(1, dtype=torch.int64), 65536
        ),
        "bfloat16 sum": one(bfloat16_sum, bf, torch.zeros(1, dtype=BF16)),
        "bfloat16 dot": one(multiplied, *[torch.ones(16, 16, dtype=BF16)] * 2, torch.zeros(16, 16), 16),
        "bfloat16 constant": one(bfloat16_constant, bf, torch.zeros(1, dtype=BF16)),
        "rounding": one(convert, torch.tensor([1 + 3 * 2.0**-9]), torch.zeros(1, dtype=BF16), None, 1),
        "to fp8": one(convert, odd, torch.zeros(4).to(torch.float8_e4m3fn), None, 4),
        "from fp8": one(convert, odd.to(torch.float8_e5m2), torch.zeros(4), None, 4),
    }


@triton.jit
def integers_product(x, out):
    v = tl.load(x)
    tl.store(out, v * v)


@triton.jit
def integer_argument(x, out, stride: tl.int64):
    tl.store(out, tl.load(x) * stride)


@triton.jit
def bfloat16_sum(x, out):
    v = tl.load(x)
    tl.store(out, v + v)


@triton.jit
def bfloat16_constant(x, out):
    tl.store(out, tl.load(x) * 1.5)


def unknown_triton() -> dict[str, Any]:
    """What install does where a private name is missing."""
    import triton.runtime.interpreter as interpreter

    from pagefuzz.fuzz.interpreter import install

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        triton.__version__, version = "99.0.0", triton.__version__
        install()
        triton.__version__ = version
    newer = {"warnings": [str(warning.message) for warning in caught], "sum": facts()["bfloat16 sum"]}
    newer["memoised"] = "memo" in tl.sum.__class__.__call__.__module__
    import pagefuzz.fuzz.interpreter as room

    room._installed = False
    del interpreter.InterpreterBuilder.binary_op
    before = (interpreter._patch_lang, interpreter.InterpreterBuilder.cast_impl, interpreter.ReduceOps.apply_impl)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        install()
        install()
    after = (interpreter._patch_lang, interpreter.InterpreterBuilder.cast_impl, interpreter.ReduceOps.apply_impl)
    return {"warnings": [str(warning.message) for warning in caught], "stock": before == after, "newer": newer}


def program(mode: str) -> None:
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location("pagefuzz", root / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["pagefuzz"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warnings.simplefilter("ignore")
    if mode != "stock":
        from pagefuzz.fuzz.interpreter import install

        install()
    seen: dict[str, Any] = {"digests": digests(), "facts": facts()}
    seen["memoised"] = "memo" in tl.sum.__class__.__call__.__module__
    if mode == "stock":
        seen["unknown"] = unknown_triton()
    print(json.dumps(seen))


@triton.autotune(configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % 2 == 0})
@triton.jit
def autotuned(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + (1 if EVEN else 2), mask=i < n)


def test_an_autotuned_kernel_runs_with_its_first_configuration() -> None:
    x, out = torch.arange(10.0), torch.zeros(10)
    autotuned[lambda meta: (1 if meta["BLOCK"] == 4 else 0,)](x, out, 10)
    assert out.tolist() == (x + 1).tolist()


if __name__ == "__main__":
    program(sys.argv[1])


@pytest.fixture(scope="module")
def processes() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    switches = {"stock": "", "installed": "", "switched off": "1"}
    running = {
        mode: subprocess.Popen(
            [sys.executable, __file__, mode],
            stdout=subprocess.PIPE,
            env=environment | {"PAGEFUZZ_STOCK_INTERPRETER": switch},
        )
        for mode, switch in switches.items()
    }
    seen = {mode: process.communicate(timeout=120)[0] for mode, process in running.items()}
    return {mode: json.loads(text) for mode, text in seen.items()}


@pytest.fixture
def installed() -> Iterator[None]:
    from pagefuzz.fuzz.interpreter import install

    install()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def test_other_dtypes_are_bitwise_stock(processes: dict[str, Any]) -> None:
    stock, patched = processes["stock"]["digests"], processes["installed"]["digests"]
    assert len(stock) > 50
    assert {name for name in stock if stock[name] != patched[name]} == set()


def test_stock_facts(processes: dict[str, Any]) -> None:
    def holds(fact: bool, what: str) -> None:
        assert fact, FACTS_ARE_OLD.format(triton.__version__, what) + f"; seen: {seen}"

    seen = processes["stock"]["facts"]
    raises = "TypeError: only 0-dimensional arrays can be converted to Python scalars"
    holds(seen["loop"] == (raises if VERSION == (3, 6) and NUMPY >= (2, 4) else [6]), "fails on range(runtime value)")
    refused = "ValueError: mask has unsupported dtype"
    holds(seen["scalar mask"] == (refused if VERSION == (3, 9) else [0, 1, -1, -1]), "refuses vector & scalar masks")
    holds(seen["int32 product"] == [0], "wraps int32 products silently")
    holds(seen["int64 argument"] == [0], "makes an argument that is annotated tl.int64 an int32 one")
    holds(seen["bfloat16 sum"] == [0x3F80 + 0x3F80], "adds the bit patterns of bfloat16")
    holds(seen["bfloat16 dot"] != [16.5] * 256, "multiplies the bit patterns of bfloat16 in tl.dot")
    holds(seen["bfloat16 constant"] != [0x3FC0], "gets bfloat16 constants wrong")
    holds(seen["rounding"] == [0x3F80], "truncates float32 to bfloat16")
    holds(seen["to fp8"] == [1, 384, 256, -1], "converts NaN, inf and 1e6 wrongly to fp8")
    holds(seen["from fp8"] == [1, 114688, 65536, 65536], "converts NaN and inf wrongly from fp8")


def test_installed_facts(processes: dict[str, Any]) -> None:
    seen = processes["installed"]["facts"]
    assert seen["loop"] == [6]
    assert seen["scalar mask"] == [0, 1, -1, -1]
    assert seen["int32 product"] == [0]
    assert seen["int64 argument"] == [2**32]
    assert seen["bfloat16 sum"] == [0x4000]
    assert seen["bfloat16 constant"] == [0x3FC0]
    assert seen["rounding"] == [0x3F81]


def test_unknown_triton_warns_once_and_stays_stock(processes: dict[str, Any]) -> None:
    seen = processes["stock"]["unknown"]
    assert seen["stock"]
    assert len(seen["warnings"]) == 1 and "binary_op" in seen["warnings"][0] and "3.6 to 3.9" in seen["warnings"][0]


def test_newer_triton_is_corrected_but_not_memoised(processes: dict[str, Any]) -> None:
    seen = processes["stock"]["unknown"]["newer"]
    assert len(seen["warnings"]) == 1 and "triton 99.0.0" in seen["warnings"][0]
    assert seen["sum"] == [0x4000] and not seen["memoised"]


def test_switch(processes: dict[str, Any]) -> None:
    assert processes["switched off"]["facts"] == processes["installed"]["facts"]
    assert processes["switched off"]["digests"] == processes["installed"]["digests"]
    memoised = {mode: seen["memoised"] for mode, seen in processes.items()}
    assert memoised == {"stock": False, "installed": True, "switched off": False}


@pytest.mark.usefixtures("installed")
def test_language_is_patched_once() -> None:
    def launch() -> None:
        implicit_convert[(1,)](torch.ones(4), torch.zeros(4), 4)

    launch()
    before = [id(member) for member in (tl.load, tl.core.load, tl.tensor.__add__, tl.math.exp, tl.range)]
    launch()
    assert before == [id(member) for member in (tl.load, tl.core.load, tl.tensor.__add__, tl.math.exp, tl.range)]


ALL = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(BF16)
OTHERS = torch.cat(
    [
        torch.tensor(
            [0.0, 1.0, 1.0078125, 0.3, 3.0, 2.5, 2.0**-126, 2.0**-133, 127 * 2.0**-133, 1e30, 2e38, 3.3895e38]
        ),
        torch.tensor([float("inf"), float("nan")]),
    ]
).to(BF16)
OTHERS = torch.cat([OTHERS, -OTHERS])


def differences(actual: torch.Tensor, expected: torch.Tensor, signed_zeros: bool = True) -> list[tuple[int, ...]]:
    """Indices at which two tensors of one dtype differ; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    equal = actual == expected
    if actual.is_floating_point():
        if signed_zeros:
            equal &= torch.signbit(actual) == torch.signbit(expected)
        equal |= actual.isnan() & expected.isnan()
    return [tuple(index) for index in (~equal).nonzero()[:5].tolist()]


ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": lambda a, b: (0 - a if VERSION < (3, 8) else -a).expand(len(b), -1),
    "abs": lambda a, b: a.abs().expand(len(b), -1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda a, b: torch.minimum(torch.maximum(a, -b), b),
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "where": lambda a, b: torch.where(a < b, a, torch.tensor(2.7, dtype=BF16)),
    "constants": lambda a, b: (1 + a * torch.tensor(1.3, dtype=BF16) - torch.tensor(0.7, dtype=BF16)).expand(
        len(b), -1
    ),
    "mask to number": lambda a, b: ((a < b).float() + (a > b).float()).to(BF16),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_bfloat16_elementwise(op: str) -> None:
    a, b = ALL, OTHERS
    expected = ELEMENTWISE[op](a[None, :], b[:, None])
    out = torch.zeros(len(b), len(a), dtype=expected.dtype)
    elementwise[(len(b),)](a, b, out, op, len(a))
    # Which zero a maximum of two zeros is, neither torch nor triton says.
    assert differences(out, expected, signed_zeros=op not in ("maximum", "minimum", "clamp")) == []


@pytest.mark.usefixtures("installed")
def test_bfloat16_maximum_that_ignores_nan_is_float32s() -> None:
    out, wide = torch.zeros(len(OTHERS), len(ALL), dtype=BF16), torch.zeros(len(OTHERS), len(ALL))
    elementwise[(len(OTHERS),)](ALL, OTHERS, out, "fmax", len(ALL))
    elementwise[(len(OTHERS),)](ALL.float(), OTHERS.float(), wide, "fmax", len(ALL))
    assert differences(out, wide.to(BF16)) == []


FINITE = sorted(set(ALL[ALL.isfinite()].tolist()))
FINITE_BITS = dict(zip(FINITE, torch.tensor(FINITE).to(BF16).view(torch.uint16).tolist(), strict=True))


def nearest(value: Fraction) -> float:
    """The bfloat16 nearest to `value`, ties to the even bit pattern; infinite from half a step beyond the largest."""
    largest = Fraction(FINITE[-1])
    if abs(value) >= largest + Fraction(2) ** 119:
        return float("inf") if value > 0 else -float("inf")
    place = bisect_left(FINITE, value)
    return min(
        FINITE[max(place - 1, 0) : place + 1],
        key=lambda candidate: (abs(Fraction(candidate) - value), FINITE_BITS[candidate] & 1),
    )


@pytest.mark.usefixtures("installed")
def test_bfloat16_fma_rounds_once() -> None:
    random = torch.Generator().manual_seed(3)
    x, y, z = (torch.randn(512, generator=random).to(BF16) for _ in range(3))
    x[:4], y[:4] = 1 + 2.0**-7, 1 + 2.0**-7
    z[:4] = torch.tensor([2.0**-8, 2.0**-40, -(2.0**-30), 1e38])
    x[4], y[4], z[4] = (
        2.0**-4,
        2.0**-4 + 2.0**-11,
        1.0,
    )  # 2^-15 above a tie: float32 would see it, bfloat16 must round up
    out = torch.zeros(512, dtype=BF16)
    fma[(1,)](x, y, z, out, 512)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    assert differences(out, torch.tensor([nearest(value) for value in exact]).to(BF16)) == []


def converted(x: torch.Tensor, dtype: torch.dtype, *rounding: str | None) -> torch.Tensor:
    """`x` converted by tl.cast, or by storing it where no `rounding` (None: the default) is given."""
    size = triton.next_power_of_2(len(x))
    padded, out = torch.zeros(size, dtype=x.dtype), torch.zeros(size, dtype=dtype)
    padded[: len(x)] = x
    if rounding:
        convert[(1,)](padded, out, rounding[0], size)
    else:
        implicit_convert[(1,)](padded, out, size)
    return out[: len(x)]


HALVES = torch.arange(65536, dtype=torch.int32) << 16
FLOATS = torch.cat([(HALVES | low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
INTEGERS = torch.cat([torch.arange(-70000, 70000), torch.tensor([2**24 - 2**15, 2**24 - 2**15 - 1])])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "x",
    [
        FLOATS,
        torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16),
        FLOATS[::7].double(),
        INTEGERS,
        INTEGERS.int(),
        torch.arange(-128, 128).to(torch.int8),
        torch.tensor([False, True]),
    ],
    ids=lambda x: str(x.dtype).removeprefix("torch."),
)
def test_conversion_to_bfloat16(x: torch.Tensor) -> None:
    assert differences(converted(x, BF16, None), x.to(BF16)) == []
    assert differences(converted(x, BF16), x.to(BF16)) == []


@pytest.mark.usefixtures("installed")
def test_conversion_to_bfloat16_rounds_once() -> None:
    """A value that lies just beside a tie, nearer than float32 can tell."""
    doubles = [
        1 + 2.0**-8 + 2.0**-40,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8 - 2.0**-40,
        2.0**-134 + 2.0**-170,
        3.39616e38,
        1e300,
    ]
    expected = [nearest(Fraction(value)) for value in doubles]
    x = torch.tensor(doubles + [-value for value in doubles], dtype=torch.float64)
    assert converted(x, BF16, None).tolist() == expected + [-value for value in expected]
    integers = [2**40 + 2**32 + 1, 2**40 + 2**32, 2**40 + 3 * 2**32 - 1, 2**62 + 2**54 + 2**20]
    assert converted(torch.tensor(integers), BF16, None).tolist() == [nearest(Fraction(value)) for value in integers]


@pytest.mark.usefixtures("installed")
def test_conversion_to_bfloat16_towards_zero() -> None:
    x = FLOATS[~FLOATS.isnan()]
    expected = (x.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    assert differences(converted(x, BF16, "rtz"), expected) == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64])
def test_conversion_from_bfloat16(dtype: torch.dtype) -> None:
    bound = {torch.int8: 2.0**7, torch.int32: 2.0**31, torch.int64: 2.0**63}.get(dtype, float("inf"))
    x = ALL if bound == float("inf") else ALL[ALL.abs() < bound]
    assert differences(converted(x, dtype, None), x.to(dtype)) == []


REDUCTIONS = [(op, axis) for op in ("sum", "max", "min", "larger") for axis in (0, 1, None)]
REDUCTIONS += [(op, axis) for op in ("argmax", "argmin", "product") for axis in (0, 1)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("op", "axis"), REDUCTIONS)
def test_bfloat16_reduction(op: str, axis: int | None) -> None:
    random = torch.Generator().manual_seed(5)
    x = (torch.randint(-400, 400, (4, 8), generator=random) / 8).to(BF16)  # sums are exact in float32
    if op == "product":
        x = torch.where(x > 0, 1.25, -1.5).to(BF16)
    dims = (0, 1) if axis is None else axis
    expected: torch.Tensor
    if op == "sum":
        expected = x.double().sum(dims).to(BF16)
    elif op in ("argmax", "argmin"):
        assert isinstance(axis, int)
        expected = getattr(np, op)(x.float().numpy(), axis)
        expected = torch.from_numpy(np.asarray(expected)).int()
    elif op == "product":
        assert isinstance(axis, int)
        expected = x.select(axis, 0)
        for step in range(1, x.shape[axis]):
            expected = expected * x.select(axis, step)
    else:
        expected = x.amin(dims) if op == "min" else x.amax(dims)
    out = torch.zeros(expected.shape, dtype=expected.dtype)
    reduced[(1,)](x, out, op, axis, 4, 8)
    assert differences(out, expected) == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("op", ["cumsum", "cumprod", "larger"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_bfloat16_scan(op: str, axis: int, reverse: bool) -> None:
    random = torch.Generator().manual_seed(6)
    x = (torch.randint(-400, 400, (4, 8), generator=random) / 8).to(BF16)
    if op == "cumprod":
        x = torch.where(x > 0, 1.25, -1.5).to(BF16)
    flipped = x.double().flip(axis) if reverse else x.double()
    expected = flipped.cummax(axis).values if op == "larger" else getattr(flipped, op)(axis)
    expected = expected.flip(axis) if reverse else expected
    out = torch.zeros_like(x)
    scanned[(1,)](x, out, op, axis, reverse, 4, 8)
    assert differences(out, expected.to(BF16)) == []


@pytest.mark.usefixtures("installed")
def test_bfloat16_dot() -> None:
    random = torch.Generator().manual_seed(8)
    a, b = (torch.randint(-30, 30, (16, 16), generator=random).to(BF16) / 4 for _ in range(2))
    out = torch.zeros(16, 16)
    multiplied[(1,)](a, b, out, 16)
    assert differences(out, (a.double() @ b.double() + 0.5).float()) == []


@pytest.mark.usefixtures("installed")
def test_bfloat16_masks_constants_atomics_sort() -> None:
    x = torch.tensor([3.0, 300.0, -1.5, 0.01, -0.02, 7.0, 1.0, 2.0**-8]).to(BF16)
    out = torch.ones(4, 8, dtype=BF16)
    memory[(1,)](x, out, 8)
    assert out[0].tolist() == [3.0, 300.0, -1.5] + [torch.tensor(-1.7).to(BF16).item()] * 5
    assert out[1].tolist() == [torch.tensor(1.7).to(BF16).item()] * 8
    one = torch.tensor(1.0, dtype=BF16)  # every addition rounds: 1 + 2^-8 stays 1
    assert out[2].tolist() == [4.0, (one + x[2] + x[3]).item(), (one + x[4] + x[5]).item(), 2.0, 1, 1, 1, 1]
    assert out[3].tolist() == sorted(x.tolist())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "kernel", [descriptor, block_pointer][: 2 if VERSION < (3, 9) else 1]
)  # 3.9 dropped the latter
def test_bfloat16_padding_is_nan(kernel: Any) -> None:
    x, out = torch.arange(72).to(BF16), torch.zeros(4, 16, dtype=BF16)
    kernel[(1,)](x, out, 16)
    expected = torch.full((4, 16), float("nan"), dtype=BF16)
    expected[:3, :12] = x.view(3, 24)[:, 8:20]
    assert differences(out, expected) == []


@pytest.mark.usefixtures("installed")
def test_what_stock_rejects_stays_rejected() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="Expected dtype"):
        exponential[(1,)](torch.ones(4, dtype=BF16), torch.zeros(4, dtype=BF16), 4)


def memo() -> Any:
    from pagefuzz.fuzz.interpreter.memo import Memo

    return next(found for found in gc.get_objects() if type(found) is Memo)


@triton.jit
def scaled(x, out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * scale + tl.full([N], 1.5, tl.float32))


@pytest.mark.usefixtures("installed")
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagefuzz.fuzz.interpreter import memo as room

    monkeypatch.setattr(room, "MAX_PLANS", 50)
    x, out, kept = torch.arange(8.0), torch.zeros(8), memo()
    plans = []
    for number in range(200):
        scaled[(1,)](x, out, number / 7, 8)
        assert torch.equal(out, x * torch.tensor(number / 7) + 1.5)
        plans.append(kept.plans)
    assert max(plans) <= 50 < sum(a < b for a, b in itertools.pairwise(plans))
    assert sum(len(table) for table in kept.tables) == kept.plans
    monkeypatch.setattr(room, "MAX_CONSTANT_BYTES", 500)
    for number in range(50):
        scaled[(1,)](x, out, number / 7, 8)
        assert kept.constant_bytes < 500 + 100


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["create_masked_load", "create_fmul", "create_splat", "create_masked_store"])
def test_interrupt_leaves_a_sane_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    x, out = torch.arange(16.0), torch.zeros(16)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for memoised in (False, True):
        if not memoised:
            memo().forget()
        with monkeypatch.context() as patch:
            patch.setattr(builder, name, interrupted, raising=True)
            if not memoised or name != "create_splat":  # a constant by then
                with pytest.raises(KeyboardInterrupt):
                    scaled[(1,)](x, out, 3.0, 16)
        vars(builder).pop(name, None)
        assert interpreter.interpreter_semantic.builder is builder
        scaled[(1,)](x, out, 3.0, 16)
        assert torch.equal(out, x * 3 + 1.5)


@triton.jit
def printing(x, N: tl.constexpr):
    tl.device_print("value", tl.load(x) + tl.program_id(0))


@pytest.mark.usefixtures("installed")
def test_prints_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        printing[(2,)](torch.ones(1), 4)
        assert capsys.readouterr().out == "(0, 0, 0)  value:  [1.]\n(1, 0, 0)  value:  [2.]\n"


@pytest.mark.usefixtures("installed")
def test_what_numpy_raises_it_raises_every_time() -> None:
    x, out = torch.tensor([3e38, 1.0]), torch.zeros(2)
    for _ in range(3):
        scaled[(1,)](x, out, 1e30, 2)
        with np.errstate(over="raise"), pytest.raises(triton.runtime.errors.InterpreterError, match="overflow"):
            scaled[(1,)](x, out, 1e30, 2)


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("installed")
def test_arguments_of_every_kind() -> None:
    x, scale = torch.arange(8.0), 2.0
    for make in (torch.zeros, lambda n: torch.zeros(2 * n)[::2], lambda n: torch.nn.Parameter(torch.zeros(n), False)):
        out = make(8)
        with Counting():
            scaled[(1,)](x, out, scale, 8)
        whole = out if out.is_contiguous() else torch.as_strided(out, (8,), (1,))
        assert torch.equal(whole.detach(), x * 2 + 1.5)
    scaled[(1,)](x, x, scale, 8)  # one tensor twice
    assert torch.equal(x, torch.arange(8.0) * 2 + 1.5)
