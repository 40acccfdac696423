"""What to paste: the settings in each framework's own words, with a button that copies them."""

from __future__ import annotations

from batchwright.report.page.markup import Html, element, joined, missing, section
from batchwright.report.page.reading import Data, mapping_in, section_of, text_in, why_missing

HEADING = "What to paste"

# All the script there is. Without it, or where a browser keeps the clipboard from files, the text can be selected.
SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) {
  const text = button.parentElement.querySelector("pre");
  button.hidden = false;
  button.addEventListener("click", async () => {
    let copied = false;
    try {
      await navigator.clipboard.writeText(text.textContent);
      copied = true;
    } catch {
      const range = document.createRange();
      range.selectNodeContents(text);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copied = document.execCommand("copy");
    }
    button.firstChild.textContent = copied ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => { button.firstChild.textContent = "Copy"; }, 2000);
  });
}
""".strip()


def draw_configs(run: Data) -> Html:
    """Return the section."""
    found = section_of(run, "recommendation")
    texts = {name: text_in(found, "configs", name) for name in mapping_in(found, "configs")}
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        reason = "nothing was recommended" if found is not None else why_missing(run, "recommendation")
        return section("config", HEADING, missing(reason))
    return section(
        "config", HEADING, *(_one(name, text, number == 0) for number, (name, text) in enumerate(texts.items()))
    )


def _one(name: str, text: str, is_first: bool) -> Html:
    # Out of sight until the script runs; the rest of its name is for those who hear it.
    words = joined([element("span", "Copy"), element("span", f" the settings for {name}", class_="unseen")])
    button = Html(f'<button type="button" class="copy" hidden>{words}</button>')
    code = element("pre", element("code", text), tabindex="0", role="region", aria_label=f"Settings for {name}")
    inside = joined([element("summary", name), element("div", button, code, class_="paste")])
    return Html(f"<details{' open' if is_first else ''}>{inside}</details>")
