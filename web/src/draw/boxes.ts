// SPDX-License-Identifier: Apache-2.0
// Draws rows of boxes into pixels: the levels of a flame graph, the lanes of a timeline.
//
// A row is a list of intervals that do not overlap, sorted by start, in columns of numbers. A row is
// walked pixel by pixel: what ends within a pixel is skipped by a search that starts where the last
// one ended and doubles its steps, so the work depends on the pixels and only by its logarithm on the
// boxes in one. Boxes that round to less than two pixels are not dropped: prefix sums give the exact
// share of a pixel that they cover, and the pixel gets that much of the colour (or, in rows that
// have `fills`, of the row's height), but at least MIN_COVERAGE, so that a lone box is seen. Nothing
// is allocated for a picture.
//
// A colour is one number, 0xAABBGGRR: its bytes in memory are red, green, blue, alpha on the
// little-endian machines that browsers run on. Alpha is always 255.

export interface Row {
  start: Float64Array;
  end: Float64Array;
  /** `sum[i]`: summed length of the boxes before i; one entry more than boxes. */
  sum: Float64Array;
  /** Which of the colours each box has: an index into the list of colours. */
  colourIndex: Uint32Array;
  /** What the caller knows each box by: a node of the flame graph, a row of the timeline. */
  id: Int32Array;
  /** Top and height in CSS pixels. */
  top: number;
  height: number;
  /** The colour that is blended with small boxes' colour, and seen where there is no box. */
  background: number;
  /** Colour of lines over the ground, where no box is; none: it is plain. */
  hatch?: number;
  /** Added to each `colourIndex`; none: 0. */
  offset?: number;
  /** Whether small boxes keep their colour and fill as much of the row's height as they cover of a pixel, from its
   * bottom; else they fill all of it, and their colour is blended. */
  fills?: boolean;
  /** How much of the row's height each box fills, from its bottom: shares of 1. */
  levels?: Float32Array;
}

export interface Viewport {
  /** In the unit of the rows. */
  left: number;
  right: number;
  /** CSS pixels that are scrolled away above. */
  scroll: number;
}

/** Index of the first box that ends after x. */
export function firstEndingAfter(row: Row, x: number, from = 0): number {
  return search(row.end, x, from, row.end.length);
}

function search(end: Float64Array, x: number, from: number, to: number): number {
  let low = from;
  let high = to;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (end[middle]! > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Index of the first box, from `from` on, that ends after x; quick where that is near `from`. */
function next(end: Float64Array, x: number, from: number): number {
  const count = end.length;
  let low = from;
  let step = 1;
  while (low < count && !(end[low]! > x)) {
    const high = low + step;
    if (high >= count || end[high]! > x) return search(end, x, low + 1, Math.min(high, count));
    low = high;
    step *= 2;
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

/** Summed length of what the boxes of a row cover between `left` and `right`, where `from` and `to` are
 * the first boxes that end after each of them. */
export function between(row: Row, from: number, to: number, left: number, right: number): number {
  const { start, sum } = row;
  if (from >= start.length) return 0;
  let total = sum[to]! - sum[from]!;
  if (start[from]! < left && from < to) total -= left - start[from]!;
  if (to < start.length && start[to]! < right) total += right - Math.max(left, start[to]!);
  return total;
}

/** A pixel with small boxes gets at least this much of their colour, though they cover less of it. */
const MIN_COVERAGE = 0.25;

/** Between two lines of a hatched ground, in device pixels. */
const HATCH_PX = 5;

/** A colour over a background that it covers by a share, `least` at least. */
export function blended(colour: number, background: number, coverage: number, least = MIN_COVERAGE): number {
  if (coverage >= 0.996) return colour; // all but what 8 bits of a colour can show
  const part = Math.round(256 * Math.max(least, coverage));
  const rest = 256 - part;
  const red = ((colour & 255) * part + (background & 255) * rest) >> 8;
  const green = (((colour >>> 8) & 255) * part + ((background >>> 8) & 255) * rest) >> 8;
  const blue = (((colour >>> 16) & 255) * part + ((background >>> 16) & 255) * rest) >> 8;
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

/** Of one picture; further boxes are drawn without their text. */
const MAX_LABELS = 4096;

/** Boxes that are wide enough for text: left edge and width in device pixels, cut at the edges. */
export class Labels {
  count = 0;
  readonly row = new Int32Array(MAX_LABELS);
  readonly box = new Int32Array(MAX_LABELS);
  readonly x = new Int32Array(MAX_LABELS);
  readonly width = new Int32Array(MAX_LABELS);

  add(row: number, box: number, x: number, width: number): void {
    if (this.count === MAX_LABELS) return;
    const at = this.count++;
    this.row[at] = row;
    this.box[at] = box;
    this.x[at] = x;
    this.width[at] = width;
  }
}

export class Painter {
  readonly labels = new Labels();
  /** One line of pixels of a row: all its lines are alike. */
  private line = new Uint32Array(0);
  /** Of rows with `fills` or `levels`: how many pixels of each column are filled, from the bottom. */
  private filled = new Uint16Array(0);
  /** Columns by how much of them is filled, and where those of each height begin. */
  private byHeight = new Uint16Array(0);
  private begins = new Int32Array(0);

  /**
   * Paint the rows that are in sight. `pixels` has width × height device pixels; `ratio` of them are
   * one CSS pixel. `labels` then holds the boxes that have `labelWidth` device pixels for text.
   */
  paint(
    pixels: Uint32Array, width: number, height: number, ratio: number, rows: readonly Row[],
    colours: Uint32Array, viewport: Viewport, background: number, labelWidth: number,
  ): Labels {
    pixels.fill(background);
    this.labels.count = 0;
    if (this.line.length !== width) {
      this.line = new Uint32Array(width);
      this.filled = new Uint16Array(width);
      this.byHeight = new Uint16Array(width);
    }
    for (let number = 0; number < rows.length; number++) {
      const row = rows[number]!;
      const top = Math.round((row.top - viewport.scroll) * ratio);
      const end = Math.round((row.top + row.height - viewport.scroll) * ratio);
      const bottom = Math.min(height, end);
      if (bottom <= 0 || top >= height) continue;
      this.paintLine(width, row, number, colours, viewport, labelWidth, end - top);
      if (row.fills || row.levels) this.paintFilled(pixels, width, top, bottom, end - top, row.background);
      else for (let y = Math.max(0, top); y < bottom; y++) pixels.set(this.line, y * width);
    }
    return this.labels;
  }

  /** Paints a row from its bottom to its top: a line differs from the one below it only in the columns that end there,
   * so that the work is one copy a line and one step a column. */
  private paintFilled(pixels: Uint32Array, width: number, top: number, bottom: number, height: number, background: number): void {
    const { filled, byHeight, line } = this;
    if (this.begins.length < height + 2) this.begins = new Int32Array(height + 2);
    const begins = this.begins.fill(0);
    for (let x = 0; x < width; x++) begins[filled[x]! + 1]!++;
    for (let full = 1; full <= height; full++) begins[full + 1]! += begins[full]!;
    for (let x = 0; x < width; x++) byHeight[begins[filled[x]!]!++] = x;
    // Each entry now has where the next height begins.
    for (let up = 0, at = 0; up < height; up++) {
      for (const ends = begins[up]!; at < ends; at++) line[byHeight[at]!] = background;
      const y = top + height - 1 - up;
      if (y >= 0 && y < bottom) pixels.set(line, y * width);
    }
  }

  private paintLine(
    width: number, row: Row, number: number, colours: Uint32Array, viewport: Viewport, labelWidth: number, height: number,
  ): void {
    const { line, filled } = this;
    const { start, end, colourIndex, background, levels, fills } = row;
    const offset = row.offset ?? 0;
    const left = viewport.left;
    const scale = width / (viewport.right - viewport.left);
    const unit = 1 / scale;
    const count = start.length;
    line.fill(background);
    if (row.hatch !== undefined) for (let x = 0; x < width; x += HATCH_PX) line[x] = row.hatch;
    filled.fill(height);
    let box = firstEndingAfter(row, left);
    let free = 0; // the first pixel that is not painted
    while (box < count && free < width) {
      const x0 = (start[box]! - left) * scale;
      if (x0 >= width) break;
      const x1 = (end[box]! - left) * scale;
      const from = Math.max(free, Math.round(x0));
      const to = Math.min(width, Math.round(x1));
      if (to - from >= 2) {
        // The last pixel of a box of more than four stays background, so that neighbours are distinguished;
        // but not of one that goes on beyond the right edge.
        const ends = !levels && to - from > 4 && x1 <= width;
        line.fill(colours[colourIndex[box]! + offset]!, from, ends ? to - 1 : to);
        if (row.hatch !== undefined && ends) line[to - 1] = background;
        if (levels) filled.fill(Math.max(1, Math.round(levels[box]! * height)), from, to);
        if (to - from >= labelWidth) this.labels.add(number, box, from, to - from);
        free = to;
        box++;
        continue;
      }
      const pixel = Math.max(free, Math.floor(x0));
      if (pixel >= width) break;
      const low = left + pixel * unit;
      const high = low + unit;
      // The box before was painted to a whole pixel, and may end within this one.
      const first = box > 0 && end[box - 1]! > low ? box - 1 : box;
      const after = next(end, high, box);
      const coverage = between(row, first, after, low, high) * scale;
      // A box that only reaches in from the pixel before was seen there; 2 % of this one is too little.
      if (start[box]! >= low || after > box || coverage > 0.02) {
        const reaches = after < count && start[after]! < high;
        const shown = longest(start, end, box, reaches ? after : Math.max(box, after - 1));
        const colour = colours[colourIndex[shown]! + offset]!;
        const least = start[box]! >= low || after > box ? MIN_COVERAGE : 0;
        if (levels || fills) {
          line[pixel] = colour;
          filled[pixel] = Math.max(1, Math.round(height * (levels ? levels[shown]! : Math.min(1, Math.max(least, coverage)))));
        } else line[pixel] = blended(colour, background, coverage, least);
      }
      free = pixel + 1;
      box = after;
    }
  }
}

/** Which of some boxes in one pixel gives it its colour: the longest of the first, the middle and the last. */
function longest(start: Float64Array, end: Float64Array, first: number, last: number): number {
  const middle = (first + last) >>> 1;
  let found = first;
  if (end[middle]! - start[middle]! > end[found]! - start[found]!) found = middle;
  if (end[last]! - start[last]! > end[found]! - start[found]!) found = last;
  return found;
}

/** A row of boxes that are sorted by start and do not overlap. */
export function makeRow(
  start: Float64Array, end: Float64Array, colourIndex: Uint32Array, id: Int32Array, top: number,
  height: number, background: number,
): Row {
  const sum = new Float64Array(start.length + 1);
  let total = 0;
  for (let i = 0; i < start.length; i++) sum[i + 1] = total += end[i]! - start[i]!;
  return { start, end, sum, colourIndex, id, top, height, background };
}
