// Opens pages in a headless Chromium and says what is wrong with them, as JSON on stdout. Called by report_page.py:
//   node report_page.mjs MODULES CHROMIUM FOLDER PAGE.html...
// MODULES holds playwright-core and axe-core; screenshots go to FOLDER.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, executablePath, folder, ...pages] = process.argv.slice(2);
const require = createRequire(join(modules, "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
const WIDTHS = [1280, 360];
const SCHEMES = ["light", "dark"];

// Runs in the page: texts of drawings that meet, are cut off or are too faint, and whether the page is too wide.
function look() {
  const found = { overlaps: [], clipped: [], faint: [], texts: 0, tooWide: document.documentElement.scrollWidth - innerWidth };
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(channels(one)), light(channels(other))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  for (const svg of document.querySelectorAll(".chart svg")) {
    const frame = svg.getBoundingClientRect();
    if (frame.width === 0) continue;
    const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim());
    const boxes = texts.map((text) => text.getBoundingClientRect());
    found.texts += texts.length;
    texts.forEach((text, i) => {
      const box = boxes[i];
      const words = text.textContent;
      const outside = Math.max(frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom);
      if (outside > 1 || box.left < 0 || box.right > innerWidth) found.clipped.push(`${words} by ${outside.toFixed(1)}`);
      for (let j = 0; j < i; j += 1) {
        const wide = Math.min(box.right, boxes[j].right) - Math.max(box.left, boxes[j].left);
        const high = Math.min(box.bottom, boxes[j].bottom) - Math.max(box.top, boxes[j].top);
        if (wide > 1 && high > 3) found.overlaps.push(`${texts[j].textContent} / ${words}`);
      }
      const part = [...text.classList].find((name) => name.startsWith("part-"));
      const behind = part ? getComputedStyle(svg.querySelector(`rect.${part}`)).fill : paper;
      const ratio = contrast(getComputedStyle(text).fill, behind);
      if (ratio < 4.5) found.faint.push(`${words}: ${ratio.toFixed(2)}`);
    });
  }
  return found;
}

async function copies(page) {
  const button = page.locator("button.copy").first();
  if ((await button.count()) === 0) return null;
  await button.click();
  await page.waitForTimeout(100);
  return (await button.locator("span").first().textContent()) === "Copied";
}

const profile = mkdtempSync(join(tmpdir(), "chromium-"));
const results = [];
try {
  for (const colorScheme of SCHEMES) {
    for (const width of WIDTHS) {
      // A context of its own for each: the profile starts empty.
      const context = await chromium.launchPersistentContext(join(profile, `${colorScheme}-${width}`), {
        executablePath, args: FLAGS, headless: true, colorScheme, viewport: { width, height: 900 },
        deviceScaleFactor: width < 500 ? 2 : 1,
      });
      for (const file of pages) {
        const page = await context.newPage();
        const url = pathToFileURL(file).href;
        const errors = [];
        const requests = [];
        page.on("console", (message) => ["error", "warning"].includes(message.type()) && errors.push(message.text()));
        page.on("pageerror", (error) => errors.push(String(error)));
        page.on("request", (request) => !request.url().startsWith("data:") && request.url() !== url && requests.push(request.url()));
        await page.goto(url);
        const name = basename(file, ".html");
        await page.screenshot({ path: join(folder, `${name}-${width}-${colorScheme}.png`), fullPage: true });
        const seen = await page.evaluate(look);
        const copied = await copies(page);
        await page.evaluate((details) => document.querySelectorAll(details).forEach((each) => { each.open = true; }), "details");
        await page.evaluate(axe);
        const axed = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
        const violations = axed.violations.map(({ impact, id, nodes }) => ({ impact, id, nodes: nodes.length, first: nodes[0].html.slice(0, 160) }));
        if (width > 500 && colorScheme === "light") await page.pdf({ path: join(folder, `${name}.pdf`), format: "A4", printBackground: true });
        results.push({ page: name, width, colorScheme, errors, requests, violations, copied, ...seen });
        await page.close();
      }
      await context.close();
    }
  }
} finally {
  rmSync(profile, { recursive: true, force: true });
}
console.log(JSON.stringify(results));
