"""Write the files of the page: the training graph of a decoder, its tokenizer, and ONNX Runtime's for the browser.

Run it, after `npm install --prefix examples/hosts/javascript/test`, with the folder of a decoder in 4 bits:
python examples/hosts/language/export.py DECODER
Then serve the folder: python -m http.server --directory examples/hosts/language/site
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import graphopt
import passes

HERE = Path(__file__).parent
HOSTS = Path(graphopt.__file__).parent / "hosts"
MODULES = HERE.parent / "javascript" / "test" / "node_modules"
RUNTIME = MODULES / "onnxruntime-web" / "dist"
TOKENIZER = MODULES / "@huggingface" / "tokenizers" / "dist" / "tokenizers.min.mjs"
PAGE = (
    *(HERE / name for name in ("index.html", "page.js", "language.css")),
    *(HOSTS / "web" / name for name in ("page.css", "controls.js")),
)
FILES = ("tokenizer.json", "tokenizer_config.json")


def main(decoder: Path, site: Path = HERE / "site", rank: int = 8) -> None:
    for needed in (RUNTIME, TOKENIZER):
        if not needed.exists():
            sys.exit(f"{needed}: expected it, found none: run `npm install` in {MODULES.parent}")
    for name in (*FILES, "model.onnx"):
        if not (decoder / name).is_file():
            sys.exit(f"{decoder}: expected the folder of a decoder with {name}, found none: see {HERE / 'README.md'}")
    step = graphopt.compile(
        decoder / "model.onnx",
        adapter=passes.LoRA(rank=rank, alpha=2 * rank),
        loss=passes.CausalLanguageModel(labels=True),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(2e-3, weight_decay=0.0),
    )
    graphopt.export_hosts(step, site / "wasm")
    graphopt.export_hosts(step, site / "webgpu", target="webgpu")
    with_slots = site.with_name("with_slots")
    if with_slots.exists():
        shutil.rmtree(with_slots)
    graphopt.save_folder(graphopt.Executor(step, native=False), with_slots, base=decoder, form="slots")
    (site / "onnxruntime").mkdir(exist_ok=True)
    for path in [*PAGE, *(HOSTS / "javascript").glob("*.js"), TOKENIZER, *(decoder / name for name in FILES)]:
        shutil.copy(path, site)
    for pattern in ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.*"):
        for path in RUNTIME.glob(pattern):
            shutil.copy(path, site / "onnxruntime")
    (site / "page.json").write_text(json.dumps({"name": decoder.resolve().name}))
    print(f"{site}: {sum(path.stat().st_size for path in site.rglob('*') if path.is_file()) / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected the folder of a decoder: python export.py DECODER")
    main(Path(sys.argv[1]))
