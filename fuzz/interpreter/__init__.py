"""Makes Triton's interpreter fast enough to fuzz with, bit for bit as it was, and honest about bfloat16.

`install` is all that others use. It patches `triton.runtime.interpreter` in a process in which Triton runs interpreted
(TRITON_INTERPRET=1); nothing changes where kernels are compiled.

- bfloat16.py corrects what is wrong: arithmetic on bfloat16, comparisons that are no int1. An autotuned kernel, which
  stock cannot run without a GPU, takes the first of its configurations.
- annotations.py corrects the types of integer arguments.
- memo.py and recording.py find out only once what each call of the language means.
- launch.py and handles.py do the same for what a launch and an array cost.

tests/same_bits holds the last two lines against the interpreter that has the first two only.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

from pagefuzz.fuzz.interpreter.annotations import typed_arguments
from pagefuzz.fuzz.interpreter.bfloat16 import corrections
from pagefuzz.fuzz.interpreter.handles import handles
from pagefuzz.fuzz.interpreter.launch import launching, patching
from pagefuzz.fuzz.interpreter.memo import memoising

SWITCH = "PAGEFUZZ_STOCK_INTERPRETER"
VERIFIED = ("3.6.", "3.7.", "3.8.", "3.9.")

_installed = False


def install() -> None:
    """Patch `triton.runtime.interpreter` of this process; later calls do nothing.

    With PAGEFUZZ_STOCK_INTERPRETER=1 in the environment it corrects and leaves out what only makes faster. It does so
    too on a triton that it does not know, and says so once (RuntimeWarning); where the names that it corrects are
    missing it leaves the interpreter as it is.
    """
    global _installed
    if _installed:
        return
    _installed = True
    import triton
    import triton.language as tl
    import triton.runtime.autotuner as autotuner
    import triton.runtime.interpreter as interpreter

    unknown = ""
    patches: list[tuple[Any, str, Any]] = []
    try:
        # Without a GPU there is nothing to time: an autotuned kernel runs with the first of its configurations.
        untimed = (autotuner.Autotuner, "_bench", lambda self, *args, config, **meta: 0.0)
        typed = typed_arguments(interpreter, tl)
        patches = [*patching(interpreter, tl), *corrections(interpreter, tl), *typed, untimed]
        if os.environ.get(SWITCH, "") in ("", "0"):
            if not triton.__version__.startswith(VERIFIED):
                unknown = "run as slowly as in stock"
            else:
                patches += _faster(interpreter, tl)
    except AttributeError as missing:
        unknown = "run as slowly as in stock" + ("" if patches else ", and arithmetic on bfloat16 tensors is wrong")
        unknown += f" ({missing})"
    if unknown:
        warnings.warn(
            f"pagefuzz does not know the interpreter of triton {triton.__version__}: interpreted kernels {unknown}. "
            "Use triton 3.6 to 3.9, or update pagefuzz.",
            RuntimeWarning,
            stacklevel=2,
        )
    for owner, name, value in patches:
        setattr(owner, name, value)


def _faster(interpreter: Any, tl: Any) -> list[tuple[Any, str, Any]]:
    patches = [*memoising(interpreter, tl), *launching(interpreter, tl), *handles(interpreter)]
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else the verdict of this check is thrown away
        patches.append((builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)))
    return patches
