"""Give MkDocs its pages: the repository's Markdown as it lies there, and a page for each public name."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/guides/**/*.md",
    "examples/hosts/*/README.md",
    "examples/retrain/README.md",
    "examples/benchmarks/RESULTS*.md",
    "examples/zoo/RESULTS*.md",
)
FILES = ("examples/pictures/*", "graphopt/hosts/host.schema.json")
FIRST = ("compile", "fit", "Executor")  # of the reference
PUBLIC = ("graphopt", "passes", "graphopt.data", "graphopt.callbacks", "graphopt.models", "graphopt.testing")
WRITERS = (  # modules that passes and hosts of one's own use
    "graphopt.graph.emitter",
    "graphopt.graph.rewriting",
    "graphopt.graph.roles",
    "graphopt.hosts.contract",
    "graphopt.runtime.executor_options",
    "passes.gradients.registry",
    "passes.lowering.registry",
)
MERMAID = "@mermaid-js/tiny@11"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
NAME = re.compile(r"(?<![\[`])`((?:graphopt|passes)(?:\.\w+)+)`(?![\]`])")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

sys.path.insert(0, str(ROOT))


def on_config(config: Any) -> Any:
    """Take what a maintainer fills in from pyproject.toml, and put the site into a folder of its version."""
    config.site_description = PROJECT["description"]
    config.site_author = ", ".join(author["name"] for author in PROJECT["authors"])
    config.repo_url = PROJECT["urls"]["Repository"]
    config.repo_name = config.repo_url.split("/", 3)[-1]
    config.site_url = f"{PROJECT['urls']['Documentation'].rstrip('/')}/{PROJECT['version']}/"
    config.site_dir = str(BUILD / "site" / PROJECT["version"])
    config.nav = [
        {"Start": "README.md"},
        {"Guides": ["examples/guides/README.md", *guides()]},
        {"Reference": reference()},
        {
            "Project": [
                "CHANGELOG.md",
                "CONTRIBUTING.md",
                "SECURITY.md",
                "examples/guides/decisions/README.md",
            ]
        },
    ]
    return config


def guides() -> list[dict[str, list[str]]]:
    """Return the navigation of the guides, which is that of their index."""
    sections = re.split(r"^## (.*)$", (ROOT / "examples/guides/README.md").read_text(), flags=re.MULTILINE)[1:]
    found = {
        title: [f"examples/guides/{page}" for page in re.findall(r"\]\((\w+\.md)\) \|$", text, re.MULTILINE)]
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }
    return [{title: pages} for title, pages in found.items() if pages]


def names(module: str) -> list[str]:
    """Return the public names of a module: those of its `__all__`, or its own functions and classes."""
    loaded = importlib.import_module(module)
    public = getattr(loaded, "__all__", None) or [
        name
        for name, member in vars(loaded).items()
        if name[0] != "_" and (inspect.isfunction(member) or inspect.isclass(member)) and member.__module__ == module
    ]
    first = [name for name in FIRST if name in public and module == "graphopt"]
    return [*first, *sorted(set(public) - set(first), key=str.lower)]


def reference() -> list[Any]:
    """Return the navigation of the reference: the names of each public module, then modules for writers."""
    modules: list[Any] = [
        {
            module: [
                f"reference/{module}/index.md",
                *({name: page} for name, page in own_pages(module)),
            ]
        }
        for module in PUBLIC
    ]
    return [*modules, {"For passes and hosts": [{module: f"reference/{module}.md"} for module in WRITERS]}]


def source(module: str, name: str) -> str:
    """Return the path under which a public name is defined, as the tools that read the source know it."""
    member = getattr(importlib.import_module(module), name)
    return f"{member.__module__}.{member.__qualname__}"


@functools.cache
def pages() -> dict[str, str]:
    """Return the page of each object that has a public name: that of the first module that has it."""
    found: dict[str, str] = {}
    for module in PUBLIC:
        for name in names(module):
            found.setdefault(source(module, name), f"reference/{module}/{name}.md")
    return found


def own_pages(module: str) -> list[tuple[str, str]]:
    """Return the names of a module whose pages lie under it, and the pages."""
    shown = [(name, pages()[source(module, name)]) for name in names(module)]
    return [(name, page) for name, page in shown if page == f"reference/{module}/{name}.md"]


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's pages and pictures under their own paths, so that links between them hold here, too."""
    for pattern in (*PAGES, *FILES):
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            file = File(uri, str(ROOT), config.site_dir, config.use_directory_urls)
            file.dest_uri = file.dest_uri.removeprefix("examples/")
            files.append(file)
    for module in PUBLIC:
        listed = [f"- [`{name}`][{source(module, name)}]: {summary(module, name)}\n" for name in names(module)]
        text = f"::: {module}\n    options: {{members: false}}\n\n{''.join(listed)}"
        files.append(File.generated(config, f"reference/{module}/index.md", content=text))
        for name, page in own_pages(module):
            inherits = str(module == "graphopt").lower()  # an executor's methods; a loss's are its family's
            options = f"options: {{heading: {module}.{name}, inherited_members: {inherits}}}"
            text = f"::: {source(module, name)}\n    {options}\n"
            files.append(File.generated(config, page, content=text))
    for module in WRITERS:
        members = [name for name in names(module) if source(module, name) not in pages()]
        text = f"::: {module}\n    options: {{members: {json.dumps(members)}}}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    return files


def summary(module: str, name: str) -> str:
    return (inspect.getdoc(getattr(importlib.import_module(module), name)) or "").split("\n\n")[0].replace("\n", " ")


def linked(text: str) -> str:
    """Link public names, as in `passes.LoRA`, to their pages."""

    def link(found: re.Match[str]) -> str:
        module, _, name = found[1].rpartition(".")
        public = module in PUBLIC and name in names(module)
        return f"[`{found[1]}`][{source(module, name)}]" if public else found[0]

    return NAME.sub(link, text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to files that are no pages lead into the repository, and public names to their pages."""
    if page.file.generated_by:
        return markdown
    if page.file.src_uri.startswith(("examples/zoo/", "examples/benchmarks/")):
        page.meta["search"] = {"exclude": True}  # tables of numbers
        markdown = re.sub(r"\](?=\(%| ?\[)", r"\]", markdown)  # usage and messages, no links
    folder = os.path.dirname(page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        path, anchor = os.path.normpath(os.path.join(folder, found[1])), found[2] or ""
        if files.get_file_from_path(path) or not (ROOT / path).exists():  # MkDocs reports what is not there
            return found[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{path}{anchor}"

    def name(found: re.Match[str]) -> str:
        module, _, last = found[1].rpartition(".")
        return f"[`{found[1]}`][{source(module, last)}]" if module in PUBLIC and last in names(module) else found[0]

    parts, end = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        start = fence.start() if fence else len(markdown)
        parts.append(linked(LINK.sub(lead, markdown[end:start])) + (fence[0] if fence else ""))
        end = fence.end() if fence else start
    text = "".join(parts)
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]
        head, _, rest = text.partition("\n## ")
        text = f"{head}\n{(Path(__file__).parent / 'demo.html').read_text()}\n## {rest}"
    return text


def on_post_build(config: Any) -> None:
    """Add the page that trains in the browser, the library of diagrams, and this version to the list of versions."""
    site = Path(config.site_dir)
    example = runpy.run_path(str(ROOT / "examples/hosts/browser/export.py"))
    try:
        example["main"](site / "train")
    except SystemExit as missing:
        raise PluginError(str(missing)) from None
    diagrams = BUILD / "diagrams"
    if not diagrams.exists():
        diagrams.mkdir(parents=True)
        packed = subprocess.run(
            ["npm", "pack", "--silent", MERMAID], cwd=diagrams, check=True, capture_output=True, text=True
        )
        shutil.unpack_archive(diagrams / packed.stdout.strip(), diagrams)
    shutil.copy(diagrams / "package" / "dist" / "mermaid.tiny.js", site)
    listed = site.parent / "versions.json"
    versions = json.loads(listed.read_text()) if listed.exists() else []
    this = {"version": site.name, "title": site.name, "aliases": []}
    versions = [this, *(each for each in versions if each["version"] != site.name)]
    listed.write_text(json.dumps(versions))
    (site.parent / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>graphopt</title>'
        f'<meta http-equiv="refresh" content="0; url={site.name}/"><a href="{site.name}/">graphopt</a>\n'
    )
