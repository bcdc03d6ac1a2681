// Attention received: where it is read, its scale, and the strip on a head page.

// Where a received array is read: one head, one layer, or the whole model.
function receivedSource(scope, layer, head) {
  const name = { head: "receivedHead", layer: "receivedLayer", model: "receivedModel" }[scope];
  const width = facts.receivedWidths[name],
    data = arrays[name].data,
    length = arrays[name].shape.at(-1);
  const row = scope === "head" ? layer * facts.heads.length + head : scope === "layer" ? layer : 0;
  const of = (stream) => {
    let start = 0;
    for (const before of facts.streams) {
      if (before === stream) break;
      start += Math.ceil(before.length / width);
    }
    return [
      ...data.subarray(
        row * length + start,
        row * length + start + Math.ceil(stream.length / width),
      ),
    ];
  };
  return { width, of };
}

// Log scale from the 2% to the 99.8% quantile: one sink must not hide the rest. It spans at least
// from a third to ten times the median, so that nearly equal tokens are shaded nearly equally.
function shadeScale(values) {
  const sorted = values.filter((v) => v > 0).sort((a, b) => a - b);
  if (!sorted.length) return () => 0;
  const quantile = (level) =>
    sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * level))];
  const high = Math.max(quantile(0.998), 10 * quantile(0.5)),
    low = Math.min(quantile(0.02), quantile(0.5) / 3);
  const scale = (value) =>
    Math.min(1, Math.max(0, Math.log(Math.max(value, low) / low) / Math.log(high / low)));
  return Object.assign(scale, { low, high });
}

function receivedFigure(layer, head, width) {
  const stream = streamOf(facts.layers[layer].keyStream),
    source = receivedSource("head", layer, head);
  const values = source.of(stream);
  const scale = shadeScale(values);
  const canvas = el("canvas", {
    width: values.length,
    height: 1,
    role: "img",
    "aria-label": `attention received by token, ${headName(layer, head)}`,
    style: `width:${width}px;height:26px;border:1px solid var(--line)`,
  });
  const context = canvas.getContext("2d"),
    image = context.createImageData(values.length, 1);
  values.forEach((value, i) => {
    if (Number.isFinite(value)) image.data.set([...viridis(scale(value)), 255], i * 4);
  });
  context.putImageData(image, 0, 0);
  const say = el("p", { class: "say", style: "min-height:1.5em" }, "Point at the strip.");
  canvas.addEventListener("pointermove", (event) => {
    const r = canvas.getBoundingClientRect(),
      i = Math.min(
        values.length - 1,
        Math.max(0, Math.floor(((event.clientX - r.left) / r.width) * values.length)),
      );
    say.replaceChildren(...binWords(stream, i, source.width), ` ≈ ${coarse(values[i])}`);
  });
  const order = values
    .map((value, i) => [value, i])
    .filter(([value]) => Number.isFinite(value))
    .sort((a, b) => b[0] - a[0])
    .slice(0, 5);
  const list = el(
    "ol",
    { class: "top-tokens" },
    order.map(([value, i]) =>
      el(
        "li",
        {},
        el("span", { class: "token" }, ...binWords(stream, i, source.width)),
        el("span", {}, `≈ ${coarse(value)}`),
      ),
    ),
  );
  return [
    el("h4", {}, "Attention received by token"),
    el(
      "p",
      { class: "caption" },
      "Share of all weights, from the first token at the left to the last; log scale.",
    ),
    canvas,
    say,
    list,
    el(
      "p",
      { style: "margin-top:8px" },
      el(
        "button",
        {
          type: "button",
          class: "plain",
          click: () => {
            setScope("head");
            byId("text").scrollIntoView();
          },
        },
        "Shade the text by this head",
      ),
    ),
  ];
}

function coarse(value) {
  if (!Number.isFinite(value)) return "not measured";
  return value > 0 && value < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
}

function binWords(stream, bin, width) {
  const from = bin * width,
    to = Math.min(from + width, stream.length) - 1;
  const tokens = arrays.tokens.data.slice(stream.start + from, stream.start + to + 1).join("");
  return [
    `${to > from ? `${whole(from)}–${whole(to)}` : whole(from)} `,
    el("b", {}, shorten(tokens, 24)),
  ];
}
