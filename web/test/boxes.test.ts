// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import { between, boxAt, firstEndingAfter, makeRow, blended, Painter, type Row, type Viewport } from "../src/draw/boxes";

function covered(row: Row, left: number, right: number): number {
  return between(row, firstEndingAfter(row, left), firstEndingAfter(row, right), left, right);
}

const RED = 0xff0000ff;
const WHITE = 0xffffffff;

function rowOf(spans: readonly [number, number][], height = 2): Row {
  const start = Float64Array.from(spans, ([from]) => from);
  const end = Float64Array.from(spans, ([, to]) => to);
  return makeRow(start, end, new Uint32Array(spans.length), Int32Array.from(spans, (_, i) => i), 0, height, WHITE);
}

const painter = new Painter();

function paint(
  pixels: Uint32Array, width: number, height: number, ratio: number, rows: readonly Row[], viewport: Viewport, background: number, labelWidth: number,
): { row: number; box: number; x: number; width: number }[] {
  const { count, row, box, x, width: room } = painter.paint(pixels, width, height, ratio, rows, Uint32Array.of(RED), viewport, background, labelWidth);
  return Array.from({ length: count }, (_, i) => ({ row: row[i]!, box: box[i]!, x: x[i]!, width: room[i]! }));
}

describe("searches", () => {
  const row = rowOf([[0, 10], [20, 30], [30, 35]]);

  it("finds the first box that ends after a place", () => {
    expect([-1, 0, 10, 25, 30, 35].map((x) => firstEndingAfter(row, x))).toEqual([0, 0, 1, 1, 2, 3]);
  });

  it("hits a box, its start included, its end excluded", () => {
    expect([0, 9.9, 10, 20, 30, 35].map((x) => boxAt(row, x))).toEqual([0, 0, -1, 1, 2, -1]);
  });

  it("takes the nearest box within the slack", () => {
    expect(boxAt(row, 12, 3)).toBe(0);
    expect(boxAt(row, 18, 3)).toBe(1);
    expect(boxAt(row, 15, 3)).toBe(-1);
  });

  it("adds up what is covered, cut at both places", () => {
    expect(covered(row, 5, 25)).toBe(10);
    expect(covered(row, -5, 50)).toBe(25);
    expect(covered(row, 11, 19)).toBe(0);
    expect(covered(row, 22, 24)).toBe(2);
    expect(covered(row, 36, 40)).toBe(0);
  });

  it("agrees with a plain sum on random rows", () => {
    let seed = 7;
    const random = (): number => (seed = (seed * 48271) % 2147483647) / 2147483647;
    const spans: [number, number][] = [];
    for (let at = 0; at < 1000; ) {
      const from = at + random() * 5;
      at = from + random() * 5;
      spans.push([from, at]);
    }
    const many = rowOf(spans);
    for (let i = 0; i < 500; i++) {
      const left = random() * 1000;
      const right = left + random() * 30;
      const plain = spans.reduce((sum, [from, to]) => sum + Math.max(0, Math.min(to, right) - Math.max(from, left)), 0);
      expect(covered(many, left, right)).toBeCloseTo(plain, 8);
    }
  });
});

describe("paint", () => {
  it("fills wide boxes and leaves the background between them", () => {
    const pixels = new Uint32Array(20 * 2);
    const labels = paint(pixels, 20, 2, 1, [rowOf([[0, 10], [10, 20]])], { left: 0, right: 20, scroll: 0 }, WHITE, 8);
    expect([...pixels.slice(0, 20)].map((one) => one === RED)).toEqual(
      Array.from({ length: 20 }, (_, x) => x !== 9 && x !== 19));
    expect(labels.map(({ box, x, width }) => [box, x, width])).toEqual([[0, 0, 10], [1, 10, 10]]);
  });

  it("hatches the ground where nothing was measured, not the gap behind a box", () => {
    const pixels = new Uint32Array(20);
    paint(pixels, 20, 1, 1, [{ ...rowOf([[0, 11]], 1), hatch: 7 }], { left: 0, right: 20, scroll: 0 }, WHITE, 30);
    expect([...pixels]).toEqual([...Array<number>(10).fill(RED), WHITE, WHITE, WHITE, WHITE, WHITE, 7, WHITE, WHITE, WHITE, WHITE]);
  });

  it("shows boxes below a pixel by the share that they cover", () => {
    const spans = Array.from({ length: 1000 }, (_, i): [number, number] => [i, i + 0.5]);
    const pixels = new Uint32Array(10);
    paint(pixels, 10, 1, 1, [rowOf(spans, 1)], { left: 0, right: 1000, scroll: 0 }, WHITE, 30);
    expect(new Set(pixels)).toEqual(new Set([blended(RED, WHITE, 0.5)]));
  });

  it("adds up to what boxes below a pixel cover", () => {
    let seed = 11;
    const random = (): number => (seed = (seed * 48271) % 2147483647) / 2147483647;
    for (const longest of [0.2, 1, 4]) {
      const spans: [number, number][] = [];
      for (let at = 0; at < 2000; ) {
        const from = at + random() * longest;
        at = from + random() * longest;
        spans.push([from, at]);
      }
      const row = rowOf(spans, 1);
      const pixels = new Uint32Array(200);
      paint(pixels, 200, 1, 1, [row], { left: 0, right: 2000, scroll: 0 }, WHITE, 30);
      // Green of a pixel goes from 255 (background) to 0 (red): its sum is what is not covered.
      const shown = pixels.reduce((sum, one) => sum + (255 - ((one >>> 8) & 255)) / 255, 0) * 10;
      expect(Math.abs(shown - covered(row, 0, 2000)) / 2000).toBeLessThan(0.02);
    }
  });

  it("keeps the colour of boxes below a pixel where a row fills by height", () => {
    const spans = Array.from({ length: 1000 }, (_, i): [number, number] => [i, i + 0.5]);
    const pixels = new Uint32Array(10 * 8);
    paint(pixels, 10, 8, 1, [{ ...rowOf(spans, 8), fills: true }], { left: 0, right: 1000, scroll: 0 }, WHITE, 30);
    expect([...pixels.slice(0, 40)].every((one) => one === WHITE)).toBe(true);
    expect([...pixels.slice(40)].every((one) => one === RED)).toBe(true);
  });

  it("never paints a lane full that is hardly covered", () => {
    const spans = Array.from({ length: 1000 }, (_, i): [number, number] => [i, i + 0.01]);
    const pixels = new Uint32Array(10 * 8);
    paint(pixels, 10, 8, 1, [{ ...rowOf(spans, 8), fills: true }], { left: 0, right: 1000, scroll: 0 }, WHITE, 30);
    expect(pixels.filter((one) => one === RED)).toHaveLength(10 * 2);
  });

  it("draws boxes as high as their levels, without gaps", () => {
    const pixels = new Uint32Array(20 * 4);
    const row = { ...rowOf([[0, 10], [10, 20]], 4), levels: Float32Array.of(0.5, 1) };
    paint(pixels, 20, 4, 1, [row], { left: 0, right: 20, scroll: 0 }, WHITE, 30);
    const filled = (x: number) => [0, 1, 2, 3].filter((y) => pixels[y * 20 + x] === RED).length;
    expect([0, 9, 10, 19].map(filled)).toEqual([2, 2, 4, 4]);
  });

  it("takes colours from where a row's offset leads", () => {
    const pixels = new Uint32Array(4);
    const row = { ...rowOf([[0, 4]], 1), offset: 1 };
    painter.paint(pixels, 4, 1, 1, [row], Uint32Array.of(RED, 0xff00ff00), { left: 0, right: 4, scroll: 0 }, WHITE, 30);
    expect(pixels[0]).toBe(0xff00ff00);
  });

  it("keeps a lone short box visible", () => {
    const pixels = new Uint32Array(10);
    paint(pixels, 10, 1, 1, [rowOf([[500, 500.001]], 1)], { left: 0, right: 1000, scroll: 0 }, WHITE, 30);
    expect(pixels[5]).not.toBe(WHITE);
    expect(pixels.filter((one) => one !== WHITE)).toHaveLength(1);
  });

  it("draws only rows in sight", () => {
    const above = { ...rowOf([[0, 10]]), top: -50 };
    const pixels = new Uint32Array(20);
    expect(paint(pixels, 10, 2, 1, [above], { left: 0, right: 10, scroll: 0 }, WHITE, 2)).toEqual([]);
  });

  it("survives empty rows and boxes without length", () => {
    const pixels = new Uint32Array(10);
    paint(pixels, 10, 1, 1, [rowOf([], 1), rowOf([[1, 1], [1, 1]], 1)], { left: 0, right: 10, scroll: 0 }, WHITE, 2);
    expect(pixels).toHaveLength(10);
  });
});
