// Findings, keys, and the start.

function buildFindings() {
  for (const details of document.querySelectorAll(".findings details")) {
    const finding = facts.findings[details.dataset.kind];
    const box = details.querySelector(".evidence");
    details.addEventListener("toggle", () => {
      if (details.open && box.isConnected && !box.childNodes.length) drawEvidence(box, finding);
    });
    const show = details.querySelector(".show-on-plate");
    if (show) show.addEventListener("click", () => showOnPlate(finding));
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.place");
    if (!button) return;
    event.preventDefault();
    const kind = button.closest("details")?.dataset.kind;
    if (button.dataset.head === "") {
      if (kind) showOnPlate(facts.findings[kind]);
      return;
    }
    const layer = layerIndex(Number(button.dataset.layer)),
      head = facts.heads.indexOf(Number(button.dataset.head));
    if (layer < 0 || head < 0) return;
    if (kind) setHighlight(facts.findings[kind]);
    pin(layer, head, event.shiftKey || state.comparing);
  });
  const all = byId("all-findings");
  if (all)
    all.addEventListener("click", () => {
      for (const item of document.querySelectorAll(".findings [data-more]")) item.hidden = false;
      all.parentElement.remove();
    });
}
function buildRoles() {
  for (const button of document.querySelectorAll(".role")) {
    button.addEventListener("click", () => showOnPlate(facts.roles[button.dataset.heads]));
  }
}
function setHighlight(finding) {
  state.highlight = new Set(
    finding.places.map(
      ([layer, head]) => `${layerIndex(layer)},${head === null ? "" : facts.heads.indexOf(head)}`,
    ),
  );
  const wanted = facts.statistics.findIndex((s) => s.name === finding.quantity);
  const other = facts.statistics.findIndex((s) => s.name === finding.evidence);
  const index = wanted >= 0 ? wanted : other;
  if (finding.places.length) state.role = facts.layers[layerIndex(finding.places[0][0])].role;
  chooseStatistic(index >= 0 ? index : state.statistic);
}
function showOnPlate(finding) {
  setHighlight(finding);
  byId("plate").scrollIntoView();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "Escape") {
    if (typing) typing.blur();
    else if (state.pinned.length) closePanel();
    else if (state.highlight.size) {
      state.highlight.clear();
      markPlate();
    }
    return;
  }
  if (typing) return;
  if (event.key === "/" && facts.streams.length) {
    event.preventDefault();
    byId("text").scrollIntoView();
    byId("find").focus({ preventScroll: true });
    byId("find").select();
  } else if (event.key.startsWith("Arrow")) {
    if (
      !state.pinned.length &&
      document.activeElement === byId("plate-drawing") &&
      plate.geometry
    ) {
      event.preventDefault();
      pin(plate.geometry.layers[0], 0);
    } else if (!event.target.closest(".scroll") && movePin(event.key)) event.preventDefault();
  } else if (
    event.key === "Enter" &&
    document.activeElement === byId("plate-drawing") &&
    plate.geometry
  ) {
    if (state.pinned.length) byId("panel").focus();
    else pin(plate.geometry.layers[0], 0);
  }
});

// The panel takes room from the column: what was pointed at must stay where it was.
on("pinned", () => {
  const box = byId("plate-drawing"),
    before = box.getBoundingClientRect().top;
  drawPanel();
  drawPlate();
  if (facts.streams.length) drawTextChoice();
  if (state.scope === "head") drawText();
  scrollBy(0, box.getBoundingClientRect().top - before);
  if (innerWidth <= 900 && state.pinned.length) bringAboveSheet();
});
function bringAboveSheet() {
  const cell = state.pinned[state.active];
  const node = plate.svg.querySelector(`[data-cell="${cell.layer},${cell.head}"]`);
  if (!node) return;
  const below = node.getBoundingClientRect().bottom - innerHeight * 0.36;
  if (below > 0) scrollBy(0, below);
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    byId("plate-drawing").append(
      el(
        "p",
        { class: "notice" },
        "This browser is too old to unpack the measurements. Firefox 113, Chrome 80, Safari 16.4 or newer can.",
      ),
    );
    return;
  }
  await unpackAll();
  state.role = roles()[0];
  buildFindings();
  buildRoles();
  if (facts.statistics.length) {
    buildChoices();
    onWidth(byId("plate-drawing"), drawPlate);
    chooseStatistic(0);
    byId("plate-table").addEventListener("toggle", (event) => {
      if (event.target.open) tablePlate();
    });
  } else {
    byId("plate-drawing").append(
      el("p", { class: "notice" }, "No head could be measured; the findings above say why."),
    );
  }
  if (facts.streams.length) buildText();
  if (facts.depth) onWidth(byId("depth-figures"), drawDepth);
  if (facts.circuits) onWidth(byId("circuit-maps"), drawCircuits);
  addEventListener("resize", () => {
    if (state.pinned.length) drawPanel();
  });
  document.documentElement.dataset.ready = "true";
}
start();
