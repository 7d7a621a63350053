"""The suite's own tests look at interpreted kernels through the harness's interpreter, wherever they run."""

import os
import signal

if os.environ.get("TRITON_INTERPRET") == "1":  # else: --device cuda, for tests/test_kernels.py
    from pagefuzz.fuzz.interpreter import install

    install()

# A shell's background job ignores Ctrl-C, and all that it starts does too: the tests that interrupt runs would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
