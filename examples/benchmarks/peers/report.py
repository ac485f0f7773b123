"""Results as Markdown: a table of ratios for each number of threads, why peers are missing, and all numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BASE, LIMIT = "graphopt", "limit"
HEADINGS = {
    "graphopt": "graphopt, us",
    "graphopt-run": "graphopt `run`",
    "graphopt-1.19": "graphopt on 1.19.2",
    "graphopt-1.19-fused": "same, `fused`",
    "torch": "PyTorch",
    "torch-compile": "torch.compile",
    "jax": "JAX jit + optax",
    "onnxruntime-training": "onnxruntime-training Module",
    "onnxsim": "onnxsim",
    "limit": "limit",
}


def number(value: float | None, digits: int = 3) -> str:
    """Return a number of some digits, thousands apart, or a dash."""
    if value is None:
        return "-"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - whole)}f}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def ratios(
    results: Sequence[Any], titles: Mapping[str, str], threads: int, short: bool = False
) -> Iterator[str]:
    """Yield a table: a line a workload and optimizer, a column a peer; a short one has ratios alone, and no notes."""
    chosen = [r for r in results if r.threads == threads and not (short and r.peer.startswith("graphopt-1"))]
    peers = list(dict.fromkeys(result.peer for result in chosen))
    yield row("", "", *(HEADINGS[peer] for peer in peers))
    yield row("---", "---", *("---:" for _ in peers))
    notes: dict[str, int] = {}
    for workload, optimizer in dict.fromkeys((result.workload, result.optimizer) for result in chosen):
        found = {r.peer: r for r in chosen if (r.workload, r.optimizer) == (workload, optimizer)}
        base = found[BASE].median if BASE in found else None
        cells = []
        for peer in peers:
            median = found[peer].median if peer in found else None
            if peer not in found:
                cells.append("")
            elif found[peer].error or median is None:
                note = notes.setdefault(f"{HEADINGS[peer]}: {found[peer].error}", len(notes) + 1)
                cells.append("-" if short else f"({note})")
            elif peer == BASE or base is None:
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
    """Yield a table of all numbers: a line a workload, optimizer, number of threads and peer."""
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


def summary(results: Sequence[Any], titles: Mapping[str, str], machine: str) -> str:
    """Return the short tables, for the README."""
    lines = [
        f"Microseconds a step of ours, and times of others by ours: above 1 graphopt is faster. {machine}."
    ]
    for threads in dict.fromkeys(result.threads for result in results):
        count = f"{threads} thread{'s' if threads > 1 else ''}"
        table = list(ratios(results, titles, threads, short=True))
        lines += ["", table[0].replace("|  |", f"| {count} |", 1), *table[1:]]
    return "\n".join(lines)


def markdown(
    results: Sequence[Any], titles: Mapping[str, str], machine: str, versions: Mapping[str, str]
) -> str:
    """Return everything as a page."""
    rounds = min(len(result.rounds) for result in results if result.rounds)
    lines = [
        "# graphopt beside its peers",
        "",
        "Made by `python examples/benchmarks/peers/run.py`. Times by graphopt's, in bold: above 1 graphopt is faster; "
        "microseconds a step in brackets.",
        f"Medians of {rounds} rounds or more in which all take turns, on {machine}.",
        "All start from the same weights and see the same rows; their losses agree to 1e-3 over 20 steps. The limit "
        "is bare MatMul and Conv of the step's shapes, and one pass over parameters and state, on the same runtime.",
        "",
    ]
    for threads in dict.fromkeys(result.threads for result in results):
        lines += [
            f"## {threads} thread{'s' if threads > 1 else ''}",
            "",
            *ratios(results, titles, threads),
            "",
        ]
    lines += ["## All numbers", "", *details(results), "", "## Versions", ""]
    lines += [f"- {name}: {found}" for name, found in versions.items()]
    return "\n".join(lines) + "\n"
