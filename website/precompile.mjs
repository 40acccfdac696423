// Compiles at build time what every visitor's Python would compile anew. Called by build_calculator.py:
//   node precompile.mjs FOLDER        (has pyodide/ and wheels/, as the page loads them)
//
// Promises:
// - the wheel stays what runs: its bytecode carries the hash of the source, and Python compares it at each import (PEP 552);
// - the standard library stays whole: modules that are used come as bytecode, all others as Pyodide has them;
// - what is compiled is what was imported when questions were answered here, so nothing is listed by hand.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

// Not the default, which shows a megabyte of Pyodide's own source.
process.on("uncaughtException", (error) => {
  console.error(error.message);
  process.exit(1);
});

const folder = process.argv[2];
const { loadPyodide } = await import(pathToFileURL(join(folder, "pyodide", "pyodide.mjs")).href);
const python = await loadPyodide({ indexURL: join(folder, "pyodide") });
const wheels = readdirSync(join(folder, "wheels")).filter((name) => name.endsWith(".whl"));
for (const name of wheels) python.unpackArchive(new Uint8Array(readFileSync(join(folder, "wheels", name))).buffer, "wheel");

python.runPython(`
import contextlib, io, py_compile, sys, zipfile
from pathlib import Path
from py_compile import PycInvalidationMode as Mode

import batchwright

SITE = batchwright.__file__.removesuffix("/batchwright/__init__.py")
STDLIB = next(path for path in sys.path if path.endswith(".zip"))
COMMANDS = ("plan 64 --micro-batch 3 --for transformers", "recommend llama-3-8b --on a100-80gb", "advise out-of-memory",
            "explain memory", "--help", "plan --help", "plan nothing")

def sources(root):
    """Where the modules under a folder or an archive that were imported so far have their source."""
    origins = (getattr(getattr(module, "__spec__", None), "origin", None) or "" for module in sys.modules.values())
    return {origin[len(root) + 1:] for origin in origins if origin.startswith(root + "/") and origin.endswith(".py")}

def write(file, members):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)

def compile_wheels(names):
    """Bytecode beside its source, whose hash it carries."""
    files = {name: py_compile.compile(f"{SITE}/{name}", invalidation_mode=Mode.CHECKED_HASH, doraise=True) for name in names}
    return {file.removeprefix(SITE + "/"): Path(file).read_bytes() for file in files.values()}

def compile_stdlib(names):
    """Bytecode in the place of its source: Python reads an archive's without looking at a source."""
    members = {}
    with zipfile.ZipFile(STDLIB) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            if name in names:
                Path("/source.py").write_bytes(data)
                py_compile.compile("/source.py", "/source.pyc", f"{STDLIB}/{name}", doraise=True, invalidation_mode=Mode.UNCHECKED_HASH)
                name, data = name + "c", Path("/source.pyc").read_bytes()
            members[name] = data
    return members

from batchwright.memory import calculator
for query in ("", "model=gpt2&devices=8&sharding=zero-3", "model=lama-9b", "batch=1e9"):
    calculator.answer_query(query)
calculator.check_text('{"train_batch_size": 64}', ".json", "8")
answering = sources(SITE)

from batchwright import cli
for line in COMMANDS:
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.main(line.split())

write("/answer.zip", compile_wheels(answering))
write("/command.zip", compile_wheels(sources(SITE) - answering))
write("/stdlib.zip", compile_stdlib(sources(STDLIB)))
`);
const put = (name, ...place) => writeFileSync(join(folder, ...place), python.FS.readFile(`/${name}.zip`));
put("stdlib", "pyodide", "python_stdlib.zip");
put("answer", "wheels", "answer.zip");
put("command", "wheels", "command.zip");
