// Composition: which heads read what earlier heads wrote; the strongest pairs only.

const KIND_LINES = { Q: "line-1", K: "line-2", V: "line-3" };
const KIND_WORDS = { Q: "into the query", K: "into the key", V: "into the value" };

function drawComposition(box, width) {
  const { edges, above, pairs, zFrom } = facts.circuits;
  if (!pairs) {
    box.replaceChildren();
    return;
  }
  const title = el("h3", {}, "Which heads read what earlier heads wrote");
  const count = `${whole(above)} of ${whole(pairs)} pairs stand above z = ${zFrom}, which heads turned at random hardly reach`;
  if (!edges.length) {
    box.replaceChildren(title, el("p", {}, `None: ${count}.`));
    return;
  }
  const shown = edges.length < above ? `; the ${edges.length} highest are drawn` : "";
  box.replaceChildren(
    title,
    el("p", { class: "definition" }, `${count}${shown}. Earlier layers are above.`),
    el(
      "p",
      { class: "readout", id: "composition-readout", "aria-live": "polite" },
      "Point at a line.",
    ),
    compositionDrawing(edges, Math.min(width, 760)),
    compositionTable(edges),
  );
}

function compositionDrawing(edges, width) {
  const used = [...new Set(edges.flatMap((edge) => [edge[1], edge[3]]))].sort((a, b) => a - b);
  const heads = Math.max(...used.map((layer) => facts.layers[layer].heads));
  const left = Math.max(...used.map((layer) => facts.layers[layer].name.length)) * 6.6 + 12;
  const step = heads > 1 ? Math.min(90, (width - left - 20) / (heads - 1)) : 0;
  const gap = Math.max(26, Math.min(64, 460 / used.length));
  const x = (head) => left + 8 + head * step,
    y = (layer) => 26 + used.indexOf(layer) * gap;
  const full = Math.max(x(heads - 1) + 12, 300),
    height = y(used.at(-1)) + 12;
  const node = svg("svg", {
    width: full,
    height,
    viewBox: `0 0 ${full} ${height}`,
    role: "img",
    "aria-label": `${edges.length} pairs of heads that compose; the table below holds the same`,
  });
  const every = Math.max(1, Math.ceil(24 / (step || 24)));
  for (let head = 0; head < heads; head += every) {
    const text = `${head === 0 ? "H" : ""}${facts.heads[head]}`;
    node.append(svg("text", { x: x(head), y: 10, "text-anchor": "middle" }, text));
  }
  const busy = new Set(edges.flatMap((e) => [`${e[1]},${e[2]}`, `${e[3]},${e[4]}`]));
  for (const edge of [...edges].reverse()) node.append(compositionLine(edge, x, y, edges[0][6]));
  for (const layer of used) {
    node.append(
      svg("text", { x: left - 8, y: y(layer) + 4, "text-anchor": "end" }, facts.layers[layer].name),
    );
    for (let head = 0; head < facts.layers[layer].heads; head++) {
      const there = busy.has(`${layer},${head}`);
      node.append(
        svg(
          "circle",
          {
            class: there ? "cell node" : "missing",
            cx: x(head),
            cy: y(layer),
            r: there ? 5 : 2,
            click: there ? (event) => pin(layer, head, event.shiftKey || state.comparing) : null,
          },
          there ? svg("title", {}, headName(layer, head)) : null,
        ),
      );
    }
  }
  const kinds = [..."QKV"].filter((kind) => edges.some((edge) => edge[0] === kind));
  const legend = kinds.map((kind) =>
    el(
      "span",
      { style: "display:inline-flex;align-items:center;gap:5px;margin-right:14px" },
      svg(
        "svg",
        { width: 18, height: 10, "aria-hidden": "true" },
        svg("path", { class: `curve ${KIND_LINES[kind]}`, d: "M0 5h18" }),
      ),
      `${kind}: ${KIND_WORDS[kind]}`,
    ),
  );
  return el(
    "figure",
    { class: "composition" },
    el("figcaption", {}, legend),
    el("div", { class: "scroll" }, node),
  );
}

function compositionLine(edge, x, y, most) {
  const [kind, layer, head, later, reader] = edge;
  const middle = (y(layer) + y(later)) / 2;
  const d = `M${x(head)} ${y(layer)}C${x(head)} ${middle} ${x(reader)} ${middle} ${x(reader)} ${y(later)}`;
  const tell = () =>
    byId("composition-readout").replaceChildren(
      el("b", {}, `${headName(layer, head)} → ${headName(later, reader)}`),
      ` · ${kind}-composition `,
      el("b", {}, three(edge[5])),
      ` · z ${three(edge[6])}`,
    );
  return svg(
    "g",
    { pointerenter: tell },
    svg("path", {
      class: `curve ${KIND_LINES[kind]}`,
      d,
      style: `stroke-opacity:${(0.35 + (0.6 * edge[6]) / most).toFixed(2)}`,
    }),
    svg("path", { d, style: "fill:none;stroke:transparent;stroke-width:9" }),
  );
}

function compositionTable(edges) {
  const place = (layer, head) =>
    el(
      "button",
      {
        type: "button",
        class: "place",
        "data-layer": facts.layers[layer].id,
        "data-head": facts.heads[head],
      },
      headName(layer, head),
    );
  const rows = edges.map(([kind, layer, head, later, reader, value, z]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, kind),
      el("td", {}, place(layer, head)),
      el("td", {}, place(later, reader)),
      el("td", { class: "number" }, three(value)),
      el("td", { class: "number" }, three(z)),
    ),
  );
  const columns = ["Kind", "Earlier head", "Later head", "Composition", "z"];
  return el(
    "details",
    { class: "table" },
    el("summary", {}, "The same pairs as a table"),
    el(
      "div",
      { class: "scroll" },
      tableOf(
        columns.map((name, i) => el("th", { scope: "col", class: i > 2 ? "number" : null }, name)),
        rows,
      ),
    ),
  );
}
