"""The calculator in a real browser: does it answer as Python does, online and with the network cut, for everyone.

    python benchmarks/site.py                 (builds the calculator; needs node, npm and a Chromium; keeps screenshots)
    python benchmarks/site.py --site FOLDER   (a site that is built already)

60 random questions, a tenth of them bad, are asked of the page and of this Python: numbers have to agree to 1e-12, all
else to the byte. Half are asked online, half after the server was stopped and the page loaded anew. Also: the first
answer within 10 s of a cold load, later ones within 200 ms (median and the slowest twentieth are printed), no finding
of axe-core in 20 views (English and Chinese, light and dark, 1280 and 375 pixels), nothing wider than the window, no
request to another origin, and a page that says so where a file of it is blocked. Ends with 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from batchwright.catalogue.cards import all_cards
from batchwright.catalogue.models import load_models
from batchwright.memory.calculator import SHARDINGS, answer_query
from batchwright.memory.formula_tensors import OPTIMIZERS, PRECISIONS, TUNINGS
from batchwright.planning.dialects import FRAMEWORKS

ROOT = Path(__file__).parents[1]
PACKAGES = ("playwright-core@1", "axe-core@4")
COLD_SECONDS, LATER_MILLISECONDS = 10.0, 200.0
BROWSER_SECONDS = 900.0
# What the page shows where a file cannot be had; without its script, as in an old browser, it cannot know the question.
_COMMAND = "batchwright recommend gpt2 --on h100-80gb --seq-len 512"
BLOCKED = {
    "pyodide.mjs": _COMMAND,
    "pyodide.asm.wasm": _COMMAND,
    "python_stdlib.zip": _COMMAND,
    "batchwright-": _COMMAND,
    "calculator.mjs": "batchwright recommend llama-3-8b --on a100-80gb",
}
BAD = (
    "model=lama-9b",
    "batch=1e9",
    "batch=",
    "seq_len=99999999999",
    "devices=-1",
    "card=a100",
    "%%%=&==",
    "model=%E6%A8%A1%E5%9E%8B",
    "batch=1&batch=2",
    "sharding=zero-3",
    "<script>=1",
    "tuning=Lora+&precision=int8",
)


def random_questions(number: int, seed: int) -> list[str]:
    """Return questions as addresses, a tenth of them bad."""
    rng = random.Random(seed)
    models = list(load_models().values())
    questions = []
    for _ in range(number):
        model, devices = rng.choice(models), rng.choice([1, 1, 2, 4, 8, 64])
        question = {
            "model": model.name,
            "card": rng.choice(all_cards()).name,
            "batch": round(10 ** rng.uniform(0, 5)),
            "seq_len": rng.randint(1, model.max_positions),
            "precision": rng.choice(list(PRECISIONS)),
            "tuning": rng.choice(list(TUNINGS)),
            "checkpointing": rng.choice(["no", "yes"]),
            "optimizer": rng.choice(list(OPTIMIZERS)),
            "sharding": "none" if devices == 1 else rng.choice(list(SHARDINGS)),
            "devices": devices,
            "framework": rng.choice(list(FRAMEWORKS)),
        }
        questions.append(urlencode(question))
    for place in rng.sample(range(1, number), number // 10):
        questions[place] = rng.choice(BAD)
    return questions


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Name where two answers differ: numbers beyond 1e-12, all else at all."""
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        return [text for key in one for text in differences(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            text for i, (a, b) in enumerate(zip(one, other, strict=True)) for text in differences(a, b, f"{place}[{i}]")
        ]
    if isinstance(one, float) and isinstance(other, float):
        return [] if math.isclose(one, other, rel_tol=1e-12, abs_tol=0) else [f"{place}: {one} and {other}"]
    return [] if type(one) is type(other) and one == other else [f"{place}: {one!r} and {other!r}"]


@dataclass
class Server:
    """Serves a folder on loopback, compressed, and counts what it sends."""

    folder: Path
    blocked: str = "\0"
    sent: dict[str, int] = field(default_factory=dict)
    compressed: dict[Path, bytes] = field(default_factory=dict)

    def __enter__(self) -> Server:
        server = self
        for path in self.folder.resolve().rglob("*"):
            if path.is_file():  # beforehand, as a host of static files does
                self.compressed[path] = gzip.compress(path.read_bytes(), 6)

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(server.folder))

            extensions_map: dict[str, str] = {  # noqa: RUF012 - as its base class has it
                **SimpleHTTPRequestHandler.extensions_map,
                ".mjs": "text/javascript",
                ".wasm": "application/wasm",
            }

            def do_GET(self) -> None:
                path = Path(self.translate_path(self.path))
                path = path / "index.html" if path.is_dir() else path
                if not path.is_file() or server.blocked in path.name:
                    with contextlib.suppress(ConnectionError):
                        self.send_error(404)
                    return
                content = server.compressed[path.resolve()]
                self.send_response(200)
                self.send_header("Content-Type", self.guess_type(str(path)))
                self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "max-age=600")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the page was left
                    self.wfile.write(content)
                server.sent[path.name] = server.sent.get(path.name, 0) + len(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def origin(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.http.server_port}"

    def stop(self) -> None:
        """Cut the network."""
        self.http.shutdown()
        self.http.server_close()


def drive(server: Server, questions: list[str], modules: Path, chromium: str, screenshots: Path) -> dict[str, Any]:
    """Run the browser; the server is stopped when it says so."""
    file = screenshots / "questions.json"
    file.write_text(json.dumps(questions))
    script = Path(__file__).with_suffix(".mjs")
    command = ["node", str(script), str(modules), chromium, server.origin, str(screenshots), str(file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    # A page that never answers ends in a time-out of the script's own; this is for a browser that hangs.
    timer = threading.Timer(BROWSER_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    for line in process.stdout:
        if line.strip() == "cut":
            server.stop()
            process.stdin.write("go on\n")
            process.stdin.flush()
    if process.wait():
        raise SystemExit("the browser failed")
    seen: dict[str, Any] = json.loads((screenshots / "seen.json").read_text())
    return seen


def look_blocked(folder: Path, file: str, modules: Path, chromium: str, screenshots: Path) -> str:
    """Open the page where one of its files cannot be had, and return what it says."""
    code = (
        "const {createRequire}=await import('node:module');const r=createRequire(process.argv[1]+'/package.json');"
        "const {chromium}=r('playwright-core');const b=await chromium.launch({executablePath:process.argv[2],"
        "args:['--no-sandbox','--disable-gpu','--disable-background-networking']});const p=await b.newPage();"
        "await p.goto(process.argv[3]+'/calculator/?model=gpt2&card=h100-80gb&seq_len=512');"
        "const said=p.locator('#problem:not([hidden]), #unsupported:not([hidden])');"
        "await said.waitFor({timeout:30000});"
        "console.log(await said.innerText());"
        "await p.screenshot({path:process.argv[4]});await b.close();"
    )
    with Server(folder, blocked=file) as server:
        command = ["node", "--input-type=module", "-e", code, str(modules), chromium, server.origin]
        done = subprocess.run(
            [*command, str(screenshots / f"without-{file}.png")], capture_output=True, text=True, check=True
        )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the calculator in a headless Chromium.")
    parser.add_argument("--site", type=Path, help="a built site, with calculator/ in it; default: it is built")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome") or "")
    parser.add_argument(
        "--modules", type=Path, help="folder whose node_modules has playwright-core, axe-core (and pyodide)"
    )
    parser.add_argument("--keep", type=Path, help="folder for screenshots; default: a temporary one")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.chromium or not shutil.which("npm"):
        print("needs chromium, node and npm (Debian: apt-get install chromium nodejs npm)", file=sys.stderr)
        return 2
    keep = options.keep or Path(tempfile.mkdtemp(prefix="site-"))
    keep.mkdir(parents=True, exist_ok=True)
    modules = options.modules or install(keep / "modules")
    site = options.site or keep / "site"
    if options.site is None:
        npm = ["--npm", str(options.modules)] if options.modules else []
        build = [sys.executable, str(ROOT / "website" / "build_calculator.py"), str(site / "calculator"), *npm]
        subprocess.run(build, check=True)
    questions = random_questions(options.questions, options.seed)
    with Server(site) as server:
        seen = drive(server, questions, modules, options.chromium, keep)
        sent = sum(server.sent.values())
    files = [path for path in (site / "calculator").rglob("*") if path.is_file()]
    once = sum(len(gzip.compress(path.read_bytes(), 6)) for path in files)
    blocked = {file: look_blocked(site, file, modules, options.chromium, keep) for file in BLOCKED}
    return report(seen, questions, once, sent, blocked, keep)


def install(folder: Path) -> Path:
    """Fetch the two packages that drive and judge the browser."""
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def report(
    seen: dict[str, Any], questions: list[str], once: int, sent: int, blocked: dict[str, str], keep: Path
) -> int:
    """Print the numbers; 1 if one of them is not as promised."""
    wrong: list[str] = []
    for query, answer in zip(questions, seen["answers"], strict=True):
        found = differences(json.loads(answer["raw"]), json.loads(json.dumps(answer_query(query))))
        wrong += [f"{query}: {text}" for text in found]
        wrong += [] if answer["shown"] else [f"{query}: the page does not show the answer"]
    same = sum(
        answer["raw"] == json.dumps(answer_query(query), ensure_ascii=False)
        for query, answer in zip(questions, seen["answers"], strict=True)
    )
    later = sorted(answer["milliseconds"] for answer in seen["answers"] if answer["milliseconds"] is not None)
    slow = later[math.ceil(0.95 * len(later)) - 1]
    offline = sum(not answer["online"] for answer in seen["answers"])
    places = f"{offline} of them with the network cut"
    print(f"{len(questions)} questions, {places}: {same} the same to the byte, {len(wrong)} differ")
    cold, cut = seen["coldSeconds"], seen["offlineSeconds"]
    busy = f"({seen['coldProcessorSeconds']:.1f} s of processor time, load {os.getloadavg()[1]:.1f})"
    print(f"first answer {cold:.1f} s after a cold load {busy}, {cut:.1f} s without a network")
    print(f"later: median {statistics.median(later):.0f} ms, 95 % within {slow:.0f} ms, slowest {later[-1]:.0f} ms")
    print(f"a visitor loads {once / 2**20:.1f} MiB compressed; sent in all views {sent / 2**20:.1f} MiB")
    counts = {"findings of axe-core": "findings", "views too wide": "wide", "requests elsewhere": "foreign"}
    print(", ".join(f"{name}: {len(seen[key])}" for name, key in {**counts, "console": "console"}.items()))
    messages = seen["messages"]
    print(f"after typing: {messages['address'][:60]}")
    print(f"command: {messages['command'].splitlines()[0]!r}; check: {messages['checked'].splitlines()[0]!r}")
    for file, said in blocked.items():
        print(f"without {file}: {' '.join(said.split())[:240]}")
    findings = [json.dumps(finding) for finding in seen["findings"][:10]]
    for text in [*wrong[:10], *findings, *seen["wide"], *seen["foreign"][:5], *seen["console"][:5]]:
        print("  " + text[:400])
    print(f"screenshots in {keep}")
    fine = not (wrong or seen["findings"] or seen["wide"] or seen["foreign"] or seen["console"])
    fine &= seen["coldSeconds"] <= COLD_SECONDS and slow <= LATER_MILLISECONDS
    fine &= all(command in blocked[file] for file, command in BLOCKED.items())
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
