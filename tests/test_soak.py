"""The soak: it counts what it runs, and says whom it accuses and how to see that again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pagefuzz.fuzz.saved import from_token
from pagefuzz.kernels.registry import Kernel
from pagefuzz.tests import soak, workers
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
