// The table of tensors: search, sort, pages, and a tensor's own histogram; then the page is started.
const compare = new Intl.Collator("en", { numeric: true }).compare;

const shiftOf = (tensor) => (isGradient(tensor.kind) && state.scaled ? nearRun(state.shift) : 0);
const shareOf = (name) => (tensor) => (tensor.kind === "update" ? null : number(sharesOf(tensor, state.format, shiftOf(tensor))[name]));
const lostOf = (tensor) => number((tensor.lost || {})[state.format]);

function rangeCell(tensor) {
  const between = range(tensor);
  if (!between) return ["–"];
  return [...(between.below ? ["<"] : []), ...power(between.low), " .. ", ...power(between.high), ...(between.open ? ["+"] : [])];
}

function nameCell(tensor) {
  const own = tensor.policy || {}, badges = [["inf", own.inf], ["NaN", own.nan]].filter(([, count]) => count > 0);
  return [tensor.name, ...badges.map(([what, count]) => element("span", { class: "badge", title: `${digits(count)} ${what} in the policy's run` }, what))];
}

// first: which way the first click sorts, 1 up and -1 down; hot: what should catch the eye.
const COLUMNS = [
  { title: "Module", first: 1, value: (tensor) => tensor.module },
  { title: "Tensor", first: 1, value: (tensor) => tensor.name, cell: nameCell },
  { title: "Kind", first: 1, value: (tensor) => tensor.kind },
  { title: "Line", first: 1, value: (tensor) => tensor.line || null },
  { title: "Shape", first: -1, numeric: true, value: (tensor) => tensor.count, cell: (tensor) => [tensor.shape.length ? tensor.shape.join("×") : "scalar"] },
  { title: "|x| range", first: -1, numeric: true, value: (tensor) => (range(tensor) || { high: null }).high, cell: rangeCell },
  { title: "Zero %", first: -1, numeric: true, value: (tensor) => tensor.zero / (tensor.count || 1), cell: (tensor, value) => [column(value)] },
  { title: "Underflow %", first: -1, numeric: true, value: shareOf("underflow"), cell: (tensor, value) => [column(value)], hot: (value) => value >= 0.01 },
  { title: "Subnormal %", first: -1, numeric: true, value: shareOf("subnormal"), cell: (tensor, value) => [column(value)] },
  { title: "Overflow %", first: -1, numeric: true, value: shareOf("overflow"), cell: (tensor, value) => [column(value)], hot: (value) => value > 0 },
  { title: "Error", first: -1, numeric: true, value: (tensor) => number(tensor.error), cell: (tensor, value) => [digits(value)], hot: (value) => !(value < 0.1) },
  { title: "Lost %", first: -1, numeric: true, value: lostOf, cell: (tensor, value) => [column(value)], hot: (value) => value >= 0.1 },
];

function rowsShown() {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = TENSORS.filter((tensor) => (!state.only || tensor.kind === state.only) && words.every((word) => searched(tensor).includes(word)));
  if (state.sort === null) return rows;
  const { value } = COLUMNS[state.sort], missing = (x) => x === null || x === undefined;
  const keyed = rows.map((tensor, i) => [value(tensor), i, tensor]);
  const size = (x) => (Number.isNaN(x) ? Infinity : x);  // NaN is worse than any number; what is missing comes last
  keyed.sort(([a, i], [b, j]) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b) || i - j;
    const order = typeof a === "string" ? compare(a, b) : Math.sign(size(a) - size(b)) || 0;
    return order * state.direction || i - j;
  });
  return keyed.map(([, , tensor]) => tensor);
}

function showHead() {
  byId("head").replaceChildren(...COLUMNS.map((one, i) => {
    const sorted = state.sort === i ? (state.direction > 0 ? "ascending" : "descending") : "none";
    const arrow = element("span", { class: "arrow", "aria-hidden": "true" }, { ascending: "▲", descending: "▼", none: "" }[sorted]);
    return element("th", { scope: "col", class: one.numeric ? "number" : "", "aria-sort": sorted }, element("button", { type: "button", click: () => sortBy(i) }, one.title, arrow));
  }));
}

function sortBy(i) {  // one way, the other way, the order of the program
  const { first } = COLUMNS[i];
  if (state.sort !== i) Object.assign(state, { sort: i, direction: first });
  else if (state.direction === first) state.direction = -first;
  else Object.assign(state, { sort: null, direction: 0 });
  state.page = 0;
  showTable();
  byId("head").children[i].firstChild.focus();
}

function showTable() {
  showHead();
  const rows = rowsShown(), pages = Math.max(1, Math.ceil(rows.length / state.size));
  state.page = Math.min(state.page, pages - 1);
  const from = state.page * state.size, shown = rows.slice(from, from + state.size);
  byId("count").textContent = rows.length === TENSORS.length ? `${digits(rows.length)} tensors` : `${digits(rows.length)} of ${digits(TENSORS.length)} tensors`;
  byId("page").textContent = rows.length ? `${digits(from + 1)} to ${digits(from + shown.length)} of ${digits(rows.length)}` : "";
  byId("previous").disabled = state.page === 0;
  byId("next").disabled = state.page >= pages - 1;
  const body = byId("rows");
  body.replaceChildren(...(shown.length ? shown.map(row) : [element("tr", {}, element("td", { class: "none", colspan: COLUMNS.length }, "No tensor matches."))]));
  const open = shown.indexOf(state.open);
  if (open >= 0) openRow(state.open, body.children[open]);
  options(byId("table-scale"), [["1", "scale 1"], ["scaled", `loss scale ${scaleText(state.shift)}`]], state.scaled ? "scaled" : "1");
}

function row(tensor) {
  const cells = COLUMNS.slice(1).map((one) => {
    const value = one.value(tensor), hot = one.hot && value !== null && one.hot(value);
    return element("td", { class: `${one.numeric ? "number" : ""} ${hot ? "hot" : ""}` }, ...(one.cell ? one.cell(tensor, value) : [value === null || value === undefined ? "–" : String(value)]));
  });
  const toggle = element("button", { type: "button", class: "module", "aria-expanded": "false" }, ...breakable(tensor.module));
  const node = element("tr", { class: "tensor" }, element("th", { scope: "row" }, toggle), ...cells);
  node.addEventListener("click", () => {
    if (getSelection().toString()) return;  // the click ended a selection of text
    const was = state.open;
    closeRow();
    if (was !== tensor) openRow(tensor, node);
  });
  return node;
}

function closeRow() {
  state.open = null;
  const detail = byId("rows").querySelector(".detail");
  if (!detail) return;
  detail.previousElementSibling.querySelector("button").setAttribute("aria-expanded", "false");
  detail.remove();
}

function openRow(tensor, node) {
  state.open = tensor;
  node.querySelector("button").setAttribute("aria-expanded", "true");
  const chart = element("div", { class: "chart" }), panel = element("div", { class: "panel" });
  node.after(element("tr", { class: "detail" }, element("td", { colspan: COLUMNS.length }, panel)));
  panel.style.width = `${byId("scroll").clientWidth - 32}px`;
  const shift = shiftOf(tensor), where = tensor.line ? `, ${tensor.line}` : "";
  panel.append(
    element("h3", {}, `${tensor.module} · ${tensor.name}`),
    element("p", { class: "lead" }, `${tensor.kind}${where}, ${digits(tensor.count)} values, held in ${tensor.dtype}${shift ? `; times the loss scale ${scaleText(state.shift)}` : ""}`),
    element("div", { class: "beside" }, chart, facts(tensor)));
  drawHistogram(chart, { ...histogramData(tensor, shift, shift), height: 240, label: `Histogram of ${tensor.module} ${tensor.name}` });
}

// All formats beside each other, at scale 1 and at the run's own loss scale.
function facts(tensor) {
  const notes = [["NaN in float32", tensor.nan], ["inf in float32", tensor.inf], ["NaN in the policy's run", (tensor.policy || {}).nan], ["inf in the policy's run", (tensor.policy || {}).inf]];
  const lines = notes.filter(([, count]) => count > 0).map(([what, count]) => element("p", { class: "hot" }, `${digits(count)} ${what}`));
  const cell = (content, attributes = {}) => element("td", { class: "number", ...attributes }, content);
  const head = (...titles) => element("thead", {}, element("tr", {}, ...titles.map((title, i) => element("th", { scope: "col", class: i ? "number" : "" }, title))));
  if (tensor.kind === "update") {
    const rows = Object.entries(tensor.lost || {}).map(([name, share]) => element("tr", {}, element("th", { scope: "row" }, weightsIn(name)), cell(column(share))));
    return element("div", {}, ...lines, element("table", {}, head("Weights in", "unchanged %"), element("tbody", {}, ...rows)));
  }
  const block = (title, shares) => Object.keys(FORMATS).filter((name) => shares[name]).map((name, i) => element("tr", { class: i ? "" : "first" },
    element("th", { scope: "row" }, `${FORMATS[name].title}${title}`), ...["underflow", "subnormal", "overflow"].map((key) => cell(column(shares[name][key])))));
  const rows = [...block("", tensor.shares || {}), ...(tensor.scaled_shares && RUN ? block(` × ${scaleText(Math.round(RUN))}`, tensor.scaled_shares) : [])];
  return element("div", {}, ...lines, element("table", {}, head("", "underflow %", "subnormal %", "overflow %"), element("tbody", {}, ...rows)));
}

function start() {
  showFacts();
  showVerdict();
  showFindings();
  const formats = Object.entries(FORMATS).map(([name, format]) => [name, format.title]);
  options(byId("histogram-kind"), KINDS.map((kind) => [kind, PLURALS[kind]]), state.kind);
  options(byId("table-kind"), [["", "all"], ...KINDS.map((kind) => [kind, PLURALS[kind]])], "");
  for (const id of ["histogram-format", "table-format"]) {
    options(byId(id), formats, state.format);
    byId(id).addEventListener("change", (event) => {
      state.format = byId("histogram-format").value = byId("table-format").value = event.target.value;
      showHistogram();
      showTable();
    });
  }
  const onChange = (id, event, act) => byId(id).addEventListener(event, (at) => act(at.target));
  const filter = (changes) => { Object.assign(state, { page: 0, open: null }, changes); showTable(); };
  const moveTo = (value) => { state[isGradient(state.kind) ? "shift" : "factor"] = value; showHistogram(); if (isGradient(state.kind)) later(); };
  let pending = 0;
  const later = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(showTable); };
  onChange("histogram-kind", "change", (select) => { state.kind = select.value; showHistogram(); });
  onChange("histogram-axis", "change", (select) => { state.axis = select.value; showHistogram(); showTable(); });
  onChange("scale", "input", (slider) => moveTo(Number(slider.value)));
  onChange("scale-reset", "click", () => moveTo(isGradient(state.kind) ? Math.round(RUN) : 0));
  onChange("search", "input", (box) => filter({ search: box.value }));
  onChange("table-kind", "change", (select) => filter({ only: select.value }));
  onChange("table-scale", "change", (select) => filter({ scaled: select.value === "scaled" }));
  onChange("page-size", "change", (select) => filter({ size: Number(select.value) }));
  onChange("previous", "click", () => filter({ page: state.page - 1 }));
  onChange("next", "click", () => filter({ page: state.page + 1 }));
  onChange("copy", "click", copyYaml);
  showAdvice();
  showWeights();
  const draw = () => { showHistogram(); showErrors(); showTable(); };
  draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; draw(); } });
}

start();
