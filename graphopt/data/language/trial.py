"""Try a tokenizer in a process of its own, which has limits of time and memory, and which a panic may end.

This program reads JSON from its input and writes JSON to its output. It imports nothing of graphopt: `tokenizer` runs
it as a file.
"""

import contextlib
import json
import sys

import tokenizers

_TEXT = "Hello, world! 1,234 \u00e4\u4f60\U0001f600\n\t \u0301"


def _main() -> None:
    text = json.loads(sys.stdin.buffer.read())
    answer = {}
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.get_vocab()
        with contextlib.suppress(Exception):  # of a vocabulary that lacks these characters
            for encoding in tokenizer.encode_batch([_TEXT, ""]):
                tokenizer.decode(encoding.ids)
    except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
        answer = {"error": " ".join(str(error).split())}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    _main()
