"""Build the calculator: the wheel that pip installs, Pyodide from the npm registry, and the page in two languages.

    python website/build_calculator.py FOLDER [--npm FOLDER] [--wheel FILE]

Promises:
- the page runs the wheel itself; nothing of the package is written a second time;
- Pyodide and the wheels of click and rich are fetched here and are never committed;
- what a visitor's Python would compile first is compiled here (precompile.mjs), checked against the wheel's source;
- what the page offers to choose from is what the package answers about.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from batchwright.memory.calculator import list_choices

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).parent / "calculator"
PYODIDE = "314.0.7"
# What a page needs of the npm package; the rest is for consoles and types.
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
# Pure Python, as the command needs them; plan, recommend and the calculator itself do without.
WHEELS = ("click", "rich")
PAGES = {"en": "index.html", "zh": "zh.html"}


def build_calculator(folder: Path, *, npm: Path | None = None, wheel: Path | None = None) -> list[Path]:
    """Write every file of the calculator, and return them."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pyodide").mkdir(parents=True)
    (folder / "wheels").mkdir()
    package = install_pyodide(npm)
    for name in PYODIDE_FILES:
        shutil.copy(package / name, folder / "pyodide" / name)
    if wheel is None:
        _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "wheels"), str(ROOT))
    else:
        shutil.copy(wheel, folder / "wheels")
    fetch = (
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder / "wheels"),
    )
    _run(sys.executable, *fetch, *WHEELS)
    for name in ("calculator.mjs", "unsupported.js", "calculator.css"):
        shutil.copy(SOURCE / name, folder / name)
    drop_packages(folder / "pyodide" / "pyodide-lock.json")
    _run("node", str(SOURCE.parent / "precompile.mjs"), str(folder))
    write_worker(folder)
    write_pages(folder)
    write_offline(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def install_pyodide(npm: Path | None) -> Path:
    """Return the folder of the npm package, installed unless a folder that has it is named."""
    place = npm or ROOT / "build" / "npm"
    package = place / "node_modules" / "pyodide"
    if not package.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text("{}", encoding="utf-8")
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", f"pyodide@{PYODIDE}", cwd=place)
    return package


def drop_packages(lock: Path) -> None:
    """Leave out the packages that Pyodide would fetch from elsewhere: none is loaded, and the list is long."""
    info = json.loads(lock.read_text(encoding="utf-8"))["info"]
    lock.write_text(json.dumps({"info": info, "packages": {}}), encoding="utf-8")


def write_worker(folder: Path) -> None:
    """Write the worker with the names of what it loads: for an answer, and for the first command that is typed."""
    wheels = sorted(path.name for path in (folder / "wheels").iterdir() if path.suffix == ".whl")
    own, *others = sorted(wheels, key=lambda name: not name.startswith("batchwright-"))
    files = {"answer": [own, "answer.zip"], "command": [*others, "command.zip"]}
    text = (SOURCE / "worker.mjs").read_text(encoding="utf-8").replace("{{files_json}}", json.dumps(files))
    (folder / "worker.mjs").write_text(text, encoding="utf-8")


def write_pages(folder: Path) -> None:
    """Write the page once for each language, from one template."""
    template = (SOURCE / "calculator.html").read_text(encoding="utf-8")
    languages = json.loads((SOURCE / "texts.json").read_text(encoding="utf-8"))
    choices = _for_script(list_choices())
    for language, file in PAGES.items():
        texts = languages[language]
        page = template.replace("{{choices_json}}", choices).replace("{{texts_json}}", _for_script(texts["dynamic"]))
        for name, text in texts.items():
            if name != "dynamic":
                page = page.replace("{{" + name + "}}", html.escape(text))
        assert "{{" not in page, page[page.index("{{") :][:40]
        (folder / file).write_text(page, encoding="utf-8")


def write_offline(folder: Path) -> None:
    """Write the service worker, with every file that has to be there without a network."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    names = ["./", *(path.relative_to(folder).as_posix() for path in files)]
    text = (SOURCE / "offline.js").read_text(encoding="utf-8")
    text = text.replace("{{version}}", f"calculator-{content}").replace("{{files_json}}", json.dumps(names))
    (folder / "offline.js").write_text(text, encoding="utf-8")


def _for_script(data: object) -> str:
    """Write JSON that may stand inside of a script element."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    """Build into a folder and say what a visitor loads."""
    parser = argparse.ArgumentParser(description="Build the calculator.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--npm", type=Path, help="a folder whose node_modules has pyodide already")
    parser.add_argument("--wheel", type=Path, help="the wheel to run; default: built from this checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        files = build_calculator(Path(aside) / "calculator", npm=options.npm, wheel=options.wheel)
        total = sum(path.stat().st_size for path in files)
        shutil.rmtree(options.folder, ignore_errors=True)
        shutil.copytree(Path(aside) / "calculator", options.folder)
    print(f"{len(files)} files, {total / 2**20:.1f} MiB uncompressed, in {options.folder}")


if __name__ == "__main__":
    main()
