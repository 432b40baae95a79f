// The page: what is selected, and each part drawn from it.
const REPORT = JSON.parse(document.getElementById("data").textContent);
const TENSORS = REPORT.tensors, FORMATS = REPORT.formats;
const KINDS = ["activation", "activation gradient", "parameter", "weight gradient", "update"].filter((kind) => TENSORS.some((tensor) => tensor.kind === kind));
const PLURALS = { activation: "Activations", "activation gradient": "Activation gradients", parameter: "Parameters", "weight gradient": "Weight gradients", update: "Updates" };
const RUN = Math.log2(number(REPORT.loss_scale) || 1);  // the run's loss scale; whole numbers everywhere else
const byId = (id) => document.getElementById(id);
const isGradient = (kind) => kind.endsWith("gradient");

const state = {
  kind: KINDS.includes("activation gradient") ? "activation gradient" : KINDS[0],
  format: FORMATS[REPORT.compute_dtype] ? REPORT.compute_dtype : Object.keys(FORMATS)[0],
  axis: "linear", shift: Math.round(RUN), factor: 0,
  search: "", only: "", scaled: true, sort: null, direction: 0, page: 0, size: 25, open: null,
};

const nearRun = (shift) => (shift === Math.round(RUN) ? RUN : shift);
const scaleText = (shift) => (shift === Math.round(RUN) && RUN !== shift ? digits(REPORT.loss_scale) : `2${raised(shift)}`);

// {underflow, subnormal, overflow} of a tensor times 2^shift: as measured where it was, else from the histogram.
function sharesOf(tensor, format, shift) {
  const measured = shift === 0 ? tensor.shares : shift === RUN ? tensor.scaled_shares : null;
  if (measured && measured[format]) return measured[format];
  const [zero, subnormal, , over] = zones(FORMATS[format], false);
  const sums = { underflow: 0, subnormal: 0, overflow: tensor.inf || 0, about: shift !== Math.floor(shift) || over.low % 1 !== 0 };
  const add = (low, count) => {
    if (!count) return;
    sums.underflow += count * overlap(low, low + 1, zero);
    sums.subnormal += count * overlap(low, low + 1, subnormal);
    sums.overflow += count * overlap(low, low + 1, over);
  };
  tensor.counts.forEach((count, i) => add(REPORT.bins[i] + shift, count));
  add(REPORT.bins[0] - 1 + shift, tensor.below);
  for (const name of ["underflow", "subnormal", "overflow"]) sums[name] /= tensor.count || 1;
  return sums;
}

// Several tensors as one, each value with the same weight.
function together(tensors) {
  const sum = { count: 0, zero: 0, below: 0, counts: REPORT.bins.map(() => 0), kind: tensors[0].kind };
  for (const tensor of tensors) {
    for (const name of ["count", "zero", "below"]) sum[name] += tensor[name];
    tensor.counts.forEach((count, i) => { sum.counts[i] += count; });
  }
  return sum;
}

function meanOf(tensors, value) {
  let total = 0, count = 0;
  for (const tensor of tensors) {
    const one = number(value(tensor));
    if (one !== null) { total += one * tensor.count; count += tensor.count; }
  }
  return count ? total / count : null;
}

function range(tensor) {
  const from = tensor.counts.findIndex((count) => count > 0), to = tensor.counts.findLastIndex((count) => count > 0);
  return from < 0 ? null : { low: REPORT.bins[from], high: REPORT.bins[to] + 1, below: tensor.below > 0, open: to === REPORT.bins.length - 1 };
}

// What a histogram shows; `span` is how far the slider can carry it to the right.
function histogramData(tensor, shift, span) {
  const bars = tensor.counts.map((count, i) => ({ low: REPORT.bins[i] + shift, share: count / (tensor.count || 1) }));
  if (tensor.below) bars.unshift({ low: REPORT.bins[0] - 1 + shift, share: tensor.below / (tensor.count || 1), below: true });
  const between = range(tensor) || { low: -16, high: 1 }, updates = tensor.kind === "update";
  const lo = Math.min(between.low - (between.below ? 1 : 0), updates ? -16 : -28) - 1;
  return {
    bars, zero: tensor.zero / (tensor.count || 1), zones: zones(FORMATS[state.format], updates),
    lo, hi: Math.max(between.high + span, updates ? 2 : 20) + 1, log: state.axis === "log",
    axis: updates ? "|update / weight|" : shift ? `|x| × ${scaleText(Math.round(shift))}` : "|x|",
  };
}

function options(select, entries, value) {
  select.replaceChildren(...entries.map(([key, label]) => element("option", { value: key, selected: key === value }, label)));
}

function showFacts() {
  const pairs = [["Policy", `${REPORT.policy} (computes in ${REPORT.compute_dtype})`]];
  const scale = number(REPORT.loss_scale), loss = (value) => (Number.isFinite(number(value)) ? value.toPrecision(5) : digits(value));
  pairs.push(["Loss scale", scale === 1 ? "none" : Number.isInteger(RUN) ? [...power(RUN), ` = ${digits(scale)}`] : digits(scale)]);
  pairs.push(["Loss", `${loss(REPORT.loss.policy)}${number(REPORT.loss.reference) === null ? "" : `, in float32 ${loss(REPORT.loss.reference)}`}`]);
  const plural = (count, word) => `${digits(count)} ${word}${count === 1 ? "" : word === "batch" ? "es" : "s"}`;
  pairs.push(["Run on", `${plural(REPORT.batches, "batch")}, ${REPORT.rows_left_out ? `${digits(REPORT.rows)} of ` : ""}${plural(REPORT.rows + REPORT.rows_left_out, "row")}, at step ${digits(REPORT.step)}, ${REPORT.backend}`]);
  byId("facts").replaceChildren(...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  byId("footer").textContent = Object.entries(REPORT.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
}

const card = (finding) => element("li", { class: finding.severity },
  element("p", { class: "what" }, element("strong", {}, finding.severity === "problem" ? "Problem" : "Note"), ` ${finding.kind}`),
  link(finding.module),
  element("p", {}, finding.text));

const sentence = (text) => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;

function showVerdict() {
  const verdict = REPORT.verdict;
  byId("verdict-text").classList.add(verdict.good ? "good" : "bad");
  byId("verdict-text").textContent = sentence(verdict.text.replace("policy below", "policy under Advice"));
  byId("figures").replaceChildren(...verdict.figures.map((figure) => element("li", {},
    element("span", { class: "label" }, figure.what), element("span", { class: "value" }, figure.value),
    element("span", { class: "before" }, ...breakable(figure.where)))));
}

const note = (finding) => element("li", {}, element("span", { class: "what" }, finding.kind), element("div", {}, link(finding.module), element("p", {}, finding.text)));

function showFindings() {
  const all = REPORT.findings, problems = all.filter((finding) => finding.severity === "problem");
  const notes = all.filter((finding) => finding.severity !== "problem"), few = 12;
  byId("findings").hidden = byId("to-findings").hidden = !all.length;
  byId("findings-title").textContent = byId("to-findings").textContent = problems.length ? "Findings" : "Notes";
  byId("problems").replaceChildren(...problems.slice(0, few).map(card));
  byId("notes").replaceChildren(...notes.slice(0, few).map(note));
  const more = byId("more-findings"), rest = [...problems.slice(few), ...notes.slice(few)];
  more.hidden = !rest.length;
  more.querySelector("summary").textContent = `${rest.length} more`;
  more.querySelector("ul").replaceChildren(...rest.map(card));
}

const breakable = (path) => String(path).split("/").flatMap((part, i) => (i ? ["/", element("wbr"), part] : [part]));

const searched = (tensor) => `${tensor.module}/${tensor.name}`.toLowerCase();

// A tree path may begin above the root of the modules: the longest end of it that finds something.
function findable(path) {
  const parts = path.split("/");
  while (parts.length && !TENSORS.some((tensor) => searched(tensor).includes(parts.join("/").toLowerCase()))) parts.shift();
  return parts.join("/");
}

function link(module) {
  if (!module) return "";
  const words = findable(module);
  if (!words) return element("p", { class: "module" }, ...breakable(module));
  return element("button", { type: "button", class: "module", title: "Show its tensors", click: () => find(words) }, ...breakable(module));
}

function find(words) {
  Object.assign(state, { search: words, page: 0, only: "", open: null });
  byId("search").value = words;
  byId("table-kind").value = "";
  showTable();
  byId("tensors").scrollIntoView();
}

function showHistogram() {
  const tensors = TENSORS.filter((tensor) => tensor.kind === state.kind);
  if (!tensors.length) { byId("histogram").hidden = true; return; }
  const gradient = isGradient(state.kind), updates = state.kind === "update", slider = byId("scale");
  const most = Math.max(24, Math.ceil(RUN)), least = Math.min(gradient ? 0 : -12, Math.floor(RUN));
  const chosen = gradient ? state.shift : state.factor, shift = gradient ? nearRun(chosen) : chosen;
  Object.assign(slider, { min: least, max: gradient ? most : 12 });
  slider.parentElement.hidden = updates;
  slider.value = chosen;
  slider.setAttribute("aria-valuetext", `2 to the ${chosen}`);
  byId("scale-name").textContent = gradient ? "Loss scale" : "Factor";
  byId("scale-value").replaceChildren(...(shift === chosen ? power(chosen) : [digits(REPORT.loss_scale)]), gradient && chosen === Math.round(RUN) && RUN ? " (the run's)" : "");
  byId("scale-reset").disabled = chosen === (gradient ? Math.round(RUN) : 0);
  const all = together(tensors), title = FORMATS[state.format].title, words = PLURALS[state.kind].toLowerCase();
  byId("histogram-lead").textContent = updates
    ? `All updates together, relative to the weight they change. Below the left line a ${title} weight stays as it is.`
    : `Share of all values, zeros too, by size, ${words} together, as float32 has them${gradient ? ". The loss scale moves them to the right, into " : "; the ranges are those of "}${title}${gradient ? "'s range." : "."}${gradient ? "" : " The loss scale does not reach them. The factor is what float8 with a scale of its own multiplies them by."}`;
  const tiles = updates ? updateTiles(tensors, all) : rangeTiles(tensors, all, shift);
  byId("tiles").replaceChildren(...tiles.map((tile) => element("li", { class: tile.name },
    element("span", { class: "label" }, tile.label), element("span", { class: "value" }, tile.value), element("span", { class: "before" }, tile.before || ""))));
  const data = histogramData(all, shift, gradient ? most : updates ? 0 : 12);
  const hint = "Point at a bar to read its share.";
  const readout = (bar) => byId("histogram-readout").replaceChildren(...(bar ? [...(bar.below ? ["below ", ...power(bar.low + 1)] : [...power(digits(bar.low)), " to ", ...power(digits(bar.low + 1))]), `: ${percent(bar.share)} of the values`] : [hint]));
  const label = `Histogram of ${words}. ${tiles.map((tile) => `${tile.label}: ${tile.value}`).join(". ")}.`;
  const ghost = shift ? { bars: histogramData(all, 0, 0).bars, name: `at ${gradient ? "scale" : "factor"} 1` } : null;
  drawHistogram(byId("histogram-chart"), { ...data, ghost, height: 340, label, readout });
  readout(null);
}

function rangeTiles(tensors, all, shift) {
  const share = (name, at) => meanOf(tensors, (tensor) => sharesOf(tensor, state.format, at)[name]);
  const about = sharesOf(tensors[0], state.format, shift).about ? "≈ " : "", zero = all.zero / (all.count || 1);
  const now = { lost: share("underflow", shift), subnormal: share("subnormal", shift), overflow: share("overflow", shift) };
  const then = { lost: share("underflow", 0), subnormal: share("subnormal", 0), overflow: share("overflow", 0) };
  const rest = (shares) => Math.max(0, 1 - zero - shares.lost - shares.subnormal - shares.overflow);
  const tile = (name, label, value, before) => ({ name, label, value: (about && value ? about : "") + percent(value), before: shift ? `${percent(before)} at ${isGradient(state.kind) ? "scale" : "factor"} 1` : "" });
  return [
    { name: "zero", label: "Zero already", value: percent(zero) },
    tile("lost", "Becomes zero", now.lost, then.lost),
    tile("subnormal", "Subnormal", now.subnormal, then.subnormal),
    tile("normal", "Normal range", rest(now), rest(then)),
    tile("overflow", "Overflows", now.overflow, then.overflow),
  ];
}

// `lost` is of the updates that are not zero; this is of all.
function lostShare(tensor) {
  const lost = number((tensor.lost || {})[state.format]);
  return lost === null ? null : lost * (1 - tensor.zero / (tensor.count || 1));
}

function updateTiles(tensors, all) {
  const zero = all.zero / (all.count || 1);
  let lost = meanOf(tensors, (tensor) => lostShare(tensor)), about = "";
  if (lost === null) {
    const [none, either] = zones(FORMATS[state.format], true);
    const count = (low, count) => count * (overlap(low, low + 1, none) + overlap(low, low + 1, either) / 2);
    lost = (all.below + all.counts.reduce((sum, n, i) => sum + count(REPORT.bins[i], n), 0)) / (all.count || 1);
    about = "≈ ";
  }
  return [
    { name: "zero", label: "Update is zero", value: percent(zero) },
    { name: "lost", label: "Leaves the weight as it is", value: about + percent(lost) },
    { name: "normal", label: "Changes the weight", value: about + percent(Math.max(0, 1 - zero - lost)) },
  ];
}

const ERROR_MARKS = { activation: "circle", "activation gradient": "square", "weight gradient": "triangle" };

// The modules in the order in which the program comes to them; one that it comes back to is there again.
function visitsOf(tensors) {
  const visits = [];
  for (const tensor of tensors.filter((one) => one.kind !== "weight gradient").sort((a, b) => a.order - b.order)) {
    if (!visits.length || visits.at(-1).module !== tensor.module) visits.push({ module: tensor.module, order: tensor.order });
  }
  for (const { module } of tensors) if (!visits.some((visit) => visit.module === module)) visits.push({ module, order: Infinity });
  for (const tensor of tensors) {  // a weight's place in the tree says nothing of the program
    const at = tensor.kind === "weight gradient" ? visits.findIndex((visit) => visit.module === tensor.module)
      : visits.findLastIndex((visit) => visit.module === tensor.module && visit.order <= tensor.order);
    const error = number(tensor.error), old = visits[at][tensor.kind] ?? 0;
    visits[at][tensor.kind] = Math.max(old, Number.isNaN(error) ? Infinity : error);
  }
  return visits;
}

function showErrors() {
  const visits = visitsOf(TENSORS.filter((tensor) => tensor.kind in ERROR_MARKS && number(tensor.error) !== null));
  if (!visits.length) { byId("errors").hidden = true; return; }
  const kinds = Object.keys(ERROR_MARKS).filter((kind) => visits.some((visit) => kind in visit));
  const series = kinds.map((kind) => ({ name: PLURALS[kind], mark: ERROR_MARKS[kind], values: visits.map((visit) => visit[kind] ?? null) }));
  const marked = new Map();
  for (const [found, kind, words] of [["error", "activation", "error"], ["gradient error", "activation gradient", "gradients' error"]]) {
    for (const finding of REPORT.findings.filter((finding) => finding.kind === found)) {
      const of = (visit) => (visit.module === finding.module ? visit[kind] ?? 0 : 0), most = Math.max(...visits.map(of));
      const at = visits.findIndex((visit) => of(visit) > 0 && of(visit) >= most / 2);
      if (at >= 0 && !marked.has(at)) marked.set(at, `${words} grows at `);
    }
  }
  const broken = series.some((one) => one.values.includes(Infinity));
  byId("error-legend").replaceChildren(...series.map((one) => {
    const icon = shape("svg", { width: 16, height: 12, "aria-hidden": "true" }, shape("path", { d: MARKS[one.mark](8, 6), class: `point ${one.mark}` }));
    return element("li", {}, icon, ` ${one.name}`);
  }), ...(broken ? [element("li", {}, "× not finite")] : []));
  const modules = visits.map((visit) => visit.module), hint = "Point at a module, or use the arrow keys, to read its errors.";
  const words = (one, i) => `${one.name.toLowerCase()} ${one.values[i] === Infinity ? "not finite" : digits(one.values[i])}`;
  const readout = (i) => byId("error-readout").replaceChildren(...(i < 0 ? [hint] : [element("code", {}, modules[i]), ": ", series.filter((one) => one.values[i] !== null).map((one) => words(one, i)).join(", ")]));
  drawErrors(byId("error-chart"), { modules, series, marked: [...marked].slice(0, 2), readout, select: (i) => find(modules[i]) });
  readout(-1);
}

const weightsIn = (name) => ({ int8: "bfloat16 with int8 corrections", int16: "bfloat16 with int16 corrections", stochastic: "bfloat16, rounded stochastically (on average)" }[name] || (FORMATS[name] || { title: name }).title);

function showWeights() {
  const lost = Object.entries(REPORT.lost_updates);
  const cell = (content) => element("td", { class: "number" }, content), first = (content) => element("th", { scope: "row" }, content);
  byId("weights").hidden = byId("to-weights").hidden = !lost.length;
  byId("rounding").tBodies[0].replaceChildren(...lost.map(([name, share]) => element("tr", {}, first(weightsIn(name)), cell(column(share)))));
}

function showAdvice() {
  const advice = REPORT.advice;
  byId("advice").hidden = byId("to-advice").hidden = !advice || advice.unchanged;
  if (byId("advice").hidden) return;
  byId("yaml").textContent = advice.yaml;
  byId("buys").replaceChildren(...advice.lines.flatMap((line) => [element("dt", {}, element("code", {}, line.key)), element("dd", {}, line.buys)]));
}

async function copyYaml() {
  const button = byId("copy");
  try {
    await navigator.clipboard.writeText(REPORT.advice.yaml);
  } catch {  // no clipboard for pages of this kind: by way of a selection
    getSelection().selectAllChildren(byId("yaml"));
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
