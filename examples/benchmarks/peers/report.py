"""Results as Markdown: a table of ratios for each number of threads, why peers are missing, and all numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BASES = ("graphopt", "graphopt-cuda", "graphopt-cuda-mixed")
FRAMEWORKS = ("graphopt", "torch", "torch-compile", "jax", "onnxruntime-training")
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
} | {
    f"{peer}{mixed}": title
    for mixed in ("", "-mixed")
    for peer, title in {
        "graphopt-cuda": "graphopt, us",
        "graphopt-cuda-graph": "graphopt, CUDA graph",
        "torch-cuda": "PyTorch",
        "torch-cuda-compile": "torch.compile",
    }.items()
}


def number(value: float | None, digits: int = 3) -> str:
    """Return a number of some digits, thousands apart, or a dash."""
    if value is None:
        return "-"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - whole)}f}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def ratios(chosen: Sequence[Any], titles: Mapping[str, str], short: bool = False) -> Iterator[str]:
    """Yield a table: a line a workload and optimizer, a column a peer; a short one has ratios alone, and no notes."""
    if short:
        chosen = [result for result in chosen if not result.peer.startswith("graphopt-1")]
    peers = list(dict.fromkeys(result.peer for result in chosen))
    yield row("", "", *(HEADINGS[peer] for peer in peers))
    yield row("---", "---", *("---:" for _ in peers))
    notes: dict[str, int] = {}
    for workload, optimizer in dict.fromkeys((result.workload, result.optimizer) for result in chosen):
        found = {r.peer: r for r in chosen if (r.workload, r.optimizer) == (workload, optimizer)}
        base = next((found[peer].median for peer in BASES if peer in found), None)
        cells = []
        for peer in peers:
            median = found[peer].median if peer in found else None
            if peer not in found:
                cells.append("")
            elif found[peer].error or median is None:
                note = notes.setdefault(f"{HEADINGS[peer]}: {found[peer].error}", len(notes) + 1)
                cells.append("-" if short else f"({note})")
            elif peer in BASES or base is None:
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
            str(result.threads or "GPU"),
            result.peer,
            number(result.median),
            spread,
            speed,
            number(result.compile),
            number(result.peak),
            apart,
        )


def groups(table: Sequence[Any], gpu: Sequence[Any], card: str | None) -> Iterator[tuple[str, list[Any]]]:
    """Yield the results of a table each, with its title."""
    for threads in dict.fromkeys(result.threads for result in table):
        title = f"{threads} thread{'s' if threads > 1 else ''}"
        yield title, [result for result in table if result.threads == threads]
    for precision in ("float32", "mixed precision") if gpu else ():
        mixed = precision != "float32"
        yield f"{card}, {precision}", [r for r in gpu if r.peer.endswith("mixed") == mixed]


def summary(
    table: Sequence[Any], gpu: Sequence[Any], titles: Mapping[str, str], machine: str, card: str | None
) -> str:
    """Return the short tables, for the guide."""
    lines = [
        f"Microseconds a step of ours, and times of others by ours: above 1 graphopt is faster. {machine}."
    ]
    for title, results in groups(table, gpu, card):
        head, *rest = ratios(results, titles, short=True)
        lines += ["", head.replace("|  |", f"| {title} |", 1), *rest]
    return "\n".join(lines)


def brief(table: Sequence[Any], titles: Mapping[str, str]) -> str:
    """Return the first of the short tables, of the frameworks alone, for the README."""
    title, results = next(groups(table, (), None))
    lines = ratios([result for result in results if result.peer in FRAMEWORKS], titles, short=True)
    return "\n".join(lines).replace("|  |", f"| {title} |", 1)


def markdown(
    table: Sequence[Any],
    gpu: Sequence[Any],
    titles: Mapping[str, str],
    machine: str,
    card: str | None,
    versions: Mapping[str, str],
) -> str:
    """Return everything as a page."""
    results = [*table, *gpu]
    rounds = min((len(result.rounds) for result in results if result.rounds), default=0)
    lines = [
        "# graphopt beside its peers",
        "",
        "Made by `python examples/benchmarks/peers/run.py`. Times by graphopt's, in bold: above 1 graphopt is faster; "
        "microseconds a step in brackets.",
        f"Medians of {rounds} rounds or more in which all take turns, on {machine}.",
        "All start from the same weights and see the same rows; their losses agree to 1e-3 over 20 steps"
        f"{', in mixed precision to 3e-2' if gpu else ''}. The limit is bare MatMul and Conv of the step's shapes, "
        "and one pass over parameters and state, on the same runtime.",
        "",
    ]
    for title, chosen in groups(table, gpu, card):
        lines += [f"## {title}", "", *ratios(chosen, titles), ""]
    lines += ["## All numbers", "", *details(results), "", "## Versions", ""]
    lines += [f"- {name}: {found}" for name, found in versions.items()]
    return "\n".join(lines) + "\n"
