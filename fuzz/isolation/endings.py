"""How a process ended, in words."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from pagefuzz.fuzz.run import NOT_THE_AUTHORS, TORCHS_ADVICE

LAST_WORDS = 300  # characters of what a dead process said last


def last_line(said: str) -> str:
    return said.partition(TORCHS_ADVICE)[0].strip().rpartition("\n")[2][-LAST_WORDS:]


def signal_name(number: int) -> str:
    try:
        return f", {signal.Signals(number).name}"
    except ValueError:
        return ""


def authors_line(said: str) -> str:
    """The author's line in a traceback of faulthandler, as the end of a sentence: in the thread that it was in, if it
    names that."""
    frames = said[said.rfind("\nCurrent thread") + 1 :]
    for file, line in re.findall(r'File "([^"]*)", line (\d+) in ', frames):  # Python's own have a comma there
        if not file.startswith(NOT_THE_AUTHORS):
            return f" (at {Path(file).name}, line {line})"
    return ""
