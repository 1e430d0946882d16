"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const DASHES = ["", "8 4", "2 3", "8 3 2 3", "12 4 4 4"];
const hidden = new Set();
const charts = [];

const color = (i) => `var(--c${i % 7})`;
const dash = (i) => DASHES[i % DASHES.length];
const element = (name, attributes = {}, parent = null, text = null) => {
  const svg = ["svg", "path", "line", "text", "g", "rect"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
};
const short = (x) => {
  if (x === 0) return "0";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(x) >= size) return `${+(x / size).toPrecision(4)}${unit}`;
  return Math.abs(x) < 1e-3 ? x.toExponential(1) : `${+x.toPrecision(4)}`;
};
const full = (x) => (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e9) || x === 0
  ? x.toLocaleString("en-US", { maximumSignificantDigits: 6 }) : x.toExponential(3);

function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step);
  return found;
}

/* A chart of series {group, x, mean, low, high, runs}; `source` returns those of the chosen metric, and its axes. */
class Chart {
  constructor(box, source, fromZero) {
    this.box = box;
    this.fromZero = fromZero;
    this.source = source;
    this.svg = element("svg", { role: "img", tabindex: "0" }, box);
    this.tip = element("div", { class: "tip", hidden: "", role: "status" }, box);
    this.svg.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.svg.addEventListener("pointerdown", (event) => this.point(this.at(event)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(box);
    charts.push(this);
  }

  draw() {
    const { x, y, series } = this.source();
    const width = Math.max(260, this.box.clientWidth), height = Math.round(Math.min(340, Math.max(220, width * 0.6)));
    this.shown = series.filter((one) => !hidden.has(one.group));
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", `${y} against ${x}; arrow keys move the cursor`);
    const with_runs = document.getElementById("each")?.checked;
    const runs = (one) => (with_runs && one.runs) || [];
    const xs = this.shown.flatMap((one) => one.x);
    const ys = this.shown.flatMap((one) => [one.mean, one.low, one.high, ...runs(one)].flatMap((line) => line || []));
    if (!xs.length) {
      element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, this.svg, "nothing to show");
      this.place = null;
      return;
    }
    let [x0, x1, y0, y1] = [Math.min(...xs), xs.reduce((a, b) => Math.max(a, b)), Infinity, -Infinity];
    for (const value of ys) { y0 = Math.min(y0, value); y1 = Math.max(y1, value); }
    const pad = 0.05 * (y1 - y0) || Math.abs(y1) * 0.05 || 1;
    [y0, y1] = [y0 - pad, y1 + pad];
    if (x0 > 0 && x0 < 0.25 * x1 && this.fromZero) x0 = 0;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const marks = ticks(y0, y1, 5);
    const left = 14 + 7.2 * Math.max(...marks.map((mark) => short(mark).length)) + 14;
    const right = width - 14, top = 10, bottom = height - 42;
    const px = (v) => left + ((v - x0) / (x1 - x0)) * (right - left);
    const py = (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - top);
    this.place = { px, py, left, right, top, bottom, x0, x1, width };
    for (const mark of marks) {
      element("line", { class: "grid", x1: left, x2: right, y1: py(mark), y2: py(mark) }, this.svg);
      element("text", { x: left - 6, y: py(mark) + 4, "text-anchor": "end" }, this.svg, short(mark));
    }
    for (const mark of ticks(x0, x1, Math.max(3, Math.floor((right - left) / 90))))
      element("text", { x: px(mark), y: bottom + 17, "text-anchor": "middle" }, this.svg, short(mark));
    element("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, this.svg, x);
    const middle = (top + bottom) / 2;
    element("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, this.svg, y);
    const path = (across, down) => across.map((v, i) => `${i ? "L" : "M"}${px(v).toFixed(1)} ${py(down[i]).toFixed(1)}`).join("");
    for (const one of this.shown) {
      if (one.low) {
        const back = path([...one.x].reverse(), [...one.low].reverse()).replace("M", "L");
        element("path", { d: `${path(one.x, one.high)}${back}Z`, fill: color(one.group), opacity: 0.15 }, this.svg);
      }
      for (const run of runs(one))
        element("path", { d: path(one.x, run), fill: "none", stroke: color(one.group), "stroke-width": 0.8, opacity: 0.6 }, this.svg);
    }
    for (const one of this.shown) {
      const line = { d: path(one.x, one.mean), fill: "none", stroke: color(one.group), "stroke-width": 2 };
      element("path", { ...line, "stroke-dasharray": dash(one.group), "stroke-linejoin": "round" }, this.svg);
      if (one.x.length === 1)
        element("path", { d: `${path(one.x, one.mean)}h0`, stroke: color(one.group), "stroke-width": 7, "stroke-linecap": "round" }, this.svg);
    }
    this.rule = element("line", { class: "rule", y1: top, y2: bottom, visibility: "hidden" }, this.svg);
    this.label = x;
  }

  at(event) {
    if (!this.place) return null;
    const { left, right, x0, x1, width } = this.place, box = this.svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * width;
    return x0 + ((Math.min(right, Math.max(left, across)) - left) / (right - left)) * (x1 - x0);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.point(null);
    if (!by || !this.place) return;
    event.preventDefault();
    const steps = [...new Set(this.shown.flatMap((one) => one.x))].sort((a, b) => a - b);
    const next = by > 0 ? steps.find((v) => v > (this.cursor ?? -Infinity)) : steps.findLast((v) => v < (this.cursor ?? Infinity));
    this.point(next ?? this.cursor ?? steps[0]);
  }

  /* Show the values nearest to a position on the axis of steps, or none. */
  point(x) {
    this.cursor = x;
    this.tip.hidden = x === null || !this.place;
    if (!this.rule) return;
    this.rule.setAttribute("visibility", this.tip.hidden ? "hidden" : "visible");
    if (this.tip.hidden) return;
    const nearest = (xs) => xs.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best), 0);
    const { px, width } = this.place, at = this.shown.length === 1 ? this.shown[0].x[nearest(this.shown[0].x)] : x;
    this.rule.setAttribute("x1", px(at));
    this.rule.setAttribute("x2", px(at));
    this.tip.replaceChildren();
    element("div", { class: "soft" }, this.tip, `${this.label}: ${full(+at.toPrecision(4))}`);
    for (const one of this.shown) {
      const i = nearest(one.x);
      const band = one.low ? ` [${full(+one.low[i].toPrecision(4))}, ${full(+one.high[i].toPrecision(4))}]` : "";
      const line = element("div", {}, this.tip);
      key(one.group, line);
      line.append(`${DATA.groups[one.group]}: ${full(+one.mean[i].toPrecision(4))}${band}`);
    }
    const beyond = px(at) > width / 2, scale = this.svg.getBoundingClientRect().width / width;
    this.tip.style.left = beyond ? "auto" : `${px(at) * scale + 10}px`;
    this.tip.style.right = beyond ? `${(width - px(at)) * scale + 10}px` : "auto";
  }
}

function key(group, parent) {
  const svg = element("svg", { class: "key", width: 30, height: 10, viewBox: "0 0 30 10", "aria-hidden": "true" }, parent);
  element("path", { d: "M1 5H29", stroke: color(group), "stroke-width": 2.5, "stroke-dasharray": dash(group) }, svg);
}

function redraw() {
  for (const chart of charts) chart.draw();
}

for (const legend of document.querySelectorAll(".legend"))
  DATA.groups.forEach((label, group) => {
    const button = element("button", { type: "button", "aria-pressed": "true", "data-group": group }, legend);
    key(group, button);
    button.append(label);
    button.addEventListener("click", () => {
      if (!hidden.delete(group)) hidden.add(group);
      for (const same of document.querySelectorAll(`[data-group="${group}"]`))
        same.setAttribute("aria-pressed", String(!hidden.has(group)));
      redraw();
    });
  });

for (const cell of document.querySelectorAll("[data-key]")) key(+cell.dataset.key, cell.querySelector("span"));

const metric = document.getElementById("metric");
metric.addEventListener("change", redraw);
document.getElementById("each").addEventListener("change", redraw);
for (const box of document.querySelectorAll("[data-curves]"))
  new Chart(box, () => {
    const { label, series } = DATA.metrics[metric.value];
    return { x: DATA.x, y: label, series: series.filter((one) => DATA.envs[one.group] === box.dataset.curves) };
  }, true);
for (const box of document.querySelectorAll("[data-profile]"))
  new Chart(box, () => DATA.profiles[+box.dataset.profile], false);

for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("pre").textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // a page that is opened from a file may not use the clipboard
      const range = document.createRange();
      range.selectNodeContents(button.parentElement.querySelector("pre"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
