// Axes and small line drawings.

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const marks = decades > 4 ? [1] : decades > 1.6 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const mark of marks) {
      const tick = mark * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  const every = Math.ceil(ticks.length / 7);
  const thinned = ticks.filter((_, i) => i % every === 0);
  return thinned.length > 1 ? thinned : [low, high];
}
function ticksOf(low, high, log, count) {
  return log ? logTicks(low, high) : linearTicks(low, high, count);
}
function tickText(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(0).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

// A frame with axes. Returns the node, the two scales, and where to draw.
function frame({ width, height, left = 46, right = 12, top = 8, bottom = 34, x, y, label }) {
  const node = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": label,
  });
  const across = position(x.low, x.high, x.log),
    up = position(y.low, y.high, y.log);
  const px = (value) => left + across(value) * (width - left - right);
  const py = (value) => height - bottom - up(value) * (height - top - bottom);
  for (const tick of y.ticks || ticksOf(y.low, y.high, y.log, Math.max(2, height / 45))) {
    node.append(
      svg("line", { class: "grid-line", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }),
      svg("text", { x: left - 6, y: py(tick) + 3.5, "text-anchor": "end" }, tickText(tick)),
    );
  }
  let free = -Infinity;
  for (const tick of x.ticks || ticksOf(x.low, x.high, x.log, Math.max(2, width / 90))) {
    const text = x.text ? x.text(tick) : tickText(tick);
    const half = text.length * 3.2;
    if (px(tick) - half < free) continue;
    free = px(tick) + half + 6;
    node.append(
      svg("line", {
        class: "axis-line",
        x1: px(tick),
        x2: px(tick),
        y1: height - bottom,
        y2: height - bottom + 4,
      }),
      svg(
        "text",
        { x: Math.min(px(tick), width - half), y: height - bottom + 15, "text-anchor": "middle" },
        text,
      ),
    );
  }
  node.append(
    svg("line", {
      class: "axis-line",
      x1: left,
      x2: width - right,
      y1: height - bottom,
      y2: height - bottom,
    }),
    svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, x.title || ""),
  );
  return { node, px, py, left, right, top, bottom, width, height };
}

// Curves with their names written beside the end of each, moved apart where they would touch.
function curves(drawing, lines) {
  const { node, px, py } = drawing;
  for (const line of lines) {
    let path = "",
      open = false;
    for (const [x, y] of line.points) {
      if (y === null || !Number.isFinite(y) || (line.positive && y <= 0)) {
        open = false;
        continue;
      }
      path += `${open ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
      open = true;
    }
    node.append(svg("path", { class: `curve ${line.style}`, d: path }));
    const known = line.points.filter(([, y]) => y !== null && Number.isFinite(y));
    if (known.length === 1) {
      node.append(
        svg("circle", {
          cx: px(known[0][0]),
          cy: py(known[0][1]),
          r: 3.5,
          class: `point ${line.style}`,
        }),
      );
    }
    line.end = known.length ? { x: px(known.at(-1)[0]), y: py(known.at(-1)[1]) } : null;
  }
  const ends = lines.filter((line) => line.end && line.name).sort((a, b) => a.end.y - b.end.y);
  let free = -Infinity,
    limit = drawing.height - drawing.bottom + 2;
  for (const line of ends) {
    line.end.y = Math.max(line.end.y + 4, free);
    free = line.end.y + 13;
  }
  for (const line of ends.reverse()) {
    line.end.y = Math.min(line.end.y, limit);
    limit = line.end.y - 13;
    node.append(
      svg(
        "text",
        { class: line.style, x: drawing.width - drawing.right + 6, y: line.end.y },
        line.name,
      ),
    );
  }
}

function extent(values, positive) {
  const kept = values.filter((v) => v !== null && Number.isFinite(v) && (!positive || v > 0));
  if (!kept.length) return [0, 1];
  return [Math.min(...kept), Math.max(...kept)];
}

// A colour bar with ticks, and a tick below for every value.
function colourBar({ width, scale, unit, title, paint, rug }) {
  const bar = Math.min(width, 420),
    height = 46;
  const node = svg("svg", {
    width: bar + 30,
    height,
    viewBox: `0 0 ${bar + 30} ${height}`,
    role: "img",
    "aria-label": `colour scale, ${title}, from ${three(scale.low)} to ${three(scale.high)} ${unit}`,
  });
  const inner = bar - 20;
  for (let i = 0; i < 100; i++) {
    node.append(
      svg("rect", {
        x: 10 + (i * inner) / 100,
        y: 14,
        width: inner / 100 + 0.6,
        height: 10,
        style: `fill:${paint(i / 99)}`,
      }),
    );
  }
  node.append(
    svg(
      "text",
      { x: 10, y: 9, class: "strong" },
      title + (unit ? `, ${unit}` : "") + (scale.log ? " (log scale)" : ""),
    ),
  );
  let free = -Infinity;
  for (const tick of ticksOf(scale.low, scale.high, scale.log, Math.max(4, bar / 60))) {
    const x = 10 + scale.at(tick) * inner,
      half = tickText(tick).length * 3.2;
    if (x - half < free) continue;
    free = x + half + 6;
    node.append(svg("text", { x, y: 42, "text-anchor": "middle" }, tickText(tick)));
  }
  for (const value of rug || []) {
    if (!Number.isFinite(value)) continue;
    const x = 10 + scale.at(value) * inner;
    node.append(
      svg("line", {
        x1: x,
        x2: x,
        y1: 25.5,
        y2: 30,
        style: "stroke:var(--soft);stroke-opacity:.5",
      }),
    );
  }
  return node;
}
