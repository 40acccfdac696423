"""`make site`: stage the pages, build the calculator, run mkdocs, and look whether everything can be reached.

    python website/build_site.py [--out FOLDER] [--npm FOLDER]

Promises:
- the build ends with an error on a broken link, a public name or an option without a page, a page that takes more than
  two clicks, or a request to another origin;
- nothing is written beside build/ and the folder named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from build_calculator import build_calculator
from check_site import find_problems
from stage import FENCE, ROOT, navigation, stage_pages

# In the repository the page says how to build the calculator; on the site it leads there.
BUTTONS = """
[Open the calculator](../calculator/index.html){ .md-button .md-button--primary }
[打开计算器](../calculator/zh.html){ .md-button }
"""


def main() -> int:
    """Build the site and report what is wrong with it."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    parser.add_argument("--npm", type=Path, help="a folder whose node_modules has pyodide already")
    options = parser.parse_args()
    stage = ROOT / "build" / "site"
    shutil.rmtree(stage, ignore_errors=True)
    pages = stage_pages(stage / "pages")
    text = FENCE.sub(BUTTONS.strip() + "\n\n", pages["guide/calculator.md"], count=1)
    (stage / "pages" / "guide" / "calculator.md").write_text(text, encoding="utf-8")
    build_calculator(stage / "pages" / "calculator", npm=options.npm)
    config = (ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    config = config.replace("SOURCE", str(ROOT / "src")).replace("WEBSITE", str(ROOT / "website"))
    nav = json.dumps(navigation(pages), ensure_ascii=False)
    (stage / "mkdocs.yml").write_text(f"{config}\nnav: {nav}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(stage / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if subprocess.run(command, env=environment, check=False).returncode:
        return 1
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.move(stage / "site", options.out)
    problems, counts = find_problems(options.out)
    print(", ".join(f"{number:,} {what}" for what, number in counts.items()), f"in {options.out}")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
