"""The kill matrix on a sample: one mutant for each invariant, and planted ones that must fail the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.fuzz.session import choose, load_own
from pagefuzz.fuzz.verdict import PASS, Judge
from pagefuzz.oracles.invariant import invariants
from pagefuzz.strategies.case import Sequence
from pagefuzz.strategies.layouts import GARBAGE
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.tests.commands import TREE, environ, group
from pagefuzz.tests.killing import runner
from pagefuzz.tests.mutants import device_report, idle, jobs, other_checks, report
from pagefuzz.tests.mutants.catalogue import MUTANTS
from pagefuzz.tests.mutants.features import words
from pagefuzz.tests.mutants.matrix import matrix, without_files
from pagefuzz.tests.mutants.report import Report, Row

SCRIPT = Path(report.__file__).with_name("matrix.py")
PLANTED = "pagefuzz.tests.mutants.planted"
SEED = 1


def judged(mutant: Any, folder: Path) -> Row:
    """One mutant's row of a matrix with one seed."""
    row = Row(mutant.name, mutant.operation, mutant.kernel, mutant.origin, mutant.invariant, list(mutant.also))
    row.kills = [jobs.kill(mutant, mutant.build(folder), SEED, None)]
    return row


@pytest.mark.parametrize("invariant", [item.id for item in invariants()])
def test_each_invariant_has_a_mutant_that_passes_the_matrix(invariant: str, tmp_path: Path) -> None:
    problems: list[str] = []
    for mutant in MUTANTS:  # one seed may show another side of a mutant, so the first that passes is enough
        if mutant.invariant == invariant:
            row = judged(mutant, tmp_path)
            problems += row.problems()
            if not row.problems() and row.named[invariant] == 1:
                break
    else:
        raise AssertionError(f"no mutant of {invariant} passes: {problems}")
    made = Report({"command": "none", "seeds": [SEED]}, [row])
    markdown, plain = tmp_path / "matrix.md", tmp_path / "matrix.json"
    report.write(made, markdown, plain)
    assert report.read(plain) == made
    line = next(line for line in markdown.read_text().splitlines() if line.startswith(f"| {row.mutant} |"))
    assert [cell.strip() for cell in line.split("|")][2] == invariant
    assert f"{row.examples[0]} ({row.examples[0]})" in line


def run_script(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ(**more), timeout=300, check=False)


MUST_FAIL = {
    "right": "survived with seed 1: all 40 examples passed",
    "aborts": "crashed its process with seed 1 (signal 6, SIGABRT)",
    "hangs": "hung with seed 1: did not end within 8 s",
    "seen_by_another": "is not seen by I17, which it names; seen by I4",
    "names_a_vaguer_one": "is not seen by I14, which it names; seen by I4",
    "no_longer_applies": "could not be judged with seed 1: ValueError: mutant no_longer_applies: 'text that stands",
}


def test_what_must_fail_the_run_does(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    # Enough seconds for the examples of the right one on a busy machine.
    options = ("--seeds", "1", "--examples", "40", "--workers", "2", "--limit", "8", "--json", str(path))
    done = run_script("--catalogue", PLANTED, *options)
    content = json.loads(path.read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "seeds 1"
    for name, sentence in MUST_FAIL.items():
        first = next(said for said in content["problems"] if said.startswith(f"{name} "))
        assert first.startswith(f"{name} {sentence}")
        assert f"FAILED: {first}" in done.stdout.splitlines()
    assert {said.split()[0] for said in content["problems"]} == set(MUST_FAIL)  # so not off_by_one
    assert content["headline"].startswith("7 mutants: pagefuzz kills 3, grid 5, equal 5, tiny 0.")
    row = next(row for row in content["mutants"] if row["mutant"] == "aborts")
    assert "crashed" in row["others"]["grid"]


def kill(seed: int, examples: int, named: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    judged = {"named": named, "also": list(also), "shapes": "T=1", "case": "", "smallest": True}
    return {"seed": seed, "examples": examples, "seconds": 0.1, "found": judged, "shrunk": judged}


def row_of(*kills: dict[str, Any], invariant: str = "I4") -> Row:
    return Row("m", "slot_mapping", "torch_slot_mapping", "", invariant, [], list(kills))


def test_the_majority_of_the_seeds_names_it() -> None:
    mostly = row_of(kill(1, 1, "I4"), kill(2, 1, "I4"), kill(3, 1, "I9", ("I4",)))
    assert mostly.problems() == []
    seldom = row_of(kill(1, 1, "I4"), kill(2, 1, "I9", ("I4",)), kill(3, 1, "I9", ("I4",)))
    assert seldom.problems() == ["m is named I9 2 times, I4 1 times, where it states I4"]
    seldom.or_also = ["I9"]
    assert seldom.problems() == []


def test_slow_kills_fail_the_run() -> None:
    assert row_of(kill(1, 1501, "I4")).problems() == ["m took 1501 examples with seed 1, where 1500 is the limit"]
    slow = Report({}, [row_of(kill(1, 21, "I4"))])
    assert slow.problems() == ["the median mutant takes 21 examples, where 20 is the limit"]
    assert slow.weak() == ["m"]
    fast = Report({}, [row_of(kill(1, 20, "I4")), row_of(kill(1, 20, "I4")), row_of(kill(1, 1500, "I4"))])
    assert fast.problems() == []
    assert "Median 20 examples to the kill, worst 1500." in fast.headline()


def test_an_invariant_that_names_no_mutant_fails_the_run() -> None:
    problems = Report({}, [row_of(kill(1, 1, "I4"))]).problems(every_invariant=True)
    assert len(problems) == len(invariants()) - 1
    assert problems[0] == "I0 names no mutant: give it one in the catalogue, or remove it"


def test_first_and_alone_are_told_apart() -> None:
    counts = Report({}, [row_of(kill(1, 1, "I4")), row_of(kill(1, 1, "I3", ("I4",)))]).by_invariant()
    assert counts["I4"] == {"named": 1, "sees": 2, "alone": 1}
    assert counts["I3"] == {"named": 1, "sees": 1, "alone": 0}


def wait_for_a_job(process: subprocess.Popen[Any], folder: Path) -> None:
    """Until a process of a run whose TMPDIR is `folder` has begun with a job."""
    until = time.monotonic() + 120
    while not list(folder.glob("tmp*/tmp*")) and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.1)


def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    arguments = ("--catalogue", PLANTED, "--only", "hangs", "--workers", "2", "--seeds", "1", "2", "--json", str(path))
    process = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ(TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    wait_for_a_job(process, tmp_path)
    assert len(group(process.pid)) == 3  # the run and its two processes
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: no process is left" in said
    assert group(process.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_the_readme_says_what_the_page_says() -> None:
    page, readme = ((TREE / name).read_text() for name in ("docs/mutants-matrix.md", "README.md"))
    headline = page.split("\n\n")[1]
    assert "mutants: pagefuzz kills" in headline
    assert f"**{headline}**" in readme, "write the headline of docs/mutants-matrix.md into the README"


def test_processes_end_with_whoever_started_them(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT), "--catalogue", PLANTED, "--only", "hangs", "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ(TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    wait_for_a_job(process, tmp_path)
    assert len(group(process.pid)) == 2
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while group(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert group(process.pid) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "no such"), "--only no such: no mutant has such a name; there are right, aborts"),
        (("--workers", "0"), "--workers, --limit, --seeds, --examples, --minutes and --seconds must be above 0"),
        (("--json", "no/such/folder.json"), "no/such/folder.json: there is no folder"),
        (("--device", "cpu", "--apart", "--minutes", "nan"), "--minutes and --seconds must be above 0"),
        (("--minutes", "1"), "--minutes is for --device"),
        (("--idle", "--device", "cuda"), "--idle looks at interpreted kernels"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = run_script("--catalogue", PLANTED, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_the_command_of_a_report_names_no_file_of_the_user() -> None:
    given = ["--json", "/home/me/a.json", "--seeds", "1", "2", "--markdown=/home/me/a.md", "--only", "t*"]
    assert without_files(given) == ["--seeds", "1", "2", "--only", "t*"]


def test_the_function_behind_the_command(tmp_path: Path) -> None:
    found = matrix(PLANTED, "off_by_one", [1, 2], 20, 1, 60.0, checks=False)
    assert [kill["seed"] for kill in found.rows[0].kills] == [1, 2]
    assert found.problems() == []


# ---- other checks


def own() -> dict[str, Any]:
    load_own()
    return choose([])


@pytest.mark.parametrize(
    ("name", "check"),
    # A pair's decode is asked on its own, so once is enough for the pair.
    [(name, check) for name in own() for check in other_checks.CHECKS if "+" not in name or check == "grid"],
)
def test_the_projects_own_kernels_pass_the_checks_that_others_use(name: str, check: str) -> None:
    said = other_checks.ask(check, own()[name])
    assert "silent" in said if check == "tiny" and name.endswith(("mapping", "_cache")) else said["passed"] >= 1


@pytest.mark.parametrize("check", other_checks.CHECKS)
def test_the_checks_that_others_use_catch_what_is_plainly_wrong(check: str) -> None:
    kernel = own()["torch_paged_decode_attention"]
    wrong = replace(kernel, call=lambda *arguments: kernel.call(*arguments) + 0.5)
    assert "out: off by up to 0.5" in other_checks.ask(check, wrong)["killed"]


# ---- idle


def failure(features: tuple[str, ...], *seen: str) -> dict[str, Any]:
    return {"features": list(features), "invariants": list(seen)}


def test_who_lives_without_what() -> None:
    drawn = {"rare": 3, "common": 99, "other": 50}
    found = {
        "cases": 100,
        "drawn": drawn,
        "lives without the dense oracle": True,
        "failures": [failure(("rare", "common"), "I4"), failure(("rare", "common", "other"), "I4")],
    }
    both = {**found, "failures": [failure(("rare",), "I4"), failure(("other",), "I4", "I7")]}
    result = idle.Idle({}, {"one": found, "both": {**both, "lives without the dense oracle": False}})
    assert result.without_feature() == {"rare": ["one"], "common": [], "other": []}  # common by chance
    lives = {name: names for name, names in result.without_invariant().items() if names}
    assert lives == {"I4": ["one"], "all that need one run only": ["one"]}
    assert result.without_dense_oracle() == ["one"]
    assert "other" in result.idle()[1] and "I7" in result.idle()[0]
    none = idle.Idle({}, {"quiet": {"cases": 1, "drawn": {}, "failures": []}, "dead": {"crashed": "signal 6"}})
    assert none.unjudged() == ["quiet (no failure)", "dead (crashed: signal 6)"]


def test_idle_prints_and_writes(tmp_path: Path) -> None:
    path, page = tmp_path / "idle.json", tmp_path / "idle.md"
    options = (
        "--only",
        "off_by_one",
        "--examples",
        "30",
        "--workers",
        "1",
        "--json",
        str(path),
        "--markdown",
        str(page),
    )
    done = run_script("--catalogue", PLANTED, "--idle", *options)
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content["invariants"]["I4"] == ["off_by_one"] == content["without the dense oracle"]
    assert "| I4 | 1 | off_by_one |" in page.read_text()
    assert "No mutant lives without, of the features:" in done.stdout


def test_what_memory_and_relations_see_without_the_dense_oracle(tmp_path: Path) -> None:
    known = jobs.mutants("pagefuzz.tests.mutants.catalogue")
    stray = jobs.kill(known["key_put_back"], known["key_put_back"].build(tmp_path), SEED, None)
    assert stray["shrunk"]["named"] == "I6"
    case, kernel = first_failure(known["block_id_breaks_ties"].build(tmp_path))
    assert jobs.seen_without_dense_oracle(kernel, case) == ("I7",)
    case, kernel = first_failure(known["softmax_in_bfloat16"].build(tmp_path))
    assert jobs.seen_without_dense_oracle(kernel, case) == ()
    assert Judge(kernel, runner()).verdict(case).named == "I4"  # and afterwards the oracle is there again


def first_failure(kernel: Any) -> tuple[Any, Any]:
    judge = Judge(kernel, runner())
    found: list[Any] = []

    def look(case: Any) -> bool:
        if judge.verdict(case).kind != PASS:
            found.append(case)
        return bool(found)

    jobs.drawn(judge, SEED, 500, look)
    return found[0], kernel


def test_words_of_a_tail() -> None:
    rows = (Sequence((1,), (GARBAGE, -1, 1), 1), Sequence((0,), (2**31 - 1, 9, 2), 2))
    case = SlotMappingCase(block_size=2, num_blocks=4, sequences=rows, tokens=(Token(0, 0),), order=1)
    said = words(case)
    kinds = {"garbage", "minus_one", "live", "int32_max", "past_pool", "free"}
    assert {word for word in said if word.startswith("tail ")} == {f"tail {kind}" for kind in kinds}
    assert {"order descending", "free blocks", "blocks out of order", "context length 1", "lengths differ"} <= said
    assert "order shuffled" not in said and "offset past 2^32" not in said


# ---- on a device


def test_a_device_runs_each_mutant_in_a_process_of_its_own(tmp_path: Path) -> None:
    path, page = tmp_path / "device.json", tmp_path / "device.md"
    options = ("--seeds", "1", "2", "--examples", "20", "--workers", "2", "--json", str(path), "--markdown", str(page))
    done = run_script("--catalogue", PLANTED, "--device", "cpu", "--apart", *options, "--only", "[!h]*")
    assert done.returncode == 1, done.stdout + done.stderr  # for the one that no longer applies
    content = json.loads(path.read_text())
    rows = {row["mutant"]: row["kills"] for row in content["mutants"]}
    assert [kill["survived"] for kill in rows["right"]] == ["all 20 examples passed"] * 2
    for kill_ in rows["aborts"]:  # a crash of the kernel, which its job survives
        assert kill_["found"]["named"] == "I0" and kill_["found"]["ended"] == "crashed"
    assert [kill_["found"]["named"] for kill_ in rows["off_by_one"]] == ["I4", "I4"]
    assert rows["off_by_one"][0]["shrunk"] == rows["off_by_one"][0]["found"]
    assert content["groups"]["only compiled"] == ["aborts", "off_by_one", "seen_by_another", "names_a_vaguer_one"]
    assert "no_longer_applies with seed 1: error" in content["problems"][0]
    text = page.read_text()
    assert "| aborts | torch_slot_mapping | ? | I0 | 2/2 | 1 (1) |" in text
    assert "| right | torch_slot_mapping | ? | lives | 0/2 | all 20 |" in text
    again = tmp_path / "again.md"
    assert run_script("--again", str(path), "--markdown", str(again)).returncode == 0
    assert again.read_text() == text


def test_what_a_device_has_found_is_written_where_the_run_is_ended(tmp_path: Path) -> None:
    path, page = tmp_path / "device.json", tmp_path / "device.md"
    folder = tmp_path / "scratch"
    folder.mkdir()
    arguments = ("--catalogue", PLANTED, "--device", "cpu", "--apart", "--workers", "1", "--seeds", "1")
    process = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT), *arguments, "--json", str(path), "--markdown", str(page)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ(TMPDIR=str(folder)),
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not path.exists() and time.monotonic() < until:  # it is written while the run goes on
        assert process.poll() is None
        time.sleep(0.05)
    known = json.loads(path.read_text())
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "what was known is written" in said
    until = time.monotonic() + 10
    while group(process.pid) and time.monotonic() < until:  # the kernel's process ends with the one that asked
        time.sleep(0.05)
    assert group(process.pid) == []
    done = [row["mutant"] for row in known["mutants"] if row["kills"]]
    assert done and "off_by_one" not in done
    text = page.read_text()
    assert "There was no time for" in text and "| off_by_one | torch_slot_mapping | ? | not run |" in text


def test_no_time_leaves_a_mutant_out() -> None:
    job = {"mutant": "right", "what": "kills", "seeds": [1, 2], "examples": 5, "shrinks": False}
    shop = jobs.Shop(PLANTED)
    assert shop({**job, "seconds": 30.0, "until": 0.0}) == {"kills": []}
    found = shop({**job, "examples": 10**6, "seconds": 2.0, "until": float("inf")})["kills"]
    assert [kill["seed"] for kill in found] == [1]
    assert "examples passed, and the time was over" in found[0]["survived"]


def test_why_a_mutant_lives_on_a_device_or_is_named_otherwise() -> None:
    there = device_report.interpreted(device_report.PAGE.read_text())
    assert set(there) == {mutant.name for mutant in MUTANTS}
    assert all(line.killed and line.worst >= 1 and line.seen for line in there.values())
    assert set(device_report.REASONS) <= set(there)

    def why(mutant: str, *kills: dict[str, Any]) -> str:
        row = Row(mutant, "", "", "", "I4", [], list(kills))
        return device_report.DeviceReport({"device": "d", "examples": 500}, [row], there).reason(row)

    lives = {"seed": 1, "examples": 500, "survived": "all 500 examples passed"}
    named = {name: {**kill(1, 1, name), "found": {"named": name, "also": [], "ended": ""}} for name in ("I0", "I4")}
    assert "touch one address" in why("output_written_by_two_programs", lives)
    assert "that leave the result right" in why("triton_one_page_too_many", lives)
    assert "in another order" in why("number_drawn_in_turn", lives)
    assert "interpreted it took up to" in why("shapes_not_compared", lives)
    assert why("scale_left_out", lives) == "not known"
    assert why("scale_left_out", named["I4"]) == ""
    assert "seen by what it does to the result" in why("pages_taken_for_adjacent", named["I4"])
    assert why("scale_left_out", named["I0"]) == "raises here"
    ended = {**named["I0"], "found": {**named["I0"]["found"], "ended": "crashed"}}
    assert why("scale_left_out", ended) == "a wild access ends the process here"
    assert "is not on the page" in why("unheard_of", lives)


def test_the_page_of_the_interpreted_mutants_is_read() -> None:
    page = (
        "# Title\n\n| mutant | named | also seen by | examples |\n| --- | --- | --- | --- |\n"
        "| one | I2:3 I10:1 (stated: I8) | I4 | 3 (14) |\n| two | I3 (4 of 5 seeds) |  | 1 (2) |\n"
        "| three | SURVIVED |  |  |\n\n| mutant | named |\n| --- | --- |\n| four | I4 |\n"
    )
    found = device_report.interpreted(page)
    assert set(found) == {"one", "two", "three"}
    assert found["one"] == device_report.Interpreted("I2:3 I10:1", frozenset({"I2", "I10", "I4"}), 14, True)
    assert not found["two"].killed and not found["three"].killed and not found["three"].seen
    with pytest.raises(ValueError, match="holds no table"):
        device_report.interpreted("# Title\n")


def test_mutants_that_only_a_trace_shows_go_last() -> None:
    there = device_report.interpreted(device_report.PAGE.read_text())
    names = ["output_written_by_two_programs", "scale_left_out"]
    assert device_report.likely_kills_first(names, there) == names[::-1]


def test_what_is_no_run_on_a_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"about": {}, "mutants": []}')
    done = run_script("--again", str(path))
    assert done.returncode == 2 and "not the JSON of a run on a device" in done.stderr
    done = run_script("--device", "cuda", "--only", "off_by_one", "--catalogue", PLANTED)
    assert done.returncode == 2 and "--device cuda: " in done.stderr and "Traceback" not in done.stderr
