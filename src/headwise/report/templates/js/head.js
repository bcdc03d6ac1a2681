// Head pages: everything about one pinned head, beside the plate; two heads side by side.

const MAP_LOW = 1e-4;

function drawPanel() {
  const panel = byId("panel"), box = document.querySelector(".frame");
  const open = state.pinned.length > 0;
  panel.hidden = !open;
  box.classList.toggle("open", open);
  box.classList.toggle("two", state.pinned.length > 1);
  if (!open) { state.comparing = false; panel.replaceChildren(); return; }
  const compare = el("button", {
    type: "button", class: "plain", "aria-pressed": Boolean(state.comparing),
    click: () => { state.comparing = !state.comparing; tellPlate(); drawPanel(); },
  }, state.comparing ? "Click the second head …" : "Compare with another");
  const bar = el("div", { class: "panel-bar" },
    state.pinned.length < 2 ? compare : el("span", { class: "soft" }, "Arrow keys move the framed one"),
    el("span", { class: "spring" }),
    el("button", { type: "button", class: "plain", "aria-label": "Close head pages", click: () => unpin() }, "Close"));
  const cards = el("div", { class: "cards" });
  const top = panel.scrollTop;
  panel.replaceChildren(bar, cards);
  const room = Math.floor((panel.clientWidth - 40 - (state.pinned.length - 1) * 24) / state.pinned.length);
  const width = Math.max(140, Math.min(room, 440));
  state.pinned.forEach((place, i) => cards.append(card(place, i, width)));
  panel.scrollTop = top;
}

function card({ layer, head }, index, width) {
  const about = facts.layers[layer];
  const two = state.pinned.length > 1;
  const title = el("h3", {}, headName(layer, head));
  if (two) {
    title.style.borderBottom = `2px ${index ? "dashed" : "solid"} ${index === state.active ? "var(--accent)" : "var(--line)"}`;
    title.append(" ", el("button", { type: "button", class: "plain", style: "font-size:12px;float:right;font-weight:400", "aria-label": `Unpin ${headName(layer, head)}`, click: () => unpin(index) }, "Unpin"));
  }
  const shared = about.kvHeads < about.heads ? ` · reads key-value head ${Math.floor(head / (about.heads / about.kvHeads))}` : "";
  const node = el("article", { class: "card", "aria-label": headName(layer, head), "data-place": `${layer},${head}` }, title,
    el("p", { class: "module" }, `${about.module} · ${about.mask}${shared}`));
  if (two) title.addEventListener("click", () => { if (state.active !== index && state.pinned[index]) { state.active = index; emit("pinned"); } });
  if (about.nonFinite) {
    node.append(el("p", { class: "missing-note" }, `Not measured: ${about.nonFinite}`));
    return node;
  }
  node.append(...mapFigure(layer, head, width), ...entropyFigure(layer, head, width),
    ...distanceFigure(layer, head, width), ...receivedFigure(layer, head, width),
    ...numbersTable(layer, head), ...quantileTable(layer, head));
  return node;
}

// The pooled map on a canvas, with positions and tokens on both axes.
function mapFigure(layer, head, width) {
  const [rows, columns] = facts.blocks, about = facts.layers[layer];
  const wide = width > 300, left = wide ? 74 : 44, below = wide ? 54 : 36;
  const at = (layer * facts.heads.length + head) * rows * columns;
  const data = arrays.pooled.data;
  const queries = streamOf(about.queryStream), keys = streamOf(about.keyStream);
  // Streams of different length share one array; the unused rows and columns are left away.
  const blocksOf = (stream, room) => Math.min(room, Math.ceil(stream.longest / facts.blockWidth));
  const used = { rows: blocksOf(queries, rows), columns: blocksOf(keys, columns) };
  const side = width - left - 4;
  const canvas = el("canvas", { width: used.columns, height: used.rows, style: `width:${side}px;height:${Math.round((side * used.rows) / used.columns)}px;position:absolute;left:${left}px;top:0` });
  const context = canvas.getContext("2d"), image = context.createImageData(used.columns, used.rows);
  for (let q = 0; q < used.rows; q++) {
    for (let k = 0; k < used.columns; k++) {
      const value = data[at + q * columns + k], pixel = (q * used.columns + k) * 4;
      if (!(value > 0)) continue;
      const colour = viridis(Math.log(Math.max(value, MAP_LOW) / MAP_LOW) / Math.log(1 / MAP_LOW));
      image.data.set([...colour, 255], pixel);
    }
  }
  context.putImageData(image, 0, 0);
  const height = Math.round((side * used.rows) / used.columns);
  const drawing = svg("svg", { width, height: height + below, style: "position:absolute;left:0;top:0;pointer-events:none" });
  drawing.append(svg("rect", { x: left - 0.5, y: -0.5, width: side + 1, height: height + 1, fill: "none", stroke: "var(--line)" }));
  for (const p of placesOnAxis(lengthOf(queries, used.rows), Math.max(3, Math.floor(height / 46)))) {
    const y = ((p + 0.5) / (used.rows * facts.blockWidth)) * height;
    drawing.append(svg("line", { class: "axis-line", x1: left - 4, x2: left, y1: y, y2: y }),
      axisLabel(left - 7, Math.min(Math.max(y + 3.5, 8), height), "end", p, wide ? queries : null, 8, false));
  }
  const marks = placesOnAxis(lengthOf(keys, used.columns), Math.max(2, Math.floor(side / 66)));
  for (const p of marks) {
    const scaled = side / (used.columns * facts.blockWidth);
    if (p !== marks.at(-1) && (marks.at(-1) - p) * scaled < 74) continue;
    const x = left + ((p + 0.5) / (used.columns * facts.blockWidth)) * side;
    drawing.append(svg("line", { class: "axis-line", x1: x, x2: x, y1: height, y2: height + 4 }),
      axisLabel(x, height + 15, p === 0 ? "start" : x > width - 30 ? "end" : "middle", p, wide ? keys : null, 9, true));
  }
  drawing.append(svg("text", { x: width - 4, y: height + below - 4, "text-anchor": "end" }, "key →"));
  drawing.append(svg("text", { x: 0, y: height + below - 4 }, "↓ query"));
  const say = el("p", { class: "say" }, "Point at the map.");
  const box = el("div", { style: `position:relative;width:${width}px;height:${height + below}px` }, canvas, drawing);
  canvas.addEventListener("pointermove", (event) => {
    const r = canvas.getBoundingClientRect();
    const q = Math.floor(((event.clientY - r.top) / r.height) * used.rows), k = Math.floor(((event.clientX - r.left) / r.width) * used.columns);
    if (q < 0 || k < 0 || q >= used.rows || k >= used.columns) return;
    const value = data[at + q * columns + k];
    say.replaceChildren(`Queries ${blockWords(q, queries)} → keys ${blockWords(k, keys)}: `, el("b", {}, Number.isNaN(value) ? "no rows" : value === 0 ? "0 of the weight" : `${three(value)} of the weight`));
  });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `pooled attention map of ${headName(layer, head)}`);
  return [el("h4", {}, "Attention map"),
    el("p", { class: "caption" }, facts.blockWidth > 1
      ? `Mean weight from a block of ${whole(facts.blockWidth)} queries to a block of ${whole(facts.blockWidth)} keys; the same colours for every head.`
      : "Weight from each query to each key; the same colours for every head."),
    box, say,
    colourBar({ width: width - 30, scale: { low: MAP_LOW, high: 1, log: true, at: position(MAP_LOW, 1, true) }, unit: "", title: wide ? "share of the weight" : "share", paint: (t) => css(viridis(t)) })];
}
function lengthOf(stream, blocks) { return Math.min(stream.longest, blocks * facts.blockWidth); }
function placesOnAxis(length, count) {
  const last = length - 1;
  const step = linearTicks(0, Math.max(last, 1), count)[1] || 1;
  const places = [];
  for (let p = 0; p < last - step * 0.45; p += Math.max(1, step)) places.push(p);
  return [...places, last].filter((p, i, all) => all.indexOf(p) === i);
}
function axisLabel(x, y, anchor, place, stream, room, under) {
  const token = tokenAt(stream, place), text = svg("text", { x, y, "text-anchor": anchor });
  if (token === null) { text.append(whole(place)); return text; }
  if (under) {
    text.append(svg("tspan", { class: "strong" }, whole(place)), svg("tspan", { x, dy: 13 }, shorten(token, room)));
  } else {
    text.append(`${shorten(token, room)} `, svg("tspan", { class: "strong" }, whole(place)));
  }
  return text;
}
function blockWords(block, stream) {
  const from = block * facts.blockWidth, to = Math.min(from + facts.blockWidth, stream.longest) - 1;
  const token = tokenAt(stream, from);
  return (to > from ? `${whole(from)}–${whole(to)}` : whole(from)) + (token === null ? "" : ` (${shorten(token, 12)}${to > from ? " …" : ""})`);
}

function profileOf(index, layer, head) {
  const bins = facts.bins.length, at = ((index * facts.layers.length + layer) * facts.heads.length + head) * bins;
  const middle = facts.bins.length > 1 ? (facts.bins[1] - facts.bins[0]) / 2 : 0;
  return facts.bins.map((start, i) => [start + middle, arrays.profiles.data[at + i]]).filter(([, y]) => Number.isFinite(y));
}
function entropyFigure(layer, head, width) {
  const about = facts.layers[layer], all = profileOf(0, layer, head), without = profileOf(1, layer, head);
  if (!all.length) return [];
  const lines = [{ points: all, style: "line-1", name: width > 300 ? "all keys" : "" }, { points: without, style: "line-2", name: width > 300 ? "no sink" : "" }];
  const bound = about.role === "decoder" && about.window === null ? all.map(([x]) => [x, Math.log(x + 1)]) : [];
  if (bound.length) lines.push({ points: bound, style: "line-3", name: width > 300 ? "uniform" : "" });
  const high = Math.max(...lines.flatMap((line) => line.points.map(([, y]) => y)), 0.1);
  const last = Math.max(...all.map(([x]) => x));
  const drawing = frame({ width, height: 150, right: width > 300 ? 58 : 10, left: 34, x: { low: 0, high: Math.max(last, 1), title: "position of the query, tokens" }, y: { low: 0, high }, label: `entropy by position, ${headName(layer, head)}` });
  curves(drawing, lines);
  return [el("h4", {}, "Entropy by position"), el("p", { class: "caption" }, width > 300 ? "nats" : "nats; accent: all keys, plain: without the sink, dotted: uniform"), drawing.node];
}

function distanceFigure(layer, head, width) {
  const count = facts.bands.length, at = (layer * facts.heads.length + head) * count;
  const values = facts.bands.map((_, b) => arrays.band.data[at + b]);
  let last = values.length - 1;
  while (last > 0 && !(values[last] > 0)) last--;
  if (!Number.isFinite(values[0])) return [];
  const high = Math.max(...values.slice(0, last + 1), 0.01), step = last + 1;
  const drawing = frame({ width, height: 140, left: 34, right: 4, x: { low: 0, high: step, ticks: facts.bands.slice(0, step).map((_, b) => b + 0.5), text: (t) => bandWords(Math.floor(t)), title: "distance to the key, tokens (log scale)" }, y: { low: 0, high }, label: `weight by distance, ${headName(layer, head)}` });
  const wide = (width - drawing.left - drawing.right) / step;
  for (let b = 0; b < step; b++) {
    drawing.node.append(svg("rect", { class: "bar", x: drawing.px(b) + 1, y: drawing.py(values[b]), width: Math.max(1, wide - 2), height: drawing.py(0) - drawing.py(values[b]) },
      svg("title", {}, `distance ${bandWords(b)}: ${three(values[b])} of the weight`)));
  }
  return [el("h4", {}, "Weight by distance"), el("p", { class: "caption" }, "share of the weight, sink included"), drawing.node];
}
function bandWords(band) {
  const from = facts.bands[band], to = band + 1 < facts.bands.length ? facts.bands[band + 1] - 1 : null;
  const short = (n) => (n >= 1024 ? `${n / 1024}k` : String(n));
  if (to === null) return `≥${short(from)}`;
  return to === from ? String(from) : from >= 16 ? `${short(from)}+` : `${from}–${to}`;
}

function receivedFigure(layer, head, width) {
  const stream = streamOf(facts.layers[layer].keyStream), source = receivedSource("head", layer, head);
  const values = source.of(stream);
  const scale = shadeScale(values);
  const canvas = el("canvas", { width: values.length, height: 1, role: "img", "aria-label": `attention received by token, ${headName(layer, head)}`, style: `width:${width}px;height:26px;border:1px solid var(--line)` });
  const context = canvas.getContext("2d"), image = context.createImageData(values.length, 1);
  values.forEach((value, i) => { if (Number.isFinite(value)) image.data.set([...viridis(scale(value)), 255], i * 4); });
  context.putImageData(image, 0, 0);
  const say = el("p", { class: "say", style: "min-height:1.5em" }, "Point at the strip.");
  canvas.addEventListener("pointermove", (event) => {
    const r = canvas.getBoundingClientRect(), i = Math.min(values.length - 1, Math.max(0, Math.floor(((event.clientX - r.left) / r.width) * values.length)));
    say.replaceChildren(...binWords(stream, i, source.width), ` ≈ ${coarse(values[i])}`);
  });
  const order = values.map((value, i) => [value, i]).filter(([value]) => Number.isFinite(value)).sort((a, b) => b[0] - a[0]).slice(0, 5);
  const list = el("ol", { class: "top-tokens" }, order.map(([value, i]) => el("li", {}, el("span", { class: "token" }, ...binWords(stream, i, source.width)), el("span", {}, `≈ ${coarse(value)}`))));
  return [el("h4", {}, "Attention received by token"), el("p", { class: "caption" }, "Share of all weights, from the first token at the left to the last; log scale."), canvas, say, list,
    el("p", { style: "margin-top:8px" }, el("button", { type: "button", class: "plain", click: () => { setScope("head"); byId("text").scrollIntoView(); } }, "Shade the text by this head"))];
}
function coarse(value) { 
  if (!Number.isFinite(value)) return "not measured";
  return value > 0 && value < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
}
function binWords(stream, bin, width) {
  const from = bin * width, to = Math.min(from + width, stream.length) - 1;
  const tokens = arrays.tokens.data.slice(stream.start + from, stream.start + to + 1).join("");
  return [`${to > from ? `${whole(from)}–${whole(to)}` : whole(from)} `, el("b", {}, shorten(tokens, 24))];
}

function numbersTable(layer, head) {
  const rows = [];
  facts.statistics.forEach((statistic, i) => {
    if (statistic.perLayer) return;
    const value = statisticValue(i, layer, head);
    if (!Number.isFinite(value)) return;
    const sorted = descending(i);
    rows.push(el("tr", {}, el("th", { scope: "row" }, statistic.label),
      el("td", { class: "number" }, three(value)), el("td", {}, el("span", { class: "soft" }, statistic.unit)),
      el("td", { class: "number soft" }, `${whole(rankOf(value, sorted))} of ${whole(sorted.length)}`)));
  });
  return [el("h4", {}, "Numbers"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Statistic"), el("th", { scope: "col", class: "number" }, "value"), el("th", {}, ""), el("th", { scope: "col", class: "number" }, "rank"))), el("tbody", {}, rows)))];
}

function quantileTable(layer, head) {
  const count = facts.quantiles.length;
  const shown = [0, 0.05, 0.5, 0.95, 1].map((level) => facts.quantiles.findIndex((q) => Math.abs(q - level) < 1e-6)).filter((i) => i >= 0);
  const words = (level) => (level === 0 ? "least" : level === 1 ? "most" : level === 0.5 ? "median" : `${Math.round(level * 100)}%`);
  const rows = facts.quantileNames.map((name, k) => {
    const at = ((k * facts.layers.length + layer) * facts.heads.length + head) * count;
    const values = shown.map((i) => arrays.quantiles.data[at + i]);
    if (!values.some(Number.isFinite)) return null;
    const statistic = facts.statistics.find((s) => s.name === name);
    return el("tr", {}, el("th", { scope: "row" }, statistic ? statistic.label : name.replaceAll("_", " ")), values.map((v) => el("td", { class: "number" }, Number.isFinite(v) ? three(v) : "–")));
  });
  return [el("h4", {}, "Spread over rows"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Quantile"), shown.map((i) => el("th", { scope: "col", class: "number" }, words(facts.quantiles[i]))))), el("tbody", {}, rows)))];
}
