/* What charts are drawn with: colours of the page, numbers as text, hatching, points and labels. */

const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [16, 5], [5, 2, 2, 2, 2, 2]];
/* Distances of ticks between which nothing is: 1, 2, 5, 10, … */
const WHOLE = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((first) => first * 10 ** power)).flat();
/* No wider on paper, in pixels of CSS: what A4 and Letter have room for between the margins and the box. */
const PAPER = 620;
const KEYS = "Left and right go from point to point, plus and minus zoom, 0 shows all.";
const root = document.documentElement;

const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const paint = (n) => colour(`--series-${n % 8}`);

function element(kind, name, parent, words) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (words !== undefined) made.textContent = words;
  if (parent) parent.append(made);
  return made;
}

/* A number in about five digits. */
function digits(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e5 ? 9 : 5, useGrouping: size >= 1e4 });
}

/* The numbers beside an axis, with as many places as their distance needs. */
function ticks(plot, splits, _axis, _space, step) {
  const most = Math.max(...splits.map(Math.abs));
  const shown = splits.map((value) => {
    if (value === 0) return "0";
    if (most >= 1e7 || most < 1e-3) return String(Number(value.toPrecision(6)).toExponential()).replace("e+", "e");
    let places = 0;
    while (places < 9 && Math.abs(Number(step.toFixed(places)) - step) > step * 1e-6) places++;
    return value.toLocaleString("en", { maximumFractionDigits: places });
  });
  return shown;
}

/* A square of the n-th area's colour and hatching: areas are told apart without their colour as well. */
function hatched(n, ratio) {
  const side = 8 * ratio;
  const tile = element("canvas");
  tile.width = tile.height = side;
  const pen = tile.getContext("2d");
  pen.fillStyle = paint(n);
  pen.fillRect(0, 0, side, side);
  pen.strokeStyle = colour("--hatch");
  pen.lineWidth = 1.2 * ratio;
  const line = (...ends) => {
    pen.beginPath();
    pen.moveTo(ends[0] * side, ends[1] * side);
    pen.lineTo(ends[2] * side, ends[3] * side);
    pen.stroke();
  };
  const ways = [
    [],
    [[-0.5, 0.5, 0.5, -0.5], [0, 1, 1, 0], [0.5, 1.5, 1.5, 0.5]],
    [[0, 0.5, 1, 0.5]],
    [[-0.5, 0.5, 0.5, 1.5], [0, 0, 1, 1], [0.5, -0.5, 1.5, 0.5]],
    [[0.5, 0, 0.5, 1]],
    [[0, 0.5, 1, 0.5], [0.5, 0, 0.5, 1]],
    [[0.4, 0.5, 0.6, 0.5]],
    [[0, 0, 1, 1], [0, 1, 1, 0]],
  ];
  for (const ends of ways[n % ways.length]) line(...ends);
  return tile;
}

/* The n-th kind of point: filled circle, square, triangle, open circle. */
function shape(pen, n, x, y, size) {
  pen.beginPath();
  if (n % 4 === 1) pen.rect(x - size * 0.85, y - size * 0.85, 1.7 * size, 1.7 * size);
  else if (n % 4 === 2) {
    pen.moveTo(x, y - size);
    pen.lineTo(x + size, y + size * 0.8);
    pen.lineTo(x - size, y + size * 0.8);
    pen.closePath();
  } else pen.arc(x, y, size * 0.9, 0, 2 * Math.PI);
  if (n % 4 === 3) pen.stroke();
  else pen.fill();
}

/* Words on a ground of their own, to the left or right of a place or around it. */
function label(pen, ratio, words, x, y, side) {
  const size = pen.measureText(words).width;
  const start = side === "left" ? x - size : side === "right" ? x : x - size / 2;
  pen.fillStyle = colour("--back");
  pen.globalAlpha = 0.88;
  pen.fillRect(start - 4 * ratio, y - 9 * ratio, size + 8 * ratio, 18 * ratio);
  pen.globalAlpha = 1;
  pen.fillStyle = colour("--ink");
  pen.textAlign = "left";
  pen.fillText(words, start, y + ratio);
}
