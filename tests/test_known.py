"""Known failures: what is excused and what is not, what is said of it, and what a file may hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pagefuzz.fuzz import saved as saving
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.known import Condition, Entry, Range, Unusable, entries_of, known_lines, read, vocabulary
from pagefuzz.fuzz.verdict import KNOWN, VIOLATION, Judge
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention as decode
from pagefuzz.oracles.invariant import Violation
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case, Limits, Sequence
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.tests.commands import Done, counts, failures, pytest_in
from pagefuzz.tests.killing import runner
from pagefuzz.tests.test_command_line import is_one_sentence

# WRONG names the tables whose slots are one too high: those of int64, of int32, or both.
ADAPTER = """
import os, torch
from hypothesis import settings
from pagefuzz import kernel

settings.register_profile("some", max_examples=60, deadline=None)
settings.register_profile("shards", max_examples=250, deadline=None)

def slots(block_tables, seq_ids, positions, block_size):
    with open("calls.log", "a") as log:
        log.write("call\\n")
    if not len(positions) or not len(block_tables):
        return torch.full(positions.shape, -1)
    rows, kept = torch.where(positions >= 0, seq_ids, 0).long(), positions.clamp(min=0).long()
    blocks = block_tables[rows, kept // block_size].long()
    found = torch.where(positions >= 0, blocks * block_size + kept % block_size, -1)
    if os.environ.get("RAISES"):
        raise RuntimeError("an error nobody knows")
    return found + (str(block_tables.dtype).removeprefix("torch.") in os.environ["WRONG"])

kernel("slot_mapping", name="mine_slots")(slots)
kernel("slot_mapping", name="other_slots", index_dtypes=["int32"])(slots)
kernel("slot_mapping", name="device_slots", devices=["cuda"])(slots)
"""
LINK = "https://example.org/issues/1"
INT64 = f"""
[[known]]
kernel = "mine_*"
invariants = ["I14", "I4"]
when = {{ lacks = ["int32 index"] }}
reason = "int64 tables are one off"
link = "{LINK}"
"""
EVERYWHERE = INT64.replace('{ lacks = ["int32 index"] }', '"always"')
WHY = f"int64 tables are one off ({LINK})"
CASE = SlotMappingCase(block_size=1, num_blocks=1, sequences=(Sequence((0,), (), 1),), tokens=(Token(0, 0),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter.py").write_text(ADAPTER)
    return tmp_path


def fuzz(folder: Path, known: str, *options: str, wrong: str, profile: str = "some", **more: str) -> Done:
    (folder / "adapter.known.toml").write_text(known)
    chosen = ("--adapter", "adapter.py", "--hypothesis-profile", profile, "--hypothesis-seed=5")
    return pytest_in(folder, *chosen, *(options or ("--kernel", "mine_slots")), tests=None, WRONG=wrong, **more)


# ---- a run


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_known_failure_is_counted_and_the_search_goes_on(workers: str, folder: Path) -> None:
    done = fuzz(folder, INT64, "--kernel", "mine_slots", workers, wrong="int64", profile="shards")
    assert done.code == 0, done.text
    assert counts(done.text) == {"passed": 2}
    assert done.line("  not red: 1 known failure")
    said = f" cases, mine_* breaks I14, I4: {WHY} [entry 1 of adapter.known.toml]"
    number = done.line(said).removeprefix("known: ").removesuffix(said)
    assert 60 < int(number) < 200  # half of 250 have int64 tables, and some of those no token
    assert " 250 " in done.line(" mine_slots "), "not every case was looked at"
    assert not failures(folder), "a known failure was saved"


def test_a_known_failure_costs_what_a_right_case_costs(folder: Path) -> None:
    def calls(known: str, wrong: str) -> int:
        code = fuzz(folder, known, wrong=wrong).code
        assert code == bool(wrong and not known)
        number = len((folder / "calls.log").read_text().splitlines())
        (folder / "calls.log").unlink()
        return number

    right = calls(EVERYWHERE, "")
    assert right >= 60
    # Not shrunk, not run again, and no twin more than it pays for, but for those that tell the cause.
    assert calls(EVERYWHERE, "int64 int32") < 1.5 * right
    assert calls("", "int64 int32") > 20, "a red case is shrunk, though"


def test_another_failure_is_red_and_does_not_shrink_into_a_known_one(folder: Path) -> None:
    """int64 tables would be simpler, and fail too."""
    both = INT64.replace("int64 tables", "half of the tables")
    done = fuzz(folder, both, wrong="int64 int32")
    assert done.code == 1, done.text
    assert done.line("I4 violated by mine_slots")
    assert "index_dtype='int32'" in done.command("shrunk to")
    saved = saving.read(failures(folder)[0])[1]
    assert isinstance(saved, SlotMappingCase) and saved.index_dtype == "int32" and len(saved.sequences) == 1
    assert "half of the tables are one off" in done.line("known: ")
    alone = fuzz(folder, "", wrong="int64 int32")
    assert "int32" not in alone.command("shrunk to"), "so it would shrink"


def test_what_an_entry_does_not_explain_is_red_and_named(folder: Path) -> None:
    """I14 is the more specific of the two; but it is I4 that nobody knows of."""
    done = fuzz(folder, INT64.replace('["I14", "I4"]', '["I14"]'), wrong="int64")
    assert done.code == 1, done.text
    assert done.line("I4 violated by mine_slots")
    assert done.command("also broken") == "I14"
    assert done.command("known") == f"I14: {WHY} [entry 1 of adapter.known.toml]"
    alone = fuzz(folder, "", wrong="int64")
    assert alone.line("I14 violated by mine_slots") and alone.command("also broken") == "I4"


def test_entries_excuse_a_case_together(folder: Path) -> None:
    parts = INT64.replace('["I14", "I4"]', '["I14"]') + INT64.replace('["I14", "I4"]', '["I4"]')
    done = fuzz(folder, parts, wrong="int64")
    assert done.code == 0, done.text
    for number in (1, 2):
        said = done.line(f"[entry {number} of adapter.known.toml]")
        assert said.startswith("known: ") and not said.startswith("known: 0 ")


def test_what_was_seen_is_a_part_of_the_entry(folder: Path) -> None:
    raises = EVERYWHERE.replace('["I14", "I4"]', '["I0"]')
    other = fuzz(folder, raises + 'seen = "an error that all know"\n', wrong="", RAISES="1")
    assert other.code == 1 and other.line("I0 violated by mine_slots")
    same = fuzz(folder, raises + 'seen = "an error nobody knows"\n', wrong="", RAISES="1")
    assert same.code == 0, same.text
    assert not same.line("known: ").startswith("known: 0 ")


def test_an_entry_speaks_of_its_kernel_alone(folder: Path) -> None:
    done = fuzz(folder, EVERYWHERE, "--kernel", "*_slots", wrong="int32 int64")
    assert done.code == 1, done.text
    assert "violated by other_slots" in done.text and "violated by mine_slots" not in done.text


def test_a_module_has_its_file_beside_it_too(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "adapter.py").rename(folder / "package/adapter.py")
    (folder / "package/adapter.known.toml").write_text(INT64)
    chosen = ("--adapter", "package.adapter", "--kernel", "mine_slots", "--hypothesis-profile", "some")
    done = pytest_in(folder, *chosen, PYTHONPATH=str(folder), WRONG="int64")
    assert done.code == 0, done.text
    assert done.line("known: ").endswith("[entry 1 of package/adapter.known.toml]")


# ---- what matched nothing


def test_an_entry_that_matches_nothing_any_more_is_announced(folder: Path) -> None:
    done = fuzz(folder, INT64, "--kernel", "mine_slots", "-n2", wrong="", profile="shards")
    assert done.code == 0, done.text
    said = done.line("NO MORE SEEN")
    assert f"mine_* breaks I14, I4: {WHY} [entry 1 of adapter.known.toml]" in said
    assert "of 250 cases, and none broke these: if it is fixed, delete the entry." in said
    part = fuzz(folder, INT64, "--kernel", "mine_slots", "-k", "000", wrong="", profile="shards")
    assert "NO MORE SEEN" not in part.text and part.line("known: 0 cases, mine_*")
    never = fuzz(folder, INT64.replace('lacks = ["int32 index"]', "bs = 4095"), wrong="")
    assert never.code == 0
    assert never.line("NEVER DRAWN").endswith("Its condition held for none of 60 cases.")


ENTRY = Entry("entry 1 of x.known.toml", "a*", frozenset({"ab", "ac"}), ("I4",), Condition(), "why")


def part(kernel: str, known: int = 0, violations: int = 0, held: int = 3) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "cases": 10,
        "violations": violations,
        "known": {ENTRY.label: known},
        "held": {ENTRY.label: held},
    }


@pytest.mark.parametrize(
    ("parts", "planned", "said"),
    [
        (
            [part("ab"), part("ac")],
            {"ab": 1, "ac": 1},
            "known, but NO MORE SEEN: a* breaks I4: why [entry 1 of x.known.t",
        ),
        ([part("ab"), part("ac", held=0)], {"ab": 1, "ac": 1}, "condition held for 3 of 20 cases, and none"),
        ([part("ab", held=0), part("ac", held=0)], {"ab": 1, "ac": 1}, "NEVER DRAWN: a* breaks I4: why"),
        ([part("ab"), part("ac", 2), part("ac", 3)], {"ab": 1, "ac": 2}, "known: 5 cases, a* breaks I4"),
        ([part("ab"), part("ac")], {"ab": 1, "ac": 2}, "known: 0 cases, "),  # one shard was not run
        ([part("ab"), part("ac", violations=1)], {"ab": 1, "ac": 1}, "known: 0 cases, "),  # or not to its end
        ([part("ab")], {"ab": 1}, "known: 0 cases, "),  # --kernel left the other one out
    ],
    ids=["nothing", "one holds", "never drawn", "matched", "a shard missing", "a shard red", "a kernel left out"],
)
def test_an_entry_is_only_missed_where_all_was_run(
    parts: list[dict[str, Any]], planned: dict[str, int], said: str
) -> None:
    (line,) = known_lines([ENTRY], parts, Counter(planned))
    assert said in line


def test_an_entry_of_kernels_that_are_not_in_the_run_is_not_spoken_of(folder: Path) -> None:
    assert known_lines([ENTRY], [part("b")], Counter({"b": 1})) == []
    done = fuzz(folder, INT64, "--kernel", "other_slots", wrong="")
    assert done.code == 0 and "not red" not in done.text and "mine_*" not in done.text


# ---- saved failures


def test_a_replay_says_that_the_failure_is_known_and_fails(folder: Path) -> None:
    (folder / "adapter.known.toml").write_text(INT64)
    case = replace(CASE, relations=("I14",))
    path = saving.save(folder, "mine_slots", "failure", "I14", case, case, Violation("", ""), "cpu")[0]
    done = pytest_in(folder, "--adapter", "adapter.py", "--replay", path.name, WRONG="int64")
    assert done.code == 1, done.text
    why = f"I4, I14: {WHY} [entry 1 of adapter.known.toml]"
    assert done.line(f"known failure: {why}") and done.line("still fails: I14 violated by mine_slots")
    assert done.line(f"{path.name}: known failure: {why}")
    assert done.command("seen") == "slot 1" and done.command("known") == why


def test_a_saved_failure_that_is_known_now_is_said_and_stays(folder: Path) -> None:
    red = fuzz(folder, "", wrong="int64")
    (path,) = failures(folder)
    assert red.code == 1
    saving.write(path, msgspec.structs.replace(saving.read(path)[0], passes=1))
    done = fuzz(folder, INT64, wrong="int64")
    assert done.code == 0, done.text
    assert counts(done.text) == {"passed": 1, "skipped": 1}
    assert WHY in done.line(f".pagefuzz/failures/{path.name}: known failure: I4")
    assert failures(folder) == [path] and saving.read(path)[0].passes == 0


# ---- conditions

DECODE = PagedDecodeAttentionCase(
    block_size=4,
    num_blocks=3,
    sequences=(Sequence((0, 1), (), 7), Sequence((), (2, 2), 0)),
    num_kv_heads=3,
    group_size=2,
    head_dim=80,
    values="low_scores",
    dtype="float16",
    poison="nan",
    index_dtype="int32",
)
WRITE = ReshapeAndCacheCase(block_size=4, num_blocks=2, slots=(5, -1), extra_rows=1, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("when", "case", "holds"),
    [
        ('"always"', DECODE, True),
        ('{ has = ["context length 0"] }', DECODE, True),
        ('{ has = ["context length 0", "shared pages"] }', DECODE, False),
        ('{ has = ["context length 0"], lacks = ["shared pages"] }', DECODE, True),
        ('{ lacks = ["shared pages", "context length 0"] }', DECODE, False),
        ('{ has = ["values low_scores", "float16", "poison nan", "int32 index", "caches contiguous"] }', DECODE, True),
        ('{ has = ["offset past 2^31"] }', DECODE, False),
        (
            '{ has = ["offset past 2^31"] }',
            replace(DECODE, num_blocks=2**30, sequences=(Sequence((2**29,), (), 1),)),
            True,
        ),
        ("{ D = { power_of_two = false } }", DECODE, True),
        ("{ D = { power_of_two = true } }", DECODE, False),
        ("{ bs = { power_of_two = true } }", DECODE, True),
        ("{ D = 80 }", DECODE, True),
        ("{ D = [64, 80] }", DECODE, True),
        ("{ D = [64, 128] }", DECODE, False),
        ("{ D = { at_least = 80 }, H = 6, KVH = 3, group = 2, M = 2, N = 3, B = 2 }", DECODE, True),
        ("{ D = { at_least = 81 } }", DECODE, False),
        ("{ D = { at_most = 80 } }", DECODE, True),
        ("{ D = { at_most = 79 } }", DECODE, False),
        ("{ n = 0, D = 80 }", DECODE, True),
        ("{ n = { at_least = 1, at_most = 6 } }", DECODE, False),  # both of one sequence
        ('{ "M * bs" = { at_most = 31 } }', DECODE, True),  # a table narrower than a tile of 32 keys
        ('{ "M * bs" = { not_multiple_of = 32 } }', DECODE, True),
        ('{ "M*bs" = { not_multiple_of = 8 } }', DECODE, False),
        ('{ "M*bs" = { multiple_of = 8 } }', DECODE, True),
        ('{ "M*bs" = { multiple_of = 3 } }', DECODE, False),
        ('{ "n * D" = 560 }', DECODE, True),
        ("{ n = { at_least = 0 } }", replace(DECODE, sequences=()), False),
        ('{ "T\'" = 3, T = 2 }', WRITE, True),
        ('{ has = ["padded slots"], "KVH * D" = 16 }', WRITE, True),
        ('{ has = ["every slot padded"] }', WRITE, False),
    ],
)
def test_a_condition(when: str, case: Case, holds: bool, tmp_path: Path) -> None:
    text = f'[[known]]\nkernel = "mine"\ninvariants = ["I4"]\nreason = "r"\nwhen = {when}\n'
    (entry,) = parsed(tmp_path, text, case.operation)
    assert entry.when.holds(case) is holds


@pytest.mark.parametrize("operation", STRATEGIES)
def test_every_word_and_size_of_a_drawn_case_can_be_named(operation: str) -> None:
    words, letters = vocabulary(operation)
    seen: Counter[str] = Counter()
    cases: list[Any] = []
    each_case(STRATEGIES[operation](Declaration(cache_layouts=("strided",)), Limits()), 300, 3, cases.append)
    for case in cases:
        assert case.features() <= set(words) and tuple(case.sizes()) == letters
        seen.update(case.features())
        sizes = {name: value[0] for name, value in case.sizes().items() if name != "n"}
        shown = dict(part.split("=") for part in case.shapes().split() if "=" in part and "scale" not in part)
        assert {name: str(sizes[name]) for name in shown} == shown
    assert len(seen) > len(words) / 2


# ---- a lack of precision


@pytest.mark.parametrize(
    ("second", "plain", "kind"),
    [
        ("", False, KNOWN),
        ("row", False, VIOLATION),
        ("head", False, VIOLATION),
        ("nan", False, VIOLATION),
        ("inf", False, VIOLATION),
        ("nan", True, KNOWN),  # which another entry explains
        ("row", True, VIOLATION),
    ],
)
def test_a_lack_of_precision_excuses_no_second_fault(second: str, plain: bool, kind: str) -> None:
    case = replace(
        DECODE,
        dtype="float32",
        values="ordinary",
        scale=0.05,
        sequences=(Sequence((0, 1), (), 7), Sequence((2,), (2,), 3)),
    )

    def imprecise(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
        out = decode(q, k, v, tables, lengths - int(second == "row"), scale) * (1 + 2.0**-11)
        if second in ("nan", "inf"):
            out[-1, -1, -1] = float(second)
        return out.flip(1) if second == "head" else out

    rounds = Entry("rounds", "k", frozenset({"k"}), ("I4",), Condition(), "why", unit_roundoff={"weights": "float16"})
    nan = Entry("nan", "k", frozenset({"k"}), ("I4",), Condition(), "why", seen="nan")
    kernel = Kernel("k", OPERATIONS[case.operation], imprecise, Declaration())
    assert Judge(kernel, runner()).verdict(case, ("I0", "I4")).named == "I4"
    found = Judge(kernel, runner(), (rounds, nan) if plain else (rounds,)).verdict(case, ("I0", "I4"))
    assert found.kind == kind and {entry.label for entry in found.known.values()} <= {"rounds"}


def test_what_is_seen_counts_for_the_entry_that_names_it() -> None:
    """Else that one would be announced as no more seen, though the case is red without it."""
    case = replace(DECODE, dtype="float32", values="ordinary", sequences=(Sequence((0, 1), (), 7),))

    def imprecise(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
        out = decode(q, k, v, tables, lengths, scale) * (1 + 2.0**-11)
        out[0, 0, 0] = torch.nan  # the first place that is wrong
        return out

    rounds = Entry("rounds", "k", frozenset({"k"}), ("I4",), Condition(), "why", unit_roundoff={"weights": "float16"})
    nan = Entry("nan", "k", frozenset({"k"}), ("I4",), Condition(), "why", seen="nan")
    kernel = Kernel("k", OPERATIONS[case.operation], imprecise, Declaration())
    found = Judge(kernel, runner(), (rounds, nan)).verdict(case, ("I0", "I4"))
    assert found.kind == KNOWN and [entry.label for entry in found.known.values()] == ["nan"]


# ---- files


def never(*arguments: Any) -> None:
    raise AssertionError("only read about, never run")


def kernels(operation: str = "paged_decode_attention", **declared: Any) -> dict[str, Kernel]:
    named = {"mine": operation, "mine_write+mine": "write_then_decode", "stranger": "slot_mapping"}
    return {name: Kernel(name, OPERATIONS[what], never, Declaration(**declared)) for name, what in named.items()}


def parsed(
    folder: Path, text: str, operation: str = "paged_decode_attention", device: str = "cpu", **declared: Any
) -> list[Entry]:
    path = folder / "x.known.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return read(path, "x.known.toml", ["mine"], kernels(operation, **declared), device)


GOOD = """[[known]]
kernel = "mine"
invariants = ["I4"]
when = { has = ["context length 0"] }
reason = "one"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reason", "# reason", "it has no `reason`: say why this failure is not red"),
        ('"one"', '" "', "it has no `reason`: say why this failure is not red"),
        ('"one"', '"one"\nreson = "two"', "unknown 'reson'; did you mean 'reason'? there are kernel, invariants, when"),
        ('"one"', "1", "Expected `str`, got `int`"),
        ('"one"', '"one"\nlink = " "', "`link` is blank"),
        ('"one"', '"one"\nlink = "issue 3"', "link = 'issue 3' should begin with https://"),
        ('"one"', '"one"\nseen = ""', "`seen` is blank"),
        ('"one"', '"one"\ndevices = []', "`devices` is empty"),
        ('"one"', '"one"\nunit_roundoff = {}', "`unit_roundoff` is empty"),
        ('"one"', '"one"\nunit_roundoff = "input"', "Expected `object | null`, got `str` - at `$.unit_roundoff`"),
        (
            '"one"',
            '"one"\nunit_roundoff = { wights = "input" }',
            "unit_roundoff: unknown 'wights'; did you mean 'weights'? there are scores, weights, products, sums.",
        ),
        (
            '"one"',
            '"one"\nunit_roundoff = { weights = "double" }',
            "unit_roundoff: 'double' is not one of 'float32', 'tf32',",
        ),
        (
            '"one"',
            '"one"\nunit_roundoff = { sums = "float32" }',
            "`unit_roundoff` is what mine may round already: it excuses nothing.",
        ),
        ('"mine"', '""', "it has no `kernel`: name the kernel"),
        ('"mine"', '"yours*"', "kernel = 'yours*' matches no kernel of this adapter; there are mine, mine_write+mine."),
        ('"mine"', '"stranger"', "kernel = 'stranger' matches no kernel of this adapter; there are mine, "),
        ('["I4"]', "[]", "it has no `invariants`: list the ids"),
        ('["I4"]', '"I4"', "Expected `array`, got `str` - at `$.invariants`"),
        ('["I4"]', '["I4", "I99"]', "no invariant 'I99' speaks of paged_decode_attention; there are I0, I2, "),
        ('["I4"]', '["I1"]', "no invariant 'I1' speaks of paged_decode_attention; there are I0, I2, "),
        ('{ has = ["context length 0"] }', "{}", "no `when` (an empty condition would hold for every case): say for"),
        ("when", "# when", "it has no `when`: say for which cases"),
        ('{ has = ["context length 0"] }', '"ever"', "when = 'ever' should be a table of `has`, `lacks` and sizes, or"),
        ('["context length 0"]', "[]", "when: `has` should be a list of words"),
        ('["context length 0"]', '"B = 0"', "when: `has` should be a list of words"),
        (
            '"context length 0"',
            '"context lenght 0"',
            "has the word 'context lenght 0'; did you mean 'context length 0'?",
        ),
        (
            '"context length 0"',
            '"padded slots"',
            "no case of paged_decode_attention has the word 'padded slots'; there",
        ),
        (
            "has = ",
            "hat = ",
            "and paged_decode_attention has no size 'hat'; there are B, M, n, bs, N, KVH, D, H, group.",
        ),
        ('has = ["context length 0"]', "D = {}", "when: D compares with nothing; it should be a number, a list"),
        ('has = ["context length 0"]', "D = []", "when: D compares with nothing"),
        ('has = ["context length 0"]', "D = true", "when: D should be a number, a list of numbers, or a table of at_l"),
        ('has = ["context length 0"]', "D = { below = 3 }", "unknown field `below`"),
        ('has = ["context length 0"]', "D = { multiple_of = 0 }", "when: D should be"),
        ('has = ["context length 0"]', '"D * X" = 3', "has no size 'X'"),
        ('has = ["context length 0"]', "T = 3", "has no size 'T'"),
    ],
)
def test_a_wrong_entry_gets_one_sentence(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(Unusable) as error:
        parsed(tmp_path, GOOD + GOOD.replace(old, new))
    said = str(error.value)
    assert said.startswith("entry 2 of x.known.toml: ") and message in said and said.endswith(".")
    assert "\n" not in said


def test_a_rounding_that_can_excuse_nothing_is_wrong(tmp_path: Path) -> None:
    """Else the entry would stand there, and the case be red all the same."""
    rounds = GOOD.replace('{ has = ["context length 0"] }', '"always"') + 'unit_roundoff = { weights = "input" }\n'
    assert parsed(tmp_path, rounds)[0].unit_roundoff == {"weights": "input"}
    assert parsed(tmp_path, rounds, unit_roundoff={"weights": "float16"})
    with pytest.raises(Unusable, match=r"is what mine may round already"):
        parsed(tmp_path, rounds, unit_roundoff={"weights": "input", "sums": "input"})
    for operation in ("slot_mapping", "reshape_and_cache"):
        with pytest.raises(Unusable, match=f"`unit_roundoff` excuses nothing of {operation}, held bit for bit: leave"):
            parsed(tmp_path, rounds, operation)
        assert parsed(tmp_path, rounds.replace('"mine"', '"mine*"'), operation), "the pair has a tolerance"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[known]\n", "x.known.toml is not TOML: "),
        ('[[known]]\nkernel = "a"\nkernel = "b"\n', "x.known.toml is not TOML: Cannot overwrite a value"),
        ("\udcff", "x.known.toml is not TOML: 'utf-8' codec can't decode"),
        ("[[knwon]]\n", "x.known.toml: unknown 'knwon'; every entry begins with [[known]]."),
        ("[known]\n", "x.known.toml: `known` should be a list of tables; every entry begins with [[known]]."),
        ("known = [1]\n", "x.known.toml: `known` should be a list of tables"),
    ],
)
def test_a_wrong_file_gets_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable) as error:
        parsed(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_file_is_an_error_of_usage(folder: Path) -> None:
    wrong = INT64.replace("reason", "# reason")
    pattern = r"entry 1 of adapter\.known\.toml: it has no `reason`: say why this failure is not red\."
    is_one_sentence(fuzz(folder, wrong, "-n2", wrong=""), pattern)
    (folder / "adapter.known.toml").unlink()
    (folder / "adapter.known.toml").mkdir()
    chosen = ("--adapter", "adapter.py", "--kernel", "mine_slots")
    is_one_sentence(pytest_in(folder, *chosen, WRONG=""), r"adapter\.known\.toml cannot be read: Is a directory\.")


def test_a_pattern_names_pairs_too_and_no_stranger(tmp_path: Path) -> None:
    (both,) = parsed(tmp_path, GOOD.replace('"mine"', '"*mine"'))
    assert both.kernels == {"mine", "mine_write+mine"}
    (alone,) = parsed(tmp_path, GOOD)
    assert alone.kernels == {"mine"}
    (every,) = parsed(tmp_path, GOOD.replace('"mine"', '"*"'))
    assert every.kernels == {"mine", "mine_write+mine"}
    assert entries_of([both, alone], "mine_write+mine") == (both,)


def test_an_entry_of_another_device_is_checked_and_left_out(tmp_path: Path) -> None:
    device = GOOD + 'devices = ["cuda", "xpu"]\n'
    assert parsed(tmp_path, device) == []
    assert len(parsed(tmp_path, device, device="cuda:1")) == 1
    assert parsed(tmp_path, GOOD, devices=("cuda",)) == []
    assert len(parsed(tmp_path, GOOD, devices=("cuda",), device="cuda")) == 1
    with pytest.raises(Unusable, match="no `reason`"):
        parsed(tmp_path, device.replace("reason", "# reason"))


def test_a_range_holds_where_all_of_it_does() -> None:
    assert [size for size in range(40) if size in Range(at_least=3, at_most=20, multiple_of=4)] == [4, 8, 12, 16, 20]
    assert [size for size in range(20) if size in Range(power_of_two=True)] == [1, 2, 4, 8, 16]
    assert 0 in Range(power_of_two=False)
