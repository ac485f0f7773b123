"""Make a tiny decoder that writes like Python's manual, and teach it nursery rhymes by an adapter.

The manual is the text that Python itself has for `help()`. Files of published decoders, with their tokenizers, take the
place of what `pretrain` writes.

Run it: python examples/fine_tune_language_model.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

import graphopt
import passes
from graphopt import data, models
from graphopt.data.language.documents import reference

RHYMES = Path(__file__).with_name("rhymes.jsonl")
CONTEXT, VOCABULARY, END = 96, 1024, "<|endoftext|>"
PROMPT = "Humpty Dumpty sat on a wall,"


def train_tokenizer(folder: Path) -> None:
    """Write tokenizer.json with frequent sequences of bytes, and the token that ends a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([reference(), RHYMES.read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def pretrain(folder: Path, rows: int, epochs: int) -> Path:
    """Write a decoder that has read Python's manual."""
    train_tokenizer(folder)
    text = data.text(tokenizer=str(folder), context=CONTEXT)
    arrays = {name: x[:rows] for name, x in text.arrays.items() if name == "input_ids"}
    step = graphopt.compile(
        models.transformer((CONTEXT,), VOCABULARY, width=128, heads=4, layers=3),
        loss=passes.CausalLanguageModel(),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(3e-3),
        schedule=passes.OneCycle(steps=epochs * (len(arrays["input_ids"]) // 16)),
    )
    executor = graphopt.Executor(step, report=["loss"])
    records = graphopt.fit(executor, {"x": arrays["input_ids"]}, epochs=epochs, batch_size=16, validation=None)
    print(f"read {len(arrays['input_ids']) * CONTEXT:,} tokens of the manual, loss {records[-1]['loss']:.2f}")
    graphopt.save(executor.trained(), folder / "decoder.onnx")
    return folder / "decoder.onnx"


def fine_tune(decoder: Path, epochs: int) -> graphopt.Executor:
    """Train an adapter of the decoder on prompts and their completions."""
    options = {"context": CONTEXT, "completion_only": True, "pad_to": "context"}
    rhymes = data.text(str(RHYMES), tokenizer=str(decoder.parent), **options)
    step = graphopt.compile(
        decoder,
        adapter=passes.LoRA(rank=16),
        loss=passes.CausalLanguageModel(labels=True),
        optimizer=passes.AdamW(5e-3),
    )
    executor = graphopt.Executor(step, report=["loss"])
    records = graphopt.fit(executor, rhymes, epochs=epochs, batch_size=4, validation=None)
    print(f"learnt {len(rhymes)} rhymes, loss {records[-1]['loss']:.2f}")
    return executor


def main(rows: int = 4_000, epochs: int = 3, lessons: int = 100) -> dict[str, str]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        decoder = pretrain(Path(folder), rows, epochs)
        before = graphopt.generate(decoder, PROMPT, max_tokens=40)
        executor = fine_tune(decoder, lessons)
        graphopt.save(executor.trained(), Path(folder, "rhymes.onnx"))
        after = graphopt.generate(Path(folder, "rhymes.onnx"), PROMPT, max_tokens=80)
    for when, text in (("before", before), ("after", after)):
        print(f"--- {when}: {PROMPT}{text}")
    print(f"in {time.perf_counter() - start:.0f} s")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
