// The page: what was chosen goes to Python as the text of an address, and what comes back is drawn. Nothing is computed here.

const texts = JSON.parse(document.getElementById("texts").textContent);
const choices = JSON.parse(document.getElementById("choices").textContent);
const form = document.getElementById("question");
const $ = (id) => document.getElementById(id);
const NUMBERS = new Intl.NumberFormat("en-US");
const PARTS = ["weights", "gradients", "optimizer", "activations", "temporaries", "inputs"];

// An element with text and children; text never becomes HTML.
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.map((child) => (child === null ? "-" : child)));
  return made;
}

function fill(select, values, names = {}) {
  select.replaceChildren(...values.map((value) => element("option", { value, textContent: names[value] ?? value })));
}

function prepare() {
  const fields = form.elements;
  $("models").replaceChildren(...choices.models.map(({ name }) => element("option", { value: name })));
  fill(fields.card, choices.cards.map(({ name }) => name), Object.fromEntries(choices.cards.map(({ name, product }) => [name, `${product} (${name})`])));
  fill(fields.sharding, choices.shardings, texts.shardings);
  fill(fields.precision, choices.precisions, texts.precisions);
  fill(fields.tuning, choices.tunings, texts.tunings);
  fill(fields.optimizer, choices.optimizers, texts.optimizers);
  fill(fields.checkpointing, ["no", "yes"], texts);
  fill(fields.framework, choices.frameworks);
  for (const box of document.querySelectorAll(".copyable")) {
    const button = element("button", { type: "button", className: "copy", textContent: texts.copy });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(box.querySelector("pre").textContent);
      button.textContent = texts.copied;
      setTimeout(() => (button.textContent = texts.copy), 1500);
    });
    box.append(button);
  }
}

function show(question) {
  for (const [name, value] of Object.entries(question)) {
    const field = form.elements[name];
    if (field && field !== document.activeElement) field.value = String(value);
  }
}

function typed() {
  return new URLSearchParams([...new FormData(form)].map(([name, value]) => [name, value.trim()])).toString();
}

// Python runs in a worker; a call is answered in its turn.
const calls = new Map();
let number = 0;
let worker;
function call(name, ...args) {
  return new Promise((resolve, reject) => {
    calls.set((number += 1), { resolve, reject });
    worker.postMessage({ id: number, name, args });
  });
}

let isBlocked = false;
function fail(reason) {
  isBlocked = true;
  const question = Object.fromEntries(new URLSearchParams(location.search));
  const { model, card, seq_len, precision, tuning, checkpointing } = { ...choices.defaults, ...question };
  const quote = (word) => (/^[\w.:/-]+$/.test(word) ? word : `'${String(word).replaceAll("'", `'\\''`)}'`);
  const words = ["batchwright", "recommend", model, "--on", card, "--seq-len", seq_len, "--precision", precision, "--tuning", tuning,
    "--task", "generation", ...(checkpointing === "yes" ? ["--checkpointing"] : [])];
  $("loading").hidden = true;
  $("answer").hidden = true;
  $("problem").hidden = false;
  $("problem").replaceChildren(
    element("p", { textContent: texts.blocked }),
    element("pre", { textContent: `pip install batchwright\n${words.map(quote).join(" ")}`, tabIndex: 0 }),
    element("p", { className: "soft", textContent: reason }),
  );
}

function table(id, heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col", textContent: text })));
  const body = rows.map(({ cells, className = "" }) =>
    element("tr", { className }, ...cells.map((cell, i) => element(i ? "td" : "th", i ? {} : { scope: "row" }, cell ?? null))));
  $(id).replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function link(text, change) {
  const query = new URLSearchParams(lastQuery);
  for (const [name, value] of Object.entries(change)) query.set(name, value);
  const made = element("a", { href: `?${query}`, textContent: text });
  made.addEventListener("click", (event) => {
    event.preventDefault();
    ask(query.toString(), { push: true });
  });
  return made;
}

function draw({ answer, shown }) {
  const of = (bytes) => (bytes === null ? "-" : shown[bytes] ?? "-");
  const { estimate, card, plan } = answer;
  $("verdict").textContent = answer.summary;
  $("verdict").className = answer.fits ? "fits" : "does-not-fit";

  const peak = estimate.peak_bytes.allocated;
  const kept = card.total_bytes - card.context_bytes - card.usable_bytes;
  const left = Math.max(card.usable_bytes - peak, 0);
  const whole = Math.max(card.total_bytes, peak + card.context_bytes + kept);
  const pieces = [...PARTS.map((part) => [part, estimate.parts[part] ?? 0]), ["left", left], ["kept", kept], ["context", card.context_bytes]];
  $("bar").replaceChildren(...pieces.filter(([, bytes]) => bytes / whole > 0.001).map(([part, bytes]) => {
    const piece = element("span", { className: `piece ${part}` });
    piece.style.flexGrow = String(bytes / whole);
    return piece;
  }));
  const percent = (bytes) => (0 < bytes && bytes < whole / 200 ? "<1 %" : `${Math.round((100 * bytes) / whole)} %`);
  const grows = (part) => (estimate.grows_with_batch[part] > 0 ? `+${of(estimate.grows_with_batch[part])}` : texts.fixed);
  const named = (part, name) => element("span", { className: "named" }, element("span", { className: `swatch ${part}` }), name);
  table("parts", [texts.part, texts.bytes, texts.share, texts.per_sample], [
    ...PARTS.filter((part) => estimate.parts[part]).map((part) => ({
      cells: [named(part, texts.parts[part]), of(estimate.parts[part]), percent(estimate.parts[part]), grows(part)],
    })),
    { className: "total", cells: [texts.peak, of(peak), percent(peak), ""] },
    ...(answer.fits ? [{ cells: [named("left", texts.left), of(left), percent(left), ""] }] : []),
    { cells: [named("kept", texts.kept_free), of(kept), percent(kept), ""] },
    { cells: [named("context", texts.context), of(card.context_bytes), percent(card.context_bytes), ""] },
  ]);

  $("less").hidden = answer.changes.length === 0;
  const values = { tuning: texts.tunings, sharding: texts.shardings, checkpointing: texts };
  table("changes", [texts.change, texts.one_sample, texts.fits_here], answer.changes.map(({ name, value, needed_bytes, fits }) => ({
    cells: [link(`${texts.names[name]}: ${values[name]?.[value] ?? `${value} ${texts.tokens}`}`, { [name]: value }), of(needed_bytes), fits ? texts.yes : texts.no],
  })));

  $("splitting").hidden = !answer.fits;
  $("reason").textContent = [plan.reason, ...plan.notes].map((line) => `${line[0].toUpperCase()}${line.slice(1)}.`).join(" ");
  table("splits", [texts.micro_batch, texts.accumulation, texts.effective, texts.peak, texts.activations], plan.table.map((row, i) => ({
    className: i ? "" : "chosen",
    cells: [NUMBERS.format(row.micro_batch), NUMBERS.format(row.accumulation), NUMBERS.format(row.effective_batch), of(row.peak_bytes), `${Number(row.relative_activations.toPrecision(3))}x`],
  })));
  $("config").textContent = answer.config;
  $("exactly").textContent = answer.commands.exactly;
  $("again").textContent = answer.commands.again;

  const most = Math.log2(1 + Math.max(...answer.cards.map((row) => row.largest_micro_batch ?? 0)));
  // Those that hold it come first, and the smallest of them: the others are the longer list.
  const holding = answer.cards.filter((row) => row.largest_micro_batch !== null);
  const others = answer.cards.filter((row) => row.largest_micro_batch === null);
  table("cards", [texts.card, texts.may_be_used, texts.largest], [...holding, ...others].map((row) => {
    const size = element("span", { className: "size" });
    size.style.width = `${most ? (60 * Math.log2(1 + (row.largest_micro_batch ?? 0))) / most : 0}px`;
    const largest = row.largest_micro_batch === null ? texts.nothing : NUMBERS.format(row.largest_micro_batch);
    return {
      className: row.card === card.card ? "chosen" : "",
      cells: [link(row.product, { card: row.card }), of(row.usable_bytes), element("span", {}, size, largest)],
    };
  }));
  $("notes").replaceChildren(...estimate.notes.map((note) => element("li", { textContent: `${note}.` })));
}

let lastQuery = "";
let latest = 0;
async function ask(query, { push = false, keeps = false } = {}) {
  lastQuery = query;
  const mine = (latest += 1);
  if (!keeps) history[push ? "pushState" : "replaceState"](null, "", query ? `?${query}` : location.pathname);
  pointToOtherLanguage();
  const started = performance.now();
  const text = await call("answer", query).catch((error) => JSON.stringify({ answer: JSON.stringify({ error: String(error) }), shown: {} }));
  const { answer: raw, shown } = JSON.parse(text);
  const answer = JSON.parse(raw);
  if (mine !== latest || isBlocked) return;
  $("loading").hidden = true;
  $("tools").hidden = false;
  $("problem").hidden = !("error" in answer);
  $("answer").hidden = "error" in answer;
  if ("error" in answer) {
    $("problem").replaceChildren(element("pre", { textContent: answer.error, tabIndex: 0 }));
  } else {
    lastQuery = answer.query;
    show(answer.question);
    draw({ answer, shown });
  }
  document.dispatchEvent(new CustomEvent("answered", { detail: { query, raw, milliseconds: performance.now() - started } }));
}

function pointToOtherLanguage() {
  $("other-language").href = $("other-language").getAttribute("href").split("?")[0] + location.search;
}

function fromAddress() {
  const query = location.search.replace(/^\?/, "");
  show({ ...choices.defaults, ...Object.fromEntries(new URLSearchParams(query)) });
  return ask(query, { keeps: true });
}

async function checkConfig(event) {
  event.preventDefault();
  const fields = event.target.elements;
  const checked = JSON.parse(await call("check", fields.text.value, fields.devices.value.trim()));
  $("checked").parentElement.hidden = false;
  $("checked").textContent = checked.error ?? [...checked.findings, ...checked.changes.map((change) => `- ${change}`)].join("\n");
}

async function runCommand(event) {
  event.preventDefault();
  const { text } = JSON.parse(await call("run", event.target.elements.line.value));
  $("output").parentElement.hidden = false;
  $("output").textContent = text;
}

function start() {
  document.documentElement.dataset.started = "yes"; // unsupported.js looks for it
  prepare();
  show({ ...choices.defaults, ...Object.fromEntries(new URLSearchParams(location.search)) });
  try {
    worker = new Worker("worker.mjs", { type: "module" });
  } catch (error) {
    return fail(String(error));
  }
  worker.onerror = (event) => fail(event.message || "worker.mjs");
  worker.onmessage = ({ data }) => {
    if (data.state === "failed") fail(data.error);
    if (!data.id) return;
    const { resolve, reject } = calls.get(data.id);
    calls.delete(data.id);
    if ("error" in data) reject(new Error(data.error)); else resolve(data.text);
  };
  let waiting;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => ask(typed()), 150);
  });
  addEventListener("popstate", fromAddress);
  $("config-check").addEventListener("submit", checkConfig);
  $("command").addEventListener("submit", runCommand);
  // Only then: what it fetches again would compete with the first answer.
  return fromAddress().then(() => navigator.serviceWorker?.register("offline.js").catch(() => {}));
}

start();
