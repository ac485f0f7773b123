"""Small tokenizers and templates of chats, for tests of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RHYME = """Twinkle, twinkle, little star,
How I wonder what you are!
Up above the world so high,
Like a diamond in the sky.
"""
START, STOP, END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CHATS = [
    [{"role": "user", "content": "What star?"}, {"role": "assistant", "content": "A little one."}],
    [
        {"role": "system", "content": "Be kind \N{SNOWMAN}."},
        {"role": "user", "content": "Up above?"},
        {"role": "assistant", "content": "Like a diamond \N{SNOWMAN}"},
        {"role": "user", "content": "How high?"},
        {"role": "assistant", "content": "So high"},
    ],
]


def save_tokenizer(folder: Path, template: str | None = CHATML, size: int = 320, **config: Any) -> Path:
    """Train a byte-level tokenizer, and write its files as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([RHYME], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": 512,
        **config,
    }
    if template is not None:
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder / "tokenizer.json"


def save_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> str:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return str(path)
