// Behaviour that all pages share: relative times, the state of the live connection, dialogs, keys and colours.
// Without this script, every page still works: links open, forms post, and a reload shows the current state.
"use strict";

const base = document.body.dataset.base;

// --- times: the server writes the exact time, this script shows how long ago it was --------------------------------

const serverAhead = Number(document.body.dataset.now) / 1e6 - Date.now(); // milliseconds
const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function distance(seconds) {
  for (const [unit, size] of units) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return "0 s";
}

function showTimes(root = document) {
  const now = Date.now() + serverAhead;
  for (const element of root.querySelectorAll("time[datetime]")) {
    if (!element.title || element.textContent !== element.dataset.shown) element.title = element.textContent;
    const seconds = (now - Date.parse(element.dateTime)) / 1000;
    const text = seconds >= 0 ? `${distance(seconds)} ago` : `in ${distance(-seconds)}`;
    if (element.textContent !== text) element.textContent = text;
    element.dataset.shown = text;
  }
}

showTimes();
setInterval(() => { if (!document.hidden) showTimes(); }, 10000);

// --- zone: the server formats times in the browser's zone from the next page on -------------------------------------

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
if (zone && zone !== document.body.dataset.zone) {
  document.cookie = `sgpu_zone=${encodeURIComponent(zone)}; path=${new URL(base, location).pathname}; max-age=31536000; samesite=strict`;
}

// --- the live connection ---------------------------------------------------------------------------------------------

const SILENCE_MS = 20000;
const connection = document.getElementById("connection");
const main = document.getElementById("main");
let heard = 0;

function showConnection(state) {
  if (!connection) return;
  connection.className = `connection ${state}`;
  const since = new Date(heard || Date.now()).toLocaleTimeString([], {timeZoneName: "short"});
  connection.textContent = state === "live" ? "live" : `not live since ${since}`;
}

function hear() {
  heard = Date.now();
  if (!connection?.classList.contains("live")) showConnection("live");
}

if (connection) {
  for (const name of ["htmx:sse:after:connection", "htmx:sse:before:message", "tick"]) main.addEventListener(name, hear);
  main.addEventListener("htmx:sse:error", event => {
    if (event.detail.status === 401 || event.detail.status === 404) {
      event.detail.connection.cancelled = true;
      location.reload(); // The reload shows the sign-in page, or that the page is gone.
    } else if (!document.hidden) showConnection("stale");
  });
  setInterval(() => {
    if (!document.hidden && heard && Date.now() - heard > SILENCE_MS && !connection.classList.contains("stale")) showConnection("stale");
  }, 1000);
}
document.addEventListener("htmx:after:swap", () => showTimes());

// --- confirmation: a form with data-confirm asks first; the first button keeps things as they are ------------------

function ask(text, action, typed) {
  return new Promise(resolve => {
    const dialog = document.createElement("dialog");
    const form = document.createElement("form");
    form.method = "dialog";
    const message = document.createElement("p");
    message.textContent = text;
    form.append(message);
    const confirm = document.createElement("button");
    confirm.value = "yes";
    confirm.className = "danger";
    confirm.textContent = action;
    if (typed) {
      const label = document.createElement("label");
      label.textContent = `Type ${typed} to confirm`;
      const input = document.createElement("input");
      label.append(input);
      form.append(label);
      confirm.disabled = true;
      input.addEventListener("input", () => { confirm.disabled = input.value !== typed; });
    }
    const row = document.createElement("div");
    row.className = "row";
    const keep = document.createElement("button");
    keep.value = "no";
    keep.textContent = "Keep";
    keep.autofocus = true;
    row.append(keep, confirm);
    form.append(row);
    dialog.append(form);
    document.body.append(dialog);
    dialog.addEventListener("close", () => { resolve(dialog.returnValue === "yes"); dialog.remove(); });
    dialog.showModal();
  });
}

document.addEventListener("submit", async event => {
  const form = event.target;
  const button = event.submitter;
  const question = button?.dataset.confirm || form.dataset?.confirm; // Forms with several buttons ask for some of them.
  if (!question || form.dataset.confirmed) return;
  event.preventDefault();
  if (await ask(question, button?.textContent.trim() || "Continue", form.dataset.typed)) {
    form.dataset.confirmed = "yes";
    form.requestSubmit(button);
    delete form.dataset.confirmed;
  }
});

// A second click must not post a form twice.
document.addEventListener("submit", event => {
  if (event.defaultPrevented || event.target.method !== "post") return;
  setTimeout(() => { for (const button of event.target.querySelectorAll("button")) button.disabled = true; });
});

// --- actions of buttons ----------------------------------------------------------------------------------------------

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `sgpu_theme=${root.dataset.theme}; path=${new URL(base, location).pathname}; max-age=31536000; samesite=strict`;
}

const KEYS = [
  ["/", "search or filter"], ["g, then a letter", "open a page"], ["j, k", "next and previous row"], ["Enter", "open the row"],
  ["f", "follow a log"], ["n, N", "next and previous match in a log"], ["[, ]", "previous and next rank of a log"],
  ["?", "this list"],
];

function showKeys() {
  const dialog = document.createElement("dialog");
  const list = document.createElement("dl");
  list.className = "facts";
  const pages = [...document.querySelectorAll("nav a[data-key]")].map(link => [`g ${link.dataset.key}`, link.textContent]);
  for (const [key, meaning] of [...KEYS, ...pages]) {
    const term = document.createElement("dt");
    const name = document.createElement("kbd");
    name.textContent = key;
    term.append(name);
    const description = document.createElement("dd");
    description.textContent = meaning;
    list.append(term, description);
  }
  const form = document.createElement("form");
  form.method = "dialog";
  const close = document.createElement("button");
  close.textContent = "Close";
  const row = document.createElement("div");
  row.className = "row";
  row.append(close);
  form.append(row);
  dialog.append(list, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

document.addEventListener("click", event => {
  const action = event.target.closest("[data-action]")?.dataset.action;
  if (action === "theme") switchTheme();
  if (action === "keys") showKeys();
  const copied = event.target.closest("[data-copy]");
  if (copied) navigator.clipboard?.writeText(copied.dataset.copy);
});

// --- keys: off while a field has the focus -----------------------------------------------------------------------------

let went = 0;

function moveRow(step) {
  const rows = [...document.querySelectorAll("main tbody tr")].filter(row => row.querySelector("a"));
  if (!rows.length) return;
  // The focus marks the row, because a live update would remove a class.
  const at = rows.findIndex(row => row.contains(document.activeElement));
  const row = rows[Math.max(0, Math.min(rows.length - 1, at + step))];
  row.querySelector("a").focus();
  row.scrollIntoView({block: "nearest"});
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  if (went && Date.now() - went < 1500) {
    went = 0;
    const link = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  if (event.key === "g") went = Date.now();
  else if (event.key === "?") showKeys();
  else if (event.key === "j") moveRow(1);
  else if (event.key === "k") moveRow(-1);
  else if (event.key === "/") {
    const field = document.querySelector("main input[type=search], main .filters input");
    if (field) { event.preventDefault(); field.focus(); }
  }
});
