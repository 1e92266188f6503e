// Charts with zoom in place of the server's SVG pictures. One request loads the values of all charts of the page.
//
//     a selected range ─▶ the server downsamples this range again ─▶ all charts show it; one cursor in all charts
//     every 5 s ─▶ only the newest points, with the same width of the buckets
"use strict";

{
const MOUNTED_MAX = 6;
const LIVE_MS = 5000;
const POINTS_MAX = 1000; // A longer series loads again with wider buckets.
const HEIGHT = 190;
const DASHES = [[], [6, 4], [2, 3]];
const UNITS = {percent: "%", celsius: "°C", watts: "W"};

const page = document.getElementById("metrics");
const state = document.getElementById("metrics-state");
const zoneName = document.body.dataset.zone;
let values = null; // The last answer of the server.
let zoomed = null; // [from, to] in milliseconds, or null for all.
let asked = 0;
const figures = [...page.querySelectorAll("figure.chart")].map(element => ({element, name: element.dataset.chart,
  plot: null, still: element.querySelector(".plot").firstElementChild, isVisible: false}));

function measure(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit !== "bytes") return `${Math.abs(value) >= 10 ? Math.round(value) : Number(value.toPrecision(3))} ${UNITS[unit]}`;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (value >= 999.95 && power < units.length - 1) { value /= 1000; power++; }
  return `${power ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- values ----------------------------------------------------------------------------------------------------------

class Gone extends Error {}

async function load(query) {
  const {fence, node, last} = page.dataset;
  const parameters = new URLSearchParams({fence, node, ...query});
  if (!zoomed && !("from_ms" in query) && last !== "0") parameters.set("last_ms", last);
  const answer = await fetch(`${page.dataset.source}?${parameters}`, {headers: {"HX-Request": "true"}, cache: "no-store"});
  if (answer.status === 401 || answer.status === 404) throw new Gone();
  if (!answer.ok) throw new Error(`the server answered with status ${answer.status}`);
  return answer.json();
}

function buckets() {
  const width = Math.max(...figures.map(figure => figure.element.clientWidth), 250);
  return width > 900 ? 1000 : width > 450 ? 500 : 250;
}

async function loadAll() {
  const number = ++asked;
  const range = zoomed ? {from_ms: Math.round(zoomed[0]), to_ms: Math.round(zoomed[1])} : {};
  const found = await load({buckets: buckets(), ...range});
  if (number !== asked) return; // The reader has selected another range.
  values = found;
  draw();
}

// Replaces the newest points, or loads everything again if the series needs wider buckets.
async function loadNewest() {
  const last = values.times_ms.at(-1), start = Math.floor(last / values.step_ms) * values.step_ms;
  if (values.times_ms.length >= POINTS_MAX || page.dataset.last !== "0") return loadAll();
  const number = ++asked;
  const found = await load({from_ms: start, step_ms: values.step_ms, buckets: 1000});
  if (number !== asked) return;
  if (!found.times_ms.length) { values.complete = found.complete; return; }
  if (found.step_ms !== values.step_ms || found.charts.length !== values.charts.length) return loadAll();
  const keep = values.times_ms.findIndex(at => at >= start), head = list => list.slice(0, keep < 0 ? undefined : keep);
  const older = new Map(values.charts.flatMap(chart => chart.lines.map(line => [`${chart.name} ${line.label}`, line])));
  const none = Array(head(values.times_ms).length).fill(null);
  for (const chart of found.charts) {
    for (const line of chart.lines) {
      const before = older.get(`${chart.name} ${line.label}`), mean = before ? before.mean : none;
      const edge = name => [...head(before ? before[name].length ? before[name] : mean : none), ...(line[name].length ? line[name] : line.mean)];
      [line.minimum, line.maximum, line.mean] = [edge("minimum"), edge("maximum"), [...head(mean), ...line.mean]];
    }
  }
  found.times_ms = [...head(values.times_ms), ...found.times_ms];
  values = found;
  draw();
}

// --- drawing -----------------------------------------------------------------------------------------------------------

function chartOf(figure) { return values?.charts.find(chart => chart.name === figure.name); }

function data(chart) {
  const columns = [values.times_ms.map(at => at / 1000)];
  for (const line of chart.lines) columns.push(line.mean, line.minimum.length ? line.minimum : line.mean, line.maximum.length ? line.maximum : line.mean);
  return columns;
}

function range() {
  if (zoomed) return zoomed.map(at => at / 1000);
  const times = values.times_ms, first = times[0] / 1000, last = times.at(-1) / 1000;
  return last > first ? [first, last] : [first - 1, last + 1];
}

function options(figure, chart) {
  const unit = figure.element.dataset.unit, limit = Number(figure.element.dataset.limit) || 0;
  const text = colour("--muted"), grid = colour("--line");
  const series = [{}], bands = [];
  chart.lines.forEach((line, number) => {
    const stroke = colour(`--line${number % 8}`), at = series.length;
    series.push({label: line.label, stroke, width: 1.5, dash: DASHES[Math.floor(number / 8) % 3], points: {show: chart.lines[0].mean.length < 3, size: 5}},
      {stroke: `${stroke}8c`, width: 0.75, points: {show: false}}, {stroke: `${stroke}8c`, width: 0.75, points: {show: false}});
    bands.push({series: [at + 2, at + 1], fill: `${stroke}2e`});
  });
  const axis = {stroke: text, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: "12px system-ui, sans-serif"};
  return {
    width: figure.element.clientWidth, height: HEIGHT, series, bands, legend: {show: false},
    tzDate: at => uPlot.tzDate(new Date(at * 1000), zoneName),
    scales: {
      x: {time: true, range: () => range()},
      y: {range: (_plot, _low, high) => [0, limit && high <= limit * 1.001 ? limit : high > 0 ? high * 1.05 : unit === "percent" ? 100 : 1]},
    },
    axes: [{...axis, values: [
      [86400, "{DD} {MMM}", null, null, null, null, null, null, 1], [3600, "{HH}:{mm}", "\n{DD} {MMM}", null, null, null, null, null, 1],
      [60, "{HH}:{mm}", "\n{DD} {MMM}", null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]],
      space: 72, incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800]},
      {...axis, size: 64, values: (_plot, ticks) => ticks.map(value => measure(value, unit))}],
    cursor: {drag: {x: true, y: false, setScale: false}, sync: {key: "metrics", setSeries: false}, points: {show: false},
      bind: {dblclick: () => () => { zoom(null); return null; }}},
    hooks: {
      setSelect: [plot => {
        const {left, width} = plot.select;
        if (width < 4) return;
        const selected = [left, left + width].map(at => plot.posToVal(at, "x") * 1000);
        plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
        zoom(selected);
      }],
      setCursor: [plot => showValues(figure, plot.cursor.idx)],
    },
  };
}

function showValues(figure, index) {
  const chart = chartOf(figure);
  figure.element.querySelectorAll(".legend .value").forEach((element, number) => {
    const value = index === null || index === undefined ? undefined : chart?.lines[number]?.mean[index];
    const shown = value === undefined ? "" : measure(value, figure.element.dataset.unit);
    if (element.textContent !== shown) element.textContent = shown;
  });
}

function mount(figure) {
  const chart = chartOf(figure);
  if (!chart || figure.plot) return;
  const target = figure.element.querySelector(".plot");
  target.replaceChildren();
  figure.lines = chart.lines.length;
  figure.plot = new uPlot(options(figure, chart), data(chart), target);
}

function unmount(figure) {
  if (!figure.plot) return;
  figure.plot.destroy();
  figure.plot = null;
  figure.element.querySelector(".plot").replaceChildren(figure.still);
}

function draw() {
  if (!values.times_ms.length) { status("no samples in this range"); return; }
  let count = 0;
  for (const figure of figures) {
    const chart = chartOf(figure), isShown = figure.isVisible && chart && count < MOUNTED_MAX;
    if (!isShown) { unmount(figure); continue; }
    count++;
    if (figure.plot && figure.lines !== chart.lines.length) unmount(figure);
    if (figure.plot) figure.plot.setData(data(chart));
    else mount(figure);
  }
  status(zoomed ? `${Math.round(values.step_ms / 1000)} s for each point` : "");
}

function status(text) { if (state && state.textContent !== text) state.textContent = text; }

function failed(error) {
  if (error instanceof Gone) location.reload(); // The reload shows the sign-in page, or that the run is gone.
  else status(`not live since ${new Date().toLocaleTimeString([], {timeZoneName: "short"})}`);
}

// --- zoom --------------------------------------------------------------------------------------------------------------

const resetButton = document.querySelector("[data-zoom=reset]");

function zoom(range) {
  if (range && zoomed && Math.abs(range[0] - zoomed[0]) < 1 && Math.abs(range[1] - zoomed[1]) < 1) return;
  if (range && range[1] - range[0] < 1000) range = [range[0] - 500, range[1] + 500];
  if (range && values && range[0] <= values.start_ms && range[1] >= values.end_ms) range = null;
  zoomed = range;
  resetButton.disabled = !range;
  loadAll().catch(failed);
}

document.addEventListener("click", event => {
  const action = event.target.closest("[data-zoom]")?.dataset.zoom;
  if (!action || !values) return;
  if (action === "reset") { zoom(null); return; }
  const [from, to] = range().map(at => at * 1000), quarter = (to - from) / 4;
  zoom(action === "in" ? [from + quarter, to - quarter] : [from - 2 * quarter, to + 2 * quarter]);
});
document.querySelectorAll("#metrics-form select").forEach(choice => choice.addEventListener("change", () => choice.form.requestSubmit()));

// --- life --------------------------------------------------------------------------------------------------------------

const observer = new IntersectionObserver(entries => {
  for (const entry of entries) figures.find(figure => figure.element === entry.target).isVisible = entry.isIntersecting;
  if (values) draw();
}, {rootMargin: "100px"});

new ResizeObserver(() => {
  for (const figure of figures) if (figure.plot) figure.plot.setSize({width: figure.element.clientWidth, height: HEIGHT});
}).observe(page);

function redraw() { for (const figure of figures) unmount(figure); if (values) draw(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new MutationObserver(redraw).observe(document.documentElement, {attributes: true, attributeFilter: ["data-theme"]});

if (figures.length) {
  for (const figure of figures) observer.observe(figure.element);
  document.getElementById("metrics-zoom").hidden = false;
  loadAll().catch(failed);
}

if ("live" in page.dataset) {
  let isBusy = false;
  setInterval(async () => {
    if (document.hidden || isBusy || zoomed) return;
    isBusy = true;
    try {
      if (!figures.length) { if ((await load({buckets: 1})).times_ms.length) location.reload(); }
      else if (!values) await loadAll();
      else if (!values.complete) await loadNewest();
    }
    catch (error) { failed(error); }
    isBusy = false;
  }, LIVE_MS);
}
}
