"""What the jobs found, as one row a mutant; what fails the run; the table, the Markdown and the JSON."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from pagefuzz.oracles.invariant import invariants
from pagefuzz.tests.mutants.other_checks import CHECKS

MEDIAN_LIMIT, WORST_LIMIT = 20, 1500  # examples to the kill


@dataclass
class Row:
    """One mutant: what each seed gave, and what the other checks said. invariant: that it states to be named; or_also:
    those that may be named in its place."""

    mutant: str
    operation: str
    kernel: str
    origin: str
    invariant: str
    or_also: list[str] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def killed(self) -> list[dict[str, Any]]:
        return [kill for kill in self.kills if "shrunk" in kill]

    @property
    def examples(self) -> list[int]:
        return sorted(kill["examples"] for kill in self.killed)

    @property
    def seconds(self) -> list[float]:
        return sorted(kill["seconds"] for kill in self.killed)

    @property
    def named(self) -> Counter[str]:
        """What the shrunk cases name, and how often."""
        return Counter(kill["shrunk"]["named"] for kill in self.killed)

    @property
    def also(self) -> set[str]:
        """The others that see the case as it was found."""
        return {name for kill in self.killed for name in (kill["found"]["named"], *kill["found"]["also"])} - set(
            self.named
        )

    @property
    def alone(self) -> int:
        """How many of the found cases one invariant alone sees."""
        return sum(not kill["found"]["also"] for kill in self.killed)

    @property
    def stated(self) -> str:
        return " or ".join((self.invariant, *self.or_also))

    @property
    def as_stated(self) -> int:
        """How many shrunk cases name what is stated."""
        return sum(self.named[name] for name in (self.invariant, *self.or_also))

    @property
    def smallest(self) -> int:
        """How many shrunk cases are as small as stated."""
        return sum(kill["shrunk"]["smallest"] for kill in self.killed)

    def problems(self, worst: int = WORST_LIMIT) -> list[str]:
        """Why this mutant fails the run, a sentence each."""
        found = []
        for kill in self.kills:
            seed = f"with seed {kill['seed']}"
            if "survived" in kill:
                found.append(f"survived {seed}: {kill['survived']}; draw what it needs, or add what sees it")
            elif "crashed" in kill:
                found.append(f"crashed its process {seed} ({kill['crashed']}): no invariant has seen it")
            elif "hung" in kill:
                found.append(f"hung {seed}: {kill['hung']}; no invariant has seen it")
            elif "error" in kill:
                found.append(f"could not be judged {seed}: {kill['error'].strip().splitlines()[-1]}")
            elif kill["examples"] > worst:
                found.append(f"took {kill['examples']} examples {seed}, where {worst} is the limit")
        seen = {name for kill in self.killed for name in (kill["shrunk"]["named"], *kill["shrunk"]["also"])}
        seen |= self.also
        named = ", ".join(f"{name} {count} times" for name, count in self.named.most_common())
        if self.killed and self.invariant not in seen:
            found.append(f"is not seen by {self.invariant}, which it names; seen by {', '.join(sorted(seen))}")
        elif self.killed and self.as_stated * 2 <= len(self.killed):
            found.append(f"is named {named}, where it states {self.stated}")
        found += [
            f"could not be put to the check {check}: {said['error'].strip().splitlines()[-1]}"
            for check, said in self.others.items()
            if "error" in said
        ]
        return [f"{self.mutant} {sentence}" for sentence in found]


@dataclass
class Report:
    """The whole matrix. about: command, versions, machine, seeds, the examples of the budget, seconds."""

    about: dict[str, Any]
    rows: list[Row]

    def problems(self, every_invariant: bool = False) -> list[str]:
        """What fails the run, a sentence each. every_invariant: each must be named for some mutant."""
        found = [sentence for row in self.rows for sentence in row.problems()]
        medians = [median(row.examples) for row in self.rows if row.killed]
        if medians and median(medians) > MEDIAN_LIMIT:
            found.append(f"the median mutant takes {median(medians):g} examples, where {MEDIAN_LIMIT} is the limit")
        if every_invariant:
            kills = {name for row in self.rows for name in row.named}
            idle = [item.id for item in invariants() if item.id not in kills]
            found += [f"{name} names no mutant: give it one in the catalogue, or remove it" for name in idle]
        return found

    def weak(self) -> list[str]:
        """Mutants that take more than MEDIAN_LIMIT examples in the median."""
        return [row.mutant for row in self.rows if row.killed and median(row.examples) > MEDIAN_LIMIT]

    def headline(self) -> str:
        """N mutants, killed by us and by each of the other checks."""
        total = len(self.rows)
        ours = sum(len(row.killed) == len(row.kills) > 0 for row in self.rows)
        parts = [f"pagefuzz kills {ours}"]
        for check in CHECKS:
            asked = [row.others[check] for row in self.rows if check in row.others]
            if asked:
                parts.append(f"{check} {sum(map(_is_killed, asked))}")
        text = f"{total} mutants: {', '.join(parts)}."
        medians = sorted(median(row.examples) for row in self.rows if row.killed)
        if medians:
            worst = max(max(row.examples) for row in self.rows if row.killed)
            text += f" Median {median(medians):g} examples to the kill, worst {worst}."
        return text

    def only_ours(self) -> list[str]:
        """The mutants that none of the other checks catches."""
        return [row.mutant for row in self.rows if row.others and not any(map(_is_killed, row.others.values()))]

    def by_invariant(self) -> dict[str, dict[str, int]]:
        """For each invariant, how many mutants it names, how many it sees, how many it alone sees in every case."""
        found = {}
        for item in invariants():
            saw = [[{kill["found"]["named"], *kill["found"]["also"]} for kill in row.killed] for row in self.rows]
            found[item.id] = {
                "named": sum(item.id in row.named for row in self.rows),
                "sees": sum(any(item.id in each for each in kills) for kills in saw),
                "alone": sum(bool(kills) and all(each == {item.id} for each in kills) for kills in saw),
            }
        return found

    # ---- writing

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The headings and the cells."""
        checks = [check for check in CHECKS if any(check in row.others for row in self.rows)]
        headings = [
            "mutant",
            "named",
            "also seen by",
            "alone",
            "examples",
            "seconds",
            "shrunk to",
            "as stated",
            *checks,
        ]
        return headings, [_cells(row, checks) for row in sorted(self.rows, key=_order)]

    def terminal(self, width: int) -> str:
        """The table for a terminal so many columns wide."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        headings, cells = self.table()
        table = Table(box=box.SIMPLE_HEAD, title=self.headline(), title_justify="left", padding=(0, 1))
        for place, heading in enumerate(headings):
            table.add_column(heading, overflow="fold", no_wrap=place == 0)
        for line in cells:
            table.add_row(*line)
        out = io.StringIO()
        Console(file=out, width=max(width, 120), force_terminal=False).print(table)
        return out.getvalue().rstrip()

    def markdown(self) -> str:
        about = {name: in_words(value) for name, value in self.about.items()}
        headings, cells = self.table()
        kinds = ["mutants named", "mutants seen", "mutants seen by nothing else"]
        by_invariant = [[name, *map(str, counts.values())] for name, counts in self.by_invariant().items()]
        problems = self.problems()
        weak, ours = self.weak(), self.only_ours()
        parts = [
            "# Which planted bugs die, and by what",
            self.headline(),
            *(f"{len(ours)} are caught by none of the other checks: {', '.join(ours)}." for _ in ours[:1]),
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "Written by `make mutants`. Each seed is a run of the quick profile with that seed. *named*: the invariant "
            "that the shrunk case names (times, where the seeds differ); *also seen by*: the others that see the case "
            "as it was found; *alone*: for how many seeds one invariant alone saw it; *examples*, *seconds*: median "
            "(worst) of the seeds, without shrinking; *as stated*: how many shrunk cases are as small as a person "
            "would write them. `grid`, `equal`, `tiny`: what the usual checks say (`tests/mutants/other_checks.py`).",
            markdown_table(headings, cells),
            "## By invariant",
            markdown_table(["invariant", *kinds], by_invariant),
            f"Takes more than {MEDIAN_LIMIT} examples in the median: {', '.join(weak) or 'none'}.",
        ]
        if problems:
            parts += ["## What fails", "\n".join(f"- {sentence}" for sentence in problems)]
        return "\n\n".join(parts) + "\n"

    def plain(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {
            "about": self.about,
            "headline": self.headline(),
            "problems": self.problems(),
            "by_invariant": self.by_invariant(),
            "mutants": [asdict(row) for row in self.rows],
        }


class Written(Protocol):
    """What `write` takes."""

    def markdown(self) -> str: ...

    def plain(self) -> dict[str, Any]: ...


def write(report: Written, markdown: Path | None, plain: Path | None) -> None:
    """Write a report's Markdown and JSON, each where a path is given: all of it, or what was there stays."""
    if markdown is not None:
        _replace(markdown, report.markdown())
    if plain is not None:
        _replace(plain, json.dumps(report.plain(), indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    path.with_name(f".{path.name}.new").write_text(text)
    path.with_name(f".{path.name}.new").replace(path)


def read(path: Path) -> Report:
    """The report that a JSON file holds."""
    content = json.loads(path.read_text())
    return Report(content["about"], [Row(**row) for row in content["mutants"]])


def markdown_table(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_killed(said: dict[str, Any]) -> bool:
    return any(how in said for how in ("killed", "crashed", "hung"))


def _order(row: Row) -> tuple[str, int, str, str]:
    return row.operation, len(row.invariant), row.invariant, row.mutant


def by_number(names: Iterable[str]) -> list[str]:
    """Ids of invariants, I2 before I10."""
    return sorted(names, key=lambda name: (len(name), name))


def _cells(row: Row, checks: list[str]) -> list[str]:
    said = [_said(row.others.get(check, {})) for check in checks]
    killed = row.killed
    if not killed:
        how = next(
            (word for kill in row.kills for word in ("survived", "crashed", "hung", "error") if word in kill), ""
        )
        return [row.mutant, how.upper(), *[""] * 6, *said]
    named = " ".join(
        f"{name}" if count == len(killed) else f"{name}:{count}" for name, count in row.named.most_common()
    )
    lost = f" ({len(killed)} of {len(row.kills)} seeds)" if len(killed) < len(row.kills) else ""
    smallest = next((kill for kill in killed if kill["shrunk"]["smallest"]), killed[0])
    return [
        row.mutant,
        (named if row.as_stated == len(killed) else f"{named} (stated: {row.stated})") + lost,
        " ".join(by_number(row.also)),
        f"{row.alone}/{len(killed)}",
        f"{median(row.examples):g} ({row.examples[-1]})",
        f"{median(row.seconds):.2f} ({row.seconds[-1]:.2f})",
        smallest["shrunk"]["shapes"],
        f"{row.smallest}/{len(killed)}",
        *said,
    ]


def _said(said: dict[str, Any]) -> str:
    words = {"killed": "killed", "passed": "lives", "silent": "-", "crashed": "crashes", "hung": "hangs"}
    return next((word for how, word in words.items() if how in said), "?")
