"""Cheaper handles: what stock works out for every array it works out once for every type."""

from __future__ import annotations

from typing import Any

_SIZES = "_pagefuzz_sizes"  # attributes of Triton's types: whether elements of so many bytes fit, by size
_NUMPY = "_pagefuzz_numpy"  # the dtype of arrays


def handles(interpreter: Any) -> list[tuple[Any, str, Any]]:
    Handle = interpreter.TensorHandle
    stock_fits, stock_numpy, stock_check = (
        interpreter._validate_np_data_size,
        interpreter._get_np_dtype,
        Handle.__post_init__,
    )

    def fits(array: Any, dtype: Any) -> Any:
        known = dtype.__dict__.get(_SIZES)
        if known is None:
            known = dtype.__dict__[_SIZES] = {}
        size = array.itemsize
        if size not in known:
            known[size] = stock_fits(array, dtype)
        return known[size]

    def numpy_dtype(dtype: Any) -> Any:
        known = dtype.__dict__.get(_NUMPY)
        if known is None:
            known = dtype.__dict__[_NUMPY] = stock_numpy(dtype)
        return known

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        known = dtype.__dict__.get(_SIZES)
        if known is None or not known.get(data.itemsize):
            stock_check(self)

    return [
        (interpreter, "_validate_np_data_size", fits),
        (interpreter, "_get_np_dtype", numpy_dtype),
        (Handle, "__init__", init),
    ]
