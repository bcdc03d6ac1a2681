// Elements, numbers and the state that the parts of the page share.

const facts = JSON.parse(document.getElementById("facts").textContent);
const arrays = {};
const state = {
  statistic: null,
  role: null,
  pinned: [],
  active: 0,
  highlight: new Set(),
  scope: "model",
  page: 0,
};
const listeners = {};

function on(name, listener) {
  (listeners[name] ||= []).push(listener);
}
function emit(name, detail) {
  for (const listener of listeners[name] || []) listener(detail);
}
function byId(id) {
  return document.getElementById(id);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
function el(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}
function svg(tag, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// A table from the cells of its head and its rows.
function tableOf(columns, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...columns)), el("tbody", {}, ...rows));
}

// Three significant digits, as numbers.py writes them.
function three(value) {
  if (value === null || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "minus infinite";
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  const size = Math.abs(rounded);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 100 || Number.isInteger(value)) return Math.round(rounded).toLocaleString("en");
  return rounded.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
}
function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}
// Indices written a_ij become subscripts, as page.py writes them in the table of definitions.
function formula(text) {
  return text
    .split(/(?<=[a-zΣ])_((?:i|j)(?:j|,i[+−]1|i)?)(?![a-z_])/)
    .map((part, i) => (i % 2 ? el("sub", {}, part) : part));
}
// Redraws a part of the page and gives the keyboard focus back to the control that had it.
function keepFocus(box, draw) {
  const controls = () => [...box.querySelectorAll("button, select, input")];
  const at = controls().indexOf(document.activeElement);
  draw();
  const now = controls()[at];
  if (now && document.activeElement !== now) now.focus({ preventScroll: true });
}
function whole(value) {
  return value.toLocaleString("en");
}
function withUnit(value, unit) {
  const text = three(value);
  return unit && Number.isFinite(value) ? `${text} ${unit}` : text;
}

function headName(layer, head) {
  return `${facts.layers[layer].name} · H${facts.heads[head]}`;
}
function layerIndex(id) {
  return facts.layers.findIndex((layer) => layer.id === id);
}
function roles() {
  return [...new Set(facts.layers.map((layer) => layer.role))];
}
const ROLE_NAMES = { decoder: "decoder", encoder: "encoder", cross: "cross-attention" };

function statisticValue(index, layer, head) {
  return arrays.table.data[(index * facts.layers.length + layer) * facts.heads.length + head];
}

// A token where there is one label for a position: a stream that holds a single document.
function streamOf(name) {
  return facts.streams.find((stream) => stream.name === name);
}
function tokenAt(stream, position) {
  if (!stream || stream.documents.length > 1 || position >= stream.length) return null;
  return arrays.tokens.data[stream.start + position];
}
function shorten(text, room) {
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

function pin(layer, head, beside) {
  const already = state.pinned.findIndex((p) => p.layer === layer && p.head === head);
  if (already >= 0) state.active = already;
  else if (beside && state.pinned.length) {
    state.pinned[1] = { layer, head };
    state.active = 1;
    state.comparing = false;
  } else state.pinned[state.active] = { layer, head };
  state.role = facts.layers[layer].role;
  emit("pinned");
}
function unpin(index) {
  if (index === undefined) state.pinned = [];
  else state.pinned.splice(index, 1);
  state.active = 0;
  emit("pinned");
}

// Redraws when the width changes, not when the height does.
function onWidth(node, draw) {
  let width = 0;
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      draw(now);
    }
  }).observe(node);
}
