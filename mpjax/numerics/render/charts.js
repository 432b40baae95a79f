// Numbers as people read them, and the two charts: magnitudes against a format's ranges, error by module.
"use strict";

const SVG = document.getElementById("namespace").namespaceURI;

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat());
  return node;
}

// null stays null; what is not finite comes as a string, as JSON has no such numbers.
const NOT_FINITE = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const number = (value) => (typeof value === "string" ? NOT_FINITE[value] : value ?? null);

function digits(value) {  // three significant ones
  const x = number(value);
  if (x === null) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e7) return x.toLocaleString("en").replace("-", "−");
  if (size < 1e-3 || size >= 1e5) return x.toExponential(2).replace("e+", "e").replaceAll("-", "−");
  return (size >= 1e3 ? Math.round(x).toString() : x.toPrecision(3)).replace("-", "−");
}

function percent(value) {
  const x = number(value);
  if (x === null || !Number.isFinite(x)) return "–";
  const p = 100 * x;
  if (p <= 0) return "0%";
  if (p < 1e-4) return "<0.0001%";
  if (p < 100 && p >= 99.95) return ">99.9%";
  return `${p >= 100 ? 100 : p < 0.01 ? p.toPrecision(1) : p.toPrecision(3)}%`;
}

function column(value) {  // a percentage with two places, so that points stand under each other
  const x = number(value);
  if (x === null || !Number.isFinite(x)) return "–";
  const p = 100 * x;
  return p <= 0 ? "0" : p < 0.01 ? "<0.01" : p < 100 && p >= 99.995 ? ">99.99" : p.toFixed(2);
}

const raised = (k) => String(k).replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
const power = (k) => [document.createTextNode("2"), element("sup", {}, String(k).replace("-", "−"))];

function text(x, y, content, attributes = {}) {
  const node = shape("text", { x, y, ...attributes });
  const parts = /^2\^(-?\d+)$/.exec(content);
  if (parts) node.append("2", shape("tspan", { dy: -4, class: "raised" }, parts[1].replace("-", "−")));
  else node.append(content);
  return node;
}

// What becomes of a size in a format, by log2 of the size: rounding to nearest decides where each part ends.
function zones(format, ofUpdates) {
  const { smallest_normal: normal, smallest_subnormal: least, max } = format;
  const epsilon = least / normal;
  if (ofUpdates) {  // relative to the weight: half the distance between neighbours, which depends on the weight
    const low = Math.log2(epsilon) - 2;
    return [
      { name: "lost", label: "lost", low: -Infinity, high: low },
      { name: "subnormal", label: "either", low, high: low + 1 },
      { name: "normal", label: "changes the weight", low: low + 1, high: Infinity },
    ];
  }
  const top = Math.log2(max + (epsilon * 2 ** Math.floor(Math.log2(max))) / 2);
  const end = Math.abs(top - Math.round(top)) < 0.01 ? Math.round(top) : top;
  const zero = Math.log2(least) - 1, first = Math.log2(normal);
  return [
    { name: "lost", label: "becomes zero", low: -Infinity, high: zero },
    { name: "subnormal", label: "subnormal", low: zero, high: first },
    { name: "normal", label: `${format.title}'s normal range`, whole: `${format.title}'s normal range, 2${raised(Math.round(first))} to 2${raised(Math.round(end))}`, low: first, high: end, max },
    { name: "overflow", label: "overflows", low: end, high: Infinity },
  ];
}

const overlap = (low, high, zone) => Math.max(0, Math.min(high, zone.high) - Math.max(low, zone.low));

// data: {bars: [{low, share}], zero, zones, lo, hi, log, height, label, readout}; lows are log2, scaled already.
function drawHistogram(holder, data) {
  const width = Math.max(280, holder.clientWidth), height = data.height;
  const left = 54, right = width - 10, top = 48, bottom = height - 42, start = left + 42;
  const x = (k) => start + ((Math.min(Math.max(k, data.lo), data.hi) - data.lo) / (data.hi - data.lo)) * (right - start);
  const shown = data.bars.filter((bar) => bar.share > 0 && bar.low >= data.lo - 1e-9 && bar.low < data.hi);
  const y = verticalAxis(shown.map((bar) => bar.share).concat(shown.length ? [] : [data.zero]), data.log, top, bottom);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": data.label });

  for (const zone of data.zones) {
    const from = x(zone.low), to = x(zone.high);
    if (to - from < 0.5) continue;
    if (zone.name !== "normal") svg.append(shape("rect", { x: from, y: top, width: to - from, height: bottom - top, class: `ground ${zone.name}` }));
  }
  for (const tick of y.ticks) {
    svg.append(shape("line", { x1: left, x2: right, y1: y.at(tick), y2: y.at(tick), class: "grid" }));
    svg.append(text(left - 6, y.at(tick) + 4, `${Number((100 * tick).toPrecision(3))}%`, { class: "tick end" }));
  }
  const wide = (right - start) / (data.hi - data.lo), gap = wide > 5 ? 1 : 0;
  for (const bar of shown) {
    for (const zone of data.zones) {
      const low = Math.max(bar.low, zone.low), high = Math.min(bar.low + 1, zone.high);
      if (high - low <= 1e-9 || x(high) - x(low) <= gap) continue;
      const at = Math.min(bottom - 1.5, y.at(bar.share));
      svg.append(shape("rect", { x: x(low) + gap / 2, y: at, width: x(high) - x(low) - gap, height: Math.max(1.5, bottom - at), class: `bar ${zone.name}` }));
    }
  }
  if (data.ghost) drawGhost(svg, data.ghost, x, y, bottom, right, height);
  drawZero(svg, data.zero, y, left + 4, top, bottom);
  svg.append(shape("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
  drawTicks(svg, x, data, wide, bottom);
  svg.append(text((start + right) / 2, height - 6, data.axis, { class: "name middle" }));
  drawBrackets(svg, data, x, top, bottom);
  if (data.readout) followBars(svg, data, x, start, right, top, bottom);
  holder.replaceChildren(svg);
}

// The outline of where the same values stood before they were scaled; its name is under the axis, where no line is.
function drawGhost(svg, { bars, name }, x, y, bottom, right, height) {
  const shown = bars.filter((bar) => bar.share > 0);
  if (!shown.length) return;
  const drawn = bars.slice(bars.indexOf(shown[0]), bars.indexOf(shown.at(-1)) + 1);
  const steps = drawn.map((bar) => `H${x(bar.low)}V${y.at(bar.share > 0 ? bar.share : 0)}H${x(bar.low + 1)}`);
  svg.append(shape("path", { d: `M${x(drawn[0].low)},${bottom}${steps.join("")}V${bottom}`, class: "ghost" }));
  const start = right - name.length * 5.8 - 24;
  svg.append(shape("line", { x1: start, x2: start + 18, y1: height - 10, y2: height - 10, class: "ghost" }));
  svg.append(text(right, height - 6, name, { class: "tick end" }));
}

function drawZero(svg, zero, y, left, top, bottom) {
  svg.append(text(left + 12, bottom + 16, "0", { class: "tick middle" }));
  if (!(zero > 0)) return;
  const at = Math.max(top + 14, y.at(zero));
  svg.append(shape("rect", { x: left + 3, y: at, width: 18, height: Math.max(1, bottom - at), class: "bar zero" }));
  if (y.at(zero) < top + 14) {  // taller than the chart: cut, and says how tall
    svg.append(shape("path", { d: `M${left},${at + 16}l24,-6v4l-24,6z`, class: "cut" }));
  }
  svg.append(text(left + 12, at - 4, percent(zero), { class: "tick middle strong" }));
}

function drawTicks(svg, x, data, wide, bottom) {
  const step = wide * 8 > 40 ? 8 : 16;
  for (let k = Math.ceil(data.lo / step) * step; k <= data.hi; k += step) {
    svg.append(shape("line", { x1: x(k), x2: x(k), y1: bottom, y2: bottom + 4, class: "axis" }));
    svg.append(text(x(k), bottom + 17, `2^${k}`, { class: "tick middle" }));
  }
}

function drawBrackets(svg, data, x, top, bottom) {
  let free = -Infinity;  // where the last number on a boundary ended
  for (const zone of data.zones) {
    const from = x(zone.low), to = x(zone.high), at = top - 8;
    if (to - from < 2) continue;
    const opens = zone.low > data.lo, ends = zone.high < data.hi;
    const path = `M${from + 1},${at + (opens ? 5 : 0)}V${at}H${to - 1}V${at + (ends ? 5 : 0)}`;
    svg.append(shape("path", { d: path, class: `bracket ${zone.name}` }));
    const short = zone.name === "normal" ? "normal" : zone.label;
    const label = [opens || ends ? "" : zone.whole, zone.label, short].filter(Boolean).find((words) => words.length * 6.4 + 6 < to - from);
    if (label) svg.append(text((from + to) / 2, 12, label, { class: `zone middle ${zone.name}` }));
    if (opens) svg.append(shape("line", { x1: from, x2: from, y1: at, y2: bottom, class: "boundary" }));
    if (ends) {
      const words = zone.max ? digits(zone.max) : `2^${zone.high}`, half = words.length * 3.4;
      if (to - half > free) {
        svg.append(text(to, 31, words, { class: "tick middle" }));
        free = to + half + 2;
      }
    }
  }
}

function followBars(svg, data, x, start, right, top, bottom) {
  const cursor = shape("rect", { y: top, height: bottom - top, width: 0, class: "cursor" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const at = data.lo + ((event.clientX - svg.getBoundingClientRect().left - start) / (right - start)) * (data.hi - data.lo);
    const bar = data.bars.find((bar) => at >= bar.low && at < bar.low + 1);
    cursor.setAttribute("width", bar ? x(bar.low + 1) - x(bar.low) : 0);
    if (bar) cursor.setAttribute("x", x(bar.low));
    data.readout(bar || null);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("width", 0); data.readout(null); });
}

function verticalAxis(values, log, top, bottom) {
  const most = Math.max(...values, 1e-9);
  if (!log) {
    const rough = most / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((times) => times * unit >= rough * 0.999);
    const ticks = Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
    return { at: (value) => bottom - (value / (most * 1.06)) * (bottom - top), ticks };
  }
  const floor = Math.floor(Math.log10(Math.max(Math.min(...values.filter((value) => value > 0), most), most * 1e-6)) - 0.3);
  const ceiling = Math.log10(most) + 0.15;
  const ticks = [];
  for (let k = floor + 1; k <= ceiling; k++) ticks.push(10 ** k);
  const at = (value) => bottom - ((Math.log10(Math.max(value, 1e-30)) - floor) / (ceiling - floor)) * (bottom - top);
  return { at: (value) => Math.min(bottom, at(value)), ticks };
}

// data: {modules: [name], series: [{name, mark, values}], marked: [[index, words]], readout, select}
function drawErrors(holder, data) {
  const width = Math.max(280, holder.clientWidth), height = 300;
  const left = 56, right = width - 10, top = 20 + 16 * data.marked.length, bottom = height - 32, count = data.modules.length;
  const step = (right - left) / Math.max(1, count), x = (i) => left + (i + 0.5) * step;
  const all = data.series.flatMap((series) => series.values).filter((value) => value > 0 && Number.isFinite(value));
  const least = Math.floor(Math.log10(Math.max(1e-12, Math.min(...all, 1)))), most = Math.max(least + 1, Math.ceil(Math.log10(Math.max(...all, 1e-12))));
  const upper = top + 24;  // above it: what is not finite
  const y = (value) => {
    if (!Number.isFinite(value)) return top + 8;
    return bottom - Math.max(0, (Math.log10(Math.max(value, 1e-300)) - least) / (most - least)) * (bottom - upper);
  };
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-label": "Error against float32 by module. Left and right arrow keys move from module to module, Enter shows its tensors." });
  drawGroups(svg, data.modules, left, step, top, bottom);
  for (let k = least; k <= most; k += most - least > 8 ? 2 : 1) {
    svg.append(shape("line", { x1: left, x2: right, y1: y(10 ** k), y2: y(10 ** k), class: "grid" }));
    svg.append(text(left - 6, y(10 ** k) + 4, k > -4 && k < 4 ? String(Number((10 ** k).toPrecision(1))) : `1e${k}`.replace("-", "−"), { class: "tick end" }));
  }
  if (data.series.some((series) => series.values.some((value) => value !== null && !Number.isFinite(value)))) {
    svg.append(text(left - 6, top + 12, "not finite", { class: "tick end small" }));
  }
  for (const [row, [i, words]] of data.marked.entries()) {
    const end = x(i) > (left + right) / 2, at = 13 + 16 * row;
    svg.append(shape("line", { x1: x(i), x2: x(i), y1: at - 9, y2: bottom, class: "marked" }));
    svg.append(text(x(i) + (end ? -5 : 5), at, words + tail(data.modules[i], width), { class: `zone ${end ? "end" : ""}` }));
  }
  for (const series of data.series) drawSeries(svg, series, x, y);
  const cursor = shape("line", { y1: top, y2: bottom, class: "cursor-line", visibility: "hidden" });
  svg.append(cursor);
  let current = -1;
  const show = (i) => {
    current = i;
    cursor.setAttribute("visibility", i < 0 ? "hidden" : "visible");
    if (i >= 0) for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(i));
    data.readout(i);
  };
  const under = (event) => Math.min(count - 1, Math.max(0, Math.floor((event.clientX - svg.getBoundingClientRect().left - left) / step)));
  svg.addEventListener("pointermove", (event) => show(under(event)));
  svg.addEventListener("pointerleave", () => show(-1));
  svg.addEventListener("click", (event) => data.select(under(event)));
  svg.addEventListener("focus", () => { if (current < 0) show(data.marked.length ? data.marked[0][0] : 0); });
  svg.addEventListener("blur", () => show(-1));
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: Math.min(count - 1, current + 1), ArrowLeft: Math.max(0, current - 1), Home: 0, End: count - 1 };
    if (event.key in moves) show(moves[event.key]);
    else if (event.key === "Enter" && current >= 0) data.select(current);
    else return;
    event.preventDefault();
  });
  holder.replaceChildren(svg);
}

const tail = (module, width) => (width > 600 ? module : module.split("/").slice(-2).join("/"));

// Modules with the same parent stand on one band, which is named once where their own names would not fit.
function drawGroups(svg, modules, left, step, top, bottom) {
  const above = (module) => module.split("/").slice(0, -1).join("/");
  // A block's own operations, between its layers, belong to it, wherever they stand.
  const parent = (module) => (modules.some((other) => other.startsWith(`${module}/`)) ? module : above(module));
  const last = modules.map((module) => module.split("/").at(-1)), each = last.every((name) => name.length * 6.4 + 8 < step);
  if (each) last.forEach((name, i) => svg.append(text(left + (i + 0.5) * step, bottom + 18, name, { class: "tick middle" })));
  let start = 0, band = 0;
  for (let i = 1; i <= modules.length; i++) {
    if (i < modules.length && parent(modules[i]) === parent(modules[start])) continue;
    const from = left + start * step, size = (i - start) * step;
    if (band++ % 2) svg.append(shape("rect", { x: from, y: top, width: size, height: bottom - top, class: "band" }));
    const parts = (i - start > 1 ? parent(modules[start]) : modules[start]).split("/");
    const names = [parts.join("/"), parts.slice(1).join("/"), parts.slice(-2).join("/"), parts.at(-1)];
    const name = names.find((words) => words && words.length * 6.4 + 4 < size);
    if (name && !each) svg.append(text(from + size / 2, bottom + 18, name, { class: "tick middle" }));
    start = i;
  }
  svg.append(shape("line", { x1: left, x2: left + modules.length * step, y1: bottom, y2: bottom, class: "axis" }));
}

const MARKS = {
  circle: (x, y) => `M${x - 3.2},${y}a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0z`,
  square: (x, y) => `M${x - 3},${y - 3}h6v6h-6z`,
  triangle: (x, y) => `M${x},${y - 4}l4,7h-8z`,
  cross: (x, y) => `M${x - 4},${y - 4}l8,8m0,-8l-8,8`,
};

function drawSeries(svg, series, x, y) {
  const points = series.values.map((value, i) => [x(i), value]).filter(([, value]) => value !== null);
  const line = points.filter(([, value]) => Number.isFinite(value)).map(([at, value]) => `${at},${y(value)}`);
  svg.append(shape("polyline", { points: line.join(" "), class: `line ${series.mark}` }));
  for (const [at, value] of points) {
    const finite = Number.isFinite(value);
    svg.append(shape("path", { d: MARKS[finite ? series.mark : "cross"](at, y(value)), class: `point ${series.mark} ${finite ? "" : "cross"}` }));
  }
}
