// In old JavaScript, for browsers that cannot read calculator.mjs: by the time the page has loaded, that would have started.
addEventListener("load", function () {
  if (document.documentElement.getAttribute("data-started")) return;
  document.getElementById("loading").hidden = true;
  document.getElementById("unsupported").hidden = false;
});
