"""Damaged and hostile host folders for the program in C, compiled with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/fuzz_hosts.py 1000                # 1,000 folders of seed 0
    python tests/fuzz_hosts.py 1000 --seed 7       # of another seed
    python tests/fuzz_hosts.py --only 7:123        # folder 123 of seed 7 alone, which stays where it is written

The program trains and evaluates, or says in one line what is wrong with the folder. A folder whose graph computes
another type or shape than the program reads is refused: it would write the memory beside a number to a checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import fuzz_models
import numpy as np
import onnx
import onnx.helper as h
import onnxruntime
import safetensors.numpy
from host_graphs import GRAPHS, batches

import graphopt

SOURCE = Path(graphopt.__file__).parent / "hosts" / "c"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
STEPS = 2
SIZES = [
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**32,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
    2**64,
    -(2**63),
]
Draw = random.Random


def library() -> Path | None:
    """Return ONNX Runtime's library, which is in the wheel for Linux."""
    return next(iter(sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))), None)


def build(folder: Path, program: Path = SOURCE / "train.c") -> Path:
    """Compile a program with the sanitizers, and return its path."""
    found = library()
    assert found is not None
    (folder / "libonnxruntime.so.1").symlink_to(found)
    command = ["gcc", "-std=c11", "-g", "-O1", *SANITIZERS, f"-I{SOURCE}", f"-I{SOURCE / 'abi'}"]
    command += [program, SOURCE / "graphopt.c", folder / "libonnxruntime.so.1", "-lm"]
    subprocess.run([*command, f"-Wl,-rpath,{folder}", "-o", folder / program.stem], check=True)
    return folder / program.stem


def files_of(name: str) -> dict[str, bytes]:
    """Return the files of a host folder, and those of its batches."""
    return dict(_exported(name))


@functools.cache
def _exported(name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        graphopt.export_hosts(GRAPHS[name][0](), folder)
        wanted = [path.name for path in Path(folder).iterdir()]
        files: dict[str, bytes] = {file: (Path(folder) / file).read_bytes() for file in wanted}
    fed = batches(name, STEPS)
    return files | {f"{x}.bin": np.stack([batch[x] for batch in fed]).tobytes() for x in fed[0]}


# --- Changes, each of which says whether the folder must be refused ---


def another_output(draw: Draw, files: dict[str, bytes]) -> bool:
    """Compute another type or shape than the program reads, and declare it, or declare nothing, or the old one."""
    file = draw.choice(["train.onnx", "train.onnx", "evaluate.onnx"])
    model = onnx.load_from_string(files[file])
    read = [y for y in model.graph.output if y.name == "loss" or (file[0] == "t" and y.name.endswith(".next"))]
    y = draw.choice(read)
    name, kept = y.name, f"{y.name}_before"
    for node in model.graph.node:
        node.input[:] = [kept if x == name else x for x in node.input]
        node.output[:] = [kept if x == name else x for x in node.output]
    kind = draw.choice(["one", "none", "longer", "flat", "type", "sequence", "gone"])
    kind = "none" if kind == "one" and name == "loss" else kind
    constants = {"zero": np.zeros(0 if kind == "none" else 1, np.int64), "flat": np.array([-1])}
    constants |= {"twice": np.zeros(2, np.int64), "one_axis": np.array([0])}
    add = functools.partial(_node, model)
    add("Reshape", [kept, "flat"], "as_vector")
    dtype = 0
    if kind in ("one", "none"):
        add("Gather", ["as_vector", "zero"], name)
    elif kind == "longer":
        add("Gather", ["as_vector", "twice"], "two")
        add("Concat", ["as_vector", "two"], name, axis=0)
    elif kind == "flat":
        add("Concat", ["as_vector", "as_vector"], "doubled", axis=0)
        add("Unsqueeze", ["doubled", "one_axis"], name)
    elif kind == "type":
        own = y.type.tensor_type.elem_type
        dtype = draw.choice([t for t in (2, 6, 7, 8, 9, 10, 11) if t != own])
        add("Cast", [kept], name, to=dtype)
    elif kind == "sequence":
        add("SequenceConstruct", [kept], name)
        y.CopyFrom(h.make_tensor_sequence_value_info(name, y.type.tensor_type.elem_type, None))
    if kind == "gone":
        model.graph.output.remove(y)
    elif kind != "sequence":
        y.type.tensor_type.elem_type = dtype or y.type.tensor_type.elem_type
        declared = "true" if kind == "type" else draw.choice(["nothing", "open", "old"])
        if declared == "nothing":
            y.type.tensor_type.ClearField("shape")
        elif declared == "open":
            axes = {"one": 1, "none": 1, "longer": 1, "flat": 2}[kind]
            y.type.tensor_type.shape.CopyFrom(h.make_tensor_type_proto(1, [None] * axes).tensor_type.shape)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in constants.items())
    files[file] = model.SerializeToString()
    return True


def _sizes_of_data(draw: Draw, files: dict[str, bytes]) -> bool:
    """Compute a loss without elements, or fewer numbers of a state, where no shape can be inferred before a step."""
    model = onnx.load_from_string(files["train.onnx"])
    vectors = [y for y in model.graph.output if y.name.endswith(".next") and len(y.type.tensor_type.shape.dim) == 1]
    y = draw.choice([*vectors, next(y for y in model.graph.output if y.name == "loss")])
    kept = f"{y.name}_before"
    for node in model.graph.node:
        node.input[:] = [kept if x == y.name else x for x in node.input]
        node.output[:] = [kept if x == y.name else x for x in node.output]
    _node(model, "Reshape", [kept, "flat"], "as_vector")
    _node(model, "Compress", ["as_vector", "condition"], y.name)
    constants = {"flat": np.array([-1]), "condition": np.array([y.name != "loss"])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in constants.items())
    y.type.tensor_type.shape.CopyFrom(h.make_tensor_type_proto(1, [None]).tensor_type.shape)
    files["train.onnx"] = model.SerializeToString()
    return True


def _node(model: onnx.ModelProto, op_type: str, inputs: list[str], output: str, **attributes: int) -> None:
    model.graph.node.append(h.make_node(op_type, inputs, [output], **attributes))


def _another_input(draw: Draw, files: dict[str, bytes]) -> bool:
    """Declare another type or other sizes of an input."""
    model = onnx.load_from_string(files["train.onnx"])
    x = draw.choice(model.graph.input).type.tensor_type
    if x.shape.dim and draw.random() < 0.7:
        dim = draw.choice(x.shape.dim)
        dim.dim_value = draw.choice([n for n in SIZES if -(2**63) <= n < 2**63])
        if draw.random() < 0.3:
            x.shape.dim.add().dim_value = draw.choice([0, 1, 2**32, 2**61])
    else:
        x.elem_type = draw.randrange(24)
    files["train.onnx"] = model.SerializeToString()
    return False


def _any_field(draw: Draw, files: dict[str, bytes]) -> bool:
    """Change fields of a graph."""
    file = draw.choice(["train.onnx", "evaluate.onnx"])
    model = onnx.load_from_string(files[file])
    for _ in range(draw.choice([1, 1, 3])):
        fuzz_models.mutate(draw, model)
    files[file] = model.SerializeToString()
    return False


def _state(draw: Draw, files: dict[str, bytes]) -> bool:
    """Change the header of the state, or its bytes."""
    content = files["state.safetensors"]
    (length,) = struct.unpack_from("<Q", content)
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    entry = header[draw.choice(names)]
    kind = draw.randrange(8)
    if kind == 0:
        entry["data_offsets"][draw.randrange(2)] = draw.choice(SIZES)
    elif kind == 1:
        entry["data_offsets"] = draw.choice([[], [0], [1, 0], None, "0", [0, 0], [-8, 8], [0.5, 1.5]])
    elif kind == 2:
        entry["dtype"] = draw.choice(["F64", "I32", "F16", "", 5, None])
    elif kind == 3:
        del header[draw.choice(names)]
    text = json.dumps(header, separators=(",", ":")).encode()
    size = (
        draw.choice([n % 2**64 for n in SIZES]) if kind == 4 else draw.randrange(len(text)) if kind == 5 else len(text)
    )
    content = struct.pack("<Q", size) + text + numbers
    if kind == 6:
        content = content[: draw.randrange(len(content))]
    elif kind == 7:
        content = content[: 8 + draw.randrange(len(text))]
    files["state.safetensors"] = content
    return False


def _contract(draw: Draw, files: dict[str, bytes]) -> bool:
    """Change a value in host.json."""
    contract = json.loads(files["host.json"])
    holder, key = (
        contract,
        draw.choice(["feeds", "state", "hyperparameters", "reports", "check", "version", "format"]),
    )
    while isinstance(holder[key], (dict, list)) and holder[key] and draw.random() < 0.9:
        holder = holder[key]
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    values = [
        *SIZES,
        None,
        "",
        "x" * 5000,
        "}",
        '"',
        "\\",
        1e308,
        0.1,
        [],
        {},
        ["a"] * 40,
        "\x1b[2J",
        "\N{SNOWMAN}",
    ]
    holder[key] = draw.choice(values)
    files["host.json"] = json.dumps(contract, indent=draw.choice([1, 1, None])).encode()
    return False


def _proof(draw: Draw, files: dict[str, bytes]) -> bool:
    """Change the proof: sizes, numbers at their ends, names, types, and what names the first node that differs."""
    arrays = {x: dict(safetensors.numpy.load(files[x])) for x in ("proof.safetensors", "debug.safetensors")}
    for _ in range(draw.choice([1, 1, 3])):
        chosen = arrays[draw.choice(list(arrays))]
        name = draw.choice(list(chosen))
        x = chosen[name].copy()
        kind = draw.choice(["number", "number", "shorter", "longer", "type", "gone", "wrong"])
        if kind == "number" and x.size:
            ends: dict[str, list[float]] = {"f": [np.nan, np.inf, -np.inf, 1e308, 0], "u": [0, 10, 255]}
            large = [2**62, -1, 0, 2**31, 2**26] if x.dtype == np.int64 else [0, 1, -1]
            with np.errstate(over="ignore"):
                x.flat[draw.randrange(x.size)] = draw.choice(ends.get(x.dtype.kind, large))
        elif kind == "type":
            x = x.astype(draw.choice([np.float32, np.float64, np.int64, np.int8, np.uint8]))
        elif kind == "wrong" and "graph.train" in chosen:  # so that the file is read that names a node
            name, x = "graph.train", chosen["graph.train"] + 1
        elif kind in ("shorter", "longer"):
            x = x.ravel()[: draw.randrange(x.size + 1)] if kind == "shorter" else np.concatenate([x.ravel()] * 3)
        chosen[name] = x
        if kind == "gone":
            del chosen[name]
    for file, found in arrays.items():
        files[file] = safetensors.numpy.save(found)
        if draw.random() < 0.2:
            files[file] = struct.pack("<Q", draw.choice(SIZES) % 2**64) + files[file][8:]
        if draw.random() < 0.2:
            files[file] = files[file][: draw.randrange(len(files[file]))]
    return False


def _bytes(draw: Draw, files: dict[str, bytes]) -> bool:
    """Change bytes of a file, or cut it."""
    file = draw.choice(["host.json", "state.safetensors", "train.onnx", "evaluate.onnx", "proof.safetensors"])
    content = bytearray(files[file])
    first = 4096 if file.endswith(".safetensors") else len(content)
    for _ in range(draw.choice([1, 1, 8])):
        content[draw.randrange(min(first, len(content)))] = draw.choice(
            [0, 34, 44, 57, 93, 125, 255, draw.randrange(256)]
        )
    files[file] = bytes(content[: draw.randrange(len(content))] if draw.random() < 0.2 else content)
    return False


CHANGES: list[Callable[[Draw, dict[str, bytes]], bool]] = [
    *[another_output] * 3,
    *[_sizes_of_data] * 2,
    _another_input,
    _any_field,
    *[_state] * 2,
    _contract,
    *[_proof] * 3,
    _bytes,
]


def write(seed: int, number: int, folder: Path) -> tuple[str, bool, list[str]]:
    """Write a folder, and return the names of its graph and its change, whether it must be refused, and its feeds."""
    draw = Draw(f"{seed}:{number}")
    name = draw.choice(["mlp", "linear", "lstm"])
    files, change = files_of(name), draw.choice(CHANGES)
    refused = change(draw, files)
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return f"{name} {change.__name__}", refused, [Path(file).stem for file in files if file.endswith(".bin")]


def attempt(program: Path, seed: int, number: int, folder: Path) -> str:
    """Train from a folder; return what is wrong with the program, or nothing."""
    what, refused, feeds = write(seed, number, folder)
    load = folder / "state.safetensors" if number % 4 == 0 else "-"
    command = [program, folder, folder, str(STEPS), folder / "saved", load, *feeds]
    options = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=60,
            env={**os.environ, "ASAN_OPTIONS": options, "XDG_CACHE_HOME": "/dev/null"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{seed}:{number} {what}: it takes more than a minute"
    told = done.stderr.decode(errors="replace")
    lines = [line for line in told.splitlines() if line.startswith("train: ")]
    if done.returncode not in (0, 1) or "Sanitizer" in told or "runtime error" in told:
        return f"{seed}:{number} {what}: exit {done.returncode}: {told[-1500:]}"
    if done.returncode == 1 and (len(lines) != 1 and not any("finite" in line for line in lines)):
        return f"{seed}:{number} {what}: expected one line, found {told[-500:]!r}"
    if refused and done.returncode == 0:
        return f"{seed}:{number} {what}: taken"
    if any(ord(c) < 32 or ord(c) == 127 for line in lines for c in line):
        return f"{seed}:{number} {what}: control characters in {lines}"
    return ""


def failures(count: int, seed: int = 0) -> list[str]:
    """Return what is wrong with the program on so many folders."""
    with tempfile.TemporaryDirectory() as made:
        program, found = build(Path(made)), []
        for number in range(count):
            folder = Path(made) / "folder"
            wrong = attempt(program, seed, number, folder)
            found += [wrong] if wrong else []
            shutil.rmtree(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="SEED:NUMBER")
    given = parser.parse_args()
    if given.only:
        seed, number = map(int, given.only.split(":"))
        made = Path(tempfile.mkdtemp())
        print(made, attempt(build(made), seed, number, made / "folder") or "right", sep="\n")
        return 0
    found = failures(given.count, given.seed)
    print(
        *found,
        f"{given.count - len(found)} of {given.count} folders are taken or refused in one line",
        sep="\n",
    )
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
