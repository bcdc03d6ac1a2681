// The plate: heads across, layers down, one statistic at a time.

const plate = { geometry: null, svg: null, hover: null, sorted: [], ranked: {}, scale: null };

function shownLayers() {
  return facts.layers.map((_, i) => i).filter((i) => facts.layers[i].role === state.role);
}
function statisticNow() {
  return facts.statistics[state.statistic];
}

function valuesOf(index, layers) {
  const values = [];
  for (const layer of layers) {
    for (let head = 0; head < facts.layers[layer].heads; head++) {
      values.push(statisticValue(index, layer, head));
      if (facts.statistics[index].perLayer) break;
    }
  }
  return values;
}
function rankOf(value, sorted) {
  let low = 0,
    high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) low = middle + 1;
    else high = middle;
  }
  return low + 1;
}
function everyLayer() {
  return facts.layers.map((_, i) => i);
}
function descending(index) {
  plate.ranked[index] ||= valuesOf(index, everyLayer())
    .filter(Number.isFinite)
    .sort((a, b) => b - a);
  return plate.ranked[index];
}

function chooseStatistic(index) {
  state.statistic = index;
  plate.sorted = descending(index);
  for (const chip of document.querySelectorAll("#statistic-choice [data-statistic]")) {
    const chosen = Number(chip.dataset.statistic) === index;
    chip.setAttribute("aria-checked", chosen);
    chip.tabIndex = chosen ? 0 : -1;
  }
  byId("statistic-select").value = index;
  const statistic = statisticNow();
  const unit =
    statistic.unit && !statistic.unit.startsWith("of ") ? ` Unit: ${statistic.unit}.` : "";
  byId("statistic-reading").textContent = statistic.reading;
  byId("statistic-definition").replaceChildren(
    `${capital(statistic.longName)}: `,
    ...formula(statistic.definition),
    `.${unit}`,
  );
  drawPlate();
}

function chip(text, attributes) {
  return el("button", { type: "button", class: "chip", ...attributes }, text);
}

function buildChoices() {
  const box = byId("statistic-choice"),
    groups = new Map();
  facts.statistics.forEach((statistic, i) => {
    if (!groups.has(statistic.group)) groups.set(statistic.group, []);
    groups.get(statistic.group).push(i);
  });
  const wide = el("div", { class: "wide", role: "radiogroup", "aria-label": "Statistic" });
  const select = el("select", {
    id: "statistic-select",
    "aria-label": "Statistic",
    change: () => chooseStatistic(Number(select.value)),
  });
  for (const [name, members] of groups) {
    const chips = members.map((i) =>
      chip(facts.statistics[i].label, {
        role: "radio",
        "data-statistic": i,
        "aria-checked": "false",
        click: () => chooseStatistic(i),
      }),
    );
    wide.append(
      el(
        "div",
        { class: "group" },
        el("span", { class: "name" }, name),
        el("div", { class: "members" }, chips),
      ),
    );
    select.append(
      el(
        "optgroup",
        { label: name },
        members.map((i) => el("option", { value: i }, facts.statistics[i].label)),
      ),
    );
  }
  wide.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const count = facts.statistics.length;
    chooseStatistic((state.statistic + step + count) % count);
    wide.querySelector(`[data-statistic="${state.statistic}"]`).focus();
  });
  box.append(wide, el("div", { class: "narrow" }, select));
  if (roles().length > 1) {
    const stacks = roles().map((role) =>
      chip(ROLE_NAMES[role], {
        "data-role": role,
        click: () => {
          state.role = role;
          drawPlate();
        },
      }),
    );
    box.append(
      el(
        "div",
        { class: "group", role: "group", "aria-label": "Stack" },
        el("span", { class: "name" }, "Stack"),
        el("div", { class: "members" }, stacks),
      ),
    );
  }
}

function hoverPlate(cell) {
  plate.hover = cell;
  markPlate();
  tellPlate();
}

function tellPlate() {
  const cell = plate.hover || state.pinned[state.active];
  const box = byId("plate-readout");
  const statistic = statisticNow();
  if (!cell) {
    box.replaceChildren(...spanOfAll(statistic));
    return;
  }
  const value = statisticValue(state.statistic, cell.layer, cell.head);
  const about = facts.layers[cell.layer];
  const name = statistic.perLayer ? about.name : headName(cell.layer, cell.head);
  if (!Number.isFinite(value)) {
    const why = about.nonFinite
      ? `not a number: ${about.nonFinite}`
      : `not defined for ${ROLE_NAMES[about.role]}`;
    box.replaceChildren(
      el("b", {}, name),
      ` · ${statistic.label} ${about.nonFinite ? "" : "is "}${why}`,
    );
    return;
  }
  const rank = `rank ${whole(rankOf(value, plate.sorted))} of ${whole(plate.sorted.length)}, largest first`;
  box.replaceChildren(
    el("b", {}, name),
    ` · ${statistic.label} `,
    el("b", {}, withUnit(value, statistic.unit)),
    ` · ${rank}`,
  );
}

// What the readout says while nothing is pointed at: the least, the median and the most.
function spanOfAll(statistic) {
  const sorted = plate.sorted;
  if (!sorted.length) return [`${statistic.label}: not measured`];
  const median =
    sorted.length % 2
      ? sorted[(sorted.length - 1) / 2]
      : (sorted[sorted.length / 2 - 1] + sorted[sorted.length / 2]) / 2;
  const part = (word, value) => [` · ${word} `, el("b", {}, three(value))];
  return [
    statistic.label,
    ...part("least", sorted.at(-1)),
    ...part("median", median),
    ...part("most", sorted[0]),
    statistic.unit ? ` ${statistic.unit}` : "",
  ];
}

function tablePlate() {
  const g = plate.geometry,
    statistic = statisticNow();
  const head = el("tr", {}, el("th", { scope: "col" }, "Layer"));
  const columns = statistic.perLayer ? 1 : g.heads;
  for (let h = 0; h < columns; h++)
    head.append(
      el(
        "th",
        { scope: "col", class: "number" },
        statistic.perLayer ? "layer" : `H${facts.heads[h]}`,
      ),
    );
  const rows = g.layers.map((layer) => {
    const row = el("tr", {}, el("th", { scope: "row" }, facts.layers[layer].name));
    for (let h = 0; h < columns; h++)
      row.append(
        el(
          "td",
          { class: "number" },
          h < facts.layers[layer].heads ? three(statisticValue(state.statistic, layer, h)) : "",
        ),
      );
    return row;
  });
  const table = el(
    "table",
    {},
    el("caption", {}, withCaption(statistic)),
    el("thead", {}, head),
    el("tbody", {}, rows),
  );
  byId("plate-table").querySelector(".scroll").replaceChildren(table);
}
function withCaption(statistic) {
  return statistic.longName + (statistic.unit ? `, ${statistic.unit}` : "");
}

// One step from the pinned head; up and down go to the layers of the same stack.
function movePin(key) {
  const now = state.pinned[state.active];
  if (!now) return false;
  const layers = everyLayer().filter((i) => facts.layers[i].role === facts.layers[now.layer].role);
  let row = layers.indexOf(now.layer),
    head = now.head;
  if (key === "ArrowLeft") head--;
  else if (key === "ArrowRight") head++;
  else if (key === "ArrowUp") row--;
  else if (key === "ArrowDown") row++;
  else return false;
  row = Math.max(0, Math.min(layers.length - 1, row));
  head = Math.max(0, Math.min(facts.layers[layers[row]].heads - 1, head));
  pin(layers[row], head);
  return true;
}
