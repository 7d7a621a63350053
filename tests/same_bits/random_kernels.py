"""Writes random kernels: `source(seed)` is the text of one, `launches(seed)` are the arguments of several launches.

A kernel has tiles [B, C], columns [B], rows [C] and scalars, of dtypes that change from launch to launch, and mixes
what the memoised layer has to tell apart: operands that are one object, masks that are there or not, constants that
differ in value or in type only. Not all of them run: what raises has to raise the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

HEAD = '''"""Random kernels."""
import triton
import triton.language as tl


@triton.jit
def mixed(x, y, SUBTRACT: tl.constexpr):
    if SUBTRACT:
        return x - y
    return x + y


@triton.jit
def loaded(p, mask, other):
    return tl.load(p, mask=mask, other=other)


@triton.jit
def loaded_bare(p, mask):
    return tl.load(p, mask)


@triton.jit
def stored(p, x, mask):
    tl.store(p, x, mask=mask)


@triton.jit
def pair(x, y):
    low = tl.minimum(x, y)
    return low, tl.maximum(x, y)


@triton.jit
def powers(x, N: tl.constexpr):
    if N == 0:
        return x * 0 + 1
    return powers(x, N - 1) * x


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def joined(a, b):
    return a * 3 + b


@triton.jit
def second(a, i, b, j):
    take = b >= a
    return tl.where(take, b, a), tl.where(take, j, i)
'''
PARAMETERS = "x_ptr, v_ptr, w_ptr, s_ptr, n_ptr, place_ptr, out_ptr, column_ptr, count_ptr, a, f, F: tl.constexpr, "
PARAMETERS += "B: tl.constexpr, C: tl.constexpr"
START = """    g = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    b = tl.arange(0, B)
    c = tl.arange(0, C)
    n = tl.load(n_ptr + g)
    count = n
    s = tl.load(s_ptr + g)
    at = g * B * C + b[:, None] * C + c[None, :]
    inside = b < n
    area = (b[:, None] < n) & (c[None, :] < C)"""
CONSTANTS = [
    "0",
    "1",
    "2",
    "-1",
    "3",
    "7",
    "True",
    "False",
    "0.0",
    "-0.0",
    "1.0",
    "0.5",
    "-1.5",
    "2.0",
    "1e30",
    "1e-40",
]
CONSTANTS += ["float('inf')", "float('nan')", "-float('nan')", "2147483647", "2147483648", "-2147483648", "4294967295"]
CONSTANTS += ["9223372036854775807", "255", "F", "f", "a", "B", "65504.0"]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int1", "int8", "int16", "int32", "int64"]
DTYPES += ["uint8", "uint16", "uint32", "uint64"]
UNARY = ["abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "erf", "sigmoid"]


class _Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = START.splitlines()
        self.names = {"tile": ["at"], "column": ["b"], "row": ["c"], "scalar": ["n", "s", "g"]}
        self.depth = 1
        self.made = 0

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def new(self, shape: str, text: str) -> str:
        self.made += 1
        name = f"t{self.made}"
        self.line(f"{name} = {text}")
        self.names[shape].append(name)
        return name

    def name(self, shape: str) -> str:
        return self.random.choice(self.names[shape][-6:])

    def operand(self, shape: str) -> str:
        """Something that broadcasts to `shape`."""
        others: dict[str, list[str]] = {
            "tile": [f"{self.name('column')}[:, None]", f"{self.name('row')}[None, :]", self.name("scalar")],
            "column": [self.name("scalar")],
            "row": [self.name("scalar")],
            "scalar": [],
        }
        choices = [self.name(shape)] * 3 + others[shape] + [self.random.choice(CONSTANTS)]
        return self.random.choice(choices)

    def expression(self, shape: str) -> str:
        x, y = self.name(shape), self.operand(shape)
        if self.random.random() < 0.25:
            y = x  # the same object twice
        if self.random.random() < 0.3:
            x, y = y, x
        integer = self.pick("int32", "int64", "int32", "int16", "uint32", "uint8")
        kind = self.random.randrange(16)
        if kind < 4:
            return f"{x} {self.pick('+', '-', '*', '*')} {y}"
        if kind == 4:
            compared = f"{x} {self.pick('<', '<=', '>', '>=', '==', '!=')} {y}"
            return self.pick(compared, f"({compared}).to(tl.float32)", f"({compared}).to(tl.int32)")
        if kind == 5:
            return f"tl.where({self.name(shape)} {self.pick('<', '>=', '==')} {self.operand(shape)}, {x}, {y})"
        if kind == 6:
            nan = self.pick("", "", ", propagate_nan=tl.PropagateNan.ALL")
            return f"tl.{self.pick('minimum', 'maximum')}({x}, {y}{nan})"
        if kind == 7:
            return f"tl.{self.random.choice(UNARY)}(({self.name(shape)} * 1).to(tl.float32))"
        if kind == 8:
            left = f"({self.name(shape)} * 1).to(tl.{integer})"
            if self.random.random() < 0.5:
                return f"{left} {self.pick('<<', '>>', '>>')} {self.pick(1, 2, 3)}"
            self.new(shape, left)
            right = self.pick(self.name(shape), self.pick(1, 3, 5))
            return f"{self.names[shape][-1]} {self.pick('//', '%', '&', '|', '^', '>>')} ({right} * 1)"
        if kind == 9:
            more = self.pick("", "", "", ", fp_downcast_rounding='rtz'", ", bitcast=True")
            return f"tl.cast({self.name(shape)}, tl.{self.random.choice(DTYPES)}{more})"
        if kind == 10:
            return self.pick(
                f"mixed({x}, {y}, {self.pick('True', 'False', 'F > 1')})",
                f"powers({self.name(shape)}, {self.pick(0, 1, 3)})",
                f"tl.fma({x}, {y}, {self.operand(shape)})",
                f"tl.clamp({self.name(shape)}.to(tl.float32), {self.operand(shape)}, {self.operand(shape)})",
                f"tl.fdiv({self.name(shape)}.to(tl.float32), {self.name(shape)}.to(tl.float32))",
                f"tl.umulhi({self.name(shape)}.to(tl.int32), {self.name(shape)}.to(tl.int32))",
                f"{x} / {y}",
                f"tl.cdiv({self.name(shape)}, {self.pick(2, 3)})",
            )
        if kind == 11 and shape != "scalar":
            return f"tl.{self.pick('cumsum', 'cumsum', 'cumprod')}({self.name(shape)}, {self.pick(0, 0, 'B // B - 1')})"
        if kind == 12 and shape == "tile":
            x = self.name("tile")
            if self.random.random() < 0.1:  # slow
                scan = f"tl.associative_scan({x}, {self.pick(0, 1)}, {self.pick('larger', 'joined')}, F > 1)"
                return self.pick(f"tl.sort({x}, 1)", scan)
            return self.pick(
                f"tl.reshape(tl.trans({x}), (B, C))",
                f"tl.trans(tl.trans({x}))",
                f"tl.dot(tl.dot({x}, tl.trans({x})), {x})",
                f"tl.dot(tl.zeros([B, B], tl.float32) + 0.5, {x}.to(tl.float32), input_precision='ieee')",
                f"tl.broadcast_to({self.name('column')}[:, None], (B, C))",
                f"tl.flip({x}, 1)",
                f"tl.softmax({x}.to(tl.float32), 0)",
                f"tl.reshape(tl.join({x}, {self.name('tile')}), (2, B, C)).sum(0)",
                f"tl.full((B, C), {self.random.choice(CONSTANTS)}, tl.{self.random.choice(DTYPES)})",
                f"tl.rand({self.pick('a', 7)}, at)",
            )
        if kind == 13:
            return f"{self.pick('-', '-', '~', 'not ')}{self.name(shape)}"
        if kind == 14:
            return f"{x} {self.pick('+', '-', '*')} {self.random.choice(CONSTANTS)}"
        return f"({x} {self.pick('+', '*')} {y}) {self.pick('-', '+', '*')} {self.operand(shape)}"

    def load(self) -> None:
        mask = self.pick("", "", ", mask=area", ", mask=area, other=0", ", mask=area, other=-1.5", ", mask=None")
        if self.random.random() < 0.2:
            mask = f", mask=area, other={self.name('scalar')}"
        self.new("tile", f"tl.load(x_ptr + at{mask})")
        mask = self.pick("inside", "None", "b >= 0")
        column = self.pick(
            f"loaded(v_ptr + g * B + b, {mask}, {self.pick('0', '1', 'None', 'f') if mask != 'None' else 'None'})",
            f"loaded_bare(v_ptr + g * B + b, {mask})",
            "tl.load(v_ptr + g * B + b, inside)",
        )
        self.new("column", column)
        self.new("row", f"tl.load(w_ptr + g * C + c{self.pick('', ', mask=c < n', ', mask=c < 2, other=f')})")
        if self.random.random() < 0.5:
            self.new("column", f"tl.load(v_ptr + tl.load(place_ptr + g * B + b){self.pick('', ', mask=inside')})")

    def reduction(self) -> None:
        x = f"({self.name('tile')} * 1)" if self.random.random() < 0.8 else self.name("tile")
        op = self.pick("sum", "max", "min", "sum", "max", "argmax", "argmin")
        kind = self.random.choice([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5])
        if kind == 0:
            self.new("column", f"tl.{op}({x}, {self.pick('1', 'axis=1')})")
        elif kind == 1:
            self.new("row", f"tl.{op}({x}, {self.pick('0', 'axis=0')})")
        elif kind == 2:
            self.new("scalar", f"tl.{op}({self.name('column')}, 0)")
        elif kind == 3:
            self.new("scalar", f"tl.{self.pick('sum', 'max', 'min')}({x})")
        elif kind == 4:
            self.new("tile", f"{x} - tl.{self.pick('sum', 'max', 'min')}({x}, 1, keep_dims=True)")
        else:
            self.new("row", f"tl.reduce({x}, 0, {self.pick('larger', 'joined')})")

    def block(self, *lines: str) -> None:
        self.depth += 1
        for line in lines:
            self.line(line)
        self.depth -= 1

    def statement(self) -> None:
        kind = self.random.randrange(20)
        shape = self.pick("tile", "tile", "column", "row", "scalar")
        if kind < 8:
            self.new(shape, self.expression(shape))
        elif kind < 11:
            self.reduction()
        elif kind == 11:
            count = self.pick("count", "tl.cdiv(count, 2)", "1, count", "0, count, 2", "2", "F")
            self.line(f"for i in {self.pick('range', 'range', 'tl.range')}({count}):")
            x = self.name(shape)
            self.block(f"{x} = {x} {self.pick('+', '*', '-')} {self.pick('i', 's', x, self.operand(shape))}")
        elif kind == 12:
            x = self.name(shape)
            left = self.name("scalar")
            self.line(f"if {left} {self.pick('>', '<', '==', '>=')} {self.pick('0', '1', 'n', 'a')}:")
            self.block(f"{x} = {x} + {self.operand(shape)}", f"{self.pick('s', 'n')} += {self.pick(1, 2)}")
            if self.random.random() < 0.6:
                self.line("else:")
                self.block(f"{x} = {x} {self.pick('*', '-')} {self.pick(2, x)}")
        elif kind == 13 and self.random.random() < 0.4:
            self.line(f"if {self.pick('n == 0', 's > 3', 'g == 1')}:")
            self.block(f"tl.store(out_ptr + at, {self.name('tile')})", "return")
        elif kind == 14:
            x, y = self.name(shape), self.operand(shape)
            self.line(f"low, high = pair({x}, {self.pick(x, y)})")
            self.new(shape, "high - low" if self.random.random() < 0.5 else "low * 2 + high")
        elif kind == 15:
            mask = self.pick("mask=area", "mask=area", "mask=None", "area", "mask=at > 2")
            self.line(f"tl.store(out_ptr + at, {self.operand('tile')}, {mask})")
        elif kind == 16:
            value = self.pick("1", "n", f"{self.name('column')}.to(tl.int32)")
            mask = self.pick("", ", mask=inside", ", mask=None")
            op = self.pick("add", "max", "min", "and", "or", "xor", "xchg")
            atomic = f"tl.atomic_{op}(count_ptr + b % 8, {value}{mask})"
            if mask == ", mask=inside":  # the result of a masked lane is whatever was in memory
                self.line(atomic)
            else:
                self.new("column", atomic)
        elif kind == 17:
            self.line(f"tl.device_assert({self.pick('n >= 0', 's == s', 'n < 3', 'inside')}, 'a message')")
        elif kind == 18:
            self.line("i = 0")
            self.line(f"while i < {self.pick('count', '2', 'F')}:")
            x = self.name(shape)
            self.block(f"{x} = {x} {self.pick('+', '-')} {self.pick('i', x, '1')}", "i += 1")
        else:
            self.line(f"stored(out_ptr + at, {self.name('tile')}, {self.pick('area', 'None', 'area & (at >= 0)')})")


def source(seed: int) -> str:
    """The text of kernel number `seed`, without HEAD."""
    writer = _Writer(seed)
    writer.load()
    for _ in range(writer.random.randrange(3, 9)):
        writer.statement()
    writer.line(f"tl.store(out_ptr + at, {writer.name('tile')}, mask={writer.pick('area', 'None', 'at >= 0')})")
    result = writer.pick(
        writer.name("column"), writer.name("scalar"), f"{writer.name('column')} + {writer.name('scalar')}"
    )
    writer.line(f"tl.store(column_ptr + g * B + b, {result}, mask=inside)")
    return "\n".join([f"\n\n@triton.jit\ndef kernel{seed}({PARAMETERS}):", *writer.lines]) + "\n"


FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ALL = [
    *FLOATS,
    *FLOATS,
    torch.float32,
    torch.int32,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.float64,
    torch.bool,
]
ODD = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 3e38, 65504.0]


def values(r: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([r.random() < 0.5 for _ in range(count)])
    if dtype.is_floating_point:
        odd = r.choice([0.0, 0.0, 0.2])
        return torch.tensor([r.choice(ODD) if r.random() < odd else r.gauss(0, 3) for _ in range(count)]).to(dtype)
    info = torch.iinfo(dtype)
    extremes = [info.min, info.max, 0, -1 if info.min else info.max]
    odd = r.choice([0.0, 0.0, 0.2])
    return torch.tensor(
        [r.choice(extremes) if r.random() < odd else r.randrange(-20 if info.min else 0, 100) for _ in range(count)],
        dtype=dtype,
    )


def launches(seed: int, count: int) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Grids and arguments: the same code with other types, sizes and scalars."""
    r = random.Random(-seed - 1)
    floats = r.random() < 0.5
    for _ in range(count):
        grid = r.choice([(1, 1), (1, 1), (2, 1), (1, 2), (3, 1)])
        G, B, C = grid[0] * grid[1], r.choice([1, 2, 4, 8]), r.choice([1, 2, 4])
        dtypes = FLOATS if floats and r.random() < 0.8 else ALL
        place = torch.tensor([r.randrange(G * B) for _ in range(G * B)], dtype=r.choice([torch.int32, torch.int64]))
        if r.random() < 0.15:
            place[r.randrange(G * B)] = r.choice([-1, G * B, 10**6, -(10**6)])
        yield (
            grid,
            {
                "x_ptr": values(r, G * B * C, r.choice(dtypes)).view(G, B, C),
                "v_ptr": values(r, G * B, r.choice(dtypes)),
                "w_ptr": values(r, G * C, r.choice(dtypes)),
                "s_ptr": values(r, G, r.choice(ALL)),
                "n_ptr": torch.tensor([r.randrange(B + 1) for _ in range(G)], dtype=torch.int32),
                "place_ptr": place,
                "out_ptr": values(r, G * B * C, r.choice(ALL)).view(G, B, C),
                "column_ptr": values(r, G * B, r.choice(ALL)),
                "count_ptr": torch.arange(8, dtype=r.choice([torch.int32, torch.int32, torch.int64])),
                "a": r.choice([0, 1, 2, -3, 2**31 - 1, 2**31, 2**40, True]),
                "f": r.choice([0.0, -0.0, 0.5, 2.0, float("nan"), float("inf"), 1e-40, 3]),
                "F": r.choice([0, 1, 2, True]),
                "B": B,
                "C": C,
            },
        )
