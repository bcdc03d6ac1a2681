// Arrays: base64, inflated, then float32, scaled float16 in byte planes, or logarithmic bytes.

function halfTable() {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31,
      fraction = bits & 1023;
    let value;
    if (exponent === 0) value = fraction * 2 ** -24;
    else if (exponent === 31) value = fraction ? NaN : Infinity;
    else value = (1 + fraction / 1024) * 2 ** (exponent - 15);
    table[bits] = bits & 32768 ? -value : value;
  }
  return table;
}
const HALVES = halfTable();

async function inflate(text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function coarseTable(meta) {
  const table = new Float32Array(256);
  for (let code = 1; code < 255; code++) {
    table[code] = meta.low * (meta.high / meta.low) ** ((code - 1) / 253);
  }
  table[255] = NaN;
  return table;
}

async function unpack(name) {
  const node = byId(`array-${name}`);
  const meta = JSON.parse(node.dataset.meta);
  const raw = await inflate(node.textContent);
  node.textContent = "";
  if (meta.dtype === "json") return { data: JSON.parse(new TextDecoder().decode(raw)) };
  if (meta.dtype === "f4") return { data: new Float32Array(raw), shape: meta.shape };
  const bytes = new Uint8Array(raw);
  if (meta.dtype === "u1") {
    const table = coarseTable(meta);
    return { data: Float32Array.from(bytes, (code) => table[code]), shape: meta.shape };
  }
  const count = bytes.length / 2,
    data = new Float32Array(count),
    scale = 2 ** -meta.exponent;
  for (let i = 0; i < count; i++) data[i] = HALVES[bytes[i] | (bytes[count + i] << 8)] * scale;
  return { data, shape: meta.shape };
}

async function unpackAll() {
  const nodes = [...document.querySelectorAll('script[id^="array-"]')];
  const names = nodes.map((node) => node.id.slice("array-".length));
  const found = await Promise.all(names.map(unpack));
  names.forEach((name, i) => {
    arrays[name] = found[i];
  });
}
