"""Fuzzes every chosen kernel of slot_mapping; one item a kernel and shard."""

from collections.abc import Callable


def test_slot_mapping(shard: Callable[[], None]) -> None:
    shard()
