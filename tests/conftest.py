"""The suite's own tests look at interpreted kernels through the harness's interpreter, wherever they run."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":  # else: --device cuda, for tests/test_kernels.py
    from pagefuzz.fuzz.interpreter import install

    install()
