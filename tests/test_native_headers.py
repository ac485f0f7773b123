"""The headers of kernels, drawn: each includes what it uses, and neither includes nor calls make a circle.

`python tests/test_native_headers.py` prints what each header includes, and why.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from graphopt.targets.native import library, toolchain

# A processor has one of these, which bfloat16.h includes by a macro: they define the same names.
TILES = {"avx512bf16.h", "neon_bf16.h"}
_DECLARED = re.compile(r"^\w[\w *]*?\*?(\w+)\([^(){};]*\);$", re.MULTILINE)  # and defined by who includes it
_DECLARATOR = re.compile(r"\w+(?=\s*(\[[^\]]*\])*\s*[,;])")


def code_of(text):
    """Return what a header includes, and its code without comments and strings, each macro in one line."""
    text = re.sub(r"/\*.*?\*/", " ", text.replace("\\\n", " "), flags=re.DOTALL)
    includes = set(re.findall(r'^#include "(.*)"$', text, re.MULTILINE))
    if "#include TILES_OF_PROCESSOR" in text:
        includes |= TILES
    return includes, re.sub(r'^#include .*$|"(\\.|[^"\\])*"', "", text, flags=re.MULTILINE)


def defined(code):
    """Return the names that a header defines at its top level: macros, types, constants, variables and functions."""
    names = set(re.findall(r"^#define (\w+)", code, re.MULTILINE))
    code = re.sub(r"^#.*$", "", code, flags=re.MULTILINE)
    names |= {name for body in re.findall(r"\benum \{(.*?)\}", code, re.DOTALL) for name in constants(body)}
    while (outside := re.sub(r"\{[^{}]*\}", "@", code)) != code:
        code = outside
    names |= set(re.findall(r"\b(\w+)\s*\((?:[^(){};]|\([^(){};]*\))*\)\s*@", code))
    for statement in re.findall(r"\btypedef\b[^;]*;", code):
        name = re.search(r"\(\*(\w+)\)", statement) or re.search(r"(\w+)\s*(__attribute__.*)?;", statement)
        names.add(name[1])
    variables = r"^(?:static|extern|const)\b[^;()@]*?(\w+)(?:\[[^\]]*\])*(?: =[^;]*)?;"
    return names | set(re.findall(variables, code, re.MULTILINE)) | set(_DECLARED.findall(code))


def constants(body):
    return [part.split("=")[0].strip() for part in re.sub(r"\([^()]*\)", "", body).split(",") if part.strip()]


def used(code):
    """Return the names that a header uses, without members of structures."""
    members = re.compile(r"\btypedef struct[^{;]*\{.*?\}", re.DOTALL)
    code = members.sub(lambda body: _DECLARATOR.sub("", body[0]), code)
    return set(re.findall(r"(?<![\w.])(?<!->)[A-Za-z_]\w*", code))


def drawing(texts):
    """Return, for each header, what it includes and, for each header whose names it uses, these names.

    What bfloat16.h includes for a processor is a part of it.
    """
    read = {name: code_of(text) for name, text in texts.items()}
    names = {name: defined(code) for name, (_, code) in read.items()}
    for name, own in names.items():  # a declaration is the definition that counts
        declared = {x for other in read[name][0] & names.keys() for x in _DECLARED.findall(read[other][1])}
        names[name] = own - declared
    names["bfloat16.h"] = set().union(names["bfloat16.h"], *(names.pop(name) for name in TILES))
    uses = {}
    for name, (_, code) in read.items():
        words = used(code)
        uses[name] = {other: own & words for other, own in names.items() if own & words - names.get(name, set())}
        uses[name].pop(name, None)
    for name in TILES:
        uses[name].pop("bfloat16.h", None)
    return {name: includes for name, (includes, _) in read.items()}, uses, names


def circle(arrows):
    """Return the headers that are left if those without arrows are taken away, again and again."""
    left = dict(arrows)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return left


TEXTS = {name: (toolchain.FOLDER / name).read_text() for name in toolchain.HEADERS}


def test_headers_include_no_circle():
    includes, _, _ = drawing(TEXTS)
    assert includes["bfloat16.h"] >= TILES
    assert circle(includes) == {}


def test_headers_include_what_they_use_and_nothing_else():
    """So calls go where includes go, and make no circle either."""
    includes, uses, _ = drawing(TEXTS)
    for name, others in uses.items():
        reason = {other: words for other, words in others.items() if other not in includes[name]}
        assert not reason, f"{name} does not include these, whose names it uses: {reason}"
        needless = includes[name] - others.keys() - TILES
        assert not needless, f"{name} uses nothing of {needless}"
    assert circle({name: set(others) for name, others in uses.items()}) == {}


def test_a_name_has_one_meaning_in_all_headers():
    _, _, names = drawing(TEXTS)
    owners = {}
    for name, own in names.items():
        for each in own:
            owners.setdefault(each, []).append(name)
    assert {each: files for each, files in owners.items() if len(files) > 1} == {}
    assert len(owners) > 400


def test_the_drawing_finds_circles_and_names():
    texts = {
        **TEXTS,
        "lines.h": TEXTS["lines.h"].replace("x->pack(", "pack_lines("),
        "geometry.h": TEXTS["geometry.h"] + "static int product(void) { return borrow(1) != 0; }\n",
    }
    includes, uses, names = drawing(texts)
    assert uses["lines.h"]["bfloat16.h"] == {"pack_lines"}
    assert {"bfloat16.h", "lines.h"} <= circle({name: set(others) for name, others in uses.items()}).keys()
    assert "borrow" in uses["geometry.h"]["resources.h"]
    assert "product" in names["geometry.h"] & names["calls.h"]
    assert circle({**includes, "lines.h": {"bfloat16.h"}}).keys() >= {"bfloat16.h", "lines.h"}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-march=native"], ["-march=x86-64"]], ids=["native", "baseline"])
def test_each_header_compiles_by_itself(flags, tmp_path):
    compiler = toolchain.compiler()
    if compiler is None or toolchain.platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs a C compiler for x86-64")
    for name in sorted({*toolchain.HEADERS} - TILES):
        source = tmp_path / "header.c"
        source.write_text(f'{library._LIMITS}#include "{name}"\n')
        command = [
            *compiler,
            "-std=gnu11",
            *flags,
            "-fsyntax-only",
            "-w",
            f"-I{toolchain.FOLDER}",
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[:500]}"


if __name__ == "__main__":
    for header, others in drawing(TEXTS)[1].items():
        print(header, *(f"\n    {other}: {' '.join(sorted(words))}" for other, words in sorted(others.items())))
