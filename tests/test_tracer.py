"""Tests of fuzz/tracer.py. Run as a program it prints, as JSON, what the tracer saw in a process without `install`."""

# The parameters of kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def"

import importlib.util
import inspect
import itertools
import json
import mmap
import os
import pickle
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
BLOCK_POINTERS = VERSION < (3, 9)

if type(tl.sum).__name__ != "InterpretedFunction":
    pytest.skip("this process compiles kernels; set TRITON_INTERPRET=1 before it starts", allow_module_level=True)


@triton.jit
def copy(x, out, first, limit, N: tl.constexpr):
    """out[first + i] = x[first + i] for i < limit; the other lanes are masked off."""
    i = first + tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < first + limit), mask=i < first + limit)


@triton.jit
def scatter(x, slots, out, stride, N: tl.constexpr):
    """out[slots[program] * stride + i] = x[program, i]."""
    i = tl.arange(0, N)
    slot = tl.load(slots + tl.program_id(0))
    tl.store(out + slot * stride + i, tl.load(x + tl.program_id(0) * N + i), mask=(i < N) & (slot >= 0))


@triton.jit
def load_one(x, out, index):
    tl.store(out, tl.load(x + index))


@triton.jit
def store_one(out, index, value):
    tl.store(out + index, value)


@triton.jit
def atomic_add(x, first, N: tl.constexpr):
    i = first + tl.arange(0, N)
    tl.atomic_add(x + i, 3, mask=i < first + 3)


@triton.jit
def atomic_swap(x, index):
    tl.atomic_cas(x + index, 0, 5)


@triton.jit
def block_pointer(x, out, row, N: tl.constexpr):
    block = tl.make_block_ptr(x, (4, 20), (32, 1), (row, 16), (2, N), (1, 0))
    v = tl.load(block, boundary_check=(1,), padding_option="zero")
    tl.store(out + tl.arange(0, 2)[:, None] * N + tl.arange(0, N)[None, :], v)


@triton.jit
def descriptor_inside(x, out, rows, N: tl.constexpr):
    block = tl.make_tensor_descriptor(x, shape=[rows, 20], strides=[32, 1], block_shape=[8, N])
    tl.store(out + tl.arange(0, 8)[:, None] * N + tl.arange(0, N)[None, :], block.load([0, 16]))


@triton.jit
def descriptor_argument(block, out, N: tl.constexpr):
    v = block.load([0, 16])
    block.store([2, 16], v)
    tl.store(out + tl.arange(0, 8)[:, None] * N + tl.arange(0, N)[None, :], v)


@triton.jit
def words(x, out, first):
    """Reads bytes as 32-bit words."""
    p = (x + first).to(tl.pointer_type(tl.uint32)) + tl.arange(0, 2)
    tl.store(out + tl.arange(0, 2), tl.load(p).to(tl.int32))


@triton.jit
def read_address(address, out):
    tl.store(out, tl.load(tl.load(address).to(tl.pointer_type(tl.float32))))


@triton.jit
def helper(x, index):
    return tl.load(x + index)


@triton.jit
def nested(x, out, index):
    tl.store(out, helper(x, index))


@triton.jit
def each(out, stride, extra, N: tl.constexpr):
    """Program p stores N elements from out + p * stride on, and one at out + extra."""
    p = tl.program_id(0)
    tl.store(out + p * stride + tl.arange(0, N), p + tl.zeros([N], tl.float32))
    tl.store(out + extra + p * (extra < 0), 1.0, mask=extra >= 0)


@triton.jit
def in_columns(out, COLUMNS: tl.constexpr, N: tl.constexpr, shift):
    """Program (p, q) stores column q - shift of COLUMNS, N rows deep, of block p: interleaved with its neighbours."""
    p, q = tl.program_id(0), tl.program_id(1)
    at = out + p * COLUMNS * N + tl.arange(0, N) * COLUMNS + q - shift * (q == COLUMNS - 1)
    tl.store(at, tl.zeros([N], tl.float32))


@triton.jit
def chain(out, step, first):
    """Program p stores out[p] and loads out[p - step] from program `first` on."""
    p = tl.program_id(0)
    tl.store(out + p, 1.0)
    tl.load(out + p - step, mask=p >= first)


@triton.jit
def load_after(x, out, index, N: tl.constexpr):
    """Program 0 stores all of out[:N], program 1 loads x[index]."""
    p = tl.program_id(0)
    i = tl.arange(0, N)
    tl.store(out + i, 2.0 + tl.zeros([N], tl.float32), mask=p + i < N * (p == 0))
    tl.load(x + index, mask=p == 1)


@triton.jit
def twice(out):
    p = tl.program_id(0)
    tl.store(out + p, 1.0)
    tl.store(out + p, tl.load(out + p) + 1.0)


@triton.jit
def bytes_and_words(out, byte):
    """Program 0 stores the word at byte 4, program 1 a byte, program 2 loads the word at byte 16."""
    p = tl.program_id(0)
    word = (out + 4 + 12 * (p == 2)).to(tl.pointer_type(tl.int32))
    tl.store(word, 7, mask=p == 0)
    tl.store(out + byte, 1, mask=p == 1)
    tl.load(word, mask=p == 2)


@triton.jit
def ticket(counter, out):
    """Takes a number and writes it to the place of the program, and to out[0]."""
    p = tl.program_id(0)
    n = tl.atomic_add(counter, 1)
    tl.store(out + p, n)
    tl.store(out, n)


@triton.jit
def order_of(counter, out, Y: tl.constexpr, Z: tl.constexpr):
    """out[i] = the i-th program."""
    n = tl.atomic_add(counter, 1)
    tl.store(out + n, (tl.program_id(0) * Y + tl.program_id(1)) * Z + tl.program_id(2))


Seen = dict[str, Any]


def look(named: dict[str, torch.Tensor], kernel: Any, grid: tuple[int, ...], *args: Any) -> Seen:
    """What a trace says of one launch, and whether the launch raised, as plain data."""
    from pagefuzz.fuzz.tracer import traced

    with traced(named) as trace:
        try:
            kernel[grid](*args)
            raised = False
        except InterpreterError:
            raised = True
    wild = None
    if trace.wild is not None:
        wild = [trace.wild.kind, list(trace.wild.program), *trace.wild.args[2:]]
    sets = {
        kind: {name: offsets.tolist() for name, offsets in getattr(trace, kind).items()} for kind in ("loads", "stores")
    }
    race = None
    if trace.race is not None:
        at = trace.race
        race = [at.kind, *map(list, at.programs), at.tensor, at.index, at.elements]
    return {"wild": wild, "raised": raised, "launches": trace.launches, "race": race, **sets}


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def scenarios() -> Iterator[tuple[str, Seen, Seen]]:
    """Name, what was seen, and what should have been (of the keys that matter)."""
    x, out = torch.arange(16.0), torch.zeros(16)
    both = {"x": x, "out": out}

    def wild(kind: str, tensor: str, index: int, lanes: int = 1, value: int | None = None, program: int = 0) -> Seen:
        return {"wild": [kind, [program, 0, 0], tensor, index, lanes, value], "raised": True}

    legal: Seen = {"wild": None, "raised": False, "launches": 1}
    yield "all of it", look(both, copy, (1,), x, out, 0, 16, 16), legal | {"loads": {"x": list(range(16)), "out": []}}
    seen = look(both, copy, (1,), x, out, 8, 3, 16)
    yield "masked off", seen, legal | {"loads": {"x": [8, 9, 10], "out": []}, "stores": {"x": [], "out": [8, 9, 10]}}
    yield "nothing active", look(both, copy, (1,), x, out, 10**9, 0, 16), legal | {"loads": {"x": [], "out": []}}
    yield "one past the end", look(both, copy, (1,), x, out, 0, 17, 32), wild("load", "x", 16)
    yield "far past the end", look(both, load_one, (1,), x, out, 10**9), wild("load", "x", 10**9)
    yield "one before", look(both, load_one, (1,), x, out, -1), wild("load", "x", -1)
    yield "unnamed", look({"x": x}, load_one, (1,), out, x, 99), wild("load", "x", 99)
    yield "by parameter", look({}, load_one, (1,), x, out, 99), wild("load", "x", 99)
    yield "store, past", look(both, store_one, (1,), out, 16, 2.5), wild("store", "out", 16, 1, bits(2.5))
    yield "store, below", look(both, store_one, (1,), out, -7, -1.0), wild("store", "out", -7, 1, bits(-1.0))
    yield "in a helper", look(both, nested, (1,), x, out, 16), wild("load", "x", 16)

    cache, key = torch.zeros(6, 8), torch.arange(32.0).view(4, 8)
    named = {"cache": cache, "key": key, "slots": torch.empty(0)}
    if VERSION < (3, 9) or _installed():  # stock 3.9 refuses the mask
        for dtype in (torch.int32, torch.int64):
            slots = torch.tensor([4, -1, 0, 5], dtype=dtype)
            named["slots"] = slots
            seen = look(named, scatter, (4,), key, slots, cache, 8, 8)
            stored = [*range(8), *range(32, 48)]
            yield f"scatter {dtype}", seen, legal | {"stores": {"cache": stored, "key": [], "slots": []}}
            assert seen["loads"] == {"cache": [], "key": list(range(32)), "slots": [0, 1, 2, 3]}
            slots[2] = 6
            seen = look(named, scatter, (4,), key, slots, cache, 8, 8)
            yield f"wild slot {dtype}", seen, wild("store", "cache", 48, 8, bits(16.0), 2)
        slots = torch.tensor([2**20 + 1], dtype=torch.int32)  # slot * stride wraps to 4096 - 2^31
        seen = look(named | {"slots": slots}, scatter, (1,), key, slots, cache, 4096 - 2**11, 8)
        index = (2**20 + 1) * 2048 - 2**32
        yield "int32 overflow", seen, wild("store", "cache", index, 8, bits(0.0))

    table = torch.arange(24.0).view(4, 6)[:, :4]
    named = {"table": table, "out": out}
    yield "row of a view", look(named, load_one, (1,), table, out, 21), legal | {"loads": {"table": [21], "out": []}}
    yield "gap of a view", look(named, load_one, (1,), table, out, 10), wild("load", "table", 10)
    yield "after a view", look(named, load_one, (1,), table, out, 22), wild("load", "table", 22)
    kv = torch.arange(64.0).view(4, 2, 8)
    k, v = kv[:, 0], kv[:, 1]
    yield "packed", look({"k": k, "v": v}, load_one, (1,), v, out, 16), legal | {"loads": {"k": [], "v": [16]}}
    yield "neighbour is legal", look({"k": k, "v": v}, load_one, (1,), k, v, 8), legal | {"loads": {"k": [], "v": [0]}}
    yield "neighbour is no argument", look({"k": k, "v": v}, load_one, (1,), k, out, 8), wild("load", "k", 8)
    yield "a part of kv", look({"kv": kv}, load_one, (1,), v, out, 8), wild("load", "kv", 16)
    yield "expanded", look({}, load_one, (1,), torch.ones(1, 3).expand(5, 3), out, 2), legal
    yield "expanded, past", look({}, load_one, (1,), torch.ones(1, 3).expand(5, 3), out, 3), wild("load", "x", 3)
    yield "empty", look({"x": x[:0]}, load_one, (1,), x[:0], out, 0), {"raised": True, "loads": {"x": []}}

    counts = torch.zeros(8, dtype=torch.int32)
    seen = look({"x": counts}, atomic_add, (1,), counts, 5, 4)
    yield "atomic", seen, legal | {"loads": {"x": [5, 6, 7]}, "stores": {"x": [5, 6, 7]}}
    yield "wild atomic", look({"x": counts}, atomic_add, (1,), counts, 6, 4), wild("atomic", "x", 8, 1, 3)
    yield "swap", look({"x": counts}, atomic_swap, (1,), counts, 7), legal | {"stores": {"x": [7]}}
    yield "wild swap", look({"x": counts}, atomic_swap, (1,), counts, -2), wild("atomic", "x", -2, 1, 5)

    rows, into = torch.arange(128.0).view(4, 32), torch.zeros(8, 16)
    named = {"x": rows, "out": into}
    if BLOCK_POINTERS:
        read = [row * 32 + i for row in (2, 3) for i in range(16, 20)]
        yield "block pointer", look(named, block_pointer, (1,), rows, into, 2, 16), {"loads": {"x": read, "out": []}}
        yield "wild block pointer", look(named, block_pointer, (1,), rows, into, 3, 16), wild("load", "x", 144, 4)
    read = [row * 32 + i for row in range(4) for i in range(16, 20)]
    seen = look(named, descriptor_inside, (1,), rows, into, 4, 16)
    yield "descriptor", seen, legal | {"loads": {"x": read, "out": []}}
    yield "wild descriptor", look(named, descriptor_inside, (1,), rows, into, 5, 16), wild("load", "x", 144, 4)
    argument = TensorDescriptor(rows, [4, 20], [32, 1], [8, 16])
    seen = look(named, descriptor_argument, (1,), argument, into, 16)
    yield "host descriptor", seen, legal | {"stores": {"x": read[8:], "out": list(range(128))}}
    argument = TensorDescriptor(rows, [4, 40], [32, 1], [8, 16])
    seen = look(
        {"x": rows[:3]}, descriptor_argument, (1,), TensorDescriptor(rows[:3], [4, 20], [32, 1], [8, 16]), into, 16
    )
    yield "wild host descriptor", seen, wild("load", "x", 112, 4)

    raw, pair = torch.arange(16).to(torch.uint8), torch.zeros(2, dtype=torch.int32)
    named = {"x": raw, "out": pair}
    yield "wide", look(named, words, (1,), raw, pair, 4), legal | {"loads": {"x": list(range(4, 12)), "out": []}}
    yield "wide, past the end", look({"x": raw}, words, (1,), raw, raw, 10), {"raised": True, "loads": {"x": []}}
    address = torch.tensor([x.data_ptr() + 8, x.data_ptr() + 10])
    seen = look({"x": x}, read_address, (1,), address, out)
    yield "address of a tensor of the call", seen, {"raised": False}
    seen = look({"out": out}, read_address, (1,), address, out)
    yield "address of no tensor of the call", seen, {"raised": True}
    seen = look({"x": x}, read_address, (1,), address, x)
    yield "address from memory", seen, legal | {"loads": {"x": [2]}}
    seen = look({"x": x}, read_address, (1,), address[1:], x)
    yield "misaligned", seen, wild("load", "x", 2)

    yield from races()


def races() -> Iterator[tuple[str, Seen, Seen]]:
    out, counts = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    named = {"cache": out}

    def race(kind: str, first: int, second: int, index: int, elements: int = 1, tensor: str = "cache") -> Seen:
        return {"race": [kind, [first, 0, 0], [second, 0, 0], tensor, index, elements], "raised": False}

    none: Seen = {"race": None, "raised": False}
    yield "side by side", look(named, each, (4,), out, 8, -1, 8), none
    yield "overlap", look(named, each, (3,), out, 7, -1, 8), race("store", 0, 1, 7, 2)
    yield "all on one", look(named, each, (4,), out, 0, -1, 8), race("store", 0, 1, 0, 8)
    yield "one more far away", look(named, each, (3,), out, 8, 63, 8), race("store", 0, 1, 63)
    yield "one program", look(named, each, (1,), out, 0, 3, 8), none
    yield "by parameter", look({}, each, (2,), out, 0, -1, 8), race("store", 0, 1, 0, 8, "out")
    yield "a view", look({"cache": out[:40]}, each, (2,), out[16:], 4, -1, 8), race("store", 0, 1, 20, 4)
    yield "interleaved", look(named, in_columns, (2, 4), out, 4, 8, 0), none
    seen = look(named, in_columns, (2, 4), out, 4, 8, 1)
    yield "the same column", seen, {"race": ["store", [0, 2, 0], [0, 3, 0], "cache", 2, 16]}
    yield "reads its own", look(named, chain, (4,), out, 0, 0), none
    yield "reads the one before", look(named, chain, (4,), out, 1, 1), race("load", 0, 1, 0, 3)
    yield "reads the one after", look(named, chain, (4,), out, -1, 0), race("load", 1, 0, 1, 3)
    yield "reads what no program wrote", look({"x": out, "y": out}, chain, (4,), out, -40, 0), none
    yield "no launch reads", look({"x": out}, load_after, (2,), out[:8], out[16:], 3, 16), none
    yield "the last it stored", look(named, load_after, (2,), out, out[16:], 31, 16), race("load", 0, 1, 31)
    yield "one past what it stored", look(named, load_after, (2,), out, out[16:], 32, 16), none
    yield "twice by itself", look(named, twice, (8,), out), none
    raw = torch.zeros(32, dtype=torch.uint8)
    for byte in range(32):
        seen = look({"cache": raw}, bytes_and_words, (3,), raw, byte)
        if 4 <= byte < 8:
            yield f"a byte of a word, {byte}", seen, race("store", 0, 1, byte)
        elif 16 <= byte < 20:
            yield f"a byte of a word that is read, {byte}", seen, race("load", 1, 2, byte)
        else:
            yield f"a byte beside the words, {byte}", seen, none
    yield "atomics", look({"x": counts}, ticket, (4,), counts[:1], counts[8:]), none


def _installed() -> bool:
    from pagefuzz.fuzz import interpreter

    return interpreter._installed


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location("pagefuzz", root / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["pagefuzz"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warnings.simplefilter("ignore")
    print(json.dumps({name: [seen, expected] for name, seen, expected in scenarios()}))


def check(name: str, seen: Seen, expected: Seen) -> None:
    assert {key: seen[key] for key in expected} == expected, name


@pytest.fixture(autouse=True)
def installed() -> None:
    from pagefuzz.fuzz.interpreter import install

    install()


@pytest.mark.filterwarnings("ignore")
def test_scenarios() -> None:
    for name, seen, expected in scenarios():
        check(name, seen, expected)


def test_scenarios_without_install() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    text = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, env=environment, check=True).stdout
    seen = json.loads(text)
    assert len(seen) > 30
    for name, (was, expected) in seen.items():
        check(name, was, expected)


@pytest.mark.parametrize("index", [16, -3])
def test_refused_store_changes_nothing(index: int) -> None:
    memory = torch.arange(64.0)
    before, target = memory.clone(), memory[16:32]
    assert look({"out": target}, store_one, (1,), target, index, 5.0)["raised"]
    assert torch.equal(memory, before)
    assert not look({"out": memory}, store_one, (1,), memory, index + 16, 5.0)["raised"]
    assert not torch.equal(memory, before)


def test_partly_wild_store_changes_nothing() -> None:
    memory = torch.zeros(64)
    seen = look({}, copy, (1,), torch.ones(16), memory[:8], 0, 12, 16)
    assert seen["wild"][:2] == ["store", [0, 0, 0]] and seen["wild"][3:5] == [8, 4]
    assert not memory.any()


def test_kernel_allocated_tensors_are_legal() -> None:
    from pagefuzz.fuzz.tracer import traced

    x = torch.arange(16.0)
    with traced({"x": x}) as trace:
        workspace, out = torch.empty(16), torch.empty(16)
        copy[(1,)](x, workspace, 0, 16, 16)
        copy[(1,)](workspace, out, 0, 16, 16)
    assert torch.equal(out, x) and trace.wild is None and trace.launches == 2
    assert trace.loads["x"].tolist() == list(range(16)) and trace.loads["x"].dtype == np.int64


def test_two_launches_are_no_race_and_the_first_race_is_kept() -> None:
    from pagefuzz.fuzz.tracer import traced

    with traced({}) as trace:
        workspace, out = torch.empty(16), torch.empty(64)
        for _ in range(2):
            each[(2,)](workspace, 8, -1, 8)
            copy[(1,)](workspace, out, 0, 16, 16)
        none = trace.race
        each[(2,)](workspace, 0, -1, 8)
        each[(3,)](out, 0, 5, 1)
    first = trace.race
    assert none is None and first is not None and first.tensor == "out" and first.elements == 8
    assert first.programs == ((0, 0, 0), (1, 0, 0)) and first.index == 0
    assert str(first) == "programs (0, 0, 0) and (1, 0, 0) both wrote element 0 of out (8 elements of out in all)"
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_launch_with_an_atomic_is_left_out_and_the_next_is_not() -> None:
    from pagefuzz.fuzz.tracer import traced

    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(16)
    with traced({"out": out}) as trace:
        ticket[(4,)](counter, torch.zeros(4, dtype=torch.int32))
        assert trace.race is None
        chain[(3,)](out, 1, 1)
    assert str(trace.race) == (
        "program (1, 0, 0) read element 0 of out, which program (0, 0, 0) of the same launch wrote (2 elements of out "
        "in all)"
    )


@pytest.mark.parametrize("seed", range(40))
def test_races_are_those_of_a_plain_search(seed: int) -> None:
    """Random accesses of mixed sizes against a search byte by byte."""
    from pagefuzz.fuzz.tracer import _write_read, _write_write

    random = np.random.default_rng(seed)
    sides: dict[str, Any] = {"store": [], "load": []}
    touched: dict[str, dict[int, set[Any]]] = {"store": {}, "load": {}}
    for _ in range(int(random.integers(1, 9))):
        kind, program = ("store", "load")[int(random.integers(2))], (int(random.integers(3)), 0, 0)
        size = int(2 ** random.integers(4))
        at = random.integers(0, int(random.choice([40, 400])), int(random.integers(1, 6)))
        at = at if seed % 2 else at // size * size
        sides[kind].append((size, (at + 1000).astype(np.uint64), program))
        for address in at.tolist():
            for byte in range(size):
                touched[kind].setdefault(1000 + address + byte, set()).add(program)
    both = sorted(byte for byte, programs in touched["store"].items() if len(programs) > 1)
    found = _write_write(sides["store"])
    assert (found is None) == (not both)
    if found is not None:
        assert int(found[2][0]) == both[0] and set(found[1]) <= touched["store"][both[0]] and found[1][0] < found[1][1]
        return
    crossed = sorted(
        byte
        for byte, programs in touched["load"].items()
        if byte in touched["store"] and programs - touched["store"][byte]
    )
    found = _write_read(sides["store"], sides["load"])
    assert (found is None) == (not crossed)
    if found is not None:
        writer, reader = found[1]
        assert int(found[2][0]) == crossed[0] and writer in touched["store"][crossed[0]]
        assert reader == min(touched["load"][crossed[0]] - {writer})


@pytest.mark.parametrize("grid", [(1,), (7,), (3, 4), (2, 3, 4)])
def test_programs_run_in_the_order_asked_for(grid: tuple[int, ...]) -> None:
    from pagefuzz.fuzz.order import in_order, permutation

    count = int(np.prod(grid))
    whole = (*grid, 1, 1)[:3]
    orders = {}
    before = builder_state()
    for order in (0, 1, 2, 3, 2**32 - 1):
        out = torch.full((count,), -1, dtype=torch.int32)
        with in_order(order):
            order_of[grid](torch.zeros(1, dtype=torch.int32), out, whole[1], whole[2])
        orders[order] = out.tolist()
        assert orders[order] == permutation(order, count) and sorted(orders[order]) == list(range(count))
    assert orders[0] == list(range(count)) and orders[1] == orders[0][::-1]
    assert count < 7 or len({tuple(each) for each in orders.values()}) == 5
    assert builder_state() == before


def test_an_order_is_the_same_everywhere() -> None:
    from pagefuzz.fuzz.order import permutation

    assert permutation(2, 8) == [0, 4, 3, 1, 2, 5, 7, 6]


def test_races_name_the_programs_whatever_the_order() -> None:
    from pagefuzz.fuzz.order import in_order

    out = torch.zeros(64)
    for order in (0, 1, 5):
        with in_order(order):
            assert look({"cache": out}, chain, (4,), out, 1, 1)["race"] == ["load", [0, 0, 0], [1, 0, 0], "cache", 0, 3]
            assert look({"cache": out}, each, (3,), out, 0, -1, 2)["race"][1:3] == [[0, 0, 0], [1, 0, 0]]


def test_first_wild_access_wins_and_sets_follow() -> None:
    from pagefuzz.fuzz.tracer import WildAccess, traced

    x, out = torch.arange(16.0), torch.zeros(16)
    with traced({"x": x}) as trace:
        load_one[(1,)](x, out, 3)
        assert trace.loads["x"].tolist() == [3]
        for index in (20, 30):
            with pytest.raises(InterpreterError, match="WildAccess") as caught:
                load_one[(1,)](x, out, index)
            assert isinstance(caught.value.__cause__, WildAccess)
        load_one[(1,)](x, out, 5)
    assert trace.loads["x"].tolist() == [3, 5]
    wild = trace.wild
    assert wild is not None and wild.index == 20
    assert str(pickle.loads(pickle.dumps(wild))) == str(wild)
    assert "wild load by program (0, 0, 0): x[20]" in str(wild)


def builder_state() -> list[Any]:
    import triton.runtime.interpreter as interpreter

    return [
        dict(vars(interpreter.interpreter_builder)).keys(),
        interpreter._implicit_cvt,
        interpreter.GridExecutor._init_args_hst,
    ]


def test_everything_is_restored_and_traces_do_not_nest() -> None:
    from pagefuzz.fuzz.tracer import traced

    x = torch.zeros(4)
    copy[(1,)](x, x, 0, 4, 4)
    before = builder_state()

    def failing_host_function() -> None:
        with traced({"x": x}):
            assert builder_state() != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_host_function()
    assert builder_state() == before
    with traced({"x": x}), pytest.raises(RuntimeError, match="active already"), traced({"x": x}):
        pass
    assert builder_state() == before
    with pytest.raises(ValueError, match="tensor 'x' is on meta"), traced({"x": x.to("meta")}):
        pass
    assert builder_state() == before


def test_every_primitive_access_of_this_triton_is_wrapped() -> None:
    import triton.runtime.interpreter as interpreter

    source = inspect.getsource(interpreter)
    for primitive, method in {
        "load": "create_masked_load",
        "store": "create_masked_store",
        "atomic_cas": "create_atomic_cas",
        "atomic_rmw": "create_atomic_rmw",
    }.items():
        calls = source.count(f"_interpreter.{primitive}(")
        assert calls == 1, (
            f"triton {triton.__version__} calls {primitive} in {calls} places: wrap them all in the tracer"
        )
        body = source.split(f"def {method}(")[1].split("    def ")[0]
        assert f"_interpreter.{primitive}(" in body


def test_larger_than_memory() -> None:
    count = 2**33
    mapping = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    cache = torch.frombuffer(mapping, dtype=torch.float16, count=count).view(2, 2**16, 2**16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for view, index in ((cache, count - 1), (cache[:, :, : 2**15], count - 2**15 - 1), (cache.transpose(0, 2), 7)):
        seen = look({"cache": view}, store_one, (1,), view, index, 1.0)
        assert seen["wild"] is None and seen["stores"] == {"cache": [index]}
    assert look({"cache": cache}, store_one, (1,), cache, count, 1.0)["wild"][2:4] == ["cache", count]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # kilobytes
    del cache, view


VIEWS = [
    ((), ()),
    ((0, 3), (3, 1)),
    ((7,), (1,)),
    ((7,), (3,)),
    ((4, 3), (6, 1)),
    ((3, 4), (1, 6)),
    ((3, 3), (5, 3)),  # overlaps: 5 * 0 + 3 * 2 lies beyond 5 * 1
    ((5, 4), (1, 1)),
    ((4, 5, 2), (2, 3, 7)),
    ((2, 3, 4), (0, 5, 1)),
    ((2, 1, 4), (9, 100, 2)),
    ((2, 3, 4), (24, 4, 1)),
]


@pytest.mark.parametrize(("shape", "strides"), VIEWS)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_extent_is_exact(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    from pagefuzz.fuzz.tracer import _Extent

    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.float64}[itemsize]
    view = torch.zeros(256, dtype=dtype)[16:].as_strided(shape, strides, 16)
    extent = _Extent("x", view)
    places = itertools.product(*(range(count) for count in shape))
    elements = {sum(a * b for a, b in zip(place, strides, strict=True)) for place in places}
    occupied = {element * itemsize + byte for element in elements for byte in range(itemsize)}
    for size in (1, 2, 4, 8):
        offsets = np.arange(-16 * itemsize, 100 * itemsize)
        expected = [
            all(offset + byte in occupied for byte in range(size)) and offset % min(size, itemsize) == 0
            for offset in offsets.tolist()
        ]
        addresses = (offsets + view.data_ptr()).astype(np.uint64)
        assert extent.inside(addresses, size).tolist() == expected
        for start in range(0, len(addresses), 7):
            part = addresses[start : start + 3]
            assert extent.all_inside(part, size) == all(expected[start : start + 3])
