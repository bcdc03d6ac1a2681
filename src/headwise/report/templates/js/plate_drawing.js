// Drawing the plate: cells, axes, and the marks on top.

function measurePlate(width) {
  const layers = shownLayers();
  const heads = Math.max(...layers.map((i) => facts.layers[i].heads));
  const shared = facts.layers[layers[0]].kvHeads;
  const size = shared > 1 && shared < heads ? heads / shared : heads;
  const groups = Math.ceil(heads / size);
  const gap = groups > 1 ? Math.min(6, Math.max(2, width / heads / 5)) : 0;
  const left = Math.max(...layers.map((i) => facts.layers[i].name.length)) * 6.6 + 10;
  const right = width > 520 ? 62 : 0;
  const room = width - left - right - gap * (groups - 1);
  const cell = Math.min(heads <= 4 ? 120 : 96, room / heads);
  const rows = layers.length;
  const height = rows <= 12 ? 26 : rows <= 40 ? 19 : rows <= 72 ? 13 : 9;
  const top = groups > 1 ? 34 : 20;
  const x = (head) => left + head * cell + Math.floor(head / size) * gap;
  return {
    layers,
    heads,
    size,
    groups,
    gap,
    left,
    right,
    cell,
    height,
    top,
    x,
    width: x(heads - 1) + cell + right,
    bottom: top + rows * height,
  };
}

function drawPlate() {
  const box = byId("plate-drawing");
  const width = Math.floor(box.clientWidth);
  if (!width || state.statistic === null) return;
  for (const button of document.querySelectorAll("#statistic-choice [data-role]")) {
    button.setAttribute("aria-pressed", button.dataset.role === state.role);
  }
  const g = (plate.geometry = measurePlate(width));
  const statistic = statisticNow();
  const everything = valuesOf(state.statistic, everyLayer());
  const scale = (plate.scale = scaleOf(statistic, everything));
  const node = svg("svg", {
    width: g.width,
    height: g.bottom + 4,
    viewBox: `0 0 ${g.width} ${g.bottom + 4}`,
    "aria-hidden": "true",
  });
  box.setAttribute(
    "aria-label",
    `${statistic.longName}: ${g.heads} heads across, ${g.layers.length} layers down. Arrow keys move from head to head, Enter goes to the page of the head, Escape comes back.`,
  );
  drawPlateAxes(node, g, statistic);
  g.layers.forEach((layer, row) => drawPlateRow(node, g, statistic, scale, layer, row));
  node.append(svg("g", { id: "plate-marks" }));
  node.addEventListener("pointermove", (event) => hoverPlate(cellAt(event)));
  node.addEventListener("pointerleave", () => hoverPlate(null));
  node.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) pin(cell.layer, cell.head, event.shiftKey || state.comparing);
  });
  plate.svg = node;
  box.replaceChildren(node);
  byId("plate-legend").replaceChildren(
    colourBar({
      width,
      scale,
      unit: statistic.unit.startsWith("of ") ? "" : statistic.unit,
      title: statistic.longName,
      paint: (t) => css(viridis(t)),
      rug: everything.length <= 4096 ? everything : [],
    }),
  );
  markPlate();
  tellPlate();
  if (byId("plate-table").open) tablePlate();
}

function drawPlateAxes(node, g, statistic) {
  const every = Math.ceil(22 / g.cell);
  for (let head = 0; head < g.heads; head++) {
    if (head % every) continue;
    node.append(
      svg(
        "text",
        { x: g.x(head) + g.cell / 2, y: g.top - 6, "text-anchor": "middle" },
        `${head === 0 ? "H" : ""}${facts.heads[head]}`,
      ),
    );
  }
  for (let group = 0; g.groups > 1 && group < g.groups; group++) {
    const from = g.x(group * g.size),
      to = g.x(Math.min((group + 1) * g.size, g.heads) - 1) + g.cell;
    node.append(svg("line", { class: "axis-line", x1: from + 1, x2: to - 1, y1: 14.5, y2: 14.5 }));
    if (to - from > 22) {
      const name =
        to - from > 60 ? `key-value head ${group}` : to - from > 34 ? `kv ${group}` : `${group}`;
      node.append(
        svg(
          "text",
          { x: (from + to) / 2, y: 10, "text-anchor": "middle" },
          to - from > 100 || name.length < 6 ? name : `kv ${group}`,
        ),
      );
    }
  }
  if (g.right)
    node.append(
      svg(
        "text",
        { x: g.width, y: g.top - 6, "text-anchor": "end" },
        statistic.perLayer ? "layer" : "mean",
      ),
    );
}

function drawPlateRow(node, g, statistic, scale, layer, row) {
  const y = g.top + row * g.height;
  const skip = g.height < 12 ? Math.ceil(12 / g.height) : 1;
  if (row % skip === 0) {
    node.append(
      svg(
        "text",
        { x: g.left - 8, y: y + g.height / 2 + 3.5, "text-anchor": "end" },
        facts.layers[layer].name,
      ),
    );
  }
  const count = statistic.perLayer ? 1 : facts.layers[layer].heads;
  let sum = 0,
    known = 0;
  for (let head = 0; head < count; head++) {
    const value = statisticValue(state.statistic, layer, head);
    const there = Number.isFinite(value);
    const colour = there ? viridis(scale.at(value)) : null;
    const last = statistic.perLayer
      ? g.x(facts.layers[layer].heads - 1) + g.cell
      : g.x(head) + g.cell;
    const width = last - g.x(head) - (g.cell > 6 ? 1 : 0);
    node.append(
      svg("rect", {
        class: there ? "cell" : "cell missing",
        x: g.x(head),
        y,
        width,
        height: g.height - (g.height > 6 ? 1 : 0),
        "data-cell": `${layer},${head}`,
        style: there ? `fill:${css(colour)}` : null,
      }),
    );
    if (there) {
      sum += value;
      known++;
    }
    if (g.cell >= 44 && g.height >= 17 && !statistic.perLayer) {
      node.append(
        svg(
          "text",
          {
            class: "inside",
            x: g.x(head) + g.cell / 2,
            y: y + g.height / 2 + 3.2,
            "text-anchor": "middle",
            style: there ? `fill:${inkOn(colour)}` : null,
          },
          there ? three(value) : facts.layers[layer].nonFinite ? "NaN" : "–",
        ),
      );
    }
  }
  if (g.right && g.height >= 12) {
    node.append(
      svg(
        "text",
        { x: g.width, y: y + g.height / 2 + 3.5, "text-anchor": "end", class: "strong" },
        known ? three(sum / known) : facts.layers[layer].nonFinite ? "NaN" : "–",
      ),
    );
  }
}

function cellAt(event) {
  const g = plate.geometry,
    box = plate.svg.getBoundingClientRect();
  const factor = g.width / box.width;
  const x = (event.clientX - box.left) * factor,
    y = (event.clientY - box.top) * factor;
  const row = Math.floor((y - g.top) / g.height);
  if (row < 0 || row >= g.layers.length) return null;
  const layer = g.layers[row];
  for (let head = 0; head < facts.layers[layer].heads; head++) {
    if (x >= g.x(head) && x < g.x(head) + g.cell) return { layer, head };
  }
  return null;
}

function markPlate() {
  const layer = byId("plate-marks"),
    g = plate.geometry;
  if (!layer) return;
  const nodes = [];
  const box = (cell, name) => {
    const row = g.layers.indexOf(cell.layer);
    if (row < 0) return;
    const shape = {
      x: g.x(cell.head) - 0.5,
      y: g.top + row * g.height - 0.5,
      width: g.cell,
      height: g.height,
    };
    if (name.startsWith("pin")) nodes.push(svg("rect", { class: "pin-halo", ...shape }));
    nodes.push(svg("rect", { class: name, ...shape }));
  };
  for (const key of state.highlight) {
    const [at, head] = key.split(",");
    const row = g.layers.indexOf(Number(at));
    if (row < 0) continue;
    const x = head === "" ? g.left - 4 : g.x(Number(head)) + Math.min(5, g.cell / 2);
    nodes.push(
      svg("circle", {
        class: "mark-dot",
        cx: x,
        cy: g.top + row * g.height + (head === "" ? g.height / 2 : Math.min(5, g.height / 2)),
        r: Math.min(3.2, g.cell / 3, g.height / 3),
      }),
    );
  }
  if (plate.hover) box(plate.hover, "hover-box");
  state.pinned.forEach((cell, i) => box(cell, i ? "pin second" : "pin"));
  layer.replaceChildren(...nodes);
}
