"""Train eleven graphs on every host, and write the tables of the guide `examples/guides/hosts.md`.

    python examples/hosts/matrix/run.py [--only WORD]... [--table matrix|ends] [--folder FOLDER]

A host in Python gets a virtual environment of its own, made when it is missing. Results are kept in FOLDER, so that
`--only` repeats the hosts whose names contain a word and the table keeps the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from host_graphs import ENDS, GRAPHS, STEPS, batches  # noqa: E402

import graphopt  # noqa: E402

GUIDE = ROOT / "examples/guides/hosts.md"
TITLES = "linear regression", "MLP", "CNN", "LSTM", "transformer", "adapter", "Loop and If"
AT_ENDS = "CTC of 400 frames", "LayerNormalization at 1,000", "sines at 20,000", "U-Net with AveragePool"
# Tables in the guide, by the word of their marks: titles, graphs, and how many batches train.
TABLES = {"matrix": (TITLES, GRAPHS, STEPS), "ends": (AT_ENDS, ENDS, 20)}
EXPORTED = {**GRAPHS, **ENDS}
JAVASCRIPT = HERE.parent / "javascript" / "test"
EXECUTOR = "executor"
INSTALLED, RUN = 900, 120  # seconds that an installation and 50 steps may take


@dataclass(frozen=True)
class Host:
    """What runs a graph, and how it is exported.

    Args:
        name: the name in the table; with one adapter, that and the installed version.
        requires: what pip installs, beside NumPy and ONNX; nothing for hosts that are not Python's.
        adapter: the module of `adapters/` that opens a graph, or `EXECUTOR`: graphopt trains itself, on WebGPU.
        fixed: export with a fixed batch and loops written out.
        target: the runtime whose defects the export avoids.
        program: the JavaScript program and its argument.
    """

    name: str
    requires: tuple[str, ...] = ()
    adapter: str = ""
    fixed: bool = False
    target: str | None = None
    program: tuple[str, ...] = ()


def onnxruntime(version: str, *beside: str) -> Host:
    """Return a version of ONNX Runtime, without what its package needs beyond NumPy."""
    requires = ("--no-deps", f"onnxruntime=={version}", *beside)
    return Host(f"onnxruntime {version}", requires, "with_onnxruntime")


HOSTS = [
    onnxruntime("1.16.3", "numpy<2"),
    onnxruntime("1.17.3", "numpy<2"),
    onnxruntime("1.18.1", "numpy<2"),
    onnxruntime("1.20.1", "numpy<2"),
    onnxruntime("1.24.4", "numpy<2"),
    onnxruntime("1.32.0", "numpy"),
    Host(
        "onnxruntime-training 1.19.2",
        ("--no-deps", "onnxruntime-training==1.19.2", "numpy<2"),
        "with_onnxruntime",
    ),
    Host("onnxruntime-node", program=("in_node.js", "node")),
    Host("onnxruntime-web, wasm in Node", program=("in_node.js", "wasm")),
    Host("onnxruntime-web, wasm in Chromium", program=("in_browser.js", "wasm")),
    Host("onnxruntime-web, WebGPU in Chromium", target="webgpu", program=("in_browser.js", "webgpu")),
    Host("Python, WebGPU: onnxruntime-webgpu 1.27.0", ("onnxruntime-webgpu==1.27.0", str(ROOT)), EXECUTOR),
    Host(
        "Python, WebGPU: plugin 0.4.0 with onnxruntime 1.32.0",
        ("onnxruntime==1.32.0", "onnxruntime-ep-webgpu==0.4.0", str(ROOT)),
        EXECUTOR,
    ),
    Host("C, onnxruntime 1.32.0"),
    Host(
        "OpenVINO provider 1.24.1",
        ("onnxruntime-openvino==1.24.1",),
        "with_openvino_provider",
        fixed=True,
        target="openvino",
    ),
    Host("OpenVINO 2026.4.1", ("openvino==2026.4.1",), "with_openvino", fixed=True, target="openvino"),
    Host("ONNX reference evaluator 1.23.2", ("onnx==1.23.2",), "with_reference", fixed=True),
    Host("tract 0.23.9", ("tract==0.23.9",), "with_tract", fixed=True, target="tract"),
    Host("tinygrad 0.14.0", ("tinygrad==0.14.0",), "with_tinygrad", fixed=True, target="tinygrad"),
    Host(
        "IREE 3.13.0",
        ("iree-base-compiler[onnx]==3.13.0", "iree-base-runtime==3.13.0"),
        "with_iree",
        fixed=True,
        target="iree",
    ),
    Host("TVM 0.27.0", ("apache-tvm==0.27.0.post1",), "with_tvm", fixed=True, target="tvm"),
    Host("MNN 3.6.1", ("MNN==3.6.1",), "with_mnn", fixed=True, target="mnn"),
    Host("jaxonnxruntime 0.3.0", ("jaxonnxruntime==0.3.0", "jax==0.10.2", "absl-py"), "with_jax", fixed=True),
]

# What a runtime says, and the table's words for it; the first that is found.
REASONS = {
    r"\"onnx\.(\w+)\"": r"no \1",
    r"Unimplemented\((\w+)\)": r"no \1",
    r"frontend ONNX: ([\w, ]+)": r"no \1",
    r"op='(\w+)' is not supported": r"no \1",
    r"NotImplementedError: (\w+) (version \d+ )?is not implemented": r"no \1",
    r"Failed analyse for node #\d+ \S+ (\w+)": r"\1 refused",
    r"Translating node #\d+ \S+ (\w+)": r"\1 refused",
    r"Conversion is failed for: .*?(Scan|Loop|\w+)-\d+$": r"\1 refused",
    r"(Scan) is not implemented for other": r"\1 backwards refused",
    r"graph is not (acyclic)": "cuts the graph into a cycle",
    r"(LayerNormalization) expects 1 output": r"\1 refused",
    r"node not found in (graph cache)": "Loop or Scan refused",
    r"need at least one array to concatenate": "Loop refused",
    r"(load_module_from_file)": "conversion fails",
    r"storage (buffers)": "too many buffers",
}


def steps_of(name: str) -> int:
    """Return how many batches a graph trains on."""
    return next(steps for _, graphs, steps in TABLES.values() if name in graphs)


def export(folder: Path, name: str, host: Host) -> tuple[Path, list[float]]:
    """Write the folder of a graph, and its batches; return it and the losses of graphopt's executor."""
    step, fed = EXPORTED[name][0](), batches(name, steps_of(name))
    rows = len(fed[0]["target"]) if host.fixed else None
    written = folder / "graphs" / f"{name}{'-fixed' * host.fixed}{'-' + host.target if host.target else ''}"
    graphopt.export_hosts(step, written, batch=rows, unroll=host.fixed, target=host.target)
    graphopt.save(step, written / "step.onnx")
    stacked = {key: np.stack([batch[key] for batch in fed]) for key in fed[0]}
    np.savez(written / "batches.npz", **stacked)
    for key, array in stacked.items():
        array.tofile(written / f"{key}.bin")
    plain = [
        {key: {"type": x.dtype.name, "dims": x.shape, "data": x.ravel().tolist()} for key, x in batch.items()}
        for batch in fed
    ]
    (written / "batches.json").write_text(json.dumps(plain))
    executor = graphopt.Executor(step, threads=1)
    return written, [float(executor.step(batch)["loss"]) for batch in fed]


def environment(folder: Path, host: Host) -> Path:
    """Return the Python of a host's environment, made where it is missing."""
    place = folder / "environments" / re.sub(r"\W+", "-", host.name)
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        beside = () if "--no-deps" in host.requires else ("numpy", "onnx")
        install = [str(python), "-m", "pip", "install", "--quiet", *host.requires, *beside]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=INSTALLED)
        done.touch()
    return python


def command(folder: Path, graph: Path, host: Host, steps: int) -> list[str]:
    """Return the command that trains a graph on a host."""
    if host.program:
        return ["node", str(JAVASCRIPT / host.program[0]), host.program[1], str(graph)]
    if host.adapter == EXECUTOR:
        return [str(environment(folder, host)), str(HERE / "executor.py"), str(graph)]
    if host.adapter:
        return [
            str(environment(folder, host)),
            "-W",
            "ignore",
            str(HERE / "host.py"),
            host.adapter,
            str(graph),
        ]
    build = folder / "c"
    python = environment(folder, next(other for other in HOSTS if host.name.endswith(other.name)))
    make = ["make", "-s", "-C", str(ROOT / "graphopt" / "hosts" / "c"), f"PYTHON={python}", f"BUILD={build}"]
    subprocess.run(make, check=True, capture_output=True, text=True)
    fed = np.load(graph / "batches.npz")
    names = [x["name"] for x in json.loads((graph / "host.json").read_text())["feeds"]]
    feeds = [f"{name}={','.join(map(str, fed[name].shape[1:]))}" for name in names]
    return [
        str(build / "train"),
        str(graph),
        str(graph),
        str(steps),
        str(folder / "c.safetensors"),
        "-",
        *feeds,
    ]


def losses(printed: str, host: Host, steps: int) -> list[float]:
    """Return the losses that a host has printed."""
    if host.program:
        found = json.loads(printed)
        if "skip" in found:
            raise ValueError(found["skip"])
        return found["losses"]
    if host.adapter:
        return json.loads(printed.splitlines()[-1])
    return [float(line) for line in printed.splitlines()[:steps]]


def outcome(folder: Path, name: str, host: Host) -> str:
    """Return the largest relative difference of a loss, or the reason why there is none, in a word."""
    try:
        graph, expected = export(folder, name, host)
        path = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command(folder, graph, host, len(expected)),
            cwd=folder,  # MNN's converter leaves a file there
            env=path,
            capture_output=True,
            text=True,
            timeout=RUN,
            check=True,
        )
        found = np.array(losses(done.stdout, host, len(expected)))
        largest = float(np.max(np.abs(found - expected) / np.abs(expected)))
        return f"{largest:.0e}" if largest > 0 else "0"
    except graphopt.GraphoptError as error:
        return f"export: {error}"
    except subprocess.TimeoutExpired:
        return f"over {RUN} s"
    except subprocess.CalledProcessError as error:
        (folder / "errors.txt").open("a").write(f"== {host.name}, {name}\n{error.stderr}\n")
        if error.returncode < 0:
            return "crashes"
        for pattern, words in REASONS.items():
            if match := re.search(pattern, error.stderr, re.MULTILINE):
                return match.expand(words)
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        return (lines or ["fails"])[-1][:60].replace("|", " ")
    except (ValueError, IndexError) as error:
        return str(error)[:60]


def table(results: dict[str, dict[str, str]], titles: Sequence[str], graphs: Iterable[str]) -> str:
    """Return the results of some graphs as a table in Markdown."""
    rows = [["host", *titles], ["---", *["---:"] * len(titles)]]
    found = {host.name: [results.get(host.name, {}).get(name, "") for name in graphs] for host in HOSTS}
    rows += [[name, *cells] for name, cells in found.items() if any(cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Run the hosts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="run the hosts whose names contain this word")
    parser.add_argument("--table", choices=TABLES, action="append", help="run the graphs of this table")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for host in HOSTS:
        if not arguments.only or any(word in host.name for word in arguments.only):
            for name in [name for x in arguments.table or TABLES for name in TABLES[x][1]]:
                results.setdefault(host.name, {})[name] = outcome(folder, name, host)
                print(f"{host.name}, {name}: {results[host.name][name]}", flush=True)
            kept.write_text(json.dumps(results, indent=1))
    for word in arguments.table or TABLES:
        begin, end = f"<!-- {word} -->", f"<!-- {word} end -->"
        before, rest = GUIDE.read_text().split(begin)
        made = table(results, *TABLES[word][:2])
        GUIDE.write_text(f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
