// Runs Python beside the page: the wheel that pip installs, and nothing that is not of this origin.
// A message {id, name, args} is answered by {id, text} or {id, error}; {state} says how far the loading is.
const GLUE = `
import contextlib, io, json, shlex
from batchwright.memory import calculator
from batchwright.units import format_bytes

def _bytes_of(data, is_bytes=False):
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _bytes_of(value, key.endswith("bytes") or key in ("parts", "grows_with_batch", "allocated"))
            if is_bytes:
                yield from _bytes_of(value, True)
    elif isinstance(data, list):
        for value in data:
            yield from _bytes_of(value, is_bytes)
    elif is_bytes and isinstance(data, int) and not isinstance(data, bool):
        yield data

def answer(query):
    data = calculator.answer_query(query)
    left = [data["card"]["usable_bytes"] - data["estimate"]["peak_bytes"]["allocated"],
            data["card"]["total_bytes"] - data["card"]["context_bytes"] - data["card"]["usable_bytes"]] if "card" in data else []
    shown = {number: format_bytes(number) for number in {*_bytes_of(data), *left} if number >= 0}
    return json.dumps({"answer": json.dumps(data, ensure_ascii=False), "shown": shown})

def check(text, devices):
    return json.dumps(calculator.check_text(text, ".json", devices), ensure_ascii=False)

def run(line):
    out = io.StringIO()
    try:
        words = shlex.split(line)
    except ValueError as error:
        return json.dumps({"code": 2, "text": f"Error: {error}."})
    from batchwright import cli
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(words[1:] if words[:1] == ["batchwright"] else words)
        except SystemExit as leaving:
            code = leaving.code
    return json.dumps({"code": code or 0, "text": out.getvalue()})
`;

// What an answer needs, and what only a command does: wheels, and bytecode that their sources are checked against.
const FILES = {{files_json}};
const fetchAll = (names) => Promise.all(names.map(async (name) => {
  const answer = await fetch(`wheels/${name}`);
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.arrayBuffer();
}));

// Where WebAssembly cannot be had, Pyodide warns and waits forever.
const withoutWasm = new Promise((_, reject) => {
  const instantiate = WebAssembly.instantiateStreaming;
  if (!instantiate) return; // an older Safari: Pyodide takes another way
  WebAssembly.instantiateStreaming = (...args) => {
    const instance = instantiate(...args);
    instance.catch(reject);
    return instance;
  };
});

async function load() {
  const indexURL = new URL("pyodide/", import.meta.url).href;
  // Not a static import: where it fails, the page can say what was missing.
  const loading = import("./pyodide/pyodide.mjs").then(({ loadPyodide }) => loadPyodide({ indexURL }));
  const [archives, python] = await Promise.race([Promise.all([fetchAll(FILES.answer), loading]), withoutWasm]);
  const unpack = (archive) => python.unpackArchive(archive, "wheel");
  archives.forEach(unpack);
  python.runPython(GLUE);
  const functions = Object.fromEntries(["answer", "check", "run"].map((name) => [name, python.globals.get(name)]));
  let command;
  return { ...functions, run: async (line) => {
    await (command ??= fetchAll(FILES.command).then((archives) => archives.forEach(unpack)));
    return functions.run(line);
  } };
}

const loaded = load();
loaded.then(() => postMessage({ state: "ready" }), (error) => postMessage({ state: "failed", error: String(error) }));

onmessage = async ({ data: { id, name, args } }) => {
  try {
    postMessage({ id, text: await (await loaded)[name](...args) });
  } catch (error) {
    postMessage({ id, error: String(error) });
  }
};
