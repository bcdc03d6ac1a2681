// Head pages: everything about one pinned head, beside the plate; two heads side by side.

function drawPanel() {
  const panel = byId("panel"),
    box = document.querySelector(".frame");
  const open = state.pinned.length > 0;
  panel.hidden = !open;
  box.classList.toggle("open", open);
  box.classList.toggle("two", state.pinned.length > 1);
  if (!open) {
    state.comparing = false;
    panel.replaceChildren();
    return;
  }
  const compare = el(
    "button",
    {
      type: "button",
      class: "plain",
      "aria-pressed": Boolean(state.comparing),
      click: () => {
        state.comparing = !state.comparing;
        tellPlate();
        drawPanel();
      },
    },
    state.comparing ? "Click the second head …" : "Compare with another",
  );
  const bar = el(
    "div",
    { class: "panel-bar" },
    state.pinned.length < 2
      ? compare
      : el("span", { class: "soft" }, "Arrow keys move the framed one"),
    el("span", { class: "spring" }),
    el(
      "button",
      { type: "button", class: "plain", "aria-label": "Close head pages", click: closePanel },
      "Close",
    ),
  );
  const cards = el("div", { class: "cards" });
  const top = panel.scrollTop;
  keepFocus(panel, () => panel.replaceChildren(bar, cards));
  const room = Math.floor(
    (panel.clientWidth - 40 - (state.pinned.length - 1) * 24) / state.pinned.length,
  );
  const width = Math.max(140, Math.min(room, 440));
  state.pinned.forEach((place, i) => cards.append(card(place, i, width)));
  panel.scrollTop = top;
}

// Back to where the head was chosen.
function closePanel() {
  const inside = byId("panel").contains(document.activeElement);
  unpin();
  if (inside) byId("plate-drawing").focus({ preventScroll: true });
}

function card({ layer, head }, index, width) {
  const about = facts.layers[layer];
  const two = state.pinned.length > 1;
  const title = el("h3", {}, headName(layer, head));
  if (two) {
    title.style.borderBottom = `2px ${index ? "dashed" : "solid"} ${index === state.active ? "var(--accent)" : "var(--line)"}`;
    title.append(
      " ",
      el(
        "button",
        {
          type: "button",
          class: "plain",
          style: "font-size:12px;float:right;font-weight:400",
          "aria-label": `Unpin ${headName(layer, head)}`,
          click: () => unpin(index),
        },
        "Unpin",
      ),
    );
  }
  const shared =
    about.kvHeads < about.heads
      ? ` · reads key-value head ${Math.floor(head / (about.heads / about.kvHeads))}`
      : "";
  const node = el(
    "article",
    { class: "card", "aria-label": headName(layer, head), "data-place": `${layer},${head}` },
    title,
    el("p", { class: "module" }, `${about.module}${about.mask ? ` · ${about.mask}` : ""}${shared}`),
  );
  if (two)
    title.addEventListener("click", () => {
      if (state.active !== index && state.pinned[index]) {
        state.active = index;
        emit("pinned");
      }
    });
  if (about.nonFinite) {
    node.append(el("p", { class: "missing-note" }, `Not measured: ${about.nonFinite}`));
    return node;
  }
  if (facts.streams.length)
    node.append(
      ...mapFigure(layer, head, width),
      ...entropyFigure(layer, head, width),
      ...distanceFigure(layer, head, width),
      ...receivedFigure(layer, head, width),
    );
  node.append(
    ...spectrumFigure(layer, head, width),
    ...numbersTable(layer, head),
    ...(facts.streams.length ? quantileTable(layer, head) : []),
  );
  return node;
}

function profileOf(index, layer, head) {
  const bins = facts.bins.length,
    at = ((index * facts.layers.length + layer) * facts.heads.length + head) * bins;
  const middle = facts.bins.length > 1 ? (facts.bins[1] - facts.bins[0]) / 2 : 0;
  return facts.bins
    .map((start, i) => [start + middle, arrays.profiles.data[at + i]])
    .filter(([, y]) => Number.isFinite(y));
}
function entropyFigure(layer, head, width) {
  const about = facts.layers[layer],
    all = profileOf(0, layer, head),
    without = profileOf(1, layer, head);
  if (!all.length) return [];
  const lines = [
    { points: all, style: "line-1", name: width > 300 ? "all keys" : "" },
    { points: without, style: "line-2", name: width > 300 ? "no sink" : "" },
  ];
  const bound =
    about.role === "decoder" && about.window === null ? all.map(([x]) => [x, Math.log(x + 1)]) : [];
  if (bound.length)
    lines.push({ points: bound, style: "line-3", name: width > 300 ? "most" : "" });
  // One scale for both heads where two are compared.
  const others = state.pinned.flatMap((p) => [0, 1].flatMap((i) => profileOf(i, p.layer, p.head)));
  const high = Math.max(...[...others, ...bound].map(([, y]) => y), 0.1);
  const last = Math.max(...all.map(([x]) => x));
  const drawing = frame({
    width,
    height: 150,
    right: width > 300 ? 58 : 10,
    left: 34,
    x: { low: 0, high: Math.max(last, 1), title: "position of the query, tokens" },
    y: { low: 0, high },
    label: `entropy by position, ${headName(layer, head)}`,
  });
  curves(drawing, lines);
  return [
    el("h4", {}, "Entropy by position"),
    el(
      "p",
      { class: "caption" },
      `Nats; 0: one token. ${width > 300 ? "" : "Coloured: all keys; plain: without the sink. "}${bound.length ? "Dotted: the most there can be." : ""}`,
    ),
    drawing.node,
  ];
}

function distanceFigure(layer, head, width) {
  const count = facts.bands.length,
    at = (layer * facts.heads.length + head) * count;
  const bandsOf = (start) => facts.bands.map((_, b) => arrays.band.data[start + b]);
  const values = bandsOf(at);
  let last = values.length - 1;
  while (last > 0 && !(values[last] > 0)) last--;
  if (!Number.isFinite(values[0])) return [];
  const others = state.pinned.flatMap((p) =>
    bandsOf((p.layer * facts.heads.length + p.head) * count).filter(Number.isFinite),
  );
  const high = Math.max(...values.slice(0, last + 1), ...others, 0.01),
    step = last + 1;
  const drawing = frame({
    width,
    height: 140,
    left: 34,
    right: 4,
    x: {
      low: 0,
      high: step,
      ticks: facts.bands.slice(0, step).map((_, b) => b + 0.5),
      text: (t) => bandWords(Math.floor(t)),
      title: "distance to the key, tokens (log scale)",
    },
    y: { low: 0, high },
    label: `weight by distance, ${headName(layer, head)}`,
  });
  const wide = (width - drawing.left - drawing.right) / step;
  for (let b = 0; b < step; b++) {
    drawing.node.append(
      svg(
        "rect",
        {
          class: "bar",
          x: drawing.px(b) + 1,
          y: drawing.py(values[b]),
          width: Math.max(1, wide - 2),
          height: drawing.py(0) - drawing.py(values[b]),
        },
        svg("title", {}, `distance ${bandWords(b)}: ${three(values[b])} of the weight`),
      ),
    );
  }
  return [
    el("h4", {}, "Weight by distance"),
    el("p", { class: "caption" }, "Share of the weight, sink included."),
    drawing.node,
  ];
}
function bandWords(band) {
  const from = facts.bands[band],
    to = band + 1 < facts.bands.length ? facts.bands[band + 1] - 1 : null;
  const short = (n) => (n >= 1024 ? `${n / 1024}k` : String(n));
  if (to === null) return `≥${short(from)}`;
  return to === from ? String(from) : from >= 16 ? `${short(from)}+` : `${from}–${to}`;
}

function numbersTable(layer, head) {
  const rows = [];
  facts.statistics.forEach((statistic, i) => {
    if (statistic.perLayer) return;
    const value = statisticValue(i, layer, head);
    if (!Number.isFinite(value)) return;
    const sorted = descending(i);
    rows.push(
      el(
        "tr",
        {},
        el("th", { scope: "row" }, statistic.label),
        el("td", { class: "number" }, three(value)),
        el("td", {}, el("span", { class: "soft" }, statistic.unit)),
        el(
          "td",
          { class: "number soft" },
          `${whole(rankOf(value, sorted))} of ${whole(sorted.length)}`,
        ),
      ),
    );
  });
  return [
    el("h4", {}, "Numbers"),
    el(
      "p",
      { class: "caption" },
      capital(
        `${facts.streams.length ? "over all rows; " : ""}${facts.circuits ? "circuits from the weights; " : ""}rank among all heads, largest first.`,
      ),
    ),
    el(
      "div",
      { class: "scroll" },
      tableOf(
        [
          el("th", { scope: "col" }, "Statistic"),
          el("th", { scope: "col", class: "number" }, "value"),
          el("th", {}, ""),
          el("th", { scope: "col", class: "number" }, "rank"),
        ],
        rows,
      ),
    ),
  ];
}

function quantileTable(layer, head) {
  const count = facts.quantiles.length;
  const shown = [0, 0.05, 0.5, 0.95, 1]
    .map((level) => facts.quantiles.findIndex((q) => Math.abs(q - level) < 1e-6))
    .filter((i) => i >= 0);
  const words = (level) =>
    level === 0
      ? "least"
      : level === 1
        ? "most"
        : level === 0.5
          ? "median"
          : `${Math.round(level * 100)}%`;
  const rows = facts.quantileNames.map((name, k) => {
    const at = ((k * facts.layers.length + layer) * facts.heads.length + head) * count;
    const values = shown.map((i) => arrays.quantiles.data[at + i]);
    if (!values.some(Number.isFinite)) return null;
    const statistic = facts.statistics.find((s) => s.name === name);
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, statistic ? statistic.label : "entropy off sink, nats"),
      values.map((v) => el("td", { class: "number" }, Number.isFinite(v) ? three(v) : "–")),
    );
  });
  return [
    el("h4", {}, "Spread over rows"),
    el("p", { class: "caption" }, "A row is one query: half of the rows lie below the median."),
    el(
      "div",
      { class: "scroll" },
      tableOf(
        [
          el("th", { scope: "col" }, "Quantile"),
          shown.map((i) => el("th", { scope: "col", class: "number" }, words(facts.quantiles[i]))),
        ],
        rows,
      ),
    ),
  ];
}
