"""Runs pytest on the fuzz tests as a user does, in a folder of the user's.

A command takes two seconds to import torch. So one process imports it and forks for every command; the workers that
pytest-xdist starts are fresh processes all the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
LONGEST = 100.0  # seconds
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")

SERVER = """
import json, os, sys, msgspec, numpy, pytest, rich.table, torch, triton.language
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(asked["folder"])
            os.environ.update(asked["environ"])
            sys.path[:0] = filter(None, asked["environ"].get("PYTHONPATH", "").split(":"))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv[:] = [os.path.join(os.path.dirname(sys.executable), "pytest"), *asked["arguments"]]
            code = int(pytest.main(asked["arguments"]))
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

_servers: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code, what it printed, and how long it took."""

    code: int
    text: str
    seconds: float

    def line(self, part: str) -> str:
        """The first line that holds `part`, without the blanks around it."""
        for line in self.text.splitlines():
            if part in line:
                return line.strip()
        raise AssertionError(f"no line holds {part!r}:\n{self.text}")

    def command(self, label: str) -> str:
        """The command behind `label` in a report."""
        return self.line(f"  {label} ").removeprefix(label).strip()


def environ(**more: str) -> dict[str, str]:
    """The environment of a command: the pytest of this Python, and nothing that the outer pytest tells its children."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    if "PYTHONPATH" in os.environ:  # where nothing can be installed, the packages may lie there
        more["PYTHONPATH"] = ":".join(filter(None, (more.get("PYTHONPATH"), os.environ["PYTHONPATH"])))
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    ours = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    # The same on every machine: on the CPU, with Triton interpreted.
    return {**kept, **ours, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", **more}


def _server() -> subprocess.Popen[str]:
    if not _servers or _servers[0].poll() is not None:
        _servers[:] = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ(),
            )
        ]
    return _servers[0]


def pytest_in(folder: Path, *arguments: str | Path, tests: list[str] | None = None, **more: str) -> Done:
    """Run pytest on the fuzz tests with `arguments`, started in `folder`. `more`: of the environment.

    tests: what names the fuzz tests (default: the tree's, by their absolute path). Raises AssertionError
    where the command takes too long, or leaves processes behind.
    """
    given = ["-p", "no:cacheprovider", *(tests or [str(TREE / "fuzz")]), *map(str, arguments)]
    output = folder / f".output-{time.monotonic_ns()}"
    asked = {"folder": str(folder), "environ": more, "output": str(output), "arguments": given}
    server, started = _server(), time.monotonic()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    alarm = signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        code = int(server.stdout.readline())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    text = output.read_text(errors="replace")
    output.unlink()
    assert code != -signal.SIGKILL, f"took longer than {LONGEST} s:\n{text}"
    assert not group(child), f"left processes behind:\n{text}"
    return Done(code, text, time.monotonic() - started)


def shell_in(folder: Path, command: str, **more: str) -> Done:
    """Run a printed command as it is, as a shell does."""
    started = time.monotonic()
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environ(**more),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LONGEST,
    )
    return Done(done.returncode, done.stdout + done.stderr, time.monotonic() - started)


def group(leader: int) -> list[int]:
    """The living processes of a session: a kernel's own have a group of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def failures(folder: Path) -> list[Path]:
    """The saved failures, by name."""
    return sorted((folder / ".pagefuzz/failures").glob("*"))


def counts(text: str) -> dict[str, int]:
    """The numbers of pytest's last line, by word."""
    last = text.strip().splitlines()[-1]
    return {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last)}
