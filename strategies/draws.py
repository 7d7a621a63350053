"""Small draws and small ways to break a tensor that every operation's cases share."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies.case import MAX_ELEMENTS, InvalidCase
from pagefuzz.strategies.number_formats import FORMATS, STORAGE, decode
from pagefuzz.strategies.tensors import Buffer, Tensor, row_major
from pagefuzz.strategies.values import FINITE_POISONS, FRESH, POISONS

# Each is drawn as often as it is listed; the kernels of serving engines see 64 and up, most faults show below.
HEAD_DIMS = (8, 1, 2, 4, 3, 16, 8, 2, 5, 64, 32, 4, 80, 1, 16, 128, 12)
GROUP_SIZES = (2, 1, 4, 1, 2, 3, 1, 8, 2, 5, 1, 7, 1, 12)
BLOCK_SIZES = (4, 2, 16, 1, 3, 4, 8, 2, 16, 5, 32, 12)
POISON_ORDER = ("zeros", "nan", "tenant", "nan", "largest", "infinity", "nan_and_garbage", "minus_infinity", "smallest")
FRESH_ORDER = ("nan", "zeros", "nan", "tenant", "largest", "nan", "infinity", "minus_infinity", "smallest")
ORDERS = (0, 0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 3, 0, 0, 4)  # of programs; `Case.order`
LARGE_SHARE = 1 / 32  # of the cases are large along one axis
ONE_IN_6 = (False,) * 5 + (True,)
# Of the values, and of what there are many of: lengths, the order of blocks, tokens. A choice for each would cost more;
# and since Hypothesis copies a choice to where it made another like it, large cases would come more often.
SEEDS = st.integers(0, 2**16)
MOST_TOGETHER = 256  # of more combinations, Hypothesis draws the first ones more often

assert set(POISON_ORDER) == set(POISONS) and set(FRESH_ORDER) == set(FRESH) and set(FINITE_POISONS) < set(POISONS)


@lru_cache(maxsize=64)
def _pool(declared: Declaration, what: str, preferred: tuple[int, ...]) -> tuple[int, ...]:
    pool = tuple(size for size in preferred if declared.supports_size(what, size))
    if pool:
        return pool
    listed = getattr(declared, what)
    if callable(listed):
        return tuple(size for size in range(1, 1025) if listed(size))[:8]
    return tuple(sorted(listed)[:8])


def sizes(declared: Declaration, what: str, preferred: tuple[int, ...]) -> tuple[int, ...]:
    """The declared sizes to draw from: those of `preferred` that the kernel supports, else what it lists."""
    pool = _pool(declared, what, preferred)
    if not pool:
        raise InvalidCase(f"nothing to draw: the declared {what} admit no size up to 1024")
    listed = getattr(declared, what)
    extra = () if listed is None or callable(listed) else tuple(size for size in listed if size not in pool)[:8]
    return pool + extra


def large_sizes(declared: Declaration, what: str, sizes: tuple[int, ...]) -> list[int]:
    """Those of `sizes` that the kernel declares."""
    return [size for size in sizes if declared.supports_size(what, size)]


def fewer_heads(heads: int, block: int) -> int:
    """As many kv heads as a case holds that fills sixteen blocks of `block` elements a head, `heads` at the most."""
    return max(1, min(heads, MAX_ELEMENTS // (16 * block)))


def one_of_each(*tables: tuple[Any, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    """One of each table, as one choice: a choice costs Hypothesis more than what is done with it."""
    together = tuple(product(*tables))
    assert len(together) <= MOST_TOGETHER, f"{len(together)} combinations are not drawn evenly: use two choices"
    return st.sampled_from(together)


def shape_of(draw: st.DrawFn, chance: Random, shapes: tuple[int, ...]) -> Random:
    """What chooses a case's shape, which is what a compiled kernel is compiled for: dtypes, numbers of heads, head dim,
    block size, layouts. `chance`, so that each case has its own; or one of the seeds `shapes`, where there are some."""
    return Random(draw(st.sampled_from(shapes))) if shapes else chance


_HOW_MANY = st.sampled_from((0, 0, 0, 0, 0, 0, 1, 2, 2))


def some_of(draw: st.DrawFn, chance: Random, names: tuple[str, ...]) -> tuple[str, ...]:
    """One of `names` in one of nine draws, two (or all, if there are fewer) in two, else none."""
    return tuple(sorted(chance.sample(names, min(draw(_HOW_MANY), len(names)))))


def recast(tensor: Tensor, dtype: str) -> None:
    """Give a tensor another dtype and keep its numbers; a fault for I16."""
    buffer = tensor.buffer
    native = np.float32 if dtype == "float32" else np.float16
    for index, (start, bits) in enumerate(buffer.pieces):
        values = bits.astype(np.float64) if buffer.dtype.startswith("int") else decode(bits, buffer.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            buffer.pieces[index] = (start, values.astype(native).view(STORAGE[dtype]))
    buffer.dtype = dtype


def poke(tensor: Tensor, element: int, value: int) -> None:
    """Put `value` at `element` of a small integer tensor's buffer; a fault for I16."""
    tensor.buffer.pieces[0][1][element] = value


def respaced(tensor: Tensor, dim: int) -> Tensor:
    """A small tensor with the same elements, and as much poison behind each entry of `dim` as the entry is long.

    A fault for I16. Raises InvalidCase where that would be no other layout.
    """
    if tensor.shape[dim] < 2 or 0 in tensor.shape:
        raise InvalidCase(f"{tensor.name} has no two entries in dim {dim} to put apart")
    strides = list(row_major(tensor.shape))
    strides[: dim + 1] = [2 * stride for stride in strides[: dim + 1]]
    index = np.indices(tensor.shape).reshape(len(tensor.shape), -1)
    ((start, bits),) = tensor.buffer.pieces
    spread = Buffer(tensor.name, tensor.buffer.dtype, strides[0] * tensor.shape[0])
    full = np.full(spread.size, FORMATS[spread.dtype].nan if spread.dtype in FORMATS else 99999, dtype=bits.dtype)
    full[np.array(strides) @ index] = bits[tensor.offset - start + np.array(tensor.strides) @ index]
    spread.pieces.append((0, full))
    return Tensor(tensor.name, spread, tensor.shape, tuple(strides))
