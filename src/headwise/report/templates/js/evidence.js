// The plot behind a finding: every value it looked at, and the threshold.

function drawEvidence(box, finding) {
  const width = Math.min(box.clientWidth || 600, 640);
  const entries = finding.values
    .map((value, i) => ({ value, i }))
    .filter(({ value }) => value !== null);
  if (entries.length < 2) {
    box.remove();
    return;
  }
  const ordered = ["head", "parameter", "projection"].includes(finding.word);
  if (ordered) entries.sort((a, b) => b.value - a.value);
  const [low, high] = extent(entries.map((entry) => entry.value));
  const share = finding.unit.startsWith("of ") && finding.beyond === "above";
  const log =
    !share &&
    low > 0 &&
    Math.max(high, finding.threshold) / Math.min(low, finding.threshold || low) > 50;
  const bounds = [Math.min(low, finding.threshold), Math.max(high, finding.threshold)];
  const y = log
    ? { low: bounds[0] / 1.2, high: bounds[1] * 1.2, log }
    : { low: Math.min(0, bounds[0]), high: bounds[1] * 1.05 || 1 };
  const title = `${finding.longName}${finding.unit && !finding.unit.startsWith("of ") ? `, ${finding.unit}` : ""}, by ${finding.word}${ordered ? ", largest first" : ""}${log ? " (log scale)" : ""}`;
  const count = entries.length;
  const drawing = frame({
    width,
    height: 170,
    right: 96,
    x: {
      low: ordered ? 1 : 0,
      high: ordered ? Math.max(count, 2) : Math.max(count - 1, 1),
      title: ordered ? `rank among ${whole(count)} ${finding.word}s` : finding.word,
      ticks: linearTicks(
        ordered ? 1 : 0,
        ordered ? count : count - 1,
        Math.min(count - 1, 6),
      ).filter(Number.isInteger),
    },
    y,
    label: title,
  });
  const ty = drawing.py(finding.threshold);
  drawing.node.append(
    svg("line", { class: "threshold", x1: drawing.left, x2: width - 96, y1: ty, y2: ty }),
    svg("text", { class: "line-1", x: width - 90, y: ty + 4 }, `${tickText(finding.threshold)}`),
  );
  entries.forEach(({ value, i }, k) => {
    const beyond =
      finding.beyond === "above" ? value > finding.threshold : value < finding.threshold;
    const name =
      finding.word === "head"
        ? headName(Math.floor(i / facts.heads.length), i % facts.heads.length)
        : finding.labels[i];
    drawing.node.append(
      svg(
        "circle",
        {
          class: beyond ? "dot beyond" : "dot",
          cx: drawing.px(ordered ? k + 1 : k),
          cy: drawing.py(value),
          r: count > 120 ? 1.8 : 2.8,
        },
        svg("title", {}, `${name}: ${three(value)}`),
      ),
    );
  });
  box.replaceChildren(el("figcaption", {}, title), drawing.node);
}
