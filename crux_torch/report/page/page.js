"use strict";
// Replaces the parts of the page that have changed; the server has written and escaped all of it.
const said = document.getElementById("connection");
let wanted = 0;

async function refresh() {
  const mine = ++wanted;
  const answer = await fetch(location.href);
  const text = await answer.text();
  if (mine !== wanted) return;
  const now = new DOMParser().parseFromString(text, "text/html");
  for (const old of document.querySelectorAll("[data-live]")) {
    const made = now.getElementById(old.id);
    if (!made || made.outerHTML === old.outerHTML) continue;
    const focused = old.contains(document.activeElement) && document.activeElement;
    const href = focused && focused.getAttribute("href");
    old.replaceWith(document.adoptNode(made));
    if (focused) {
      const same = [...made.querySelectorAll("a")].find((a) => a.getAttribute("href") === href);
      (same || made).focus({ preventScroll: true });
    }
  }
}

async function go(address) {
  history.pushState(null, "", address);
  await refresh();
  const detail = document.getElementById("detail");
  if (detail.childElementCount) {
    detail.focus({ preventScroll: true });
    detail.scrollIntoView({ block: "nearest" });
  }
}

document.addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  const on = event.target.closest("a[href^='?'], [data-link], [data-place]");
  if (!on) return;
  event.preventDefault();
  for (const kind of ["link", "place"])
    if (on.dataset[kind] !== undefined)
      return go("?" + new URLSearchParams({ [kind]: on.dataset[kind] }));
  go(on.getAttribute("href") === "?" ? location.pathname : on.getAttribute("href"));
});
window.addEventListener("popstate", refresh);

const events = new EventSource("events");
events.onmessage = () => refresh().catch(() => {});
events.onopen = () => { said.textContent = ""; };
events.onerror = () => { said.textContent = "The page's server does not answer; the page shows what it last said."; };
