// SPDX-License-Identifier: Apache-2.0
// Draws rows of boxes into pixels: the levels of a flame graph, the lanes of a timeline.
//
// A row is a list of intervals that do not overlap, sorted by start, in columns of numbers. For each
// pixel of a row at most two binary searches are made, so the work depends on the pixels and only by
// its logarithm on the boxes. Boxes narrower than a pixel are not dropped: prefix sums give the exact
// share of a pixel that they cover, and the pixel gets that much of the colour.

export interface Row {
  start: Float64Array;
  end: Float64Array;
  /** `sum[i]`: summed length of the boxes before i; one entry more than boxes. */
  sum: Float64Array;
  /** Colour of each box, as pixels of a canvas have it (ABGR). */
  colour: Uint32Array;
  /** What the box is for the one who made the row. */
  id: Int32Array;
  /** Top and height in CSS pixels. */
  top: number;
  height: number;
  /** Behind the boxes. */
  ground: number;
}

export interface Window {
  /** In the unit of the rows. */
  left: number;
  right: number;
  /** CSS pixels that are scrolled away above. */
  scroll: number;
}

export interface Label {
  row: number;
  box: number;
  /** Left edge and width in device pixels, cut at the edges. */
  x: number;
  width: number;
}

/** Index of the first box that ends after x. */
export function firstEndingAfter(row: Row, x: number, from = 0): number {
  let low = from;
  let high = row.end.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (row.end[middle]! > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Index of the box at x, -1 for none; within `slack` of it the nearest one. */
export function boxAt(row: Row, x: number, slack = 0): number {
  const box = firstEndingAfter(row, x);
  if (box < row.start.length && row.start[box]! <= x) return box;
  const after = box < row.start.length ? row.start[box]! - x : Infinity;
  const before = box > 0 ? x - row.end[box - 1]! : Infinity;
  if (Math.min(after, before) >= slack) return -1;
  return after <= before ? box : box - 1;
}

/** Summed length of what the boxes of a row cover between two places. */
export function covered(row: Row, left: number, right: number): number {
  const from = firstEndingAfter(row, left);
  let to = firstEndingAfter(row, right, from);
  if (from >= row.start.length) return 0;
  let total = row.sum[to]! - row.sum[from]!;
  if (row.start[from]! < left && from < to) total -= left - row.start[from]!;
  if (to < row.start.length && row.start[to]! < right) {
    total += right - Math.max(left, row.start[to]!);
    to++;
  }
  return total;
}

/** Share of the colour that a box below a pixel gets at least, so that it is seen. */
const LEAST = 0.25;

export function mixed(over: number, ground: number, share: number): number {
  if (share >= 0.996) return over;
  const part = Math.round(256 * Math.max(LEAST, share));
  const rest = 256 - part;
  const red = ((over & 255) * part + (ground & 255) * rest) >> 8;
  const green = (((over >>> 8) & 255) * part + ((ground >>> 8) & 255) * rest) >> 8;
  const blue = (((over >>> 16) & 255) * part + ((ground >>> 16) & 255) * rest) >> 8;
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * Paint the rows that are in sight. `pixels` has width × height device pixels; `ratio` of them are
 * one CSS pixel. Returns boxes that are wide enough for `labelWidth` device pixels of text.
 */
export function paint(
  pixels: Uint32Array, width: number, height: number, ratio: number, rows: readonly Row[],
  window: Window, ground: number, labelWidth: number,
): Label[] {
  pixels.fill(ground);
  const labels: Label[] = [];
  const unit = (window.right - window.left) / width;
  const line = new Uint32Array(width);
  for (let number = 0; number < rows.length; number++) {
    const row = rows[number]!;
    const top = Math.round((row.top - window.scroll) * ratio);
    const bottom = Math.round((row.top + row.height - window.scroll) * ratio);
    if (bottom <= 0 || top >= height) continue;
    paintLine(line, width, row, number, window.left, unit, labels, labelWidth);
    for (let y = Math.max(0, top); y < Math.min(height, bottom); y++) pixels.set(line, y * width);
  }
  return labels;
}

function paintLine(
  line: Uint32Array, width: number, row: Row, number: number, left: number, unit: number,
  labels: Label[], labelWidth: number,
): void {
  line.fill(row.ground);
  const { start, end, colour } = row;
  let box = firstEndingAfter(row, left);
  while (box < start.length) {
    const x0 = (start[box]! - left) / unit;
    if (x0 >= width) break;
    const x1 = (end[box]! - left) / unit;
    const from = Math.max(0, Math.round(x0));
    const to = Math.min(width, Math.round(x1));
    if (to - from >= 2) {
      // A pixel of the ground stays between neighbours that are wide enough to be told apart.
      line.fill(colour[box]!, from, to - from > 4 && x1 <= width ? to - 1 : to);
      if (to - from >= labelWidth) labels.push({ row: number, box, x: from, width: to - from });
      box++;
    } else {
      const pixel = Math.max(0, Math.min(width - 1, Math.floor(x0)));
      const low = left + pixel * unit;
      const high = low + unit;
      line[pixel] = mixed(colour[box]!, row.ground, covered(row, low, high) / unit);
      const next = firstEndingAfter(row, high, box);
      box = next > box ? next : box + 1;
    }
  }
}

/** A row of boxes that are sorted by start and do not overlap. */
export function makeRow(
  start: Float64Array, end: Float64Array, colour: Uint32Array, id: Int32Array, top: number,
  height: number, ground: number,
): Row {
  const sum = new Float64Array(start.length + 1);
  for (let i = 0; i < start.length; i++) sum[i + 1] = sum[i]! + (end[i]! - start[i]!);
  return { start, end, sum, colour, id, top, height, ground };
}
