"""Memoises Triton's semantic layer: what a call of the language does to the builder is found out once.

Interpreted, nearly all the time of a kernel goes into working out what `x + y` means: types, broadcasts, conversions,
constants. That depends on the types of the operands and on the values of Python arguments, not on data, and ends in a
few calls of the builder, which do the work in numpy. So the first call of a builtin, or of a jit function of
`triton.language` itself, runs as always while a `Recording` stands in for the builder and notes its calls. They become
a plan, which later calls with an equal key replay on the real builder. Nothing of Triton is written again here.

The key has all that a call can see of its arguments except data: types and shapes of tensors, which operands are one
object, and Python values with their Python types (-0.0 and the bits of a NaN too). Arguments of any other kind run as
in stock. So does every call in which something other than the builder looked at data, as `bool` and `int` do. Kernels
and jit functions of users are not memoised, only what they call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from pagefuzz.fuzz.interpreter.launch import index, patching_once
from pagefuzz.fuzz.interpreter.recording import Recording, plan_of, register_type

# Bounds of what is kept. When one is reached all plans go, and the ones in use come back at a millisecond each.
MAX_PLANS = 10_000
MAX_CONSTANT_BYTES = 64 << 20

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
        self.Register = register_type(self.Handle)
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
        recording = Recording(self, tensors)
        self.semantic.builder = recording
        try:
            result = stock(*recording.watched(args), **{name: recording.watched(arg) for name, arg in kwargs.items()})
        except Exception:
            if recording.effects:  # it must not be done twice
                raise
        else:
            plan = plan_of(recording, result)
            if self.plans >= MAX_PLANS or self.constant_bytes >= MAX_CONSTANT_BYTES:
                self.forget()
            self.plans += 1
            table[key] = plan or stock
            return recording.unwatched(result)
        finally:
            self.semantic.builder = self.builder
        return stock(*args, **kwargs)  # raises with the arguments as they were given

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
                    found = len(tensors)
                    keys.append((kind, keys_of((arg.start, arg.stop, arg.step), tensors)))
                    if len(tensors) > found:
                        raise _Unkeyed
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
