// The text, shaded by the attention that each token receives.

const PAGE = 2000; // tokens, about; the last page is as long as the others
const STRONGEST = 0.72; // of the accent, so that the words stay readable
const text = { stream: 0, found: null, search: "", values: [] };

function placeOfText() {
  const pinned = state.pinned[state.active];
  if (state.scope === "head" && pinned) return { scope: "head", ...pinned };
  if (state.scope === "layer") return { scope: "layer", layer: text.layer, head: 0 };
  return { scope: "model", layer: 0, head: 0 };
}
function setScope(scope) {
  state.scope = scope;
  drawTextChoice();
  drawText();
}

function drawTextChoice() {
  const pinned = state.pinned[state.active];
  if (state.scope === "head" && !pinned) state.scope = "model";
  const choice = (scope, words, disabled) =>
    chip(words, { "aria-pressed": state.scope === scope, disabled, click: () => setScope(scope) });
  const layers = el(
    "select",
    {
      "aria-label": "Layer",
      change: () => {
        text.layer = Number(layers.value);
        setScope("layer");
      },
    },
    facts.layers.map((layer, i) =>
      el("option", { value: i, selected: i === text.layer }, layer.name),
    ),
  );
  const shading = el(
    "div",
    { class: "group" },
    el("span", { class: "name" }, "Shaded by"),
    el(
      "div",
      { class: "members" },
      choice("model", "the whole model"),
      choice("layer", "one layer:"),
      layers,
      choice(
        "head",
        pinned ? `head ${headName(pinned.layer, pinned.head)}` : "the pinned head",
        !pinned,
      ),
    ),
  );
  const finder = el("input", {
    type: "search",
    id: "find",
    placeholder: "Find in the text",
    "aria-label": "Find in the text",
    value: text.search,
    autocomplete: "off",
    spellcheck: "false",
    input: () => {
      text.search = finder.value;
      text.found = null;
      findToken(1);
    },
    keydown: (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        findToken(event.shiftKey ? -1 : 1);
      }
    },
  });
  const count = el("span", {
    id: "find-count",
    class: "soft",
    style: "font-size:13px",
    "aria-live": "polite",
  });
  const rows = [
    shading,
    el(
      "div",
      { class: "group" },
      el("span", { class: "name" }, "Find"),
      el("div", { class: "members" }, finder, count),
    ),
  ];
  if (facts.streams.length > 1) {
    rows.unshift(
      el(
        "div",
        { class: "group" },
        el("span", { class: "name" }, "Tokens"),
        el(
          "div",
          { class: "members" },
          facts.streams.map((stream, i) =>
            chip(stream.name, {
              "aria-pressed": i === text.stream,
              click: () => {
                text.stream = i;
                state.page = 0;
                drawTextChoice();
                drawText();
              },
            }),
          ),
        ),
      ),
    );
  }
  keepFocus(byId("text-choice"), () => byId("text-choice").replaceChildren(...rows));
}

function pagesOf(stream) {
  const pages = Math.max(1, Math.round(stream.length / PAGE));
  return { pages, size: Math.ceil(stream.length / pages) };
}

function drawText() {
  const place = placeOfText();
  if (place.scope !== "model") {
    const wanted = facts.streams.findIndex(
      (stream) => stream.name === facts.layers[place.layer].keyStream,
    );
    if (wanted >= 0 && wanted !== text.stream) {
      text.stream = wanted;
      state.page = 0;
      drawTextChoice();
    }
  }
  const stream = facts.streams[text.stream],
    source = receivedSource(place.scope, place.layer, place.head);
  text.values = source.of(stream);
  text.width = source.width;
  const scale = shadeScale(text.values),
    { pages, size } = pagesOf(stream);
  state.page = Math.max(0, Math.min(state.page, pages - 1));
  const from = state.page * size,
    to = Math.min(from + size, stream.length);
  const nodes = [],
    starts = new Set(stream.documents.length > 1 ? stream.documents : []);
  for (let i = from; i < to; i++) {
    if (starts.has(i))
      nodes.push(el("span", { class: "document" }, `document ${stream.documents.indexOf(i)}`));
    const label = arrays.tokens.data[stream.start + i],
      next = i + 1 < to ? arrays.tokens.data[stream.start + i + 1] : "";
    nodes.push(...tokenNodes(label, i, scale(text.values[Math.floor(i / source.width)]), next));
  }
  byId("text-body").replaceChildren(...nodes);
  markFound();
  drawTextLegend(scale, source.width, place);
  drawPages(pages, from, to, stream.length);
}
// A run of newlines breaks the line once, at its end.
function tokenNodes(label, index, t, next) {
  const symbols = /^[␣⏎⇥␍⍽]+$|^0x[0-9A-F]{2}$|^#\d+$/.test(label);
  const lead = !symbols && label.startsWith("␣") ? " " : "";
  const node = el(
    "span",
    { class: symbols ? "token symbol" : "token", "data-i": index },
    symbols ? label : label.slice(lead.length).replaceAll("␣", " "),
  );
  node.style.background = shade(t * STRONGEST);
  if (t > 0.7) node.classList.add("strong");
  const after =
    label.endsWith("⏎") && !next.startsWith("⏎")
      ? el("br")
      : !facts.hasText || /^#/.test(label)
        ? " "
        : null;
  return [lead, node, after].filter(Boolean);
}
function drawTextLegend(scale, width, place) {
  const box = byId("text-legend");
  if (!scale.high) {
    box.replaceChildren();
    return;
  }
  const about =
    place.scope === "model"
      ? "mean over all heads"
      : place.scope === "layer"
        ? `mean over the heads of ${facts.layers[place.layer].name}`
        : headName(place.layer, place.head);
  const bar = colourBar({
    width: 320,
    scale: {
      low: scale.low,
      high: scale.high,
      log: true,
      at: position(scale.low, scale.high, true),
    },
    unit: "",
    title: "share of all weights",
    paint: (t) => (t < 0.005 ? "var(--back)" : shade(t * STRONGEST)),
  });
  const grain = width > 1 ? ` Neighbouring ${width} tokens share one shade.` : "";
  box.replaceChildren(
    bar,
    el(
      "p",
      { class: "definition", style: "margin:4px 0 0" },
      `${about[0].toUpperCase()}${about.slice(1)}.${grain}`,
    ),
  );
}
function drawPages(pages, from, to, length) {
  const box = byId("text-pages");
  if (pages < 2) {
    box.replaceChildren();
    return;
  }
  const go = (page) => {
    state.page = page;
    drawText();
    byId("text").scrollIntoView();
  };
  const buttons = [
    el(
      "button",
      {
        type: "button",
        class: "plain",
        disabled: state.page === 0,
        click: () => go(state.page - 1),
      },
      "Earlier",
    ),
    `tokens ${whole(from)} to ${whole(to - 1)} of ${whole(length)}`,
    el(
      "button",
      {
        type: "button",
        class: "plain",
        disabled: state.page === pages - 1,
        click: () => go(state.page + 1),
      },
      "Later",
    ),
  ];
  keepFocus(box, () => box.replaceChildren(...buttons));
}

// From where a token is attended: the column of the pooled map, over the heads in question.
function fromWhere(position) {
  const place = placeOfText(),
    [rows, columns] = facts.blocks,
    block = Math.floor(position / facts.blockWidth);
  const stream = facts.streams[text.stream];
  if (block >= columns) return null;
  const sums = new Float64Array(rows);
  facts.layers.forEach((layer, l) => {
    if (layer.keyStream !== stream.name || (place.scope !== "model" && l !== place.layer)) return;
    for (let h = 0; h < layer.heads; h++) {
      if (place.scope === "head" && h !== place.head) continue;
      for (let q = 0; q < rows; q++) {
        const value =
          arrays.pooled.data[((l * facts.heads.length + h) * rows + q) * columns + block];
        if (value > 0) sums[q] += value;
      }
    }
  });
  const best = sums.indexOf(Math.max(...sums));
  return sums[best] > 0 ? best : null;
}
function tellToken(index) {
  const stream = facts.streams[text.stream],
    value = text.values[Math.floor(index / text.width)];
  const number = placeOfText().scope === "head" ? `≈ ${coarse(value)}` : three(value);
  const document = stream.documents.filter((start) => start <= index).length - 1;
  const position = index - stream.documents[document];
  const from = fromWhere(position);
  const where =
    stream.documents.length > 1
      ? `document ${document}, position ${whole(position)}`
      : `position ${whole(position)}`;
  byId("text-readout").replaceChildren(
    el("b", {}, arrays.tokens.data[stream.start + index]),
    ` · ${where} · receives `,
    el("b", {}, number),
    ` of all weights, ${evenShare(value, stream)}`,
    from === null ? "" : ` · most from queries ${blockWords(from, { ...stream })}`,
  );
}

function evenShare(value, stream) {
  return Number.isFinite(value) ? `${coarse(value * stream.length)} times an even share` : "";
}

// First and last token of every occurrence; words that are cut into several tokens are found too.
function occurrences(stream, wanted) {
  text.joined ||= {};
  const { whole, starts } = (text.joined[stream.name] ||= joinTokens(stream));
  const tokenOf = (place) => {
    let low = 0,
      high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  const hits = [];
  for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + 1)) {
    const first = tokenOf(at);
    if (hits.at(-1)?.[0] !== first) hits.push([first, tokenOf(at + wanted.length - 1)]);
  }
  return hits;
}
function joinTokens(stream) {
  const parts = [],
    starts = [];
  let length = 0;
  for (let i = 0; i < stream.length; i++) {
    const label = arrays.tokens.data[stream.start + i].toLowerCase();
    starts.push(length);
    parts.push(label);
    length += label.length;
  }
  return { whole: parts.join(""), starts };
}

function findToken(step) {
  const stream = facts.streams[text.stream],
    wanted = text.search.trim().toLowerCase().replaceAll(" ", "␣");
  const count = byId("find-count");
  if (!wanted) {
    text.found = null;
    count.textContent = "";
    markFound();
    return;
  }
  const hits = occurrences(stream, wanted);
  if (!hits.length) {
    text.found = null;
    count.textContent = "not in the text";
    markFound();
    return;
  }
  const now = hits.findIndex(([first]) => first === text.found);
  const next = now < 0 ? 0 : (now + step + hits.length) % hits.length;
  [text.found, text.foundLast] = hits[next];
  count.textContent = `${whole(next + 1)} of ${whole(hits.length)}${hits.length > 1 ? " · Enter for the next" : ""}`;
  const page = Math.floor(text.found / pagesOf(stream).size);
  if (page !== state.page) {
    state.page = page;
    drawText();
  }
  markFound();
  tellToken(text.found);
}
function markFound() {
  for (const node of document.querySelectorAll("#text-body .found")) node.classList.remove("found");
  if (text.found === null) return;
  for (let i = text.found; i <= text.foundLast; i++) {
    const node = document.querySelector(`#text-body [data-i="${i}"]`);
    if (!node) return;
    node.classList.add("found");
    if (i === text.found) node.scrollIntoView({ block: "nearest" });
  }
}

function buildText() {
  text.layer = 0;
  drawTextChoice();
  drawText();
  const body = byId("text-body");
  if (!facts.hasText)
    byId("text-body").before(
      el(
        "p",
        { class: "definition" },
        "This scan was made without a tokenizer: tokens are shown by their numbers.",
      ),
    );
  body.addEventListener("pointerover", (event) => {
    if (event.target.dataset.i) tellToken(Number(event.target.dataset.i));
  });
  body.addEventListener("click", (event) => {
    if (event.target.dataset.i) tellToken(Number(event.target.dataset.i));
  });
}
