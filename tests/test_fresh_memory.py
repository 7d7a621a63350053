"""The memory that a kernel allocates for itself holds what the case says, and nothing by accident."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import Sequence
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.values import FRESH
from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase
from pagefuzz.tests.killing import runner

CASE = PagedDecodeAttentionCase(block_size=2, num_blocks=2, sequences=(Sequence((1,), (), 2),), head_dim=2)

EIGHT = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, *EIGHT)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool)

Maker = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
MAKERS: dict[str, Maker] = {
    "empty": lambda like, dtype: torch.empty(3, 2, dtype=dtype),
    "empty of a size": lambda like, dtype: torch.empty(size=(3, 2), dtype=dtype, device=like.device),
    "empty_like": lambda like, dtype: torch.empty_like(like, dtype=dtype),
    "empty_strided": lambda like, dtype: torch.empty_strided((3, 2), (2, 1), dtype=dtype),
    "new_empty": lambda like, dtype: like.new_empty((3, 2), dtype=dtype),
    "new_empty_strided": lambda like, dtype: like.new_empty_strided((3, 2), (1, 3), dtype=dtype),
}


def made(kind: str, make: Callable[[torch.Tensor], Any], case: PagedDecodeAttentionCase = CASE) -> list[Any]:
    """What `make` finds in the run of a kernel, for a case whose fresh memory is `kind`."""
    from dataclasses import replace

    found: list[Any] = []

    def kernel(*arguments: Any) -> torch.Tensor:
        q = next(each for each in arguments if isinstance(each, torch.Tensor) and each.dtype == torch.float32)
        found.append(make(q))
        return torch.zeros_like(q)

    seen = observe(kernel, replace(case, fresh=kind))
    assert seen.raised is None, seen.raised
    return found


def observe(call: Callable[..., Any], case: PagedDecodeAttentionCase) -> Observation:
    return runner().observe(Kernel("under test", OPERATIONS[case.operation], call, Declaration()), case)


def modes() -> int:
    return len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]  # torch gives it no types


def right(kind: str, dtype: torch.dtype) -> Callable[[float], bool]:
    """Whether a number is what a kind of fresh memory holds."""
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        without_infinity = dtype not in (*FLOATS[:4], torch.float8_e5m2)
        return {
            "nan": math.isnan,
            "infinity": math.isnan if without_infinity else lambda number: number == math.inf,
            "minus_infinity": math.isnan if without_infinity else lambda number: number == -math.inf,
            "largest": lambda number: number == largest,
            "zeros": lambda number: number == 0,
            "smallest": lambda number: 0 < number <= torch.finfo(dtype).smallest_normal,
            "tenant": lambda number: 0.1 < number < 2,
        }[kind]
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    wanted = {"zeros": 0, "smallest": 1, "tenant": 1, "minus_infinity": least}.get(kind, most)
    return lambda number: number == wanted


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("maker", MAKERS)
def test_every_way_to_fresh_memory_gives_poison(maker: str, kind: str) -> None:
    def make(like: torch.Tensor) -> list[tuple[torch.dtype, list[Any]]]:
        return [
            (
                dtype,
                MAKERS[maker](like, dtype).to(torch.float64 if dtype.is_floating_point else dtype).flatten().tolist(),
            )
            for dtype in (*FLOATS, *INTEGERS)
        ]

    ((*found,),) = made(kind, make)
    assert len(found) == len(FLOATS) + len(INTEGERS)
    for dtype, numbers in found:
        holds = right(kind, dtype)
        assert len(numbers) in (2, 6) and all(map(holds, numbers)), (dtype, numbers)


def test_kinds_differ() -> None:
    """So that none of the checks above holds for another kind."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for kind in FRESH:
        (numbers,) = made(kind, lambda like: [torch.empty(1, dtype=dtype).item() for dtype in dtypes])
        for dtype, number in zip(dtypes, numbers, strict=True):
            assert [other for other in FRESH if right(other, dtype)(number)] == [kind]


def test_gaps_of_a_strided_workspace_are_fresh_too() -> None:
    (whole,) = made(
        "nan", lambda like: torch.empty_strided((3, 2), (5, 2)).as_strided((13,), (1,)).isnan().all().item()
    )
    assert whole


def test_places_that_lie_in_each_other() -> None:
    (values,) = made("tenant", lambda like: torch.empty_strided((4, 2), (0, 1)).flatten().tolist())
    assert values == [0.75] * 8


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_to_fill(shape: tuple[int, ...]) -> None:
    assert made("nan", lambda like: torch.empty(shape).shape) == [torch.Size(shape)]


def test_what_is_filled_by_its_maker_stays() -> None:
    (values,) = made(
        "nan",
        lambda like: [
            torch.zeros(2).tolist(),
            torch.ones_like(like).flatten().tolist(),
            torch.full((2,), 7).tolist(),
            torch.tensor([1.5, 2.5]).tolist(),
            torch.arange(2).tolist(),
            like.clone().shape == like.shape,
            torch.empty(2, dtype=torch.complex64).shape[0],
        ],
    )
    assert values == [[0, 0], [1, 1], [7, 7], [1.5, 2.5], [0, 1], True, 2]


def test_fresh_memory_takes_part_in_autograd_as_before() -> None:
    (asks,) = made("nan", lambda like: torch.empty(2, requires_grad=True).requires_grad)
    assert asks


def test_outside_a_run_nothing_is_filled() -> None:
    before = torch.empty
    made("nan", lambda like: None)
    assert torch.empty is before
    assert modes() == 0


def test_a_kernel_that_raises_leaves_no_mode_behind() -> None:
    def kernel(*arguments: Any) -> Any:
        raise ZeroDivisionError("of the author's")

    assert observe(kernel, CASE).raised is not None
    assert modes() == 0


def test_write_then_decode_too() -> None:
    case = WriteThenDecodeCase(block_size=2, num_blocks=2, sequences=(Sequence((1,), (), 2),), head_dim=2)
    assert made("largest", lambda like: torch.empty(1).item(), case) == [torch.finfo(torch.float32).max]
