// The live output of a run: a virtual list over at most 50,000 lines, fed by the run's event stream.
//
//     parts of the log ─▶ Source (bytes ─▶ lines) ─▶ Lines ─▶ Viewer (about 60 elements) ─▶ one paint per frame
//     event stream    ─▶    ▲ position of the next byte, which a lost connection resumes
//
// While the reader follows, the oldest lines leave. While the reader reads, the lines stay in place, and a full list
// stops taking new lines. Following again loads the end of the output.
import {Terminal, newLine, show} from "./ansi.js";

const LINES_MAX = 50000;
const CHARACTERS_MAX = 16e6; // Of all lines, so that long lines cannot fill the memory.
const PART_BYTES = 64 << 10;
const GAP_BYTES = 256 << 10;
const ROW_PX = 18, OVERSCAN = 10;
const WORK_MS = 8, WORK_BYTES = 8 << 10; // Longest work without a chance for the browser to paint.
const SILENCE_MS = 20000;
const RETRY_MS = [500, 1000, 2000, 4000, 8000, 15000];
const PRINTED = 200;
const SCRIPT = {"HX-Request": "true"}; // Errors answer with a status instead of a page.

const view = document.getElementById("log-view");
const run = view.dataset;
const address = (path, query) => `${run.base}/${path}?${new URLSearchParams(query)}`;
const size = bytes => bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
const pause = ms => new Promise(done => setTimeout(done, ms));

class SignedOut extends Error {}

async function get(url, options = {}) {
  const answer = await fetch(url, {cache: "no-store", ...options, headers: {...SCRIPT, ...options.headers}});
  if (answer.status === 401 || answer.status === 404) throw new SignedOut();
  if (!answer.ok) throw new Error(`the server answered with status ${answer.status}`);
  return answer;
}

// A reload shows the sign-in page, or that the run is gone.
function failed(error) {
  if (error instanceof SignedOut) location.reload();
  else if (error.name !== "AbortError") connection.problem(error.message);
}

// --- lines -----------------------------------------------------------------------------------------------------------

class Lines {
  constructor() { this.clear(); }
  clear() { this.list = []; this.head = 0; this.characters = 0; this.evicted = 0; }
  get length() { return this.list.length - this.head; }
  get isFull() { return this.length >= LINES_MAX || this.characters >= CHARACTERS_MAX; }
  get isOver() { return this.length > 1 && (this.length > LINES_MAX || this.characters > CHARACTERS_MAX); }
  at(index) { return this.list[this.head + index]; }
  indexOf(line) { const found = this.list.indexOf(line, this.head); return found < 0 ? -1 : found - this.head; }
  push(line) { this.list.push(line); }

  evict() { // The oldest lines leave.
    while (this.isOver) {
      const line = this.list[this.head];
      this.list[this.head++] = undefined;
      this.characters -= line.text.length;
      line.isGone = true;
      this.evicted++;
      if (line.source) line.source.first = Math.max(line.source.first, line.next ?? line.offset);
    }
    if (this.head > 8192 && this.head > this.list.length / 2) { this.list = this.list.slice(this.head); this.head = 0; }
  }

  replace(index, count, lines) {
    for (const line of lines) this.characters += line.text.length;
    for (let at = index; at < index + count; at++) this.characters -= this.at(at).text.length;
    this.list = [...this.list.slice(this.head, this.head + index), ...lines, ...this.list.slice(this.head + index + count)];
    this.head = 0;
    let dropped = 0;
    while (this.isOver && dropped < lines.length) { this.characters -= this.list.pop().text.length; dropped++; }
    return dropped;
  }
}

const lines = new Lines();

// One output stream: its decoder, its terminal and its position.
class Source {
  constructor(fence, rank, stream, first) {
    Object.assign(this, {fence, rank, stream, first, position: first});
    this.restart();
  }
  get key() { return `${this.fence}.${this.rank}.${this.stream}`; }
  restart() { this.decoder = new TextDecoder("utf-8", {ignoreBOM: true}); this.terminal = new Terminal(); this.line = null; }

  // Adds bytes at the position. `add` receives each line at its first byte; the line then grows.
  write(bytes, add) {
    let at = 0;
    while (at < bytes.length) {
      const end = bytes.indexOf(10, at), stop = end < 0 ? bytes.length : end;
      if (!this.line) { this.line = newLine(this, this.position + at); add(this.line); }
      const before = this.line.text.length;
      if (stop > at || end >= 0) {
        const text = this.decoder.decode(bytes.subarray(at, stop), {stream: end < 0});
        if (text) this.terminal.write(this.line, text);
      }
      if (!this.line.isGone) lines.characters += this.line.text.length - before;
      if (end >= 0) { this.line.next = this.position + end + 1; this.line = null; this.terminal.endLine(); }
      at = stop + 1;
    }
    this.position += bytes.length;
  }
}

let sources = new Map();

function sourceOf(fence, rank, stream, first = 0) {
  const key = `${fence}.${rank}.${stream}`;
  let source = sources.get(key);
  if (!source) { source = new Source(fence, rank, stream, first); sources.set(key, source); }
  return source;
}

// The lines of a part that begins at any byte. A part within a log begins after its first line feed.
async function part(source, from, to, aligned = false) {
  const query = {fence: source.fence, rank: source.rank, stream: source.stream, offset: from, limit: to - from};
  let bytes = new Uint8Array(await (await get(address("logs/part", query))).arrayBuffer());
  if (from > 0 && !aligned) {
    const feed = bytes.indexOf(10);
    if (feed >= 0 && feed + 1 < bytes.length) { bytes = bytes.subarray(feed + 1); from += feed + 1; }
  }
  return {bytes, from, to: from + bytes.length};
}

function gapLine(source, from, to) {
  return Object.assign(newLine(source, from), {gap: {from, to}, next: to});
}

function linesOf(source, {bytes, from}) {
  const reader = new Source(source.fence, source.rank, source.stream, from), found = [];
  const counted = lines.characters;
  reader.write(bytes, line => found.push(line));
  lines.characters = counted; // `replace` counts the lines.
  for (const line of found) line.source = source;
  return found;
}

// --- selection of ranks and streams --------------------------------------------------------------------------------

const form = document.getElementById("log-form");
const wanted = {rank: run.rank, stream: run.stream};
const isWanted = (rank, stream) => (wanted.rank === "" || Number(wanted.rank) === rank) && (!wanted.stream || wanted.stream === stream);

// --- what the reader sees ------------------------------------------------------------------------------------------

const scroller = document.getElementById("log-scroll"), spacer = document.getElementById("log-spacer");
const box = document.getElementById("log-rows"), empty = document.getElementById("log-empty");
const older = document.getElementById("log-older"), newer = document.getElementById("log-newer");
const followButton = document.getElementById("log-follow"), detail = document.getElementById("log-detail");
const rows = [];
let follows = true, isDetached = false, isDropping = false, newLines = 0, dirty = false, lastTop = 0, selected = null;

function repaint() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(paint);
}

function from(line) {
  const parts = [];
  if (wanted.rank === "" && run.ranks !== "1") parts.push(line.source.rank);
  if (line.source.stream === "stderr") parts.push("err");
  return parts.join(" ");
}

function render(row, line) {
  if (row.line === line && row.version === line.version && row.selected === (line === selected)) return;
  row.line = line;
  row.version = line.version;
  row.selected = line === selected;
  row.element.className = `log-row${line.source?.stream === "stderr" ? " err" : ""}${line === selected ? " selected" : ""}${line.gap ? " gap" : ""}`;
  row.from.textContent = line.source && !line.gap ? from(line) : "";
  if (line.gap) row.text.textContent = line.gap.to > line.gap.from
    ? `⋯ ${size(line.gap.to - line.gap.from)} of rank ${line.source.rank} (${line.source.stream}) not shown. Click to load.` : line.gap.text;
  else show(line, row.text);
  row.cut.textContent = line.cut ? `… ${line.cut} more characters` : "";
}

function makeRow() {
  const make = (name, parent) => { const made = document.createElement(parent ? "span" : "div"); made.className = name; parent?.append(made); return made; };
  const element = make("log-row");
  const row = {element, from: make("log-from", element), text: make("log-text", element), cut: make("log-cut", element), line: null, version: -1, selected: false};
  row.element.row = row;
  box.append(element);
  rows.push(row);
}

const above = () => older.hidden ? 0 : older.offsetHeight;

function paint() {
  dirty = false;
  const hidden = [...sources.values()].reduce((sum, source) => sum + source.first, 0);
  older.hidden = !hidden || !lines.length;
  if (hidden) older.textContent = `Load older output (${size(hidden)})`;
  newer.hidden = !isDetached || !lines.length;
  empty.hidden = lines.length > 0;
  spacer.style.height = `${lines.length * ROW_PX}px`;
  if (follows) scroller.scrollTop = scroller.scrollHeight;
  lastTop = scroller.scrollTop;
  const height = scroller.clientHeight, count = Math.ceil(height / ROW_PX) + 2 * OVERSCAN;
  while (rows.length < count) makeRow();
  const first = Math.max(0, Math.min(lines.length - count, Math.floor((lastTop - above()) / ROW_PX) - OVERSCAN));
  box.style.transform = `translateY(${first * ROW_PX}px)`;
  for (let at = 0; at < rows.length; at++) {
    const line = at < count ? lines.at(first + at) : undefined;
    if (rows[at].element.hidden !== !line) rows[at].element.hidden = !line;
    if (line) render(rows[at], line);
  }
  const text = isDetached || (connection.isDone && !follows) ? "Go to the end" : connection.isDone ? "At the end" : follows ? "Following" : newLines ? `${newLines.toLocaleString("en")} new lines ↓` : "Follow";
  if (followButton.textContent !== text) followButton.textContent = text;
  followButton.setAttribute("aria-pressed", String(follows));
}

function stay(index) { scroller.scrollTop = Math.max(0, above() + index * ROW_PX); }

function add(line) {
  lines.push(line);
  if (follows) lines.evict();
  else newLines++;
}

// Takes bytes of the stream, in order.
function take(source, bytes) {
  if (isDropping || (!follows && lines.isFull)) {
    isDropping = true;
    for (let at = bytes.indexOf(10); at >= 0; at = bytes.indexOf(10, at + 1)) newLines++;
    source.position += bytes.length;
  }
  else source.write(bytes, add);
  repaint();
}

// --- the ends of the list ------------------------------------------------------------------------------------------

let isLoading = false;

async function loading(work) {
  if (isLoading) return;
  isLoading = true;
  scroller.setAttribute("aria-busy", "true");
  try { await work(); } catch (error) { failed(error); }
  finally { isLoading = false; scroller.removeAttribute("aria-busy"); repaint(); }
}

function pauseHere() {
  if (follows) { follows = false; newLines = 0; }
  repaint();
}

async function loadOlder() {
  pauseHere();
  const waiting = [...sources.values()].filter(source => source.first > 0).slice(0, 8);
  for (const source of waiting.reverse()) {
    const found = await part(source, Math.max(0, source.first - PART_BYTES), source.first);
    const top = scroller.scrollTop, older = linesOf(source, found);
    source.first = found.from;
    if (lines.replace(0, 0, older)) isDetached = true;
    paint();
    scroller.scrollTop = top + older.length * ROW_PX;
  }
}

async function loadNewer() {
  const last = lines.at(lines.length - 1);
  if (!isDetached || !last?.source) return;
  const start = last.next ?? last.offset;
  const found = await part(last.source, start, start + PART_BYTES, true);
  if (last.next === undefined && found.bytes.length) lines.replace(lines.length - 1, 1, []);
  const more = linesOf(last.source, found);
  for (const line of more) { lines.push(line); lines.characters += line.text.length; }
  const top = scroller.scrollTop, before = lines.evicted;
  lines.evict();
  scroller.scrollTop = top - (lines.evicted - before) * ROW_PX;
  if (found.bytes.length < PART_BYTES) await followEnd();
}

async function loadGap(line) {
  pauseHere();
  const index = lines.indexOf(line), {from, to} = line.gap;
  if (index < 0) return;
  const stop = Math.min(to, from + GAP_BYTES), found = await part(line.source, from, stop, true);
  if (stop < to && found.bytes.length) { // The rest of the gap begins with a whole line.
    const feed = found.bytes.lastIndexOf(10) + 1;
    if (feed) found.bytes = found.bytes.subarray(0, feed);
  }
  const more = linesOf(line.source, found), rest = from + found.bytes.length;
  if (rest < to && found.bytes.length) {
    more.push(gapLine(line.source, rest, to));
  }
  if (lines.replace(index, 1, more)) isDropping = true;
}

// Shows the output around an offset. The connection ends until the reader goes to the end again.
async function seek(rank, stream, offset, fence = Number(run.fence)) {
  connection.close();
  clear();
  follows = false;
  isDetached = true;
  const source = sourceOf(fence, rank, stream);
  const found = await part(source, Math.max(0, offset - PART_BYTES / 2), offset + PART_BYTES);
  source.first = found.from;
  lines.replace(0, 0, linesOf(source, found));
  let index = 0;
  while (index + 1 < lines.length && lines.at(index + 1).offset <= offset) index++;
  paint();
  select(lines.at(index) ?? null);
  stay(index - Math.floor(scroller.clientHeight / ROW_PX / 2));
  connection.show("paused", "an older part");
}

function clear() {
  lines.clear();
  sources = new Map();
  follows = true;
  isDetached = isDropping = false;
  newLines = 0;
  select(null);
}

// Shows the end of the output, and follows it.
async function followEnd() {
  if (!isDetached && !isDropping && connection.isOpen) { follows = true; newLines = 0; lines.evict(); repaint(); return; }
  connection.close();
  const list = await (await get(address("logs/sizes", wanted.rank === "" ? {fence: run.fence} : {fence: run.fence, rank: wanted.rank}))).json();
  const chosen = list.logs.filter(log => log.stream !== "telemetry" && isWanted(log.rank, log.stream)).slice(0, 128);
  const bytes = Math.max(4096, Math.floor(PART_BYTES / Math.max(1, chosen.length)));
  const parts = [];
  for (let at = 0; at < chosen.length; at += 4) { // A browser opens six connections to a server.
    parts.push(...await Promise.all(chosen.slice(at, at + 4).map(async log => {
      const source = new Source(list.fence, log.rank, log.stream, 0);
      return [log, await part(source, Math.max(0, log.size - bytes), log.size)];
    })));
  }
  clear();
  for (const [log, found] of parts) {
    const source = sourceOf(list.fence, log.rank, log.stream, found.from);
    source.write(found.bytes, line => { lines.push(line); });
  }
  repaint();
  if (list.complete) connection.finish();
  else connection.open(list.fence);
}

// --- the event stream ------------------------------------------------------------------------------------------------

class Connection {
  constructor() { this.controller = null; this.element = document.getElementById("log-connection"); this.after = 0; this.fence = 0; this.heard = 0; this.isDone = false; }
  get isOpen() { return this.controller !== null || this.isDone; }

  show(state, text) {
    this.element.className = `connection ${state}`;
    if (this.element.textContent !== text) this.element.textContent = text;
  }
  problem(text) { this.show("stale", text); }
  lost() {
    const since = new Date(this.heard || Date.now()).toLocaleTimeString([], {timeZoneName: "short"});
    this.show("stale", `not live since ${since}`);
  }

  close() { this.controller?.abort(); this.controller = null; this.isDone = false; }

  finish() { this.controller = null; this.isDone = true; this.show("done", "complete"); repaint(); }

  async open(fence) {
    this.close();
    this.fence = fence;
    const controller = this.controller = new AbortController();
    for (let failures = 0; this.controller === controller;) {
      if (document.hidden) { // A browser opens six connections to a server: a hidden page needs none.
        this.show("", "paused while hidden");
        await new Promise(done => document.addEventListener("visibilitychange", done, {once: true}));
        continue;
      }
      try {
        if (await this.read(controller)) { this.finish(); return; }
        failures = this.hasHeard ? 0 : failures + 1;
      }
      catch (error) {
        if (this.controller !== controller) return;
        if (error instanceof SignedOut) { location.reload(); return; }
        failures = this.hasHeard ? 0 : failures + 1;
      }
      if (document.hidden) continue;
      this.lost();
      await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)] * (0.75 + Math.random() / 2));
    }
  }

  offsets() {
    const all = [...sources.values()].map(source => `${source.key}:${source.position}`);
    if (!all.length && this.fence) all.push(`${this.fence}.0.stdout:0`); // Skips the output of earlier attempts.
    return all.join(",");
  }

  // Reads the stream until it ends. Returns true after the last message of the run.
  async read(controller) {
    this.hasHeard = false;
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    controller.signal.addEventListener("abort", stop);
    const hide = () => { if (document.hidden) stop(); };
    document.addEventListener("visibilitychange", hide);
    const watch = setInterval(() => { if (Date.now() - this.heard > SILENCE_MS) stop(); }, 1000);
    this.heard = Date.now();
    try {
      const query = {after: this.after, offsets: this.offsets(), ranks: wanted.rank === "" ? "all" : wanted.rank};
      const answer = await get(address("stream", query), {headers: {Accept: "text/event-stream"}, signal: attempt.signal});
      if (!answer.headers.get("Content-Type")?.startsWith("text/event-stream")) throw new SignedOut();
      const reader = answer.body.getReader(), decoder = new TextDecoder();
      let text = "", began = performance.now();
      const rest = async () => {
        if (performance.now() - began > WORK_MS) { await pause(0); began = performance.now(); }
        return !attempt.signal.aborted; // The list may show something else after the pause.
      };
      for (;;) {
        const {done, value} = await reader.read();
        if (done) return false;
        this.heard = Date.now();
        this.hasHeard = true;
        this.show("live", "live");
        text += decoder.decode(value, {stream: true});
        for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
          if (!text.startsWith("data: ")) continue; // A comment keeps the connection alive.
          const message = JSON.parse(text.slice(6, end));
          await this.receive(message, rest);
          if (attempt.signal.aborted) return false;
          if (message.type === "settled") return true;
        }
      }
    }
    finally {
      clearInterval(watch);
      document.removeEventListener("visibilitychange", hide);
      controller.signal.removeEventListener("abort", stop);
      attempt.abort();
    }
  }

  async receive(message, rest) {
    if (message.seq) this.after = Math.max(this.after, message.seq);
    if (message.type === "log" && isWanted(message.rank, message.stream)) {
      const bytes = decode(message.data), source = this.at(message);
      if (source.position < message.offset) source.position = message.offset;
      // Bytes before the position are already in the list.
      for (let at = source.position - message.offset; at < bytes.length && await rest(); at += WORK_BYTES) {
        take(source, bytes.subarray(at, at + WORK_BYTES));
      }
    }
    else if (message.type === "gap" && isWanted(message.rank, message.stream)) {
      const source = this.at(message), line = gapLine(source, message.offset, message.offset + message.size);
      source.restart();
      source.position = line.gap.to;
      if (!isDropping) add(line);
      repaint();
    }
    else if (message.type === "state" || message.type === "ended" || message.type === "settled") refresh();
  }

  at({fence, rank, stream, offset}) {
    if (fence > this.fence && this.fence) {
      const mark = newLine(null, 0);
      mark.gap = {from: 0, to: 0, text: `— attempt ${fence} —`};
      if (!isDropping) add(mark);
    }
    this.fence = Math.max(this.fence, fence);
    return sourceOf(fence, rank, stream, offset);
  }
}

function decode(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

const connection = new Connection();

// The header of the page changes with the run. This page has no second stream for it.
let isRefreshing = false;
async function refresh() {
  if (isRefreshing) return;
  isRefreshing = true;
  await pause(1000);
  isRefreshing = false;
  try { await replacePart(location.href, "run-head"); } catch (error) { failed(error); }
}

async function replacePart(url, id) {
  const page = new DOMParser().parseFromString(await (await get(url)).text(), "text/html");
  const found = page.getElementById(id), there = document.getElementById(id);
  if (!found || !there) return;
  there.replaceWith(document.importNode(found, true));
  document.dispatchEvent(new CustomEvent("htmx:after:swap"));
}

// --- the selected line -----------------------------------------------------------------------------------------------

function select(line) {
  selected = line?.source && !line.gap ? line : null;
  detail.hidden = !selected;
  if (selected) {
    const {source, offset} = selected;
    detail.querySelector("pre").textContent = selected.text + (selected.cut ? `… ${selected.cut} more characters` : "");
    detail.querySelector(".muted").textContent = `Rank ${source.rank}, ${source.stream}, attempt ${source.fence}, byte ${offset.toLocaleString("en")}`;
    const query = new URLSearchParams({fence: source.fence, rank: source.rank, stream: source.stream, at: offset});
    detail.querySelector("a").href = `${location.pathname}?${query}`;
  }
  repaint();
}

function moveSelection(step) {
  const index = Math.max(0, Math.min(lines.length - 1, lines.indexOf(selected) + step));
  pauseHere();
  select(lines.at(index));
  const top = above() + index * ROW_PX;
  if (top < scroller.scrollTop) scroller.scrollTop = top;
  if (top + ROW_PX > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW_PX - scroller.clientHeight;
}

box.addEventListener("click", event => {
  const line = event.target.closest(".log-row")?.row.line;
  if (!line || String(getSelection())) return;
  if (line.gap) { if (line.gap.to > line.gap.from) loading(() => loadGap(line)); }
  else { pauseHere(); select(line === selected ? null : line); }
});

// --- actions ---------------------------------------------------------------------------------------------------------

scroller.addEventListener("scroll", () => {
  const top = scroller.scrollTop, isEnd = top + scroller.clientHeight >= scroller.scrollHeight - 4;
  if (follows && top < lastTop - 1 && !isEnd) pauseHere();
  else if (!follows && isEnd && top > lastTop && !isDetached && !isDropping && !selected) { follows = true; newLines = 0; }
  repaint();
}, {passive: true});
new ResizeObserver(repaint).observe(scroller);

older.addEventListener("click", () => loading(loadOlder));
newer.addEventListener("click", () => loading(loadNewer));
followButton.addEventListener("click", () => {
  if (follows) pauseHere();
  else loading(followEnd);
});
detail.querySelector("button").addEventListener("click", () => { select(null); scroller.focus(); });

scroller.addEventListener("keydown", event => {
  if (event.key === "Enter" && lines.length) {
    const first = Math.floor((scroller.scrollTop - above()) / ROW_PX);
    if (!selected) { pauseHere(); select(lines.at(Math.max(0, Math.min(lines.length - 1, first + 1)))); }
  }
  else if (event.key === "Escape" && selected) select(null);
  else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && selected) { event.preventDefault(); moveSelection(event.key === "ArrowDown" ? 1 : -1); }
});

let match = -1;

function goToMatch(step) {
  const links = [...document.querySelectorAll("#log-matches a[data-offset]")];
  if (!links.length) return;
  links[match]?.removeAttribute("aria-current");
  match = (match + step + links.length) % links.length;
  const link = links[match];
  link.setAttribute("aria-current", "true");
  link.scrollIntoView({block: "nearest"});
  const {rank, stream, offset, fence} = link.dataset;
  loading(() => seek(Number(rank), stream, Number(offset), Number(fence)));
}

document.addEventListener("click", event => {
  const link = event.target.closest("#log-matches a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  if (link.dataset.offset === undefined) { // Clears the search, or continues it.
    match = -1;
    if ("clear" in link.dataset) { form.elements.q.value = ""; history.replaceState(null, "", link.href); }
    replacePart(link.href, "log-matches").catch(failed);
    return;
  }
  const links = [...document.querySelectorAll("#log-matches a[data-offset]")];
  links[match]?.removeAttribute("aria-current");
  match = links.indexOf(link) - 1;
  goToMatch(1);
});

// A search keeps the log in place. Other choices load the page.
form.addEventListener("submit", event => {
  const text = form.elements.q.value, url = `${location.pathname}?${new URLSearchParams(new FormData(form))}`;
  const isSame = ["rank", "stream", "fence"].every(name => (form.elements[name]?.value ?? run[name] ?? "") === (run[name] ?? ""));
  if (!isSame || !text) return;
  event.preventDefault();
  match = -1;
  history.replaceState(null, "", url);
  replacePart(url, "log-matches").catch(failed);
});
for (const choice of form.querySelectorAll("select")) choice.addEventListener("change", () => form.requestSubmit());

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const rank = form.elements.rank;
  if (event.key === "f") followButton.click();
  else if (event.key === "n") goToMatch(1);
  else if (event.key === "N") goToMatch(-1);
  else if ((event.key === "[" || event.key === "]") && rank?.options) {
    const next = rank.selectedIndex + (event.key === "]" ? 1 : -1);
    if (next >= 0 && next < rank.options.length) { rank.selectedIndex = next; form.requestSubmit(); }
  }
});

addEventListener("beforeprint", () => {
  const print = document.getElementById("log-print");
  const first = Math.max(0, lines.length - PRINTED);
  print.textContent = Array.from({length: lines.length - first}, (_, at) => lines.at(first + at).text).join("\n");
});

view.hidden = false;
if (run.at) loading(() => seek(Number(run.rank), run.stream || "stdout", Number(run.at)));
else loading(followEnd);
