// The pooled map on a canvas, with positions and tokens on both axes.

const MAP_LOW = 1e-4;

function mapFigure(layer, head, width) {
  const [rows, columns] = facts.blocks,
    about = facts.layers[layer];
  const wide = width > 300,
    left = wide ? 74 : 44,
    below = wide ? 54 : 36;
  const at = (layer * facts.heads.length + head) * rows * columns;
  const data = arrays.pooled.data;
  const queries = streamOf(about.queryStream),
    keys = streamOf(about.keyStream);
  // Streams of different length share one array; the unused rows and columns are left away.
  const blocksOf = (stream, room) => Math.min(room, Math.ceil(stream.longest / facts.blockWidth));
  const used = { rows: blocksOf(queries, rows), columns: blocksOf(keys, columns) };
  const side = width - left - 4;
  const canvas = el("canvas", {
    width: used.columns,
    height: used.rows,
    style: `width:${side}px;height:${Math.round((side * used.rows) / used.columns)}px;position:absolute;left:${left}px;top:0`,
  });
  const context = canvas.getContext("2d"),
    image = context.createImageData(used.columns, used.rows);
  for (let q = 0; q < used.rows; q++) {
    for (let k = 0; k < used.columns; k++) {
      const value = data[at + q * columns + k],
        pixel = (q * used.columns + k) * 4;
      if (!(value > 0)) continue;
      const colour = viridis(Math.log(Math.max(value, MAP_LOW) / MAP_LOW) / Math.log(1 / MAP_LOW));
      image.data.set([...colour, 255], pixel);
    }
  }
  context.putImageData(image, 0, 0);
  const height = Math.round((side * used.rows) / used.columns);
  const drawing = svg("svg", {
    width,
    height: height + below,
    style: "position:absolute;left:0;top:0;pointer-events:none",
  });
  drawing.append(
    svg("rect", {
      x: left - 0.5,
      y: -0.5,
      width: side + 1,
      height: height + 1,
      fill: "none",
      stroke: "var(--line)",
    }),
  );
  for (const p of placesOnAxis(
    lengthOf(queries, used.rows),
    Math.max(3, Math.floor(height / 46)),
  )) {
    const y = ((p + 0.5) / (used.rows * facts.blockWidth)) * height;
    drawing.append(
      svg("line", { class: "axis-line", x1: left - 4, x2: left, y1: y, y2: y }),
      axisLabel(
        left - 7,
        Math.min(Math.max(y + 3.5, 8), height),
        "end",
        p,
        wide ? queries : null,
        8,
        false,
      ),
    );
  }
  const marks = placesOnAxis(lengthOf(keys, used.columns), Math.max(2, Math.floor(side / 66)));
  for (const p of marks) {
    const scaled = side / (used.columns * facts.blockWidth);
    if (p !== marks.at(-1) && (marks.at(-1) - p) * scaled < 74) continue;
    const x = left + ((p + 0.5) / (used.columns * facts.blockWidth)) * side;
    drawing.append(
      svg("line", { class: "axis-line", x1: x, x2: x, y1: height, y2: height + 4 }),
      axisLabel(
        x,
        height + 15,
        p === 0 ? "start" : x > width - 30 ? "end" : "middle",
        p,
        wide ? keys : null,
        9,
        true,
      ),
    );
  }
  drawing.append(
    svg("text", { x: width - 4, y: height + below - 4, "text-anchor": "end" }, "key →"),
  );
  drawing.append(svg("text", { x: 0, y: height + below - 4 }, "↓ query"));
  const say = el("p", { class: "say" }, "Point at the map.");
  const box = el(
    "div",
    { style: `position:relative;width:${width}px;height:${height + below}px` },
    canvas,
    drawing,
  );
  canvas.addEventListener("pointermove", (event) => {
    const r = canvas.getBoundingClientRect();
    const q = Math.floor(((event.clientY - r.top) / r.height) * used.rows),
      k = Math.floor(((event.clientX - r.left) / r.width) * used.columns);
    if (q < 0 || k < 0 || q >= used.rows || k >= used.columns) return;
    const value = data[at + q * columns + k];
    say.replaceChildren(
      `Queries ${blockWords(q, queries)} → keys ${blockWords(k, keys)}: `,
      el(
        "b",
        {},
        Number.isNaN(value)
          ? "no rows"
          : value === 0
            ? "0 of the weight"
            : `${three(value)} of the weight`,
      ),
    );
  });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `pooled attention map of ${headName(layer, head)}`);
  return [
    el("h4", {}, "Attention map"),
    el(
      "p",
      { class: "caption" },
      facts.blockWidth > 1
        ? `Mean weight from a block of ${whole(facts.blockWidth)} queries to a block of ${whole(facts.blockWidth)} keys; the same colours for every head.`
        : "Weight from each query to each key; the same colours for every head.",
    ),
    box,
    say,
    colourBar({
      width: width - 30,
      scale: { low: MAP_LOW, high: 1, log: true, at: position(MAP_LOW, 1, true) },
      unit: "",
      title: wide ? "share of the weight" : "share",
      paint: (t) => css(viridis(t)),
    }),
  ];
}

function lengthOf(stream, blocks) {
  return Math.min(stream.longest, blocks * facts.blockWidth);
}

function placesOnAxis(length, count) {
  const last = length - 1;
  const step = linearTicks(0, Math.max(last, 1), count)[1] || 1;
  const places = [];
  for (let p = 0; p < last - step * 0.45; p += Math.max(1, step)) places.push(p);
  return [...places, last].filter((p, i, all) => all.indexOf(p) === i);
}

function axisLabel(x, y, anchor, place, stream, room, under) {
  const token = tokenAt(stream, place),
    text = svg("text", { x, y, "text-anchor": anchor });
  if (token === null) {
    text.append(whole(place));
    return text;
  }
  if (under) {
    text.append(
      svg("tspan", { class: "strong" }, whole(place)),
      svg("tspan", { x, dy: 13 }, shorten(token, room)),
    );
  } else {
    text.append(`${shorten(token, room)} `, svg("tspan", { class: "strong" }, whole(place)));
  }
  return text;
}

function blockWords(block, stream) {
  const from = block * facts.blockWidth,
    to = Math.min(from + facts.blockWidth, stream.longest) - 1;
  const token = tokenAt(stream, from);
  return (
    (to > from ? `${whole(from)}–${whole(to)}` : whole(from)) +
    (token === null ? "" : ` (${shorten(token, 12)}${to > from ? " …" : ""})`)
  );
}
