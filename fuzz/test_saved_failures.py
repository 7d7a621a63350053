"""Judges saved failures again: before everything else in a fuzz run, and alone with --replay."""

from collections.abc import Callable


def test_saved_failures(saved_failure: Callable[[], None]) -> None:
    saved_failure()
