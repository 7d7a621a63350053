"""Patches `triton.language` once for each function, where stock does so at every launch and every nested call."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from pagefuzz.fuzz.interpreter.memo import Memo

Patches = list[tuple[Any, str, Any]]


class _Kept:
    def restore(self) -> None:
        """Called by stock at the end of a launch; the patches stay."""


def corrected_patching(interpreter: Any, tl: Any) -> Patches:
    """`range(value loaded in the kernel)` works under numpy 2.4 (stock 3.6.0 raises); else stock's patching."""
    stock_patch_lang = interpreter._patch_lang

    def patch_lang(fn: Callable[..., Any]) -> Any:
        scope = stock_patch_lang(fn)
        tl.tensor.__index__ = _index
        return scope

    return [(interpreter, "_patch_lang", patch_lang)]


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.squeeze())


def patching_once(interpreter: Any, tl: Any) -> Patches:
    """Patch for each function once, and with memoised builtins."""
    memo = Memo(interpreter, tl)
    stock_patch_lang, stock_call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    seen: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
    knobs = interpreter.triton.knobs

    def patch_lang(fn: Callable[..., Any]) -> _Kept:
        # Per function, not per process: its globals may hold tl, tl.core or both, and tl may have new members by now.
        if fn not in seen:
            stock_patch_lang(fn)
            stock_bool = tl.tensor.__bool__

            def truth(tensor: Any) -> bool:
                # Stock calls every tensor true that has not exactly one element, and that the type says.
                real = getattr(tensor.handle, "real", None) if type(tensor.handle) is memo.Register else None
                if real is not None and real.data.size == tensor.numel.value != 1:
                    return True
                return stock_bool(tensor)

            tl.tensor.__index__, tl.tensor.__bool__ = _index, truth
            for name in ("reduce", "associative_scan"):
                for module in (tl, tl.core):
                    setattr(module, name, memo.reducing(getattr(module, name)))
            seen.add(fn)
        return _Kept()

    def patch_attr(obj: Any, name: str, member: Callable[..., Any], _: Any, scope: Any) -> None:
        def stock(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        also = (lambda: knobs.language.fp32_default) if name == "dot" else None
        scope.set_attr(obj, name, memo.memoised(stock, also))

    stock_valid, stock_np_dtype = interpreter._validate_np_data_size, interpreter._get_np_dtype
    Handle = interpreter.TensorHandle
    check = Handle.__post_init__

    def valid(array: Any, dtype: Any) -> bool:
        known = dtype.__dict__.get("_pagefuzz_sizes")
        if known is None:
            known = dtype._pagefuzz_sizes = {}
        size = array.itemsize
        answer = known.get(size)
        if answer is None:
            answer = known[size] = stock_valid(array, dtype)
        return answer

    def np_dtype(dtype: Any) -> Any:
        known = dtype.__dict__.get("_pagefuzz_numpy")
        if known is None:
            known = dtype._pagefuzz_numpy = stock_np_dtype(dtype)
        return known

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        sizes = dtype.__dict__.get("_pagefuzz_sizes")
        if sizes is None or not sizes.get(data.itemsize):
            check(self)

    library: dict[Any, Callable[..., Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.fn.__module__.startswith("triton.language."):
            return stock_call(self, *args, **kwargs)
        memoised = library.get(self.fn)
        if memoised is None:
            memoised = library[self.fn] = memo.memoised(lambda *args, **kwargs: stock_call(self, *args, **kwargs))
        return memoised(*args, **kwargs)

    patches: Patches = [
        (interpreter, "_patch_lang", patch_lang),
        (interpreter, "_patch_attr", patch_attr),
        (interpreter.InterpretedFunction, "__call__", call),
        (semantic, "to_tensor", memo.memoised(semantic.to_tensor)),  # every assignment in a kernel
    ]
    patches += [(interpreter, "_validate_np_data_size", valid), (interpreter, "_get_np_dtype", np_dtype)]
    patches += [(Handle, "__init__", init)]
    if not builder.options.debug:  # the verdict is thrown away unless `debug` is set
        patches.append((builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)))
    return patches
