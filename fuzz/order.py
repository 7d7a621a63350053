"""Runs the programs of interpreted launches in an order of the case's choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pagefuzz.strategies.values import counter_hash


def permutation(order: int, count: int) -> list[int]:
    """Which of `count` programs runs first, second, ...; `order` as in `Case.order`, the same on every machine."""
    if order == 0:
        return list(range(count))
    if order == 1:
        return list(range(count - 1, -1, -1))
    return np.argsort(counter_hash(order, "order", np.arange(count, dtype=np.uint64)), kind="stable").tolist()


@contextmanager
def in_order(order: int) -> Iterator[None]:
    """Run the programs of all interpreted launches in the context in this order.

    The interpreter still counts its grid in its own order; what it tells the builder is which program that is.
    """
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    stock = builder.set_grid_idx
    known: dict[tuple[int, int, int], list[int]] = {}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        columns, rows, layers = grid = builder.grid_dim
        if grid not in known:
            known[grid] = permutation(order, columns * rows * layers)
        rest, z = divmod(known[grid][(x * rows + y) * layers + z], layers)
        x, y = divmod(rest, rows)
        stock(x, y, z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_idx
