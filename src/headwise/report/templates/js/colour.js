// Colour: viridis for maps; one hue from the background to the accent for text.

const VIRIDIS = [
  [68, 1, 84],
  [72, 20, 103],
  [72, 38, 119],
  [69, 55, 129],
  [63, 71, 136],
  [57, 85, 140],
  [50, 100, 142],
  [45, 113, 142],
  [40, 125, 142],
  [35, 138, 141],
  [31, 150, 139],
  [32, 163, 134],
  [41, 175, 127],
  [61, 188, 116],
  [86, 198, 103],
  [117, 208, 84],
  [149, 216, 64],
  [186, 222, 40],
  [220, 227, 25],
  [253, 231, 37],
];

function viridis(t) {
  const x = Math.min(1, Math.max(0, t)) * (VIRIDIS.length - 1);
  const i = Math.min(Math.floor(x), VIRIDIS.length - 2),
    f = x - i;
  return VIRIDIS[i].map((low, k) => Math.round(low + (VIRIDIS[i + 1][k] - low) * f));
}
function css(rgb) {
  return `rgb(${rgb[0]} ${rgb[1]} ${rgb[2]})`;
}
// Black or white, whichever contrasts more (at least 4.5 on every colour).
function inkOn(rgb) {
  const [r, g, b] = rgb.map((v) => (v / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
}
function shade(t) {
  const part = Math.round(Math.min(1, Math.max(0, t)) * 100);
  return part === 0 ? "transparent" : `color-mix(in oklab, var(--accent) ${part}%, var(--back))`;
}

// The colour scale of a statistic over all layers of the model.
function scaleOf(statistic, values) {
  const finite = values.filter(Number.isFinite);
  let low = Math.min(...finite),
    high = Math.max(...finite);
  let log = statistic.scale === "log" && low > 0 && high / low > 8;
  if (statistic.share && low >= 0) {
    low = 0;
    high = high > 0.8 ? 1 : Math.max(high, 0.1); // a share of 0.001 must not shine
  }
  if (!finite.length) {
    low = 0;
    high = 1;
    log = false;
  }
  if (high === low) {
    low = log ? low / 2 : low - 0.5;
    high = log ? high * 2 : high + 0.5;
  }
  return { low, high, log, at: position(low, high, log) };
}
function position(low, high, log) {
  return log
    ? (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low)
    : (value) => (value - low) / (high - low);
}
