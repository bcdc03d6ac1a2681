// Depth: the stream and what is written to it, block by block; gradients where measured.

function lineFigure(width, title, unit, lines, xTitle) {
  const [low, high] = extent(
    lines.flatMap((line) => line.points.map(([, y]) => y)),
    true,
  );
  const log = high / low > 20 && low > 0;
  const xs = lines.flatMap((line) => line.points.map(([x]) => x));
  const single = new Set(xs).size === 1;
  const last = single ? xs[0] + 0.5 : Math.max(...xs),
    first = single ? xs[0] - 0.5 : Math.min(...xs);
  const y = log ? { low: low / 1.1, high: high * 1.1, log } : { low: 0, high: high * 1.05 || 1 };
  const drawing = frame({
    width,
    height: 220,
    right: 96,
    x: {
      low: first,
      high: last,
      ticks: single
        ? [xs[0]]
        : linearTicks(first, last, Math.min(last - first, width / 80)).filter(Number.isInteger),
      title: xTitle,
    },
    y,
    label: title,
  });
  curves(
    drawing,
    lines.map((line) => ({ ...line, positive: log })),
  );
  return el(
    "figure",
    {},
    el("figcaption", {}, `${title}${unit ? `, ${unit}` : ""}${log ? " (log scale)" : ""}`),
    drawing.node,
  );
}

function depthLines(stack, names) {
  const { stacks, numbers, values } = facts.depth;
  return names
    .filter(([name]) => values[name])
    .map(([name, label, style]) => ({
      name: label,
      style,
      points: numbers
        .map((number, i) => [number, values[name][i], stacks[i]])
        .filter(([, y, s]) => s === stack && y !== null)
        .map(([x, y]) => [x, y]),
    }))
    .filter((line) => line.points.length);
}

function drawDepth() {
  const box = byId("depth-figures");
  if (!box || !facts.depth) return;
  const several = new Set(facts.depth.stacks).size > 1;
  const width = Math.min(
    box.clientWidth,
    Math.max(Math.min(box.clientWidth, 420), (box.clientWidth - 32) / 2),
  );
  const nodes = [];
  for (const stack of new Set(facts.depth.stacks)) {
    const say = several ? `${stack}: ` : "";
    const draw = (title, lines, unit) =>
      lines.length && nodes.push(lineFigure(width, say + title, unit, lines, "block"));
    draw(
      "stream leaving the block, rms",
      depthLines(stack, [
        ["stream_out_rms", "other tokens", "line-2"],
        ["stream_out_rms_first", "first token", "line-1"],
      ]),
    );
    draw(
      "written to the stream, rms, without the first token",
      depthLines(stack, [
        ["attention_write_rms", "attention", "line-1"],
        ["mlp_write_rms", "MLP", "line-2"],
      ]),
    );
    draw(
      "gradient of the loss at the stream, rms",
      depthLines(stack, [["stream_gradient_rms", "stream", "line-1"]]),
      "",
    );
  }
  if (facts.gradients) {
    const attention = ["q", "k", "v", "o", "qkv"],
      styles = ["line-1", "line-2", "line-4", "line-3", "line-1"];
    const pick = (kinds) =>
      facts.gradients
        .filter((g) => kinds.includes(g.projection))
        .map((g) => ({
          name: g.projection,
          style: styles[kinds.indexOf(g.projection)],
          points: g.points,
        }));
    const names = {
      q: "W_Q",
      k: "W_K",
      v: "W_V",
      o: "W_O",
      qkv: "W_QKV",
      mlp: "MLP",
      norm: "norms",
    };
    for (const [title, kinds] of [
      ["gradient norm, attention", attention],
      ["gradient norm, MLP and norms", ["mlp", "norm"]],
    ]) {
      const lines = pick(kinds).map((line) => ({ ...line, name: names[line.name] }));
      if (lines.length) nodes.push(lineFigure(width, title, "", lines, "block"));
    }
  }
  box.replaceChildren(...nodes);
  tableDepth();
}
function tableDepth() {
  const { stacks, numbers, values } = facts.depth,
    several = new Set(stacks).size > 1;
  const names = Object.keys(values).filter((name) => name !== "writes_verified");
  byId("depth-table").replaceChildren(
    tableOf(
      [
        el("th", { scope: "col" }, "Block"),
        names.map((name) =>
          el(
            "th",
            {
              scope: "col",
              class: "number",
              style: "white-space:normal;min-width:84px;vertical-align:bottom",
            },
            name.replaceAll("_", " "),
          ),
        ),
      ],
      numbers.map((number, i) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, `${several ? `${stacks[i]} ` : ""}${number}`),
          names.map((name) => el("td", { class: "number" }, three(values[name][i]))),
        ),
      ),
    ),
  );
}
