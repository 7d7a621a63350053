"""Records what one call of the language asks of the builder, and writes the function that replays it.

A tensor under recording holds a `Register`, which notices when something else than the builder looks at it: then what
the call does may depend on data, and there is no plan. What only makes or moves constants (`_FOLDABLE`) is computed
once. All else is replayed in order, loads, stores, atomics, program ids, assertions and prints above all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pagefuzz.fuzz.interpreter.memo import Memo


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Calls of the builder that make a constant or move one. Arithmetic is not folded: there is nothing to gain.
_FOLDABLE = _names("""
    get_int1 get_int8 get_int16 get_int32 get_int64 get_uint8 get_uint16 get_uint32 get_uint64 get_fp16 get_bf16
    get_fp32 get_fp64 get_null_value get_all_ones_value create_make_range create_splat create_unsplat create_broadcast
    create_expand_dims create_reshape create_trans create_bitcast create_int_cast create_si_to_fp create_ui_to_fp
    create_fp_to_si create_fp_to_ui create_fp_ext create_fp_trunc create_fp_to_fp
""")
# Calls after which a call of the language may be run once more: they only compute. Where a plan of these raises, stock
# runs, so that it raises in stock's words. Of a call that is not named here nothing is known: it is done once.
_REPEATABLE = _FOLDABLE | _names("""
    create_get_program_id create_get_num_programs create_select create_addptr create_dot create_cat create_join
    create_split create_gather create_histogram create_int_to_ptr create_ptr_to_int create_fadd create_fsub create_fmul
    create_fdiv create_frem create_fneg create_fabs create_iabs create_add create_sub create_mul create_sdiv create_udiv
    create_srem create_urem create_idiv create_and create_or create_xor create_shl create_lshr create_ashr create_umulhi
    create_fma create_clampf create_minsi create_minui create_minimumf create_minnumf create_maxsi create_maxui
    create_maximumf create_maxnumf create_exp create_exp2 create_log create_log2 create_sin create_cos create_erf
    create_sqrt create_rsqrt create_floor create_ceil create_precise_sqrt create_precise_divf create_approx_divf
    create_icmpSLE create_icmpSLT create_icmpSGE create_icmpSGT create_icmpULE create_icmpULT create_icmpUGE
    create_icmpUGT create_icmpEQ create_icmpNE create_fcmpOLT create_fcmpOGT create_fcmpOLE create_fcmpOGE
    create_fcmpOEQ create_fcmpONE create_fcmpULT create_fcmpUGT create_fcmpULE create_fcmpUGE create_fcmpUEQ
    create_fcmpUNE get_cache_policy
""")
# What the semantic layer asks of the builder that is no operation.
_TYPE_OR_OPTION = re.compile(r"get_\w+_ty|options|codegen_fns|arch")
# Up to triton 3.7 this changes its operands' arrays: a constant that it may change is made anew every time.
_CHANGES_OPERANDS = "create_ashr"
MAX_BYTES_OF_A_CONSTANT = 64 << 10


def register_type(Handle: Any) -> Any:
    class Register(Handle):  # type: ignore[misc]  # Triton's class is only known once it is imported
        """Stands for a handle while a call is recorded, and notices when something else than the builder looks at it.

        constant: it is the same at every replay, so that whoever looks at it always sees the same.
        """

        def __init__(self, recording: Recording, real: Any, index: int, constant: bool) -> None:
            own: dict[str, Any] = object.__getattribute__(self, "__dict__")
            own.update(recording=recording, real=real, index=index, constant=constant)

        def __getattribute__(self, name: str) -> Any:
            own = object.__getattribute__(self, "__dict__")
            if name in own:
                return own[name]
            if name.startswith("__"):
                return object.__getattribute__(self, name)
            if not own["constant"]:
                own["recording"].pure = False
            return getattr(own["real"], name)

        def __setattr__(self, name: str, value: Any) -> None:
            self.recording.pure = False
            setattr(self.real, name, value)

    return Register


class Recording:
    """Stands in for the builder during one call: does what is asked, and notes it."""

    def __init__(self, memo: Memo, tensors: list[Any]) -> None:
        self.memo, self.pure, self.effects = memo, True, False
        # A step: what to call (a method's name or a function), args, kwargs, result, whether it may be folded.
        self.steps: list[tuple[Any, Any, Any, Any, bool]] = []
        self.registers: list[Any] = []
        self.inputs: dict[int, Any] = {}  # registers of the handles of the arguments, by id of the handle
        self.copies: dict[int, Any] = {}  # watched copies of the arguments, by id of the argument
        self.originals: dict[int, Any] = {}  # the arguments, by id of their watched copy
        self.tensors = tensors
        for tensor in tensors:
            if id(tensor.handle) not in self.inputs:
                self.inputs[id(tensor.handle)] = self._register(tensor.handle, False)
            if id(tensor) not in self.copies:
                copy = memo.tensor_of(vars(tensor), self.inputs[id(tensor.handle)])
                self.copies[id(tensor)], self.originals[id(copy)] = copy, tensor

    def _register(self, handle: Any, constant: bool) -> Any:
        register = self.memo.Register(self, handle, len(self.registers), constant)
        self.registers.append(register)
        return register

    def watched(self, value: Any) -> Any:
        """`value` with every tensor replaced by a copy that is watched."""
        kind = type(value)
        if kind is self.memo.Tensor:
            return self.copies[id(value)]
        if kind is self.memo.Constexpr and type(value.value) in (self.memo.Tensor, list, tuple):
            return self.memo.Constexpr(self.watched(value.value))
        return kind([self.watched(item) for item in value]) if kind in (list, tuple) else value

    def unwatched(self, value: Any) -> Any:
        """The reverse. A register that is left in anything else works as what it stands for."""
        if type(value) is self.memo.Tensor:
            if id(value) in self.originals:
                return self.originals[id(value)]
            if type(value.handle) is self.memo.Register:
                value.handle = value.handle.real
        return tuple([self.unwatched(item) for item in value]) if type(value) is tuple else value

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.memo.builder, name)
        if _TYPE_OR_OPTION.fullmatch(name):
            return member
        if not callable(member):
            self.pure = False
            return member
        return lambda *args, **kwargs: self._call(name, member, args, kwargs)

    def _call(self, name: str, member: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        real_args = [self._real(arg) for arg in args]
        real_kwargs = {key: self._real(arg) for key, arg in kwargs.items()}
        foldable = False
        if name not in _REPEATABLE:
            self.effects = True
        elif name in _FOLDABLE and all(register.constant for register in self.registers_in((args, kwargs))):
            try:
                with np.errstate(all="raise"):
                    result = member(*real_args, **real_kwargs)
                foldable = type(result) is self.memo.Handle and result.data.nbytes <= MAX_BYTES_OF_A_CONSTANT
            except FloatingPointError:  # what warns or raises goes on doing so
                pass
        if not foldable:
            result = member(*real_args, **real_kwargs)
        outcome = self._outcome(result, foldable)
        self.steps.append((name, args, kwargs, outcome, foldable))
        return outcome

    def reduced(self, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """tl.reduce and tl.associative_scan: they take and give tensors and work on data, below the semantic layer."""
        self.memo.semantic.builder = self.memo.builder
        try:
            result = stock(*[self._real(arg) for arg in args], **{key: self._real(arg) for key, arg in kwargs.items()})
        finally:
            self.memo.semantic.builder = self
        several = type(result) is tuple
        results = result if several else (result,)
        outcome = tuple([self._outcome(item.handle, False) for item in results])
        self.steps.append((stock, args, kwargs, outcome if several else outcome[0], False))
        watched = tuple([self.memo.tensor_of(vars(a), b) for a, b in zip(results, outcome, strict=True)])
        return watched if several else watched[0]

    def _real(self, value: Any) -> Any:
        """`value` with every register replaced by the handle that it stands for."""
        kind = type(value)
        if kind is self.memo.Register:
            return value.real
        if kind is self.memo.Tensor:
            return self.memo.tensor_of(vars(value), self._real(value.handle))
        return kind([self._real(item) for item in value]) if kind in (list, tuple) else value

    def registers_in(self, value: Any) -> Iterable[Any]:
        if type(value) is self.memo.Register:
            yield value
        elif type(value) is self.memo.Tensor:
            yield from self.registers_in(value.handle)
        elif type(value) in (list, tuple, dict):
            for item in value.values() if type(value) is dict else value:
                yield from self.registers_in(item)

    def _outcome(self, result: Any, constant: bool) -> Any:
        if type(result) is self.memo.Handle:
            return self.inputs[id(result)] if id(result) in self.inputs else self._register(result, constant)
        if type(result) is tuple:
            return tuple([self._outcome(item, False) for item in result])
        if result is not None:
            self.pure = False
        return result


def plan_of(recording: Recording, result: Any) -> Any:
    """The function (builder, tensors) -> result that replays a recording; None if there can be none.

    Its attribute `repeatable` says that, where it raises, the call may be run once more.
    """
    return _Plan(recording).function(result) if recording.pure else None


class _Plan:
    """Writes the function that replays a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.memo = recording, recording.memo
        self.names: dict[str, Any] = {}  # globals of the function
        self.known = True  # whether a function can be written at all
        self.constant: set[int] = set()  # registers, by index

    def function(self, result: Any) -> Any:
        """The function (builder, tensors) -> result; None if the result is of a kind that is not known."""
        recording, indices = self.recording, self._indices
        changed = [indices(args) for name, args, *_ in recording.steps if name == _CHANGES_OPERANDS]
        for _, args, kwargs, outcome, foldable in recording.steps:
            if foldable and indices((args, kwargs)) <= self.constant and not indices(outcome) & set().union(*changed):
                self.constant |= indices(outcome)
        needed, kept = indices(result), []
        for step in reversed(recording.steps):
            name, args, kwargs, outcome, _ = step
            made = indices(outcome)
            if name in _FOLDABLE and (made <= self.constant or not made & needed):
                continue
            needed |= indices((args, kwargs))
            kept.append(step)
        lines = []
        for place, tensor in enumerate(recording.tensors):
            index = recording.inputs[id(tensor.handle)].index
            if index in needed:
                needed.remove(index)
                lines.append(f"r{index} = tensors[{place}].handle")
        lines += [self._step(*step) for step in reversed(kept)]
        lines += self._return(result)
        if not self.known:
            return None
        for index in self.constant & needed:
            data = recording.registers[index].real.data
            data.flags.writeable = False  # it is shared by all replays
            self.memo.constant_bytes += data.nbytes
        plan: Any = FunctionType(self.memo.code_of("def plan(builder, tensors):\n " + "\n ".join(lines)), self.names)
        plan.repeatable = not recording.effects
        return plan

    def _indices(self, value: Any) -> set[int]:
        return {register.index for register in self.recording.registers_in(value)}

    def _name(self, value: Any) -> str:
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def _step(self, name: Any, args: Any, kwargs: Any, outcome: Any, _: bool) -> str:
        given = [self._expression(arg) for arg in args]
        given += [f"{key}={self._expression(arg)}" for key, arg in kwargs.items()]
        called = f"builder.{name}" if isinstance(name, str) else self._name(name)
        call, handle = f"{called}({', '.join(given)})", "" if isinstance(name, str) else ".handle"
        if type(outcome) is tuple:
            registers = "".join(f"r{register.index}, " for register in outcome)
            return f"{registers}= [result{handle} for result in {call}]"
        return f"r{outcome.index} = {call}{handle}" if outcome is not None else call

    def _expression(self, value: Any) -> str:
        kind = type(value)
        if kind is self.memo.Register:
            if value.index not in self.constant:
                return f"r{value.index}"
            return self._name(self.memo.Handle(value.real.data, value.real.dtype))  # the first result has the other
        if kind is self.memo.Tensor:
            return f"{self._name(self.memo.tensor_of)}({self._name(_fields(value))}, {self._expression(value.handle)})"
        if kind in (list, tuple) and self._indices(value):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if kind is list else f"({items})"
        self.known &= kind is not self.memo.Handle
        return self._name(value)

    def _return(self, result: Any) -> list[str]:
        if type(result) is self.memo.Tensor and self._place(result) is None and not result.type.scalar.is_ptr():
            self.names |= {"new": object.__new__, "Tensor": self.memo.Tensor}  # the commonest result, without a call
            fields, handle = self._name(_fields(result)), self._new_handle(result.handle)
            lines = ["tensor = new(Tensor)", f"tensor.__dict__.update({fields})", f"tensor.handle = {handle}"]
            return [*lines, "return tensor"]
        return [f"return {self._result(result)}"]

    def _result(self, value: Any) -> str:
        memo, kind = self.memo, type(value)
        if kind is tuple:
            return "(" + "".join(f"{self._result(item)}, " for item in value) + ")"
        if kind is not memo.Tensor:
            plain = value.value if kind is memo.Constexpr else value
            self.known &= type(plain) in (type(None), bool, int, float, str) or kind is memo.Dtype
            return self._name(value)
        place = self._place(value)
        if place is not None:
            return f"tensors[{place}]"
        fields, handle = self._name(_fields(value)), self._new_handle(value.handle)
        for place, tensor in enumerate(self.recording.tensors):
            if value.type.scalar.is_ptr() and tensor.type.scalar is value.type.scalar:
                return f"{self._name(memo.pointer_tensor)}({fields}, {handle}, tensors[{place}].type.scalar)"
        return f"{self._name(memo.tensor_of)}({fields}, {handle})"

    def _place(self, value: Any) -> int | None:
        """Which of the arguments this is."""
        original = self.recording.originals.get(id(value))
        return next((place for place, one in enumerate(self.recording.tensors) if one is original), None)

    def _new_handle(self, value: Any) -> str:
        handle = self._expression(value)
        if type(value) is self.memo.Register and value.index in self.constant:
            return f"{self._name(self.memo.Handle)}({handle}.data, {handle}.dtype)"  # handles of results can be changed
        return handle


def _fields(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name != "handle"}
