"""Memoises Triton's semantic layer: what a call of the language does to the builder is found out once.

Interpreted, nearly all the time of a kernel goes into working out what `x + y` means: types, broadcasts, conversions,
constants. That depends on the types of the operands and on the values of Python arguments, not on data, and ends in a
few calls of the builder, which do the work in numpy. So the first call of a builtin, or of a jit function of
`triton.language` itself, runs as always while a `_Recording` stands in for the builder and notes its calls. They become a
plan, which later calls with an equal key replay on the real builder. Nothing of Triton is written again here.

The key has all that a call can see of its arguments except data: types and shapes of tensors, which operands are one
object, and Python values with their Python types (-0.0 and the bits of a NaN too). Arguments of any other kind run as in
stock. So does every call in which something other than the builder looked at data (`bool`, `int`): a tensor under
recording holds a `_Register`, which notices.

What only makes or moves constants (`_FOLDABLE`) is computed once. All else is replayed in order, loads, stores, atomics,
program ids, assertions and prints above all. Kernels and jit functions of users are not memoised, only what they call.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from pagefuzz.fuzz.interpreter.launch import index, patching_once

# Bounds of what is kept. When one is reached all plans go, and the ones in use come back at a millisecond each.
MAX_PLANS = 20_000
MAX_CONSTANT_BYTES = 64 << 20
MAX_BYTES_OF_A_CONSTANT = 64 << 10

# Calls of the builder that make a constant or move one. Arithmetic is not folded: there is nothing to gain.
_FOLDABLE = re.compile(
    r"get_(int|uint|fp)\d+|get_bf16|get_(null|all_ones)_value"
    r"|create_(make_range|splat|unsplat|broadcast|expand_dims|reshape|trans|bitcast)"
    r"|create_(int_cast|si_to_fp|ui_to_fp|fp_to_si|fp_to_ui|fp_ext|fp_trunc|fp_to_fp)"
)
# Calls of the builder after which a call of the language may be run once more: they only compute. A plan of these that
# raises is left to stock, so that it raises in stock's words.
_REPEATABLE = re.compile(
    r"create_(get_program_id|get_num_programs|select|addptr|dot|cat|join|split|gather|histogram|int_to_ptr|ptr_to_int)"
    r"|create_([fisu]?(add|sub|mul|div|rem|neg|abs)|min\w+|max\w+|[if]cmp\w+|and|or|xor|shl|lshr|ashr|umulhi|fma|clampf)"
    r"|create_(exp2?|log2?|sin|cos|erf|r?sqrt|floor|ceil|precise_\w+|approx_divf|dot_scaled)|get_cache_policy|"
    + _FOLDABLE.pattern
)
# What the semantic layer asks of the builder that is no operation.
_TYPE_OR_OPTION = re.compile(r"get_\w+_ty|options|codegen_fns|arch")
# Up to triton 3.7 this changes its operands' arrays: a constant that it may change is made anew every time.
_CHANGES_OPERANDS = "create_ashr"

_NUMBER = "_pagefuzz_number"  # attribute of Triton's types: equal numbers, equal types
_POINTER_TENSORS = "_pagefuzz_tensors"  # attribute of pointer types: tensors of that type by shape


class _Unkeyed(Exception):
    """An argument that no key can describe."""


class Memo:
    """All plans of this process.

    interpreter: the module triton.runtime.interpreter; tl: triton.language.
    """

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self.builder, self.semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
        self.Tensor, self.Handle = tl.tensor, interpreter.TensorHandle
        self.Constexpr, self.Dtype = tl.constexpr, tl.dtype
        self.Pointer, self.Block = tl.pointer_type, tl.block_type
        self.enums = {type(member) for member in (tl.PropagateNan.ALL, tl.PropagateNan.NONE)}
        self.Register = _register_type(self.Handle)
        self.numbers: dict[Any, int] = {}
        self.next_number = 0
        self.tables: list[dict[Any, Any]] = []
        self.plans = self.constant_bytes = 0
        self.codes: dict[str, CodeType] = {}

    def memoised(self, stock: Callable[..., Any], also: Callable[[], Any] | None = None) -> Callable[..., Any]:
        """A function that does what `stock` does. also: what the result depends on beside the arguments."""
        table: dict[Any, Any] = {}
        self.tables.append(table)
        semantic, builder, keys_of = self.semantic, self.builder, self._key_function()

        def call(*args: Any, **kwargs: Any) -> Any:
            if semantic.builder is not builder:  # inside of a recording: a part of it
                return stock(*args, **kwargs)
            tensors: list[Any] = []
            try:
                key: Any = keys_of(args, tensors)
                if kwargs:
                    key = (key, tuple(kwargs), keys_of(kwargs.values(), tensors))
            except _Unkeyed:
                return stock(*args, **kwargs)
            if also is not None:
                key = (key, also())
            plan = table.get(key)
            if plan is None:
                return self._record(table, key, stock, args, kwargs, tensors)
            if plan is stock:
                return stock(*args, **kwargs)
            try:
                return plan(builder, tensors)
            except Exception:
                if not plan.repeatable:
                    raise
            return stock(*args, **kwargs)  # raises what stock raises, in the same words

        return call

    def step(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """tl.reduce or tl.associative_scan; a step of its own in a recording."""

        def call(*args: Any, **kwargs: Any) -> Any:
            recording = self.semantic.builder
            return stock(*args, **kwargs) if recording is self.builder else recording.reduced(stock, args, kwargs)

        return call

    def truth(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """tl.tensor.__bool__: a tensor that has not exactly one element is true, whatever the data."""

        def truth(tensor: Any) -> Any:
            handle = tensor.handle
            if type(handle) is self.Register and handle.real.data.size == tensor.numel.value != 1:
                return True
            return stock(tensor)

        return truth

    def _record(self, table: Any, key: Any, stock: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        recording = _Recording(self, tensors)
        self.semantic.builder = recording
        try:
            result = stock(*recording.watched(args), **{name: recording.watched(arg) for name, arg in kwargs.items()})
        except Exception:
            if recording.effects:
                raise
            recording = None
        finally:
            self.semantic.builder = self.builder
        if recording is None:
            return stock(*args, **kwargs)
        plan = recording.plan(result)
        if self.plans >= MAX_PLANS or self.constant_bytes >= MAX_CONSTANT_BYTES:
            self.forget()
        self.plans += 1
        table[key] = stock if plan is None else plan
        return recording.unwatched(result)

    def code_of(self, source: str) -> CodeType:
        """Plans differ in their constants more than in their code: each source is compiled once."""
        code = self.codes.get(source)
        if code is None:  # the directory says whose frame it is; no such file exists
            module = compile(source, str(Path(__file__).with_name("plan")), "exec")
            code = self.codes[source] = next(part for part in module.co_consts if isinstance(part, CodeType))
        return code

    def forget(self) -> None:
        """Forget all plans."""
        for table in self.tables:
            table.clear()
        self.codes.clear()
        self.numbers.clear()  # numbers are not given again: an old one that a type still has only costs a second plan
        self.plans = self.constant_bytes = 0

    def number_of(self, dtype: Any) -> int:
        """A number that two types share only if they are equal."""
        known: int | None = dtype.__dict__.get(_NUMBER)
        if known is not None:
            return known
        kind = type(dtype)
        if kind is self.Block:
            identity: Any = ("block", self.number_of(dtype.element_ty), tuple(dtype.shape))
        elif kind is self.Pointer:
            identity = ("pointer", self.number_of(dtype.element_ty), dtype.address_space, dtype.const)
        elif kind is self.Dtype:
            identity = dtype.name
        else:
            raise _Unkeyed
        number = self.numbers.setdefault(identity, self.next_number)
        self.next_number = max(self.next_number, number + 1)
        setattr(dtype, _NUMBER, number)
        return number

    def _key_function(self) -> Callable[[Iterable[Any], list[Any]], Any]:
        Tensor, Handle, Constexpr, number_of = self.Tensor, self.Handle, self.Constexpr, self.number_of
        plain, enums, sequences, types = {int, bool, str}, self.enums, {tuple, list}, (self.Dtype, self.Block)

        def keys_of(args: Iterable[Any], tensors: list[Any]) -> tuple[Any, ...]:
            """What a call can see of each of `args`; appends the tensors that are found to `tensors`."""
            keys: list[Any] = []
            for arg in args:
                kind = type(arg)
                if kind is Tensor:
                    handle = arg.handle
                    if type(handle) is not Handle:
                        raise _Unkeyed
                    key: Any = arg.type.__dict__.get(_NUMBER)
                    if key is None:
                        key = number_of(arg.type)
                    for place, other in enumerate(tensors):
                        if other.handle is handle:
                            key = (key, place, other is arg)
                            break
                    tensors.append(arg)
                    keys.append(key)
                elif arg is None:
                    keys.append(arg)
                elif kind in plain or kind in enums:
                    keys.append((kind, arg))
                elif kind is float:
                    keys.append((kind, arg if arg and arg == arg else struct.pack("d", arg)))
                elif kind is Constexpr:
                    keys.append((kind, keys_of((arg.value,), tensors)))
                elif kind in sequences:
                    keys.append((kind, keys_of(arg, tensors)))
                elif kind is slice:
                    keys.append((kind, keys_of((arg.start, arg.stop, arg.step), tensors)))
                elif kind in types and not arg.scalar.is_ptr():  # pointer types are objects of one launch
                    keys.append((kind, number_of(arg)))
                else:
                    raise _Unkeyed
            return tuple(keys)

        return keys_of

    def pointer_tensor(self, fields: dict[str, Any], handle: Any, pointer: Any) -> Any:
        """A tensor like the one with `fields`, of the type object `pointer`, which is equal to that one's but is an
        object of one launch: the tracer tells by it whose pointer this is."""
        made = pointer.__dict__.get(_POINTER_TENSORS)
        if made is None:
            made = pointer.__dict__[_POINTER_TENSORS] = {}
        own = made.get(fields["type"].name)
        if own is None:
            dtype = pointer
            if fields["type"] is not fields["dtype"]:
                dtype = object.__new__(self.Block)
                vars(dtype).update(vars(fields["type"]), element_ty=pointer)
            own = made[fields["type"].name] = {**fields, "type": dtype, "dtype": pointer}
        return self.tensor_of(own, handle)

    def tensor_of(self, fields: dict[str, Any], handle: Any) -> Any:
        """A copy of the tensor that has `fields`, with another handle."""
        tensor = object.__new__(self.Tensor)
        tensor.__dict__.update(fields)
        tensor.handle = handle
        return tensor


def memoising(interpreter: Any, tl: Any) -> list[tuple[Any, str, Any]]:
    """What to patch so that builtins and the jit functions of triton.language are memoised."""
    memo = Memo(interpreter, tl)
    semantic, Function = interpreter.interpreter_semantic, interpreter.InterpretedFunction
    stock_call, knobs = Function.__call__, interpreter.triton.knobs
    functions: dict[Any, Callable[..., Any]] = {}

    def patch_attr(obj: Any, name: str, member: Callable[..., Any], _: Any, scope: Any) -> None:
        def stock(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        also = (lambda: knobs.language.fp32_default) if name == "dot" else None
        scope.set_attr(obj, name, memo.memoised(stock, also))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.fn.__module__ or "").startswith("triton.language."):
            return stock_call(self, *args, **kwargs)
        memoised = functions.get(self.fn)
        if memoised is None:
            memoised = functions[self.fn] = memo.memoised(lambda *args, **kwargs: stock_call(self, *args, **kwargs))
        return memoised(*args, **kwargs)

    def patched() -> None:
        tl.tensor.__index__, tl.tensor.__bool__ = index, memo.truth(tl.tensor.__bool__)
        for module in (tl, tl.core):
            module.reduce, module.associative_scan = memo.step(module.reduce), memo.step(module.associative_scan)

    return [
        *patching_once(interpreter, patched),
        (interpreter, "_patch_attr", patch_attr),
        (Function, "__call__", call),
        (semantic, "to_tensor", memo.memoised(semantic.to_tensor)),  # every assignment in a kernel
    ]


def _register_type(Handle: Any) -> Any:
    class Register(Handle):  # type: ignore[misc]
        """Stands for a handle while a call is recorded, and notices when something else than the builder looks at it.

        constant: it is the same at every replay, so that whoever looks at it always sees the same.
        """

        def __init__(self, recording: _Recording, real: Any, index: int, constant: bool) -> None:
            vars(self).update(recording=recording, real=real, index=index, constant=constant)

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


class _Recording:
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
        if not _REPEATABLE.fullmatch(name):
            self.effects = True
        elif _FOLDABLE.fullmatch(name) and all(register.constant for register in self.registers_in((args, kwargs))):
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

    def plan(self, result: Any) -> Any:
        """The function (builder, tensors) -> result that replays this recording; None if there can be none."""
        return _Plan(self).function(result) if self.pure else None


class _Plan:
    """Writes the function that replays a recording."""

    def __init__(self, recording: _Recording) -> None:
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
            if not made <= self.constant if made else True:
                if made & needed or not (isinstance(name, str) and _FOLDABLE.fullmatch(name)):
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
        plan = FunctionType(self.memo.code_of("def plan(builder, tensors):\n " + "\n ".join(lines)), self.names)
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
            return self._name(value.real) if value.index in self.constant else f"r{value.index}"
        if kind is self.memo.Tensor:
            return f"{self._name(self.memo.tensor_of)}({self._name(_fields(value))}, {self._expression(value.handle)})"
        if kind in (list, tuple) and self._indices(value):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if kind is list else f"({items})"
        self.known &= kind is not self.memo.Handle
        return self._name(value)

    def _return(self, result: Any) -> list[str]:
        expression = self._result(result)
        made = re.fullmatch(r"(v\d+)\((v\d+), (.*)\)", expression)
        if made is None or self.names[made[1]] != self.memo.tensor_of:
            return [f"return {expression}"]
        self.names |= {"new": object.__new__, "Tensor": self.memo.Tensor}  # the commonest result, without a call
        return [
            "tensor = new(Tensor)",
            f"tensor.__dict__.update({made[2]})",
            f"tensor.handle = {made[3]}",
            "return tensor",
        ]

    def _result(self, value: Any) -> str:
        memo, kind = self.memo, type(value)
        if kind is tuple:
            return "(" + "".join(f"{self._result(item)}, " for item in value) + ")"
        if kind is memo.Constexpr:
            self.known &= type(value.value) in _PLAIN
            return self._name(value)
        if kind is not memo.Tensor:
            self.known &= kind in _PLAIN or kind is memo.Dtype
            return self._name(value)
        original = self.recording.originals.get(id(value))
        for place, tensor in enumerate(self.recording.tensors):
            if tensor is original:
                return f"tensors[{place}]"
        if value.handle is None:
            return f"{self._name(memo.tensor_of)}({self._name(_fields(value))}, None)"
        handle = self._expression(value.handle)
        if type(value.handle) is memo.Register and value.handle.index in self.constant:
            handle = f"{self._name(memo.Handle)}({handle}.data, {handle}.dtype)"  # a handle can be changed: a new one
        pointer = value.type.scalar
        for place, tensor in enumerate(self.recording.tensors):
            if pointer.is_ptr() and tensor.type.scalar is pointer:
                fields, origin = self._name(_fields(value)), f"tensors[{place}].type.scalar"
                return f"{self._name(memo.pointer_tensor)}({fields}, {handle}, {origin})"
        return f"{self._name(memo.tensor_of)}({self._name(_fields(value))}, {handle})"


_PLAIN = (type(None), bool, int, float, str)


def _fields(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name != "handle"}
