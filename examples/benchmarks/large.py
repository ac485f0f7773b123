"""Fine-tune a decoder of the shape of Qwen3-0.6B with LoRA, beside PyTorch with peft.

It has random weights (2.4 GB), rank 8 on packed query, key and value (graphopt) or on query and value (PyTorch), and
one row of 512 tokens. With a base of 4 bits, the backward pass recomputes what takes much memory. Each trains in a
process of its own on one thread, one after the other. The peak is VmHWM, with the pages of mapped files, which the
system may drop at any time; the second number is without them. State is what trains with the moments of AdamW, as a
share of the model's numbers.

    python examples/benchmarks/large.py --folder /tmp/qwen3

With `--defaults`, all linear layers have adapters, nobody sets another option, and a base of 4 bits stands beside that
of bitsandbytes. The peak is that of all steps without the pages of files, the first one with its checks and an empty
cache; opening is what the first step and the executor take in addition to a later step.

    python examples/benchmarks/large.py --folder /tmp/qwen3 --defaults --weights 0.1 --tokens 256 2048

It needs the packages onnxruntime-genai, transformers, torch and peft, for a base of 4 bits bitsandbytes, too, and 5 GB
of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, STEPS = 512, 3
SHAPE = {
    **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    **{"max_position_embeddings": 40960, "bos_token_id": 0, "eos_token_id": 1},
}
SHAPES = {  # by billions of weights
    "0.6": SHAPE,
    "0.1": {
        **SHAPE,
        **{"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
    },
}
NUMBERS = {"0.6": 596_049_920, "0.1": 100_094_208}


def write_model(folder: Path, weights: str) -> None:
    """Write a model of random weights for transformers, and as onnxruntime-genai's builder exports it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPES[weights])).to(torch.float32).save_pretrained(folder / "hf")
    for precision in ("fp32", "int4"):
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision, "-e", "cpu"]
        paths = ["-i", str(folder / "hf"), "-o", str(folder / precision), "-c", str(folder / "cache")]
        subprocess.run([*builder, *paths], check=True, capture_output=True)


def memory(name: str) -> float:
    """Return an entry of this process's status in gigabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e9


@dataclass(frozen=True)
class Task:
    """Hold what to train: the folder of the model, its billions of weights, the tokens of its row, and how."""

    folder: Path
    weights: str
    tokens: int
    defaults: bool


def measured(task: Task, opened: Callable[[], tuple[Callable[[np.ndarray], float], int]]) -> None:
    """Print the losses of steps, the processor time of the fastest, the peaks of memory, and the share of state."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], memory("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    start = time.process_time()
    step, trained = opened()
    ids = np.random.default_rng(0).integers(0, SHAPES[task.weights]["vocab_size"], (1, task.tokens))
    losses, seconds = [], []
    steps = STEPS if task.tokens > 512 else 4 * STEPS  # of few tokens, the first ones run without kernels
    for _ in range(steps):
        losses.append(step(ids))
        seconds.append(time.process_time() - start)
        start = time.process_time()
    done.set()
    found = {"losses": losses, "seconds": min(seconds), "peak": memory("VmHWM"), "without files": peak[0]}
    found |= {"state": 3 * trained / NUMBERS[task.weights], "opening": seconds[0] - min(seconds)}
    print(json.dumps(found))


def train_with_graphopt(task: Task, kind: str, **steps: Any) -> None:
    import graphopt
    import passes
    from graphopt.graph.roles import Role, with_role

    adapter = passes.LoRA(rank=8) if task.defaults else passes.LoRA("*qkv_proj*", rank=8)
    steps = {"loss": passes.CausalLanguageModel(), "optimizer": passes.AdamW(1e-4), **steps}
    step = graphopt.compile(task.folder / kind / "model.onnx", adapter=adapter, **steps)
    trained = sum(int(np.prod(x.shape)) for x in with_role(step, Role.PARAMETER))
    options = {} if task.defaults else {"static_shapes": True, "frozen": "low", "verify": False}

    def opened() -> tuple[Callable[[np.ndarray], float], int]:
        executor = graphopt.Executor(step, threads=1, report=["loss"], **options)
        return lambda ids: float(executor.step(input_ids=ids)["loss"]), trained

    measured(task, opened)


def train_floats(task: Task) -> None:
    train_with_graphopt(task, "fp32")


def train_4_bits(task: Task) -> None:
    import passes

    sizes = {"batch_size": 1, "sequence_length": task.tokens}
    less = {"loss": passes.CausalLanguageModel(blocks=8), "recompute": passes.Recompute(batch=sizes)}
    train_with_graphopt(task, "int4", **({} if task.defaults else less))


def train_with_torch(task: Task, **options: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    targets = "all-linear" if task.defaults else ["q_proj", "v_proj"]

    def opened() -> tuple[Callable[[np.ndarray], float], int]:
        base = Qwen3ForCausalLM.from_pretrained(task.folder / "hf", dtype=torch.float32, **options)
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets)).train()
        adapters = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-4)

        def step(ids: np.ndarray) -> float:
            tokens = torch.from_numpy(ids)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return step, sum(x.numel() for x in adapters)

    measured(task, opened)


def train_4_bits_with_torch(task: Task) -> None:
    import torch
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    train_with_torch(task, quantization_config=quantization)


WAYS = {"graphopt": train_floats, "graphopt, 4 bits": train_4_bits, "PyTorch and peft": train_with_torch}
DEFAULTS = {
    **{"graphopt": train_floats, "PyTorch and peft": train_with_torch},
    **{"graphopt, 4 bits": train_4_bits, "PyTorch, peft, bitsandbytes": train_4_bits_with_torch},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, or will be written")
    parser.add_argument("--way", choices=DEFAULTS, help="what to train with in this process")
    parser.add_argument("--weights", choices=SHAPES, default="0.6", help="billions of weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[TOKENS])
    parser.add_argument("--defaults", action="store_true", help="compare defaults with defaults")
    parser.add_argument("--ways", choices=DEFAULTS, nargs="+", help="what to compare")
    options = parser.parse_args()
    if options.way:
        DEFAULTS[options.way](Task(options.folder, options.weights, options.tokens[0], options.defaults))
        return
    if not (options.folder / "int4").exists():
        write_model(options.folder, options.weights)
    print("| tokens | | peak, GB | without files, GB | processor time, s | opening, s | first loss | state |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for tokens in options.tokens:
        for way in options.ways or (DEFAULTS if options.defaults else WAYS):
            command = [sys.executable, __file__, "--folder", str(options.folder), "--way", way]
            command += ["--weights", options.weights, "--tokens", str(tokens)]
            command += ["--defaults"] if options.defaults else []
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "XDG_CACHE_HOME": cache}
                text = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            found = json.loads(text.splitlines()[-1])
            print(
                f"| {tokens} | {way} | {found['peak']:.2f} | {found['without files']:.2f} | {found['seconds']:.2f} | "
                f"{found['opening']:.1f} | {found['losses'][0]:.4f} | {found['state']:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
