"""Run graphs of operators, gradients and steps on other versions of ONNX Runtime, and tell what differs.

python tests/runtime_sweep.py PYTHON [--pattern PATTERN ...] runs the cases of tests/gpu_sweep.py on the runtime that
another interpreter imports, such as that of an environment with onnxruntime 1.16, and prints a line for each case whose
numbers differ or whose process ends; with --all, also those that the runtime refuses.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

# What runs there: it has NumPy and the runtime alone.
RUNNER = """
import json, os, sys, numpy, onnxruntime
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # warnings of the runtime
onnxruntime.set_default_logger_severity(4)
print(json.dumps(onnxruntime.__version__), file=out, flush=True)
for line in sys.stdin:
    path = line.strip()
    try:
        session = onnxruntime.InferenceSession(path + ".onnx", providers=["CPUExecutionProvider"])
        names = [y.name for y in session.get_outputs()]
        results, calls = {}, numpy.load(path + ".npz")
        state = {}
        for i in range(int(calls["calls"])):
            given = {name: calls[f"{i}/{name}"] if f"{i}/{name}" in calls else state[name] if name in state
                     else calls[f"s/{name}"] for name in [x.name for x in session.get_inputs()]}
            outputs = dict(zip(names, session.run(names, given)))
            state.update({name[:-5]: y for name, y in outputs.items() if name.endswith(".next")})
            results.update({f"{i}/{name}": y for name, y in outputs.items()})
        numpy.savez(path + ".out.npz", **results)
        print(json.dumps(""), file=out, flush=True)
    except Exception as error:
        print(json.dumps(str(error).replace(path,"")[-250:] or "error"), file=out, flush=True)
"""


def main() -> None:
    import onnx_ir as ir
    from gpu_sweep import CASES, error_of, is_noise, on_cpu

    import graphopt
    from graphopt.graph.opsets import ir_version_of, rewrite_in
    from graphopt.graph.state import take_initial
    from graphopt.hosts.export import _LOWEST_OPSET as OLDEST

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--pattern", nargs="*", default=["*"])
    parser.add_argument("--all", action="store_true", help="print what is refused, too")
    asked = parser.parse_args()
    kinds: Counter[str] = Counter()
    process = None
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in asked.pattern):
                continue
            try:
                graph, fed = CASES[name]()
                expected = on_cpu(graph, fed) if graph.graph.outputs else []
            except Exception:  # noqa: BLE001 - not on this runtime
                continue
            graph = graphopt.lower(graph, "portable").clone()  # as `graphopt hosts` writes graphs
            state = take_initial(graph)
            graph.ir_version = ir_version_of(rewrite_in([graph], OLDEST))
            path = Path(folder) / "case"
            ir.save(graph, path.with_suffix(".onnx"))
            arrays = {f"s/{key}": value for key, value in state.items()}
            for i, feeds in enumerate(fed):
                arrays |= {f"{i}/{key}": value for key, value in feeds.items()}
            np.savez(path.with_suffix(".npz"), calls=np.array(len(fed)), **arrays)
            if process is None or process.poll() is not None:
                process = subprocess.Popen(
                    [asked.python, "-c", RUNNER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                version = process.stdout.readline()
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            said = json.loads(line) if line else f"the process ended with {process.wait()}"
            kind = "refused" if line and said else "ended" if said else "fine"
            if not said:
                found = np.load(f"{path}.out.npz")
                errors = {
                    key: error_of(found[f"{i}/{key}"], y) for i, ys in enumerate(expected) for key, y in ys.items()
                }
                wrong = {key: f"{e:.1e}" for key, e in errors.items() if e > 5e-5 and not is_noise(name, key)}
                kind, said = ("wrong", str(wrong)) if wrong else ("fine", "")
            kinds[kind] += 1
            if kind in ("wrong", "ended") or (asked.all and kind == "refused"):
                print(f"{kind}: {name}: {said[:150]}", flush=True)
        print(version.strip(), dict(kinds))


if __name__ == "__main__":
    main()
