// What the theme leaves without a name gets one, for those who hear the page.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
const name = () => {
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => (box.tabIndex = 0));
};
name();
new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
for (const cell of document.querySelectorAll("th")) {
  if (!cell.textContent.trim()) cell.replaceWith(document.createElement("td"));
}
