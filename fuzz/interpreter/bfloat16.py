"""Makes Triton's interpreter fast enough to fuzz with and honest about bfloat16.

For processes in which Triton runs interpreted (TRITON_INTERPRET=1); nothing changes where kernels are compiled.
Tried on triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0. `install` changes five things:

1. Stock patches `triton.language` at every launch and at every nested call. Here each function is patched for once.
2. The check of integer overflow, whose verdict stock computes and throws away, is left out.
3. `range(value loaded in the kernel)` works under numpy 2.4 on every version (stock 3.6.0 raises).
4. Stock keeps bfloat16 as bit patterns in uint16 arrays and calculates with those patterns. Here operands are widened
   to float32 (exact), computed, and rounded to nearest even, as hardware does. A NaN stays a NaN; its bits may change.
5. A comparison is an int1. Stock gives it the dtype of its operands, so that a scalar one turns into integers when it
   is broadcast, and 3.9.0 then refuses the mask `(offsets < n) & (slot >= 0)`.

Every other result of every other dtype is stock's, bit for bit.

What remains different from hardware for bfloat16:
- tl.sum and cumulative sums and products accumulate in float32 and round once. Hardware rounds every partial result, in
  an order of its own, so the interpreter is the more exact of the two. Other combine functions round at every step.
- A negated +0.0 is +0.0 up to triton 3.7, which lowers -x to 0 - x.
- Integers beyond 2^53 round twice on their way to bfloat16, and so does tl.fma where its float64 sum is inexact.
- tl.device_print and repr show the bit pattern; tl.dot_scaled (3.8 and later) takes bfloat16 operands through float16.
- fp8 is as wrong as in stock (NaN, infinity, saturation, rounding); bfloat16 converts to fp8 as float32 does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_installed = False
_UINT16 = np.dtype(np.uint16)


def _widen(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 `bits` (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray, truncate: bool = False) -> np.ndarray:
    """bfloat16 bits (uint16) of `values` of any real dtype, rounded once: to nearest even, or towards zero."""
    single = values
    if values.dtype != np.float32:
        # Rounding to float32 first must not create a tie: where it is inexact, take the odd one of the two neighbours.
        exact = values.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            single = exact.astype(np.float32)
        even = (single != exact) & (single.view(np.uint32) & 1 == 0)
        single = np.where(even, np.nextafter(single, np.where(exact > single, np.inf, -np.inf).astype("f4")), single)
    bits = single.view(np.uint32)
    high = bits >> 16
    rounded = high if truncate else (bits + (0x7FFF + (high & 1))) >> 16
    return np.where(np.isnan(single), high | 0x40, rounded).astype(np.uint16)


def corrections(interpreter: Any, tl: Any) -> list[tuple[Any, str, Any]]:
    Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    primitives, ir = interpreter._interpreter, interpreter._ir

    def is_bfloat16(handle: Any) -> bool:
        return handle.data.dtype.char == "H" and handle.dtype.scalar.name == "bf16"

    def to_float32(handle: Any) -> Any:
        return Handle(_widen(handle.data), tl.float32) if is_bfloat16(handle) else handle

    def to_bfloat16(handle: Any) -> Any:
        if handle.data.dtype == np.bool_:  # a comparison
            return Handle(handle.data, tl.int1)
        return Handle(_round(handle.data), tl.bfloat16)

    stock_unary, stock_binary, stock_ternary = Builder.unary_op, Builder.binary_op, Builder.ternary_op

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if is_bfloat16(arg):
            return to_bfloat16(stock_unary(self, to_float32(arg), op))
        return stock_unary(self, arg, op)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if is_bfloat16(lhs):
            return to_bfloat16(stock_binary(self, to_float32(lhs), to_float32(rhs), op))
        result = stock_binary(self, lhs, rhs, op)
        if result.data.dtype.char == "?":
            result.dtype = tl.int1
        return result

    def ternary_op(self: Any, first: Any, second: Any, third: Any, op: Any) -> Any:
        if is_bfloat16(first):  # a clamp; a select starts with its condition and moves bits only
            return to_bfloat16(stock_ternary(self, to_float32(first), to_float32(second), to_float32(third), op))
        return stock_ternary(self, first, second, third, op)

    stock_fma, stock_dot = Builder.create_fma, Builder.create_dot

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if is_bfloat16(z):
            wide = [_widen(handle.data).astype(np.float64) for handle in (x, y, z)]
            return Handle(_round(wide[0] * wide[1] + wide[2]), tl.bfloat16)
        return stock_fma(self, x, y, z)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return stock_dot(self, to_float32(a), to_float32(b), *rest)

    stock_cast, stock_fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar.name == "bf16":
            return Handle(_round(to_float32(src).data), tl.bfloat16)
        return stock_cast(self, to_float32(src), dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar.name != "bf16":
            if is_bfloat16(src) and not dst_type.scalar.is_fp8():
                return cast_impl(self, src, dst_type)
            return stock_fp_to_fp(self, to_float32(src), dst_type, rounding_mode)
        if src.dtype.scalar.is_fp8():
            src = stock_fp_to_fp(self, src, tl.float32, None)
        return Handle(_round(src.data, truncate=rounding_mode == ir.ROUNDING_MODE.RTZ), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return Handle(_round(np.array([value], dtype=np.float64)), tl.bfloat16)

    stock_rmw = Builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if not is_bfloat16(val):
            return stock_rmw(self, op, ptr, val, mask, sem, scope)
        if op != ir.ATOMIC_OP.FADD:
            raise ValueError(f"the interpreter has no atomic {op} on bfloat16, only atomic_add")
        old = np.zeros(ptr.data.shape, np.uint16)
        lanes, on = ptr.data.reshape(-1), np.broadcast_to(mask.data, ptr.data.shape).reshape(-1)
        added = np.broadcast_to(val.data, ptr.data.shape).reshape(-1)
        for lane in np.flatnonzero(on):  # one at a time: two lanes may add to one address
            address, yes = lanes[lane : lane + 1], np.ones(1, np.bool_)
            before = primitives.load(address, yes, np.zeros(1, np.uint16), _UINT16)
            old.reshape(-1)[lane] = before[0]
            primitives.store(address, _round(_widen(before) + _widen(added[lane : lane + 1])), yes)
        return Handle(old, tl.bfloat16)

    def pad_nan(stock: Any, wants_nan: Callable[..., bool]) -> Any:
        # Stock fills the lanes outside of a block with int(nan). `rest` starts with what says which lanes those are.
        def load(self: Any, block: Any, *rest: Any) -> Any:
            loaded = stock(self, block, *rest)
            if is_bfloat16(loaded) and wants_nan(block, *rest):
                inside = block.materialize_pointers(rest[0])[1]
                loaded.data[~(inside.data if isinstance(inside, Handle) else inside)] = 0x7FC0
            return loaded

        return load

    def float32_inside(stock: Any, combine_fns: Sequence[Any]) -> Any:
        # Stock computes these in numpy; all other combine functions go through the builder, element by element.
        def apply_impl(self: Any, input: Sequence[Any]) -> Any:
            narrow = [is_bfloat16(arg.handle) for arg in input]
            if self.combine_fn not in combine_fns or not any(narrow):
                return stock(self, input)
            results = stock(
                self, tuple(convert(arg, to_float32) if n else arg for arg, n in zip(input, narrow, strict=True))
            )
            results = results if isinstance(results, (list, tuple)) else [results]
            return [convert(result, to_bfloat16) if n else result for result, n in zip(results, narrow, strict=True)]

        return apply_impl

    def convert(tensor: Any, change: Callable[[Any], Any]) -> Any:
        handle = change(tensor.handle)
        return tl.tensor(handle, tl.block_type(handle.dtype, tensor.shape) if tensor.type.is_block() else handle.dtype)

    standard = tl.standard
    kinds = itertools.product(("_argmin", "_argmax"), ("left", "fast"))
    reduces = [getattr(standard, f"{kind}_combine_tie_break_{tie}") for kind, tie in kinds]
    reduces += [standard._elementwise_max, standard._elementwise_min, standard._sum_combine]
    scans = [standard._sum_combine, standard._prod_combine]
    Reduce, Scan = interpreter.ReduceOps, interpreter.ScanOps
    methods: list[Any] = [unary_op, binary_op, ternary_op, create_fma, create_dot, cast_impl, create_fp_to_fp]
    patches = [(Builder, method.__name__, method) for method in [*methods, get_bf16, create_atomic_rmw]]
    patches.append((Reduce, "apply_impl", float32_inside(Reduce.apply_impl, reduces)))
    patches.append((Scan, "apply_impl", float32_inside(Scan.apply_impl, scans)))
    nan = ir.PADDING_OPTION.PAD_NAN
    padded = pad_nan(Builder.create_descriptor_load, lambda block, *rest: block.padding == nan)
    patches.append((Builder, "create_descriptor_load", padded))
    if hasattr(Builder, "create_tensor_pointer_load"):  # up to 3.7; later block pointers are made of ordinary loads
        padded = pad_nan(Builder.create_tensor_pointer_load, lambda block, *rest: rest[1] == nan)
        patches.append((Builder, "create_tensor_pointer_load", padded))
    return patches
