// Keeps every file of the calculator, so that it works without a network once it was loaded.
// FILES and VERSION are written when the site is built; another version takes another cache.
const VERSION = "{{version}}";
const FILES = {{files_json}};

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(VERSION).then((cache) => cache.addAll(FILES)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const drop = (names) => Promise.all(names.filter((name) => name.startsWith("calculator-") && name !== VERSION).map((name) => caches.delete(name)));
  event.waitUntil(caches.keys().then(drop).then(() => self.clients.claim()));
});

self.addEventListener("fetch", (event) => {
  // The question stands in the address: it is the page's, not the file's.
  const kept = caches.open(VERSION).then((cache) => cache.match(event.request, { ignoreSearch: true }));
  event.respondWith(kept.then((answer) => answer || fetch(event.request)));
});
