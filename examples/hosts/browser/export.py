"""Write the files of the page: a training graph, digits to learn from, and ONNX Runtime's for the browser.

Run it, after `npm install --prefix examples/hosts/javascript/test`: python examples/hosts/browser/export.py
Then serve the folder: python -m http.server --directory examples/hosts/browser/site
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import graphopt
import graphopt.models
import passes
from graphopt.data import digits

HERE = Path(__file__).parent
HOSTS = Path(graphopt.__file__).parent / "hosts"
TESTS = HERE.parent / "javascript" / "test"
RUNTIME = TESTS / "node_modules" / "onnxruntime-web" / "dist"
HELD_OUT = 297  # of the 1797 digits, to measure accuracy on
PAGE = (
    HERE / "index.html",
    HERE / "page.js",
    *(HOSTS / "web" / name for name in ("page.css", "controls.js", "curve.js")),
)


def main(site: Path = HERE / "site") -> None:
    if not RUNTIME.exists():
        sys.exit(f"{RUNTIME}: expected ONNX Runtime for the browser, found none: run `npm install` in {TESTS}")
    step = graphopt.compile(
        graphopt.models.cnn((1, 8, 8), 10, channels=(16, 32), hidden=64),
        loss=passes.CrossEntropy(),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(learning_rate=2e-3),
    )
    graphopt.export_hosts(step, site / "host")
    write_explained(site / "host")
    write_digits(site)
    for path in [*PAGE, *(HOSTS / "javascript").glob("*.js")]:
        shutil.copy(path, site)
    (site / "onnxruntime").mkdir(exist_ok=True)
    for pattern in ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.*"):
        for path in RUNTIME.glob(pattern):
            shutil.copy(path, site / "onnxruntime")
    print(f"{site}: {sum(path.stat().st_size for path in site.rglob('*') if path.is_file()) / 1e6:.1f} MB")


def write_explained(host: Path) -> None:
    """Write a graph that shows where the network looks; as inference.onnx, it reads the weights of a checkpoint."""
    trained = onnx.load(host / "inference.onnx", load_external_data=False)
    stored = {tensor.name: tensor for tensor in trained.graph.initializer if tensor.external_data}
    explanation = passes.IntegratedGradients(steps=16)
    explained = ir.to_proto(graphopt.explain(host / "inference.onnx", explanation, keep=False))
    for tensor in explained.graph.initializer:
        if tensor.name in stored:
            tensor.CopyFrom(stored[tensor.name])
    (host / "explained.onnx").write_bytes(explained.SerializeToString())


def write_digits(site: Path) -> None:
    """Write images as bytes from 0 to 16 and labels as bytes, in an order drawn once."""
    arrays = digits().arrays
    order = np.random.default_rng(0).permutation(len(arrays["target"]))
    images = np.rint(arrays["x"][order] * 16).astype(np.uint8)
    (site / "images.bin").write_bytes(images.tobytes())
    (site / "labels.bin").write_bytes(arrays["target"][order].astype(np.uint8).tobytes())
    described = {"count": len(order), "held_out": HELD_OUT, "shape": [1, 8, 8], "scale": 16}
    (site / "digits.json").write_text(json.dumps(described))


if __name__ == "__main__":
    main()
