"""Integer arguments have the type that their parameter is annotated with, as they have where a kernel is compiled.

Stock gives every integer the smallest type that holds it. A stride that is annotated `tl.int64` is then int32, and so
is its product with an int32 block id, which wraps here and nowhere else.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

_DTYPES: dict[object, np.dtype[Any]] = {
    "i32": np.dtype("int32"),
    "i64": np.dtype("int64"),
    "u32": np.dtype("uint32"),
    "u64": np.dtype("uint64"),
}


def typed_arguments(interpreter: Any, tl: Any) -> list[tuple[Any, str, Any]]:
    """Patches of `triton.runtime.interpreter`: (object, attribute, what it becomes)."""
    from triton.runtime.jit import _normalize_ty

    Executor = interpreter.GridExecutor
    stock_call = Executor.__call__
    known: weakref.WeakKeyDictionary[Any, dict[str, np.dtype[Any]]] = weakref.WeakKeyDictionary()

    def annotated(fn: Any) -> dict[str, np.dtype[Any]]:
        if fn not in known:
            types = {name: _normalize_ty(annotation) for name, annotation in fn.__annotations__.items()}
            known[fn] = {name: _DTYPES[each] for name, each in types.items() if each in _DTYPES}
        return known[fn]

    def typed(value: Any, dtype: np.dtype[Any] | None) -> Any:
        if dtype is None or type(value) is not int:
            return value
        kind = tl.str_to_ty(("i" if dtype.kind == "i" else "u") + str(8 * dtype.itemsize), None)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=dtype), kind), kind)

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        types = annotated(executor.fn)
        if types:
            args = tuple(typed(arg, types.get(name)) for name, arg in zip(executor.arg_names, args, strict=False))
            kwargs = {name: typed(arg, types.get(name)) for name, arg in kwargs.items()}
        return stock_call(executor, *args, **kwargs)

    return [(Executor, "__call__", call)]
