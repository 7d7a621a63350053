"""How a process ended, in words."""

from __future__ import annotations

import re
import signal
import sysconfig
from pathlib import Path

from pagefuzz.fuzz.run import TORCHS_ADVICE

LAST_WORDS = 300  # characters of what a dead process said last
_FUZZ = str(Path(__file__).parents[1])
_NOT_THE_AUTHORS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], _FUZZ, "<")


def last_line(said: str) -> str:
    return said.partition(TORCHS_ADVICE)[0].strip().rpartition("\n")[2][-LAST_WORDS:]


def signal_name(number: int) -> str:
    try:
        return f", {signal.Signals(number).name}"
    except ValueError:
        return ""


def authors_line(said: str) -> str:
    """The author's line in a traceback of faulthandler, as the end of a sentence."""
    for file, line in re.findall(r'File "([^"]*)", line (\d+)', said):
        if not file.startswith(_NOT_THE_AUTHORS):
            return f" (at {Path(file).name}, line {line})"
    return ""
