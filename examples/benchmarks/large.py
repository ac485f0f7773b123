"""Fine-tune a decoder of the shape of Qwen3-0.6B with LoRA, beside PyTorch with peft.

It has random weights (2.4 GB), rank 8 on packed query, key and value (graphopt) or on query and value (PyTorch), and
one row of 512 tokens. With a base of 4 bits, the backward pass recomputes what takes much memory. Each trains in a
process of its own on one thread, one after the other. The peak is VmHWM, with the pages of mapped files, which the
system may drop at any time; the second number is without them. State is what trains with the moments of AdamW, as a
share of the model's numbers.

    python examples/benchmarks/large.py --folder /tmp/qwen3

It needs the packages onnxruntime-genai, transformers, torch and peft, and 5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, STEPS, NUMBERS = 512, 3, 596_049_920  # of the model
SHAPE = {
    **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    **{"max_position_embeddings": 40960, "bos_token_id": 0, "eos_token_id": 1},
}


def write_model(folder: Path) -> None:
    """Write a model of random weights for transformers, and as onnxruntime-genai's builder exports it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.float32).save_pretrained(folder / "hf")
    for precision in ("fp32", "int4"):
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision, "-e", "cpu"]
        paths = ["-i", str(folder / "hf"), "-o", str(folder / precision), "-c", str(folder / "cache")]
        subprocess.run([*builder, *paths], check=True, capture_output=True)


def memory(name: str) -> float:
    """Return an entry of this process's status in gigabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e9


def measured(step: Callable[[np.ndarray], float], trained: int) -> None:
    """Print the losses of steps, the processor time of the fastest, the peaks of memory, and the share of state."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], memory("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, TOKENS))
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.process_time()
        losses.append(step(ids))
        seconds.append(time.process_time() - start)
    done.set()
    found = {"losses": losses, "seconds": min(seconds), "peak": memory("VmHWM"), "without files": peak[0]}
    found["state"] = 3 * trained / NUMBERS
    print(json.dumps(found))


def train_with_graphopt(path: Path, **steps: Any) -> None:
    import graphopt
    import passes
    from graphopt.graph.roles import Role, with_role

    step = graphopt.compile(
        path, adapter=passes.LoRA("*qkv_proj*", rank=8), optimizer=passes.AdamW(1e-4), **steps
    )
    trained = sum(int(np.prod(x.shape)) for x in with_role(step, Role.PARAMETER))
    executor = graphopt.Executor(
        step, threads=1, report=["loss"], static_shapes=True, frozen="low", verify=False
    )
    measured(lambda ids: float(executor.step(input_ids=ids)["loss"]), trained)


def train_floats(folder: Path) -> None:
    import passes

    train_with_graphopt(folder / "fp32" / "model.onnx", loss=passes.CausalLanguageModel())


def train_4_bits(folder: Path) -> None:
    import passes

    sizes = {"batch_size": 1, "sequence_length": TOKENS}
    train_with_graphopt(
        folder / "int4" / "model.onnx",
        loss=passes.CausalLanguageModel(blocks=8),
        recompute=passes.Recompute(batch=sizes),
    )


def train_with_torch(folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    base = Qwen3ForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).train()
    adapters = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)

    def step(ids: np.ndarray) -> float:
        tokens = torch.from_numpy(ids)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    measured(step, sum(x.numel() for x in adapters))


WAYS = {"graphopt": train_floats, "graphopt, 4 bits": train_4_bits, "PyTorch and peft": train_with_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, or will be written")
    parser.add_argument("--way", choices=WAYS, help="what to train with in this process")
    options = parser.parse_args()
    if options.way:
        WAYS[options.way](options.folder)
        return
    if not (options.folder / "int4").exists():
        write_model(options.folder)
    print("| | peak, GB | without files, GB | processor time, s | tokens per second | first loss | state |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for way in WAYS:
        command = [sys.executable, __file__, "--folder", str(options.folder), "--way", way]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        found = json.loads(text)
        print(
            f"| {way} | {found['peak']:.1f} | {found['without files']:.1f} | {found['seconds']:.1f} | "
            f"{TOKENS / found['seconds']:.1f} | {found['losses'][0]:.4f} | "
            f"{found['state']:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
