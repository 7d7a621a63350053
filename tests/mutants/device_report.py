"""The mutants on a device beside the same mutants interpreted: which die only here, which only there, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from pagefuzz.tests.mutants.report import Row, by_number, in_words, markdown_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mutants-matrix.md"  # what `make mutants` writes, interpreted
# By mutant, why it lives on a device or is named otherwise. It goes before what the figures tell.
REASONS = {
    "denominator_not_rescaled": "needs a context of more than one step (16 to 64 keys): few in two shapes",
    "keys_past_16_slots_of_a_page": "no shape of these seeds has a block size above 16",
    "table_loaded_in_fours": "reads that leave the result right: seen where accesses are traced",
}
TRACED = {"I0", "I2", "I6", "I17"}  # what a trace of every access shows where the result is right
SELDOM = 4  # interpreted it took more than a 4th of the examples that were drawn here


@dataclass(frozen=True)
class Interpreted:
    """What a mutant's line of the page says: the cell of what is named, the ids of all that see it, and how many
    examples it took at worst. killed: by every seed."""

    named: str
    seen: frozenset[str]
    worst: int
    killed: bool

    @property
    def only_traced(self) -> bool:
        """Whether nothing sees it that looks at the result."""
        return bool(self.seen) and self.seen <= TRACED


def interpreted(page: str) -> dict[str, Interpreted]:
    """The lines of a page that `make mutants` has written, by mutant. Raises ValueError where there is no table."""
    found, place = {}, {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "mutant":
            place = {heading: at for at, heading in enumerate(cells)}
        elif line.startswith("| ---") or not line.startswith("|"):
            if place and not line.startswith("|"):
                break
        elif place:
            named, also, examples = (cells[place[heading]] for heading in ("named", "also seen by", "examples"))
            ids = frozenset(re.findall(r"I\d+", f"{named.split('(')[0]} {also}"))
            worst = re.search(r"\((\d+)\)", examples)
            found[cells[0]] = Interpreted(
                named.split(" (")[0], ids, int(worst.group(1)) if worst else 0, bool(ids) and " seeds)" not in named
            )
    if not found:
        raise ValueError("the page of the interpreted mutants holds no table: write it again with 'make mutants'")
    return found


@dataclass
class DeviceReport:
    """about: command, versions, device, examples (drawn at most for a mutant and seed), ...; there: the same mutants
    interpreted."""

    about: dict[str, Any]
    rows: list[Row]
    there: dict[str, Interpreted]

    @property
    def run(self) -> list[Row]:
        """The mutants that at least one seed could be tried on."""
        return [row for row in self.rows if _judged(row)]

    def groups(self) -> dict[str, list[str]]:
        """The mutants that were run, by where they die. A mutant dies if a seed kills it."""
        found: dict[str, list[str]] = {"both": [], "only interpreted": [], "only compiled": [], "neither": []}
        for row in self.run:
            here, there = bool(row.killed), bool(row.mutant in self.there and self.there[row.mutant].seen)
            if here:
                found["both" if there else "only compiled"].append(row.mutant)
            else:
                found["only interpreted" if there else "neither"].append(row.mutant)
        return found

    def reason(self, row: Row) -> str:
        """Why a mutant lives here, or is named otherwise than interpreted; empty where there is nothing to say."""
        if row.mutant in REASONS:
            return REASONS[row.mutant]
        there = self.there.get(row.mutant)
        if there is None:
            return "is not on the page of the interpreted mutants"
        if not row.killed:
            return self._why_it_lives(row, there)
        if set(row.named) & set(re.findall(r"I\d+", there.named)):
            return ""
        if set(row.named) == {"I0"}:
            ended = [kill for kill in row.killed if kill["found"]["ended"]]
            return "a wild access ends the process here" if ended else "raises here"
        if there.seen & {"I2", "I17"} and not set(row.named) & {"I2", "I17"}:
            return "no access is traced here: seen by what it does to the result"
        return "another case came first" if set(row.named) <= there.seen else ""

    def _why_it_lives(self, row: Row, there: Interpreted) -> str:
        drawn = max((kill.get("examples", 0) for kill in row.kills), default=0)
        if there.only_traced and "I17" in there.seen:
            return "programs that touch one address: seen where every access is traced"
        if there.only_traced:
            return "reads, or stores of the same bits, that leave the result right: seen where accesses are traced"
        if "I17" in re.findall(r"I\d+", there.named):
            return "shows when programs come in another order, which only the interpreter chooses"
        if there.worst * SELDOM > drawn:
            return f"drawn too seldom: interpreted it took up to {there.worst} examples, {drawn} were drawn here"
        return "not known"

    def headline(self) -> str:
        groups, left = self.groups(), sum(not row.kills for row in self.rows)
        text = f"{len(self.run)} mutants on {self.about['device']}: {len(groups['both'])} die there and interpreted, "
        text += f"{len(groups['only interpreted'])} only interpreted, {len(groups['only compiled'])} only there, "
        text += f"{len(groups['neither'])} nowhere."
        medians = sorted(median(row.examples) for row in self.run if row.killed)
        if medians:
            worst = max(row.examples[-1] for row in self.run if row.killed)
            text += f" Median {median(medians):g} examples to the kill, worst {worst}."
        return text + (f" There was no time for {left} more." if left else "")

    def problems(self) -> list[str]:
        """What says nothing of a mutant: its process died, or pagefuzz failed."""
        return [
            f"{row.mutant} with seed {kill['seed']}: {how}: {str(kill[how]).strip().splitlines()[-1]}"
            for row in self.rows
            for kill in row.kills
            for how in ("crashed", "hung", "error")
            if how in kill
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        headings = ["mutant", "of", "interpreted", "here", "kills", "examples", "first case", "why"]
        return headings, [self._cells(row) for row in sorted(self.rows, key=_order)]

    def _cells(self, row: Row) -> list[str]:
        there = self.there.get(row.mutant)
        before = "?" if there is None else there.named
        if not _judged(row):
            return [row.mutant, row.kernel, before, "not judged" if row.kills else "not run", "", "", "", ""]
        killed = row.killed
        named = " ".join(name if count == len(killed) else f"{name}:{count}" for name, count in row.named.most_common())
        once = sum(not kill.get("repeatable", True) for kill in killed)
        named += f" ({once} not repeatable)" if once else ""
        if killed:
            drawn = f"{median(row.examples):g} ({row.examples[-1]})"
        else:
            drawn = f"all {max(kill.get('examples', 0) for kill in row.kills)}"
        first = killed[0]["found"]["shapes"] if killed else ""
        kills = f"{len(killed)}/{_judged(row)}"
        return [row.mutant, row.kernel, before, named or "lives", kills, drawn, first, self.reason(row)]

    def markdown(self) -> str:
        groups = self.groups()
        lists = [f"- {title}: {', '.join(names) or 'none'}" for title, names in groups.items() if title != "both"]
        left = [row.mutant for row in self.rows if not row.kills]
        parts = [
            "# Which planted bugs die on a GPU, and which only interpreted",
            self.headline(),
            "\n".join(lists + ([f"- no time was left for: {', '.join(left)}"] if left else [])),
            "\n".join(f"- {name}: {in_words(value)}" for name, value in self.about.items()),
            "Written by `make mutants ARGS='--device cuda'`. Kernels are compiled, each mutant in a process of its "
            "own, and cases come from a few shapes, since each shape is compiled; a seed ends after "
            f"{self.about['examples']} examples, far fewer than the quick profile's. *interpreted*: the invariant "
            "named on the CPU, as [mutants-matrix.md](mutants-matrix.md) has it; *here*: the one named on the device, "
            "by the case as it was found; *kills*: seeds that killed it, of those that there was time for; "
            "*examples*: median (worst) to the kill; *first case*: the shapes of the first seed's.",
            markdown_table(*self.table()),
        ]
        if problems := self.problems():
            parts += ["## What could not be judged", "\n".join(f"- {sentence}" for sentence in problems)]
        return "\n\n".join(parts) + "\n"

    def plain(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {
            "about": self.about,
            "headline": self.headline(),
            "groups": self.groups(),
            "problems": self.problems(),
            "mutants": [
                {**asdict(row), "interpreted": self._there(row), "why": self.reason(row) if _judged(row) else ""}
                for row in self.rows
            ],
        }

    def _there(self, row: Row) -> list[str]:
        return by_number(self.there[row.mutant].seen) if row.mutant in self.there else []


def _judged(row: Row) -> int:
    """How many seeds killed a mutant or were survived."""
    return sum("survived" in kill or "shrunk" in kill for kill in row.kills)


def _order(row: Row) -> tuple[bool, bool, str, str]:
    """Those that live first: they are what is looked for."""
    return not _judged(row), bool(row.killed), row.operation, row.mutant


def read(path: Path) -> DeviceReport:
    """The report of a run's JSON, beside the interpreted mutants of today. Raises ValueError where it is none."""
    try:
        content = json.loads(path.read_text())
        known = {name.name for name in fields(Row)}
        rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in content["mutants"]]
        about = content["about"]
        if missing := {"device", "examples"} - about.keys():
            raise KeyError(*missing)
        return DeviceReport(about, rows, interpreted(PAGE.read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the JSON of a run on a device: {type(error).__name__}: {error}") from None


def likely_kills_first(names: Iterable[str], there: dict[str, Interpreted]) -> list[str]:
    """Mutants that only a trace shows go last: they take all of their time, and have little to say."""
    return sorted(names, key=lambda name: name in there and there[name].only_traced)
