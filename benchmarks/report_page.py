"""The report in a real browser: does it ask for anything, say anything, hide anything, or tell anyone less.

    python benchmarks/report_page.py                    (needs node, npm and a Chromium; keeps screenshots, says where)
    python benchmarks/report_page.py run.json           (the report of your own run)

Each page is opened at 1280 and 360 pixels, light and dark. A page fails on a console message, a request, a serious or
critical finding of axe-core, texts in a drawing that meet, are cut off or have less contrast than 4.5, a page wider
than the window, a copy button that does not copy, or 500 KiB. Ends with 1 if one fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from batchwright.report.page.page import draw_page

SAMPLES = Path(__file__).parents[1] / "tests" / "report"
PACKAGES = ("playwright-core@1", "axe-core@4")
MOST_BYTES = 500 * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="Open the report in a headless Chromium.")
    parser.add_argument("runs", nargs="*", type=Path, help="runs to draw; default: the samples of the tests")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome") or "")
    parser.add_argument("--modules", type=Path, help="folder that has playwright-core and axe-core already")
    parser.add_argument("--keep", type=Path, help="folder for pages and screenshots; default: a temporary one")
    options = parser.parse_args()
    if not options.chromium or not shutil.which("npm"):
        print("needs chromium, node and npm (Debian: apt-get install chromium nodejs npm)", file=sys.stderr)
        return 2
    folder = options.keep or Path(tempfile.mkdtemp(prefix="report-page-"))
    folder.mkdir(parents=True, exist_ok=True)
    modules = options.modules or install(folder / "modules")
    pages = write_pages(folder, options.runs)
    sizes = {page.stem: page.stat().st_size for page in pages}
    results = open_pages(pages, folder, modules, options.chromium)
    wrong = sum(tell(result, sizes[result["page"]]) for result in results)
    print(f"\n{len(results)} views, {wrong} with something wrong; screenshots in {folder}")
    return 1 if wrong else 0


def install(folder: Path) -> Path:
    """Fetch the two packages that drive and judge the browser."""
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def write_pages(folder: Path, runs: list[Path]) -> list[Path]:
    drawn = {run.stem: json.loads(run.read_text(encoding="utf-8")) for run in runs} or samples()
    pages = []
    for name, run in drawn.items():
        pages.append(folder / f"{name}.html")
        pages[-1].write_text(draw_page(run), encoding="utf-8")
    return pages


def samples() -> dict[str, dict[str, Any]]:
    """The samples of the tests, and three that are harder to lay out."""
    whole = json.loads((SAMPLES / "sample_run.json").read_text(encoding="utf-8"))
    skipped = json.loads((SAMPLES / "skipped_run.json").read_text(encoding="utf-8"))
    return {
        "sample": whole,
        "skipped": skipped,
        "large": large(whole),
        "edges": edges(whole),
        "hostile": hostile(whole),
    }


def large(run: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a large run: six digits, hundreds of GiB, many sizes that were tried."""
    run = copy.deepcopy(run)
    run["workload"].update(name="llama-3-70b, 64 cards", num_parameters=70_553_706_496, devices=64, samples=10**12)
    run["fit"].update(
        limit_bytes=80 * 2**30, micro_batch=96, line={"fixed_bytes": 9 * 2**30, "bytes_per_sample": 0.7 * 2**30}
    )
    run["fit"]["trials"] = [
        {
            "micro_batch": size,
            "shape": {},
            "outcome": "fits" if size <= 96 else "out_of_memory",
            "peak_bytes": {"device": int((9.5 + 0.7 * size) * 2**30)} if size <= 96 else None,
        }
        for size in (1, 2, 4, 8, 16, 32, 64, 96, 97, 98, 104, 112, 128)
    ]
    run["estimate"]["parts"] = {
        name: int(gib * 2**30)
        for name, gib in zip(run["estimate"]["parts"], (12.1, 4, 16.3, 31, 6, 0.1, 1.2, 2.2, 0.4), strict=True)
    }
    run["estimate"]["peak_bytes"] = {"allocated": None, "reserved": None, "device": int(73.3 * 2**30)}
    run["estimate"]["upper_bytes"] = {"allocated": None, "reserved": None, "device": int(79.3 * 2**30)}
    run["throughput"]["rows"] = [
        {
            **row,
            "micro_batch": size,
            "samples_per_second": rate,
            "low_seconds": 0.9,
            "seconds": 1.0,
            "high_seconds": 1.2,
        }
        for row, size, rate in zip(
            run["throughput"]["rows"] * 2,
            (1, 2, 4, 8, 16, 32, 64, 96),
            (900, 1800, 3500, 6e3, 9e3, 1.1e4, 1.2e4, 1.21e4),
            strict=False,
        )
    ]
    run["throughput"].update(fastest_micro_batch=64, devices=64)
    for row in run["noise"]["history"]:
        row.update({key: row[key] and 4000 * row[key] for key in ("value", "low", "high")}, step=4000 * row["step"])
    answer = run["recommendation"]
    answer.update(
        micro_batch=96, accumulation=1024, devices=64, effective_batch=6_291_456, samples_per_second=774_400.0
    )
    answer.update(range_within_5_percent=[4_000_000, 9_500_000], best_effective_batch=6_300_000)
    for row in answer["time_to_target"]:
        row["effective_batch"] *= 87_500
    return run


def edges(run: dict[str, Any]) -> dict[str, Any]:
    """One of everything, at the ends of the axes; what is not known is null."""
    run = copy.deepcopy(run)
    run["fit"]["trials"] = run["fit"]["trials"][1:2]
    run["fit"].update(line=None, limit_bytes=None)
    run["throughput"]["rows"] = run["throughput"]["rows"][:1]
    run["noise"]["history"] = [{**run["noise"]["history"][0], "value": None, "high": None}]
    answer = run["recommendation"]
    answer.update(effective_batch=answer["time_to_target"][0]["effective_batch"], range_within_5_percent=[5, 6])
    answer.update(critical_batch=None, seconds_per_step=None, samples_per_second=None, learning_rate=None)
    run["workload"].update(memory_bytes=2**34, num_parameters=None, seconds={})
    run["plan"]["table"] = run["plan"]["table"][:1]
    run["audit"].update(exact=False, cause="the loss is a mean of means", remedy="weigh each micro-batch by its tokens")
    return run


def hostile(run: dict[str, Any]) -> dict[str, Any]:
    """Every text of the run replaced by markup that would run a script, and a name that does not end."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        known = ("measured", "predicted", "formula", "fits", "out_of_memory", "samples")
        evil = "\"><img src=http://127.0.0.1:9/x onerror=console.error(1)></svg><script>console.error(1)</script>'"
        return f"{evil}{value}" if isinstance(value, str) and value not in known else value

    changed: dict[str, Any] = replaced(run)
    changed["workload"]["name"] += "x" * 300
    return changed


def open_pages(pages: list[Path], folder: Path, modules: Path, chromium: str) -> list[dict[str, Any]]:
    script = Path(__file__).with_suffix(".mjs")
    command = ["node", str(script), str(modules), chromium, str(folder), *map(str, pages)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    results: list[dict[str, Any]] = json.loads(ran.stdout)
    return results


def tell(result: dict[str, Any], size: int) -> bool:
    """Print one view; whether something is wrong with it."""
    serious = [each for each in result["violations"] if each["impact"] in ("serious", "critical")]
    lesser = len(result["violations"]) - len(serious)
    wrong = {
        "console": result["errors"],
        "requests": result["requests"],
        "axe": [f"{each['id']} ({each['impact']}, {each['nodes']}): {each['first']}" for each in serious],
        "texts that meet": result["overlaps"],
        "cut off": result["clipped"],
        "faint": result["faint"],
        "too wide": [f"by {result['tooWide']} px"] if result["tooWide"] > 0 else [],
        "copy": ["the button does not copy"] if result["copied"] is False else [],
        "size": [f"{size / 1024:.0f} KiB"] if size >= MOST_BYTES else [],
    }
    problems = {name: told for name, told in wrong.items() if told}
    print(
        f"{result['page']:<8} {result['width']:>5} px {result['colorScheme']:<5} {size / 1024:4.0f} KiB, "
        f"{result['texts']:>3} texts in drawings, axe: {len(serious)} serious, {lesser} lesser: "
        f"{'; '.join(problems) or 'nothing wrong'}"
    )
    for name, told in problems.items():
        for each in told:
            print(f"    {name}: {each}")
    for each in result["violations"]:
        if each not in serious:
            print(f"    (axe, {each['impact']}: {each['id']}: {each['first']})")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
