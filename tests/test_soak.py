"""The soak: it counts what it runs, and says whom it accuses and how to see that again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.fuzz.saved import from_token
from pagefuzz.kernels.registry import Kernel
from pagefuzz.tests import soak, workers
from pagefuzz.tests.commands import environ
from pagefuzz.tests.good_kernels import GOOD

(RIGHT,) = (kernel for kernel in GOOD if kernel.name == "token_by_head")


def skips_the_first(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
    """Loses the first token."""
    RIGHT.call(key[1:], value[1:], k_cache, v_cache, slots[1:])


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    found = {"right": replace(RIGHT, name="right"), "wrong": replace(RIGHT, name="wrong", call=skips_the_first)}
    monkeypatch.setattr(soak, "kernels", lambda: found)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_a_job_counts_its_cases_and_accuses_the_wrong_kernel_alone(seed: int, two: dict[str, Kernel]) -> None:
    assert soak.work({"kernel": "right", "seed": seed}) == {"cases": 125, "accused": []}
    result = soak.work({"kernel": "wrong", "seed": seed})
    (said,) = result["accused"]
    assert 0 < result["cases"] < 125
    saved, case = from_token(said.splitlines()[-1].strip())
    assert saved.kernel == "wrong" and said.startswith(f"{saved.invariant}: Violation(")
    assert case.one_line() in said


def test_whoever_is_accused_crashes_or_hangs_is_counted(
    two: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(command: list[str], jobs: Iterator[Any], count: int, limit: float) -> Iterator[tuple[Any, Any]]:
        results = [{"cases": 125, "accused": []}, {"cases": 3, "accused": ["I4: no"]}, {"crashed": "signal 11"}]
        yield from zip(jobs, results, strict=False)

    monkeypatch.setattr(workers, "run", ran)
    assert soak.soak(1.0, 1, 7) == 2
    said = capsys.readouterr().out
    assert "wrong, seed 7: I4: no" in said and "right, seed 8: crashed: signal 11" in said
    assert said.endswith("128 cases, 2 alarms\n")
    assert soak.soak(-1.0, 1, 7) == 0
    assert capsys.readouterr().out.endswith("0 cases, 0 alarms; no time for 2 kernels\n")


@pytest.mark.parametrize("options", [("--minutes", "-1"), ("--minutes", "nan"), ("--workers", "0")])
def test_no_time_and_no_process_are_refused(
    options: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["soak.py", *options])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert ended.value.code == 2 and "--minutes and --workers must be above 0" in capsys.readouterr().err


def test_on_a_device_all_kernels_share_a_process_of_their_own(two: dict[str, Kernel]) -> None:
    soak.isolated.cache_clear()
    try:
        assert soak.work({"kernel": "right", "seed": 1}, "cpu", 2) == {"cases": 125, "accused": []}
        _, observer = soak.isolated("cpu", 2)
        first = observer.worker
        assert first is not None and first.pid != os.getpid()
        (said,) = soak.work({"kernel": "wrong", "seed": 1}, "cpu", 2)["accused"]
        assert "Violation(" in said and observer.worker is first
    finally:
        soak.isolated("cpu", 2)[1].close()
        soak.isolated.cache_clear()


def test_a_device_that_is_not_there_is_one_sentence() -> None:
    command = [sys.executable, "-P", str(Path(soak.__file__)), "--device", "cuda", "--minutes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ(), timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith("--device cuda: ") and len(done.stderr.splitlines()) == 1


def test_an_interrupted_soak_says_what_it_has_done(
    two: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(command: list[str], jobs: Iterator[Any], count: int, limit: float) -> Iterator[tuple[Any, Any]]:
        yield next(jobs), {"cases": 125, "accused": []}
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "run", ran)
    with pytest.raises(KeyboardInterrupt):
        soak.soak(1.0, 1, 1)
    assert capsys.readouterr().out.endswith("125 cases, 0 alarms; no time for 1 kernels\n")
