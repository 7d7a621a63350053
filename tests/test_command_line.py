"""The command line: adapters, the choice of kernels, the header, shards and workers, exit codes, the summary."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from pagefuzz.fuzz.saved import read
from pagefuzz.tests.commands import TREE, Done, counts, environ, failures, group, pytest_in, shell_in

TINY = """
from hypothesis import settings
from pagefuzz import kernel

settings.register_profile("tiny", max_examples=8, deadline=None)
settings.register_profile("shards", max_examples=250, deadline=None)
"""
GOOD = (
    TINY
    + """
import torch

@kernel("slot_mapping", index_dtypes=["int32"], block_sizes=[4], negative_slots="never", table_strides="contiguous")
def good_slots(block_tables, seq_ids, positions, block_size):
    assert block_tables.dtype == positions.dtype == torch.int32 and block_tables.is_contiguous()
    assert block_size == 4 and not (positions < 0).any()
    if not len(positions):
        return torch.empty(0, dtype=torch.int64)
    blocks = block_tables[seq_ids.long(), positions.long() // 4].long()
    return blocks * 4 + positions % 4
"""
)
BAD = (
    TINY
    + """
@kernel("slot_mapping", negative_slots="never")  # or its smallest case may be a padded token
def bad_slots(block_tables, seq_ids, positions, block_size):
    return positions.long() + 1
"""
)
SIGNATURE = "(block_tables, seq_ids, positions, block_size): pass\n"
USAGE = pytest.ExitCode.USAGE_ERROR


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder where a bad kernel, whose file's name has a space and a quote, failed, and what was printed."""
    folder = tmp_path_factory.mktemp("bad")
    write(folder, "a user's kernel.py", BAD)
    return folder, pytest_in(folder, "--adapter", "a user's kernel.py", "--hypothesis-profile", "tiny")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder where a good kernel passed, and what was printed."""
    folder = tmp_path_factory.mktemp("good")
    write(folder, "good.py", GOOD)
    options = ("--adapter", "good.py", "--hypothesis-profile", "shards", "--hypothesis-seed=7")
    return folder, pytest_in(folder, *options, "-v")


# ---- adapters and kernels


def test_an_adapter_is_fuzzed_inside_its_declaration_and_nothing_else_is(good: tuple[Path, Done]) -> None:
    folder, done = good
    assert done.code == 0, done.text
    assert done.line("pagefuzz 0").endswith(": good_slots")
    assert counts(done.text) == {"passed": 2}
    assert "int32 index 100%" in done.text and "padded slots" not in done.text and "narrowed" not in done.text
    assert not (folder / ".pagefuzz").exists()


def test_a_module_is_an_adapter_too_and_patterns_choose(tmp_path: Path) -> None:
    write(tmp_path, "my_module.py", GOOD + BAD.replace(TINY, "") + BAD.replace(TINY, "").replace("bad_", "worse_"))
    options = ("--adapter", "my_module", "--hypothesis-profile", "tiny", "--collect-only", "-q")
    chosen = ("--kernel", "good*", "--kernel", "[v-z]orse_slots")
    done = pytest_in(tmp_path, *options, *chosen, PYTHONPATH=str(tmp_path))
    assert done.code == 0, done.text
    assert re.findall(r"\[(\w+)-000\]", done.text) == ["good_slots", "worse_slots"]


PAIR = """
from hypothesis import settings
from pagefuzz import kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache

@kernel("reshape_and_cache")
def mine_write(key, value, k_cache, v_cache, slot_mapping):
    torch_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping[:-1])

kernel("paged_decode_attention", name="mine_decode")(torch_paged_decode_attention)
settings.register_profile("tiny", max_examples=40)
"""


def test_a_pair_is_fuzzed_chosen_and_replayed_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "pair.py", PAIR)
    chosen = ("--adapter", "pair.py", "--kernel", "mine_w*+*", "--hypothesis-profile", "tiny")
    done = pytest_in(tmp_path, *chosen)
    assert done.code == 1, done.text
    assert "violated by mine_write+mine_decode" in done.text and "write_then_decode" in done.text
    done.line("pagefuzz 0.1.0: mine_write+mine_decode")
    for label in ("again", "or anywhere"):
        again = shell_in(tmp_path, done.command(label))
        assert again.code == 1 and "still fails: " in again.text, again.text
    every = pytest_in(tmp_path, "--adapter", "pair.py", "--collect-only", "--hypothesis-profile", "tiny")
    assert "pagefuzz 0.1.0: mine_write, mine_decode, mine_write+mine_decode" in every.text
    alone = pytest_in(tmp_path, "--adapter", "pair.py", "--kernel", "mine_decode", "--hypothesis-profile", "tiny")
    assert alone.code == 0 and "write_then_decode" not in alone.text, alone.text


def test_a_run_without_xdist_is_a_run(good: tuple[Path, Done], tmp_path: Path) -> None:
    write(tmp_path, "good.py", GOOD)
    options = ("--adapter", "good.py", "--hypothesis-profile", "shards", "--hypothesis-seed=7")
    alone = pytest_in(tmp_path, *options, "-p", "no:xdist")
    assert alone.code == 0 and counts(alone.text) == counts(good[1].text), alone.text


def test_a_file_that_has_nothing_to_do_is_no_error(tmp_path: Path) -> None:
    tests = [str(TREE / "fuzz/test_slot_mapping.py"), str(TREE / "fuzz/test_saved_failures.py")]
    done = pytest_in(tmp_path, "--kernel", "torch_reshape*", tests=tests)
    assert done.code == 0, done.text
    assert counts(done.text) == {"skipped": 2}


WRONG_ADAPTERS = {
    "syntax error": ("def f(:\n", r"adapter\.py, line 1: invalid syntax"),
    "null byte": ("x = 1\0\n", r"adapter\.py.* null bytes"),
    "exception": ("x = 1\nraise RuntimeError('no\\nGPU')\n", r"adapter\.py, line 2: RuntimeError: no GPU"),
    "exit": ("import sys\nsys.exit('bye')\n", r"adapter\.py, line 2: SystemExit: bye"),
    "skip": ("import pytest\npytest.skip('no', allow_module_level=True)\n", r"adapter\.py, line 2: Skipped"),
    "missing import": ("import no_such_thing\n", r"adapter\.py, line 1: ModuleNotFoundError: .*no_such_thing"),
    "no kernel": ("x = 1\n", r"adapter\.py: it registers no kernel"),
    "operation": (
        "from pagefuzz import kernel\n@kernel('slot_maping')\ndef f" + SIGNATURE,
        r"adapter\.py, line 2: unknown operation 'slot_maping'; did you mean 'slot_mapping'",
    ),
    "declaration": (
        "from pagefuzz import kernel\n@kernel('slot_mapping', block_size=[16])\ndef f" + SIGNATURE,
        r"adapter\.py, line 2: kernel 'f': unknown declaration 'block_size'; did you mean 'block_sizes'",
    ),
    "declared value": (
        "from pagefuzz import kernel\n@kernel('slot_mapping', negative_slots='nevr')\ndef f" + SIGNATURE,
        r"kernel 'f': negative_slots='nevr' is not one of 'any', 'minus_one', 'never'",
    ),
    "arity": (
        "from pagefuzz import kernel\n@kernel('slot_mapping')\ndef f(block_tables, seq_ids): pass\n",
        r"kernel 'f': its signature .* cannot take .*the contract is slot_mapping\(block_tables\[B, M\]",
    ),
    "order": (
        "from pagefuzz import kernel\n@kernel('slot_mapping')\ndef f(block_tables, positions, seq_ids, _): pass\n",
        r"kernel 'f': parameter 2 is 'positions' where the contract passes 'seq_ids'",
    ),
    "twice": (
        "from pagefuzz import kernel\nfor _ in 'ab':\n    @kernel('slot_mapping')\n    def f" + SIGNATURE,
        r"line 3: kernel 'f' is registered twice; give one of them another name",
    ),
    "a name of ours": (
        "from pagefuzz import kernel\n@kernel('slot_mapping')\ndef torch_slot_mapping" + SIGNATURE,
        r"kernel 'torch_slot_mapping' is registered twice",
    ),
    "size function": (
        "from pagefuzz import kernel\n@kernel('slot_mapping', block_sizes=lambda size: 1 / 0)\ndef f" + SIGNATURE,
        r"kernel 'f': block_sizes raised ZeroDivisionError",
    ),
    "no size": (
        "from pagefuzz import kernel\n@kernel('slot_mapping', block_sizes=lambda size: False)\ndef f" + SIGNATURE,
        r"kernel 'f': .*block_sizes",
    ),
    "device": (
        "from pagefuzz import kernel\n@kernel('slot_mapping', devices=['cuda'])\ndef f" + SIGNATURE,
        r"no chosen kernel declares to run on cpu",
    ),
}


def is_one_sentence(done: Done, pattern: str) -> None:
    """A usage error that says `pattern`, and no traceback."""
    assert done.code == USAGE, done.text
    said = [line for line in done.text.splitlines() if line.startswith("ERROR: ")]
    assert len(said) == 1 and re.search(pattern, said[0]), done.text
    assert len(done.text.strip().splitlines()) == 1, done.text


@pytest.mark.parametrize("what", WRONG_ADAPTERS)
def test_a_wrong_adapter_gets_one_sentence(what: str, tmp_path: Path) -> None:
    text, pattern = WRONG_ADAPTERS[what]
    write(tmp_path, "adapter.py", text)
    is_one_sentence(pytest_in(tmp_path, "--adapter", "adapter.py"), pattern)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--adapter", "missing.py"), r"--adapter missing\.py: there is no such file"),
        (("--adapter", "missing"), r"--adapter missing: there is no such file or module"),
        (("--adapter", "folder"), r"--adapter folder: .*"),
        (("--adapter", "./folder"), r"--adapter \./folder: this is a directory"),
        (("--adapter", "notes.txt"), r"--adapter notes\.txt: not a Python file"),
        (("--adapter", "pipe.py"), r"--adapter pipe\.py: there is no such file"),
        (("--kernel", "nobody*"), r"--kernel nobody\*: no kernel has such a name; there are torch_slot_mapping, "),
        (("--device", "abacus"), r"--device abacus: "),
        (("--device", "cuda:77"), r"--device cuda:77: "),
        (("--device", "meta"), r"--device meta: "),
        (("--replay", "missing.json"), r"--replay missing\.json: there is no such file or directory, and it is no tok"),
        (("--replay", "a" * 500), r"--replay a{80}\.\.\.: there is no such file"),
        (("--replay", "folder"), r"--replay folder: the directory holds no saved case"),
        (("--replay", "a\nb\x1b[2J"), r"--replay a\\nb\\x1b\[2J: there is no such file"),
        (("--hypothesis-profile", "quik"), r"--hypothesis-profile quik: .*quik"),
        (("--hypothesis-seed", "seven"), r"--hypothesis-seed seven: should be a number"),
    ],
    ids=lambda value: " ".join(value)[:30].encode("unicode_escape").decode() if isinstance(value, tuple) else "",
)
def test_a_wrong_option_gets_one_sentence(options: tuple[str, ...], pattern: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path, "notes.txt", "x")
    os.mkfifo(tmp_path / "pipe.py")
    is_one_sentence(pytest_in(tmp_path, *options), pattern)


def test_a_wrong_option_gets_one_sentence_with_workers_too(tmp_path: Path) -> None:
    write(tmp_path, "adapter.py", WRONG_ADAPTERS["declaration"][0])
    is_one_sentence(pytest_in(tmp_path, "-n", "2", "--adapter", "adapter.py"), WRONG_ADAPTERS["declaration"][1])
    is_one_sentence(pytest_in(tmp_path, "-n", "2", "--kernel", "nobody"), "--kernel nobody: no kernel")


# ---- header, seeds, profiles


def test_the_header_names_target_device_versions_profile_and_seed(good: tuple[Path, Done]) -> None:
    _, done = good
    assert done.line("  device ").startswith("device cpu (Triton interpreted")
    for package in ("torch", "triton", "numpy", "hypothesis", "python"):
        assert re.search(rf"{package} \d+\.\d+", done.line("  device ")), done.text
    assert done.line("  profile ") == "profile shards: 250 cases a kernel; --hypothesis-seed=7"


LOGGING = (
    GOOD
    + """
import os, time
settings.register_profile("ci", parent=settings.get_profile("ci"), max_examples=8)

@kernel("slot_mapping", name="logging_slots")
def logging_slots(block_tables, seq_ids, positions, block_size):
    with open(os.environ["LOG"], "a") as log:
        item = os.environ["PYTEST_CURRENT_TEST"].split()[0]
        log.write(f"{item[-4:]} {block_tables.tolist()} {seq_ids.tolist()} {positions.tolist()} {block_size}\\n")
    time.sleep(float(os.environ.get("NAP", "0")))
    rows = torch.where(positions >= 0, seq_ids, 0).long()
    kept = positions.clamp(min=0).long()
    if not len(rows) or not len(block_tables):
        return torch.full(positions.shape, -1)
    slots = block_tables[rows, kept // block_size].long() * block_size + kept % block_size
    return torch.where(positions >= 0, slots, -1)
"""
)


def logged(folder: Path, name: str, *options: str) -> tuple[Done, list[str]]:
    """A run of the kernel that logs its calls, and the calls in an order of their own."""
    write(folder, "logging_adapter.py", LOGGING)
    log = folder / f"{name}.log"
    chosen = ("--adapter", "logging_adapter.py", "--kernel", "logging_slots")
    done = pytest_in(folder, *chosen, *options, LOG=str(log))
    assert done.code == 0, done.text
    return done, sorted(log.read_text().splitlines())


def row(done: Done) -> list[str]:
    """The summary's row of the kernel that logs its calls."""
    return done.line(" logging_slots ").split()


def test_the_workers_run_the_same_cases_and_the_summary_adds_them_up(tmp_path: Path) -> None:
    options = ("--hypothesis-profile", "shards", "--hypothesis-seed=11")
    alone, calls = logged(tmp_path, "alone", *options)
    both, the_same = logged(tmp_path, "both", *options, "-n", "2")
    other, others = logged(tmp_path, "other", "--hypothesis-profile", "shards", "--hypothesis-seed=12")
    shards = [{call.split(" ", 1)[1] for call in calls if call.startswith(f"{index:03d}] ")} for index in (0, 1)]
    assert shards[0] and shards[1] and not shards[1] <= shards[0], "the second shard repeats the first"
    assert the_same == calls
    assert others != calls
    assert counts(alone.text) == counts(both.text) == {"passed": 2}
    assert "created: 2/2 workers" in both.text
    for done in (alone, both, other):
        assert " 250 " in done.line(" logging_slots "), done.text
    assert [word for word in row(alone) if ":" in word] == [word for word in row(both) if ":" in word]
    drawn = [done.text[done.text.index("drawn for slot_mapping") :].split("===")[0] for done in (alone, both)]
    assert drawn[0] == drawn[1]


def test_the_profile_ci_draws_the_same_cases_each_time_and_quick_does_not(tmp_path: Path) -> None:
    first, calls = logged(tmp_path, "first", "--hypothesis-profile", "ci")
    second, the_same = logged(tmp_path, "second", "--hypothesis-profile", "ci")
    assert calls and calls == the_same
    assert first.line("  profile ") == second.line("  profile ") == "profile ci: 8 cases a kernel; --hypothesis-seed=0"
    _, one = logged(tmp_path, "one", "--hypothesis-profile", "tiny")
    _, two = logged(tmp_path, "two", "--hypothesis-profile", "tiny")
    assert one != two


@pytest.mark.parametrize(("value", "profile"), [("true", "ci"), ("", "quick"), ("false", "quick")])
def test_ci_in_the_environment_chooses_the_profile(value: str, profile: str, tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--kernel", "torch_slot_mapping", "--collect-only", CI=value)
    assert done.line("  profile ").startswith(f"profile {profile}: "), done.text


# ---- reports


def test_a_failure_says_what_a_person_needs(bad: tuple[Path, Done]) -> None:
    folder, done = bad
    assert done.code == 1
    assert done.line("I4 violated by bad_slots: ") == "I4 violated by bad_slots: the result equals the oracle's"
    assert done.command("seen") == "slot 1"
    assert done.command("right") == "slot 0"
    assert done.command("where") == "token 0 (sequence 0, position 0)"
    assert done.command("layout") == "pool of 1 blocks, 1 slots each"
    assert "sequence 0: 1 tokens  block 0 [#]" in done.text
    assert done.command("found as").startswith("slot_mapping(block_size=")
    assert done.command("shrunk to").startswith("slot_mapping(block_size=1, num_blocks=1, ")
    assert len(done.command("found as")) > len(done.command("shrunk to"))
    assert shlex.split(done.command("again"))[:2] == ["pytest", f"{os.path.relpath(TREE / 'fuzz', folder)}/"]
    saved = [str(path.relative_to(folder)) for path in failures(folder)]
    assert len(saved) == 1 and f"--replay {saved[0]} " in done.command("again")
    report = done.text[done.text.index("I4 violated") : done.text.index("==== pagefuzz ====")]
    assert str(folder) not in report and "Traceback" not in report


@pytest.mark.parametrize("label", ["again", "or anywhere"])
def test_the_printed_command_shows_the_failure_again(label: str, bad: tuple[Path, Done]) -> None:
    folder, done = bad
    again = shell_in(folder, done.command(label))
    assert again.code == 1, again.text
    assert again.line("still fails: I4 violated by bad_slots: the result equals the oracle's")
    assert again.command("seen") == "slot 1"
    assert again.command("or anywhere") == done.command("or anywhere")


def test_the_command_names_a_pytest_that_is_not_on_the_path(tmp_path: Path) -> None:
    write(tmp_path, "bad.py", BAD)
    done = pytest_in(tmp_path, "--adapter", "bad.py", "--hypothesis-profile", "tiny", PATH="/bin")
    assert shlex.split(done.command("again"))[:3] == [sys.executable, "-m", "pytest"]
    assert shell_in(tmp_path, done.command("again"), PATH="/bin").line("still fails: I4 violated")


def test_the_command_names_an_installed_pagefuzz_as_it_was_called(tmp_path: Path) -> None:
    write(tmp_path, "bad.py", BAD)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/pagefuzz").symlink_to(TREE)
    path = str(tmp_path / "site")
    installed = ["-p", "pagefuzz.fuzz.plugin", "--pyargs", "pagefuzz.fuzz", "--import-mode=importlib"]
    options = ("--adapter", "bad.py", "--hypothesis-profile", "tiny")
    done = pytest_in(tmp_path, *options, tests=installed, PYTHONPATH=path)
    assert done.command("again").startswith("pytest -p pagefuzz.fuzz.plugin --pyargs pagefuzz.fuzz --replay ")
    assert shell_in(tmp_path, done.command("again"), PYTHONPATH=path).line("still fails: I4 violated")


def test_a_failure_that_cannot_be_saved_is_reported_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, "bad.py", BAD)
    (tmp_path / ".pagefuzz").write_text("in the way")
    done = pytest_in(tmp_path, "--adapter", "bad.py", "--hypothesis-profile", "tiny")
    assert done.code == 1
    assert "the failure could not be saved: " in done.text
    assert done.command("seen") == "slot 1"
    assert "--replay pf1." in done.command("or anywhere")


def test_a_fault_of_the_suite_does_not_look_like_a_failure_of_the_kernel(tmp_path: Path) -> None:
    fault = """
from pagefuzz.strategies.slot_mapping import SlotMappingCase

def check(self):
    raise ZeroDivisionError("our own bug")

SlotMappingCase.check = check
"""
    write(tmp_path, "adapter.py", GOOD + fault)
    done = pytest_in(tmp_path, "--adapter", "adapter.py", "--hypothesis-profile", "tiny")
    assert done.code == 1
    assert "ZeroDivisionError: our own bug" in done.text
    assert "This is a fault of pagefuzz, not of good_slots: please report it, with this case: slot_map" in done.text
    assert "violated" not in done.text and not failures(tmp_path)


# ---- interrupted runs


def start(folder: Path, *options: str, **more: str) -> subprocess.Popen[str]:
    """A run in a process group of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TREE / "fuzz"), *options]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environ(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(run: subprocess.Popen[str]) -> str:
    """What a run printed. Its whole group must be gone soon after."""
    try:
        text, _ = run.communicate(timeout=60)
        for _ in range(50):
            if not group(run.pid):
                break
            time.sleep(0.1)
        assert not group(run.pid), text
        return text
    finally:
        for process in group(run.pid):
            os.kill(process, signal.SIGKILL)


def test_an_interrupt_leaves_no_process_and_no_half_written_file(tmp_path: Path) -> None:
    write(tmp_path, "slow.py", LOGGING + BAD.replace(TINY, ""))
    log = tmp_path / "calls.log"
    options = ("-n", "2", "--adapter", "slow.py", "--hypothesis-profile", "shards")
    run = start(tmp_path, *options, LOG=str(log), NAP="0.1")
    try:
        for _ in range(300):
            if log.exists() and failures(tmp_path):
                break
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)
    finally:
        text = ended(run)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, text
    assert len(failures(tmp_path)) == 1
    for path in failures(tmp_path):
        read(path)


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    dying = """
import os, pathlib, signal

@kernel("slot_mapping")
def dying_slots(block_tables, seq_ids, positions, block_size):
    if not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return good_slots(block_tables, seq_ids, positions, block_size)
"""
    write(tmp_path, "dying.py", GOOD + BAD.replace(TINY, "") + dying)
    options = ("--adapter", "dying.py", "--hypothesis-profile", "tiny", "-n", "2", "--no-isolate")
    done = pytest_in(tmp_path, *options, "--kernel", "bad*", "--kernel", "dying*")
    assert done.code == 1, done.text
    assert re.search(r"worker 'gw\d' crashed while running '.*test_slot_mapping\[dying_slots-000\]'", done.text)
    assert "I4 violated by bad_slots" in done.text
    assert len(failures(tmp_path)) == 1
    read(failures(tmp_path)[0])
