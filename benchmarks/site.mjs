// Drives the calculator in a headless Chromium, and writes what it saw to seen.json. Called by site.py:
//   node site.mjs MODULES CHROMIUM ORIGIN SCREENSHOTS QUESTIONS.json
// Prints a line "cut" when the server has to be stopped, and goes on when a line comes on stdin.
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

const [modules, executablePath, origin, screenshots, questionsFile] = process.argv.slice(2);
const require = createRequire(join(modules, "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const questions = JSON.parse(readFileSync(questionsFile, "utf8"));
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];

const seen = { answers: [], findings: [], foreign: [], wide: [], console: [], messages: {} };

function watch(page) {
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(origin) && !url.startsWith("data:") && !url.startsWith("blob:")) seen.foreign.push(url);
  });
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.console.push(message.text()));
  page.on("pageerror", (error) => seen.console.push(String(error)));
}

const nextAnswer = (page) => page.evaluate(() => new Promise((resolve, reject) => {
  setTimeout(() => reject(new Error(`no answer: ${document.querySelector("main").innerText.slice(0, 300)}`)), 60000);
  document.addEventListener("answered", ({ detail }) => resolve(detail), { once: true });
}));

// As if the address had been changed: the page reads it, Python answers.
async function ask(page, query) {
  const detail = await page.evaluate((text) => new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error(`no answer to ${text}`)), 60000);
    document.addEventListener("answered", ({ detail }) => resolve(detail), { once: true });
    history.pushState(null, "", `?${text}`);
    dispatchEvent(new PopStateEvent("popstate"));
  }), query);
  const answer = JSON.parse(detail.raw);
  const shown = (await page.locator("error" in answer ? "#problem" : "#verdict").textContent()).trim();
  return { query, raw: detail.raw, milliseconds: detail.milliseconds, shown: shown === (answer.error ?? answer.summary).trim() };
}

async function judge(page, name) {
  await page.evaluate(axe);
  const { violations, incomplete } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  for (const { id, impact, nodes } of violations) seen.findings.push({ name, id, impact, nodes: nodes.slice(0, 3).map((node) => node.html) });
  const tooWide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (tooWide > 0) seen.wide.push(`${name}: ${tooWide} px`);
  await page.screenshot({ path: join(screenshots, `${name}.png`), fullPage: true });
}

// Seconds of processor time of the browser so far: what a machine that does nothing else would need at most.
function processorSeconds() {
  const parents = new Map();
  const ticks = new Map();
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      const fields = readFileSync(`/proc/${pid}/stat`, "utf8").replace(/^.*\) /s, "").split(" ");
      parents.set(pid, fields[1]);
      ticks.set(pid, Number(fields[11]) + Number(fields[12]));
    } catch { /* it ended meanwhile */ }
  }
  const isOurs = (pid) => pid !== undefined && (pid === String(process.pid) || isOurs(parents.get(pid)));
  return [...ticks].filter(([pid]) => pid !== String(process.pid) && isOurs(pid)).reduce((sum, [, n]) => sum + n, 0) / 100;
}

const profile = mkdtempSync(join(tmpdir(), "site-profile-"));
try {
  const browser = await chromium.launchPersistentContext(profile, { executablePath, headless: true, args: FLAGS, viewport: { width: 1280, height: 900 } });
  const page = await browser.newPage();
  watch(page);
  const started = Date.now();
  const before = processorSeconds();
  await page.goto(`${origin}/calculator/?${questions[0]}`, { waitUntil: "domcontentloaded" });
  const first = await nextAnswer(page);
  seen.coldSeconds = (Date.now() - started) / 1000;
  seen.coldProcessorSeconds = processorSeconds() - before;
  seen.answers.push({ query: questions[0], raw: first.raw, milliseconds: null, shown: true, online: true });
  const half = Math.ceil(questions.length / 2);
  for (const query of questions.slice(1, half)) seen.answers.push({ ...(await ask(page, query)), online: true });

  for (const [file, language] of [["", "en"], ["zh.html", "zh"]]) {
    for (const scheme of ["light", "dark"]) {
      for (const width of [1280, 375]) {
        await page.emulateMedia({ colorScheme: scheme });
        await page.setViewportSize({ width, height: 900 });
        for (const [state, query] of [["fits", "model=llama-3-8b&card=a100-80gb&batch=100&devices=4"], ["not", "model=llama-3-70b&card=rtx-4090-24gb&tuning=full"], ["error", "model=lama-9b"]]) {
          await page.goto(`${origin}/calculator/${file}?${query}`, { waitUntil: "domcontentloaded" });
          await nextAnswer(page);
          if (state === "fits") {
            await page.locator("#config-check button:not(.copy)").click();
            await page.locator("#checked:not(:empty)").waitFor();
            await page.locator("#command button:not(.copy)").click();
            await page.locator("#output:not(:empty)").waitFor();
            if (language === "en") seen.messages.command = await page.locator("#output").textContent();
            if (language === "en") seen.messages.checked = await page.locator("#checked").textContent();
          }
          if (state !== "error" || width === 375) await judge(page, `${language}-${scheme}-${width}-${state}`);
        }
      }
    }
  }

  // A person at the keyboard: type a batch, choose a card; the address follows.
  await page.emulateMedia({ colorScheme: "light" });
  await page.goto(`${origin}/calculator/`, { waitUntil: "domcontentloaded" });
  await nextAnswer(page);
  const typed = nextAnswer(page);
  await page.locator("[name=batch]").fill("96");
  await typed;
  seen.messages.address = new URL(page.url()).search;

  // The network is cut: the server ends, the page is loaded anew.
  await page.evaluate(() => navigator.serviceWorker.ready.then(() => true));
  await page.waitForFunction(() => navigator.serviceWorker.controller !== null, null, { timeout: 20000 }).catch(() => {});
  console.log("cut");
  await new Promise((resolve) => createInterface({ input: process.stdin }).once("line", resolve));
  await browser.setOffline(true);
  const offline = Date.now();
  await page.goto(`${origin}/calculator/?${questions[half]}`, { waitUntil: "domcontentloaded" });
  const again = await nextAnswer(page);
  seen.offlineSeconds = (Date.now() - offline) / 1000;
  seen.answers.push({ query: questions[half], raw: again.raw, milliseconds: null, shown: true, online: false });
  for (const query of questions.slice(half + 1)) seen.answers.push({ ...(await ask(page, query)), online: false });
  await browser.close();
} finally {
  rmSync(profile, { recursive: true, force: true });
}
writeFileSync(join(screenshots, "seen.json"), JSON.stringify(seen));
process.exit(0);
