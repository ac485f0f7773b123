"""Write results as Markdown: tables of ratios, the reasons for missing peers, and all numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FRAMEWORKS = ("graphopt", "torch", "torch-compile", "jax", "onnxruntime-training")
HEADINGS = {
    "graphopt": "graphopt, us",
    "graphopt-high": "graphopt, `high`",
    "graphopt-medium": "graphopt, `medium`",
    "graphopt-in-place": "graphopt, `in_place`",
    "graphopt-run": "graphopt `run`",
    "graphopt-plain": "graphopt, `native=False`",
    "graphopt-1.19": "graphopt on 1.19.2",
    "graphopt-1.19-fused": "same, `fused`",
    "torch": "PyTorch",
    "torch-compile": "torch.compile",
    "torch-medium": "PyTorch, `bf16` products",
    "torch-compile-medium": "torch.compile, `bf16` products",
    "torch-autocast": "PyTorch, autocast",
    "torch-compile-autocast": "torch.compile, autocast",
    "jax": "JAX jit + optax",
    "onnxruntime-training": "onnxruntime-training Module",
    "onnxsim": "onnxsim",
    "limit": "limit",
}


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with some digits and separators of thousands; a dash for None."""
    if value is None:
        return "-"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - whole)}f}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def ratios(chosen: Sequence[Any], titles: Mapping[str, str], short: bool = False) -> Iterator[str]:
    """Yield a table with a line per workload and optimizer and a column per peer; a short one has no notes."""
    if short:
        chosen = [result for result in chosen if not result.peer.startswith("graphopt-1")]
    peers = list(dict.fromkeys(result.peer for result in chosen))
    yield row("", "", *(HEADINGS[peer] for peer in peers))
    yield row("---", "---", *("---:" for _ in peers))
    notes: dict[str, int] = {}
    for workload, optimizer in dict.fromkeys((result.workload, result.optimizer) for result in chosen):
        found = {r.peer: r for r in chosen if (r.workload, r.optimizer) == (workload, optimizer)}
        base = found["graphopt"].median if "graphopt" in found else None
        cells = []
        for peer in peers:
            median = found[peer].median if peer in found else None
            if peer not in found:
                cells.append("")
            elif found[peer].error or median is None:
                note = notes.setdefault(f"{HEADINGS[peer]}: {found[peer].error}", len(notes) + 1)
                cells.append("-" if short else f"({note})")
            elif peer == "graphopt" or base is None:
                cells.append(number(median))
            else:
                ratio = f"{median / base:.2f}"
                cells.append(ratio if short else f"**{ratio}** ({number(median)})")
        yield row(titles[workload], optimizer, *cells)
    if short:
        return
    yield ""
    for text, note in notes.items():
        yield f"({note}) {text}  "


def details(results: Sequence[Any]) -> Iterator[str]:
    """Yield a table of all numbers, with a line per workload, optimizer, number of threads and peer."""
    yield row(
        "workload",
        "optimizer",
        "threads",
        "peer",
        "us a step",
        "of rounds",
        "samples/s",
        "compile, s",
        "peak MB",
        "losses apart",
    )
    yield row(*["---"] * 4, *["---:"] * 6)
    for result in results:
        if result.error or result.median is None:
            continue
        spread = f"{number(min(result.rounds))} to {number(max(result.rounds))}"
        speed = number(1e6 * result.samples / result.median) if result.samples else "-"
        apart = "-" if result.apart is None else f"{result.apart:.0e}"
        yield row(
            result.workload,
            result.optimizer,
            str(result.threads),
            result.peer,
            number(result.median),
            spread,
            speed,
            number(result.compile),
            number(result.peak),
            apart,
        )


def groups(table: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the title and the results of each table."""
    for threads in dict.fromkeys(result.threads for result in table):
        title = f"{threads} thread{'s' if threads > 1 else ''}"
        yield title, [result for result in table if result.threads == threads]


def summary(table: Sequence[Any], titles: Mapping[str, str], machine: str) -> str:
    """Return the short tables, for the guide."""
    lines = [
        "Microseconds per step of graphopt, and times of others relative to graphopt. Above 1, graphopt is faster. "
        f"{machine}."
    ]
    for title, results in groups(table):
        head, *rest = ratios(results, titles, short=True)
        lines += ["", head.replace("|  |", f"| {title} |", 1), *rest]
    return "\n".join(lines)


def brief(table: Sequence[Any], titles: Mapping[str, str]) -> str:
    """Return the first short table, with only the frameworks, for the README."""
    title, results = next(groups(table))
    lines = ratios([result for result in results if result.peer in FRAMEWORKS], titles, short=True)
    return "\n".join(lines).replace("|  |", f"| {title} |", 1)


def markdown(table: Sequence[Any], titles: Mapping[str, str], machine: str, versions: Mapping[str, str]) -> str:
    """Return a page with all results."""
    rounds = min((len(result.rounds) for result in table if result.rounds), default=0)
    lines = [
        "# graphopt beside its peers",
        "",
        "`python examples/benchmarks/peers/run.py` writes this page. Bold numbers are times relative to graphopt. "
        "Above 1, graphopt is faster. Microseconds per step are in brackets.",
        f"Times are medians of at least {rounds} rounds in which all take turns, on {machine}.",
        "All start from the same weights and read the same rows; their losses agree to 1e-3 over 20 steps (to 5e-2 if "
        "operands are rounded to bfloat16). The limit consists of single MatMuls and Convs of the step's shapes, and "
        "one pass over parameters and state, on the same runtime.",
        "",
    ]
    for title, chosen in groups(table):
        lines += [f"## {title}", "", *ratios(chosen, titles), ""]
    lines += ["## All numbers", "", *details(table), "", "## Versions", ""]
    lines += [f"- {name}: {found}" for name, found in versions.items()]
    return "\n".join(lines) + "\n"
