"""What a launch costs beside its kernel: patching, looking at signatures, moving tensors, converting arguments.

Stock's own code does it still. It is asked once where it gives the same answer every time, and left out where it has
no effect.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

Patches = list[tuple[Any, str, Any]]


def index(tensor: Any) -> int:
    """tl.tensor.__index__: `range(value loaded in the kernel)` works under numpy 2.4 (stock 3.6.0 raises)."""
    return int(tensor.handle.data.squeeze())


def patching(interpreter: Any, tl: Any) -> Patches:
    """Stock's patching of triton.language at every launch and nested call, with `index`."""
    stock_patch_lang = interpreter._patch_lang

    def patch_lang(fn: Callable[..., Any]) -> Any:
        scope = stock_patch_lang(fn)
        tl.tensor.__index__ = index
        return scope

    return [(interpreter, "_patch_lang", patch_lang)]


class _Kept:
    def restore(self) -> None:
        """Called by stock at the end of a launch; the patches stay."""


def patching_once(interpreter: Any, patched: Callable[[], None]) -> Patches:
    """Patch for each function once. patched: called after that."""
    stock_patch_lang = interpreter._patch_lang
    seen: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

    def patch_lang(fn: Callable[..., Any]) -> _Kept:
        # Per function, not per process: its globals may hold tl, tl.core or both, and tl may have new members by now.
        if fn not in seen:
            stock_patch_lang(fn)
            patched()
            seen.add(fn)
        return _Kept()

    return [(interpreter, "_patch_lang", patch_lang)]


class _Inspect:
    """The module `inspect` for triton.runtime.interpreter, which looks at a kernel's signature at every launch."""

    def __init__(self) -> None:
        self._specs: weakref.WeakKeyDictionary[Any, inspect.FullArgSpec] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getfullargspec(self, fn: Any) -> inspect.FullArgSpec:
        spec = self._specs.get(fn)
        if spec is None:
            spec = self._specs[fn] = inspect.getfullargspec(fn)
        return spec

    def getcallargs(self, fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        spec = self.getfullargspec(fn)
        if len(args) + len(kwargs) == len(spec.args) and not (spec.varargs or spec.varkw or spec.kwonlyargs):
            named = dict(zip(spec.args, args, strict=False)) | kwargs
            if named.keys() == set(spec.args):  # each parameter once
                return named
        return inspect.getcallargs(fn, *args, **kwargs)  # defaults, and mistakes


def launching(interpreter: Any, tl: Any) -> Patches:
    """Cheaper launches of kernels whose tensors are ordinary ones on the CPU."""
    Executor = interpreter.GridExecutor
    stock_init, stock_restore, stock_str_to_ty = Executor._init_args_hst, Executor._restore_args_dev, tl.str_to_ty
    types: dict[str, Any] = {}

    def on_host(arg: Any) -> bool:
        if isinstance(arg, torch.Tensor):
            return type(arg) is torch.Tensor and arg.is_cpu and arg.layout is torch.strided
        return not hasattr(arg, "data_ptr") and not isinstance(arg, (tuple, interpreter.TensorDescriptor))

    def init_args_hst(executor: Any, args: Any, kwargs: Any) -> Any:
        # Stock makes a second tensor object over the memory of each. They are kept apart where one is given twice.
        with torch._C.DisableTorchFunction():
            given = [*args, *kwargs.values()]
            tensors = [id(arg) for arg in given if isinstance(arg, torch.Tensor)]
            executor.in_place = all(on_host(arg) for arg in given) and len(set(tensors)) == len(tensors)
        return (list(args), dict(kwargs)) if executor.in_place else stock_init(executor, args, kwargs)

    def restore_args_dev(executor: Any, args: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        if not executor.in_place:
            stock_restore(executor, args, args_hst, kwargs, kwargs_hst)

    def str_to_ty(name: Any, constexpr: Any) -> Any:
        if constexpr is not None or type(name) is not str:
            return stock_str_to_ty(name, constexpr)
        known = types.get(name)
        if known is None:
            known = stock_str_to_ty(name, constexpr)
            if type(known) in (tl.dtype, tl.pointer_type):
                types[name] = known
        if type(known) is not tl.pointer_type:
            return known
        pointer = object.__new__(tl.pointer_type)  # an object for each argument, as in stock
        vars(pointer).update(vars(known))
        return pointer

    return [
        (interpreter, "inspect", _Inspect()),
        (Executor, "_init_args_hst", init_args_hst),
        (Executor, "_restore_args_dev", restore_args_dev),
        (tl, "str_to_ty", str_to_ty),
    ]
