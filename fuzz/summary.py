"""The table at the end of a run, over all workers."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def summary(parts: Iterable[dict[str, Any]], width: int) -> str:
    """The text of the summary. `parts` are the plain statistics of the items (session.Statistics)."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    judged: dict[tuple[str, str], Counter[str]] = {}
    features: dict[str, Counter[str]] = {}
    cases: Counter[str] = Counter()
    for part in parts:
        key = (part["operation"], part["kernel"])
        total = totals.setdefault(key, Counter())
        for name in ("cases", "runs", "loose", "violations", "seconds"):
            total[name] += part[name]
        judged.setdefault(key, Counter()).update(part["judged"])
        features.setdefault(part["operation"], Counter()).update(part["features"])
        cases[part["operation"]] += part["cases"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel\n  operation", no_wrap=True)
    table.add_column("invariants checked\n(share of the cases)")
    for heading in ("cases", "cases/s", "violations", "loose"):
        table.add_column(heading, justify="right")
    for (operation, kernel), total in sorted(totals.items()):
        counts = judged[operation, kernel]
        shares = " ".join(
            name if count == total["cases"] else f"{name}:{_share(count, total['cases'])}"
            for name, count in sorted(counts.items(), key=lambda item: (len(item[0]), item[0]))
        )
        speed = total["cases"] / total["seconds"] if total["seconds"] else 0.0
        loose = f"{total['loose']} ({_share(total['loose'], total['cases'])})" if total["loose"] else "0"
        table.add_row(
            f"{kernel}\n  {operation}", shares, str(total["cases"]), f"{speed:.0f}", str(total["violations"]), loose
        )
    out = io.StringIO()
    console = Console(file=out, width=max(width, 80), force_terminal=False)
    console.print(table)
    for operation, counts in sorted(features.items()):
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        drawn = ", ".join(f"{word} {_share(count, cases[operation])}" for word, count in ordered)
        console.print(f"drawn for {operation}: {drawn}", highlight=False, soft_wrap=False)
    return out.getvalue().rstrip()


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if part >= whole / 100 else f"{100 * part / whole:.1f}%"
