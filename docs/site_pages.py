"""Pages of the documentation site that lie outside `docs/`: README, notebooks with their outputs, and a reference from docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

from workbench.lazy import imported_names

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "notebooks/README.md": "notebooks_list.md",
}


def _modules() -> dict[str, dict[str, tuple[str, str]]]:
    """Return public module -> public name -> (module, name there); "" holds the names of the package itself."""
    found: dict[str, dict[str, tuple[str, str]]] = {"": {}}
    for name, (home, there) in imported_names(ROOT / "workbench" / "__init__.pyi").items():
        source = ROOT.joinpath(*home.split("."), f"{there}.py")
        if source.exists():
            public = re.findall(r'"(\w+)"', re.search(r"__all__ = \[(.*?)\]", source.read_text(), re.DOTALL)[1])  # type: ignore[index]
            found[name] = {each: imported_names(source).get(each, (f"{home}.{there}", each)) for each in public}
        else:
            found[""][name] = (home, there)
    return found


def on_config(config: Any) -> Any:
    """Put notebooks and reference into the navigation."""
    places = {
        "NOTEBOOKS": [{"All": "notebooks_list.md"}, *({path.stem: f"{path.stem}.md"} for path in NOTEBOOKS)],
        "REFERENCE": [{f"wb.{name}" if name else "wb": f"reference_{name or 'wb'}.md"} for name in sorted(_modules())],
    }
    config.nav = [
        {key: places.get(value, value) if isinstance(value, str) else value for key, value in part.items()}
        for part in config.nav
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    made = {target: (ROOT / source).read_text() for source, target in OUTSIDE.items()}
    for path in NOTEBOOKS:
        made[f"{path.stem}.md"] = _notebook(path)
    for name, names in _modules().items():
        made[f"reference_{name or 'wb'}.md"] = _reference(name, names)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between files lead to the pages that these have become; a file that is no page is named by its path."""
    if page.file.src_uri == "codes.md":
        page.meta["search"] = {"boost": 4}  # who searches a symptom wants the finding
    page_of = OUTSIDE | {f"notebooks/{p.name}": f"{p.stem}.md" for p in NOTEBOOKS}
    source_of = {target: source for source, target in page_of.items()}
    here = ROOT / source_of.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def followed(found: re.Match[str]) -> str:
        text, path, anchor = found[1], found[2], found[3] or ""
        there = (here.parent / path).resolve()
        if not there.is_relative_to(ROOT):
            return found[0]
        inside = there.relative_to(ROOT).as_posix()
        target = page_of.get(inside, inside.removeprefix("docs/") if inside.startswith("docs/") else None)
        return f"`{inside}`" if target is None else f"[{text}]({target}{anchor})"

    return re.sub(r"\[([^\[\]\n]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)", followed, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog of the search for screen readers: the theme leaves it without."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def _notebook(path: Path) -> str:
    """Return a notebook as a page: its Markdown as it is, code, and outputs as HTML."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f'<p><img alt="output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}"></p>'
                )
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            elif "text/html" in data:
                parts.append("<div>" + re.sub(r"\n\s*", " ", data["text/html"]) + "</div>")
            elif "text/plain" in data or "text" in output:
                parts.append(f"```text\n{data.get('text/plain', output.get('text', '')).rstrip()}\n```")
    return "\n\n".join(parts)


def _reference(name: str, names: dict[str, tuple[str, str]]) -> str:
    """Return a page of the public names of a module, each with its signature and docstring."""
    owner = f"wb.{name}" if name else "wb"
    blocks = [
        f'::: {home}.{there}\n    options:\n      heading: "{owner}.{public}"\n      toc_label: "{public}"'
        for public, (home, there) in names.items()
    ]
    return "\n\n".join([f"# {owner}", *blocks])
