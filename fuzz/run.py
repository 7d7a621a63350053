"""Runs a kernel on a case and observes what it left behind."""

from __future__ import annotations

import math
import os
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pagefuzz.fuzz.arena import Arena
from pagefuzz.kernels.registry import Kernel
from pagefuzz.oracles.observation import Observation, Output, Raised, Wild
from pagefuzz.strategies.case import Case, Limits, arguments_of

TORCHS_ADVICE = "\nSearch for `cuda"  # on how to debug follows what went wrong
_FOLDERS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], str(Path(__file__).parent))
NOT_THE_AUTHORS = (*(folder + os.sep for folder in _FOLDERS), "<")  # how the files of other frames begin
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}


_FRESH = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}


class _FreshMemoryIsPoison(TorchFunctionMode):
    """Fills what `torch.empty` and its kin hand out, so that a kernel that reads its output or its workspace before it
    writes there shows. (torch's own fill comes with deterministic algorithms, and those compute other bits.)

    kind: one of strategies.values.FRESH.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _FRESH and made.numel() and not made.dtype.is_complex:
            with torch.no_grad():
                # The whole of the memory: strided tensors have gaps, and places that lie in each other.
                whole = made.untyped_storage().nbytes() // made.element_size()
                made.as_strided((whole,), (1,), 0).fill_(_fill(self.kind, made.dtype))
        return made


@lru_cache(maxsize=256)
def _fill(kind: str, dtype: torch.dtype) -> float:
    """A kind of poison as a number of a dtype; integers have no NaN and no infinity, some float8 no infinity."""
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        numbers = {"nan": math.nan, "infinity": math.inf, "minus_infinity": -math.inf, "largest": limits.max}
        number = {**numbers, "zeros": 0.0, "smallest": limits.smallest_normal, "tenant": 0.75}[kind]
        return math.nan if math.isinf(number) and not torch.tensor(number).to(dtype).double().isinf() else number
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return {"zeros": 0, "smallest": 1, "tenant": 1, "minus_infinity": least}.get(kind, most)


class Observer(Protocol):
    """What runs cases: here, or in a process of its own (isolation/)."""

    @property
    def limits(self) -> Limits: ...

    def observe(self, kernel: Kernel, case: Case) -> Observation: ...

    def hurried(self) -> AbstractContextManager[Callable[[], bool]]: ...


class Runner:
    """Runs cases in one arena, one after the other.

    poisoned: memory that a kernel allocates is filled; else left alone, for a tool that sees who reads it.
    """

    def __init__(self, arena: Arena, interpreted: bool, poisoned: bool = True) -> None:
        self.arena = arena
        self.interpreted = interpreted
        self.hears_interrupts = True  # where not, it is the kernel that raises KeyboardInterrupt
        self.poisoned = poisoned
        if interpreted:
            from pagefuzz.fuzz.interpreter import install

            install()

    @property
    def limits(self) -> Limits:
        """What the strategies may draw for the arena here."""
        return self.arena.limits

    def hurried(self) -> AbstractContextManager[Callable[[], bool]]:
        """Nobody ends a run here, so there is no patience to lose."""
        return nullcontext(lambda: False)

    def observe(self, kernel: Kernel, case: Case) -> Observation:
        """One run. Raises InvalidCase where the case does not fit this machine; what the kernel raises is observed."""
        arguments = arguments_of(case)
        placed = self.arena.place(arguments)
        try:
            seen = self._observe(kernel, case, placed, dict(zip(arguments.values, placed, strict=True)))
        except BaseException:
            with suppress(RuntimeError):  # of a device that is gone; what was raised first says more
                self.arena.forget()
            raise
        if not seen.ended:
            self.arena.forget()
        return seen

    def _observe(self, kernel: Kernel, case: Case, placed: list[Any], named: dict[str, Any]) -> Observation:
        keywords = {"check_values": True} if case.fault in case.value_faults and case.fault else {}
        raised = returned = bits = None
        misreturned = ""
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        with (
            self._tracing(tensors) as trace,
            self._ordering(case.order),
            _FreshMemoryIsPoison(getattr(case, "fresh", "nan")) if self.poisoned else nullcontext(),
            np.errstate(),
        ):  # keeps what a kernel sets to itself
            try:
                result = kernel.call(*placed, **keywords)
                returned, misreturned = _returned(kernel, result, named)
                bits = self.arena.fetch(returned)  # waits for a device, whose errors belong to this run
            except BaseException as error:  # a kernel that exits or skips is observed like one that raises
                if self.hears_interrupts and isinstance(error, KeyboardInterrupt | GeneratorExit):
                    raise
                raised = _raised(error)
        if raised is not None and not self._is_alive():
            return Observation(ended=f"crashed: {raised}")
        wild = None
        if trace is not None and trace.wild is not None:
            at = trace.wild
            wild, raised = Wild(at.kind, tuple(at.program), at.tensor, at.index, at.lanes, at.value), None
            bits, misreturned = None, ""
        traced = trace is not None and trace.launches > 0
        return Observation(
            raised=raised,
            wild=wild,
            output=None if bits is None or returned is None else _output(bits, returned),
            misreturned=misreturned,
            watched=self.arena.watched(case.watched()),
            changes=self.arena.changes(),
            touched=self.arena.touched(),
            loads=trace.loads if traced else None,
            stores=trace.stores if traced else None,
            race=trace.race if traced else None,
        )

    def _tracing(self, tensors: dict[str, torch.Tensor]) -> Any:
        if not self.interpreted:
            return nullcontext()
        from pagefuzz.fuzz.tracer import traced

        return traced(tensors)

    def _ordering(self, order: int) -> Any:
        if not self.interpreted or order == 0:
            return nullcontext()
        from pagefuzz.fuzz.order import in_order

        return in_order(order)

    def _is_alive(self) -> bool:
        """Whether the device still answers. After an illegal access it does not, in this process.

        An error of the launch itself, of an empty grid say, stays behind where the kernel has raised it: the next
        launch raises it again, and so is ours.
        """
        if self.arena.device.type != "cpu":
            with suppress(RuntimeError):
                torch.ones(1, device=self.arena.device)
            try:
                torch.get_device_module(self.arena.device).synchronize(self.arena.device)
            except Exception:
                return False
        return True


def _raised(error: BaseException) -> Raised:
    """What to say of an exception: the innermost cause of what Triton's interpreter wraps, and the author's line."""
    inside = type(error).__name__ == "InterpreterError"
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_THE_AUTHORS)
    ]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    message = " ".join(str(error).split(TORCHS_ADVICE)[0].split())
    return Raised(type(error).__name__, message[:500], where, inside)


def _returned(kernel: Kernel, result: Any, named: dict[str, Any]) -> tuple[torch.Tensor | None, str]:
    """The returned tensor, or a sentence on what is wrong with it."""
    operation = kernel.operation
    if not operation.result:
        return None, ""  # what a write returns is nobody's business
    if not isinstance(result, torch.Tensor):
        return None, f"returned {type(result).__name__}, not a tensor"
    like = named.get("q")
    dtype = like.dtype if like is not None else torch.int64
    shape = tuple(like.shape) if like is not None else tuple(named["positions"].shape)
    device = named["block_tables"].device
    said = f"returned {result.dtype} {tuple(result.shape)} on {result.device}"
    if result.dtype != dtype or tuple(result.shape) != shape or result.device.type != device.type:
        return None, f"{said}, where the contract says {dtype} {shape} on {device}"
    return result, ""


def _output(data: np.ndarray, returned: torch.Tensor) -> Output:
    bits = data.view(_BITS[returned.element_size()]).reshape(tuple(returned.shape))
    return Output(bits, str(returned.dtype).removeprefix("torch."))
