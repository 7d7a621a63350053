"""Runs jobs in processes that may die or hang: each job is one line of JSON to a process, and one line back.

A process that dies or takes too long is noted and replaced by a fresh one. (The pools of the standard library give up
all of their jobs when one of their processes dies.)
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

Job = dict[str, Any]
Result = dict[str, Any]
START_LIMIT = 300.0  # seconds to import everything, on a busy machine
TAIL = 300  # characters of what a dead process said last


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    said: IO[str]  # its standard error
    since: float
    job: Job | None = None
    ready: bool = False
    line: list[str] = field(default_factory=list)

    def last_words(self) -> str:
        self.said.seek(0)
        return " ".join(self.said.read().split())[-TAIL:]


def run(command: list[str], jobs: Iterable[Job], workers: int, limit: float) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, in the order in which they end. A job is taken when a process is free for it.

    command: starts a process that calls `serve`. limit: seconds that one job may take. The result of a job whose
    process died is {"crashed": how}, of one that took too long {"hung": how}, of one that raised {"error": traceback}.
    Leaves no process behind, however it ends. Raises RuntimeError where a process does not even start.
    """
    more = iter(jobs)
    waiting = deque(islice(more, workers))
    selector = selectors.DefaultSelector()
    alive: list[_Worker] = []
    scratch = tempfile.TemporaryDirectory()  # what they leave behind goes with it
    start = partial(_start, command, scratch.name, selector)
    try:
        for _ in range(len(waiting)):
            alive.append(start())
        while waiting or any(worker.job for worker in alive):
            for key, _ in selector.select(timeout=0.2):
                worker = key.data
                answer = os.read(key.fd, 1 << 16).decode()
                worker.line.append(answer)
                ended = not answer
                if not ended and not answer.endswith("\n"):
                    continue
                text, worker.line = "".join(worker.line), []
                if ended:
                    yield from _died(worker, start, selector, alive)
                elif not worker.ready:
                    worker.ready = True
                else:
                    job, worker.job = worker.job, None
                    assert job is not None
                    yield job, json.loads(text)
            for worker in list(alive):
                spent = time.monotonic() - worker.since
                if worker.ready and worker.job is None and waiting:
                    worker.job, worker.since = waiting.popleft(), time.monotonic()
                    waiting.extend(islice(more, 1))
                    assert worker.process.stdin is not None
                    try:
                        worker.process.stdin.write(json.dumps(worker.job) + "\n")
                        worker.process.stdin.flush()
                    except BrokenPipeError:
                        pass  # it is dead, as its other pipe will say
                elif not worker.ready and spent > START_LIMIT:
                    raise RuntimeError(f"a process did not start within {START_LIMIT:.0f} s: {worker.last_words()}")
                elif worker.job is not None and spent > limit:
                    job = worker.job
                    _replace(worker, start, selector, alive)
                    yield job, {"hung": f"did not end within {limit:g} s"}
    finally:
        for worker in alive:
            _end(worker)
        selector.close()
        scratch.cleanup()


def _start(command: list[str], scratch: str, selector: selectors.BaseSelector) -> _Worker:
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with its process
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        env={**os.environ, "TMPDIR": scratch},
    )
    worker = _Worker(process, said, time.monotonic())
    assert process.stdout is not None
    selector.register(process.stdout, selectors.EVENT_READ, worker)
    return worker


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    for stream in (worker.process.stdout, worker.said, worker.process.stdin):
        try:
            if stream is not None:
                stream.close()
        except BrokenPipeError:
            pass


def _replace(
    worker: _Worker, start: Callable[[], _Worker], selector: selectors.BaseSelector, alive: list[_Worker]
) -> None:
    assert worker.process.stdout is not None
    selector.unregister(worker.process.stdout)
    _end(worker)
    alive[alive.index(worker)] = start()


def _died(
    worker: _Worker, start: Callable[[], _Worker], selector: selectors.BaseSelector, alive: list[_Worker]
) -> Iterator[tuple[Job, Result]]:
    status, words = worker.process.wait(), worker.last_words()
    said = f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.Signals(-status).name}"
    if worker.job is None:
        raise RuntimeError(f"a process ended without a job ({said}): {words}")
    job = worker.job
    _replace(worker, start, selector, alive)
    yield job, {"crashed": said + (f": {words}" if words else "")}


def serve(work: Callable[[Job], Result]) -> None:
    """The other side: does one job after the other until its standard input ends, and ends then, even amid a job.

    What a job prints goes to standard error.
    """
    import queue
    import threading
    import traceback

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    print("ready", file=answers, flush=True)
    while True:
        job = json.loads(asked.get())
        try:
            result = work(job)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=answers, flush=True)


def name_of(device: str) -> str:
    """What a device calls itself, asked in a process of its own, which has used it then. Raises ValueError, in one
    sentence, where there is none."""
    asked = (
        "import sys, torch; device = torch.device(sys.argv[1]); torch.zeros(1, device=device).item(); "
        "module = getattr(torch, device.type); print(getattr(module, 'get_device_name', lambda at: at)(device))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", asked, device], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1].split())
        raise ValueError(f"--device {device}: {said[:TAIL]}")
    return done.stdout.strip()


def settle(device: str) -> None:
    """Set the environment of this process and all that it starts, before anything imports triton: interpreted on the
    CPU, where no device is looked at either; compiled on a device."""
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the question whether there is one uses none
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def default_workers(device: str) -> int:
    """As many processes as there are cores, or as one card takes without losing time."""
    from pagefuzz.fuzz.session import MOST_SHARING

    cores = len(os.sched_getaffinity(0))
    return cores if device == "cpu" else min(cores, MOST_SHARING)


def command_of(script: Path, *options: str) -> list[str]:
    """The command that runs a script of the tree with this Python."""
    return [sys.executable, "-P", str(script), *options]
