"""Fuzzes every pair of chosen kernels, a write and a decode; one item a pair and shard."""

from collections.abc import Callable


def test_write_then_decode(shard: Callable[[], None]) -> None:
    shard()
