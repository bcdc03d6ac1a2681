// Circuits: small maps of numbers per head, and the spectra of a head on its page.

function drawCircuits() {
  const box = byId("circuit-maps");
  const width = Math.min(box.clientWidth, box.clientWidth < 872 ? 560 : (box.clientWidth - 32) / 2);
  const maps = facts.circuits.maps
    .map((name) => facts.statistics.findIndex((s) => s.name === name))
    .filter((index) => index >= 0);
  box.replaceChildren(...maps.map((index) => smallMap(index, width)));
  drawComposition(byId("composition"), box.clientWidth);
}

function smallMap(index, width) {
  const statistic = facts.statistics[index];
  const values = valuesOf(index, everyLayer());
  const scale = scaleOf(statistic, values);
  const count = facts.layers.length;
  const heads = Math.max(...facts.layers.map((layer) => layer.heads));
  const left = Math.max(...facts.layers.map((layer) => layer.name.length)) * 6.6 + 10;
  const cell = Math.min(56, (width - left) / heads);
  const height = count <= 8 ? 18 : Math.max(3, Math.min(12, 260 / count));
  const skip = Math.ceil(12 / height);
  const gap = cell > 6 && height > 6 ? 1 : 0;
  const full = left + heads * cell;
  const node = svg("svg", {
    width: full,
    height: count * height + 2,
    viewBox: `0 0 ${full} ${count * height + 2}`,
    role: "img",
    "aria-label": `${statistic.longName}, layers down, heads across, from ${three(Math.min(...values.filter(Number.isFinite)))} to ${three(Math.max(...values.filter(Number.isFinite)))}`,
  });
  facts.layers.forEach((layer, row) => {
    if (row % skip === 0) {
      const y = row * height + height / 2 + 3.5;
      node.append(
        svg("text", { x: left - 8, y: Math.max(9, y), "text-anchor": "end" }, layer.name),
      );
    }
    for (let head = 0; head < layer.heads; head++) {
      const value = statisticValue(index, row, head);
      const there = Number.isFinite(value);
      node.append(
        svg("rect", {
          class: there ? "cell" : "cell missing",
          x: left + head * cell,
          y: row * height,
          width: cell - gap,
          height: height - gap,
          "data-at": `${row},${head}`,
          style: there ? `fill:${css(viridis(scale.at(value)))}` : null,
        }),
      );
    }
  });
  const at = (event) => event.target.dataset.at?.split(",").map(Number);
  node.addEventListener("pointermove", (event) => {
    const place = at(event);
    if (place) tellCircuit(index, ...place);
  });
  node.addEventListener("click", (event) => {
    const place = at(event);
    if (place) pin(...place, event.shiftKey || state.comparing);
  });
  const bar = colourBar({
    width: Math.min(width - 30, 320),
    scale,
    unit: "",
    title: statistic.longName,
    paint: (t) => css(viridis(t)),
    rug: values.length <= 4096 ? values : [],
  });
  return el("figure", { "data-map": statistic.name }, bar, node);
}

function tellCircuit(index, layer, head) {
  const statistic = facts.statistics[index],
    value = statisticValue(index, layer, head);
  const labels = behavioursOf(layer, head);
  byId("circuit-readout").replaceChildren(
    el("b", {}, headName(layer, head)),
    ` · ${statistic.label} `,
    el("b", {}, Number.isFinite(value) ? three(value) : "is not defined here"),
    labels ? ` · ${labels}` : "",
  );
}

/** What a head does on repeated random tokens and on the text, in words; empty where nothing. */
function behavioursOf(layer, head) {
  const place = `${layer},${head}`;
  return [
    [facts.circuits.labels[place], "on repeated random tokens"],
    [facts.circuits.textLabels[place], "on the text"],
  ]
    .filter(([names]) => names)
    .map(([names, where]) => `${names} ${where}`)
    .join("; ");
}

function spectrumOf(which, layer, head) {
  const count = facts.circuits.rank,
    at = ((which * facts.layers.length + layer) * facts.heads.length + head) * count;
  return Array.from({ length: count }, (_, i) => [i + 1, arrays.spectra.data[at + i]]).filter(
    ([, y]) => Number.isFinite(y) && y > 0,
  );
}
function spectrumFigure(layer, head, width) {
  if (!facts.circuits) return [];
  const labels = behavioursOf(layer, head);
  const say = el(
    "p",
    { class: "caption" },
    labels ? `${labels[0].toUpperCase()}${labels.slice(1)}. ` : "",
    "Singular values, log scale; the norm before attention is folded in.",
  );
  const lines = [
    { points: spectrumOf(0, layer, head), style: "line-1", name: "W_QK" },
    { points: spectrumOf(1, layer, head), style: "line-2", name: "W_OV" },
  ].filter((line) => line.points.length);
  if (!lines.length) return [];
  // One scale for both heads where two are compared; values far below the largest are rounding.
  const others = state.pinned.flatMap((p) => [0, 1].flatMap((i) => spectrumOf(i, p.layer, p.head)));
  const all = [...lines.flatMap((line) => line.points), ...others].map(([, y]) => y);
  const high = Math.max(...all),
    low = Math.max(Math.min(...all), high * 1e-6);
  const last = Math.max(...lines.flatMap((line) => line.points.map(([x]) => x)));
  const drawing = frame({
    width,
    height: 150,
    right: 48,
    left: 44,
    x: {
      low: last > 1 ? 1 : 0.5,
      high: last > 1 ? last : 1.5,
      ticks: last > 1 ? linearTicks(1, last, Math.min(last - 1, 6)).filter(Number.isInteger) : [1],
      title: "number of the singular value",
    },
    y: { low: low / 1.1, high: Math.max(high, low) * 1.1, log: true },
    label: `singular values of W_QK and W_OV, ${headName(layer, head)}`,
  });
  curves(
    drawing,
    lines.map((line) => ({
      ...line,
      points: line.points.filter(([, y]) => y >= low),
      positive: true,
    })),
  );
  return [el("h4", {}, "Spectra of W_QK and W_OV"), say, drawing.node];
}
