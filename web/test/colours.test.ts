// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import { contrast, inkOn, paletteOf } from "../src/draw/colours";

type Triple = [number, number, number];

/** Severity 1.0 of Machado, Oliveira and Fernandes (2009), over linear RGB. */
const SEEN: Record<string, readonly Triple[]> = {
  normal: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

const linear = (one: number): number => { const c = one / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const channels = (colour: number): Triple => [linear(colour & 255), linear((colour >>> 8) & 255), linear((colour >>> 16) & 255)];
const times = (rows: readonly Triple[], by: Triple): Triple =>
  rows.map((row) => Math.min(1, Math.max(0, row[0] * by[0] + row[1] * by[1] + row[2] * by[2]))) as Triple;

/** CIE L*a*b* of linear sRGB, D65. */
function lab(rgb: Triple): Triple {
  const [x, y, z] = times([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], rgb);
  const f = (t: number): number => (t > 0.008856 ? Math.cbrt(t) : 7.787 * t + 16 / 116);
  const [fx, fy, fz] = [f(x / 0.9505), f(y), f(z / 1.089)];
  return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)];
}

/** What stands side by side in a thread's lane, and in a stream's. */
const TOGETHER = [["launch", "copy", "sync"], ["blocked", "runqueue"], ["runqueue", "running"], ["kernel", "copy"]];

describe("colours of spans that stand together", () => {
  for (const dark of [false, true]) {
    for (const [who, rows] of Object.entries(SEEN)) {
      it(`are distinct with ${who} sight, ${dark ? "dark" : "light"}`, () => {
        const palette = paletteOf(dark);
        for (const group of TOGETHER) {
          const seen = group.map((kind) => lab(times(rows, channels(palette.span(kind)))));
          seen.forEach((a, i) => seen.slice(i + 1).forEach((b, j) => {
            const apart = Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
            expect(apart, `${group[i]} and ${group[i + 1 + j]}`).toBeGreaterThan(18);
          }));
        }
      });
    }
  }
});

describe("contrast", () => {
  /** What is drawn beside the ground of its lane, and means something by its colour. */
  const DRAWN = ["kernel", "collective", "copy", "set", "replay", "launch", "graph_launch", "sync", "alloc", "pin", "build", "runqueue", "running", "stall", "odd step", "counter"];

  for (const dark of [false, true]) {
    const palette = paletteOf(dark);
    it(`of spans to the ground of their lane is 3 at least, ${dark ? "dark" : "light"}`, () => {
      const low = DRAWN.map((kind) => [kind, contrast(palette.span(kind), palette.lane)] as const).filter(([, one]) => one < 3);
      expect(low).toEqual([]);
    });

    it(`of text to its box is 4.5 at least, ${dark ? "dark" : "light"}`, () => {
      const boxes = [...DRAWN, "blocked", "step", "operator", "python", "range", "free", "event", "other"].map((kind) => palette.span(kind));
      for (const kind of ["python", "kernel", "jit", "root", "user"]) boxes.push(palette.frame(kind, "libtorch", kind));
      const inks = { "rgb(0 0 0)": 0xff000000, "rgb(255 255 255)": 0xffffffff } as Record<string, number>;
      for (const box of boxes) expect(contrast(inks[inkOn(box)]!, box)).toBeGreaterThanOrEqual(4.5);
      const [red, green, blue] = palette.fadedInk.match(/\d+/g)!.map(Number) as [number, number, number];
      expect(contrast((0xff000000 | (blue << 16) | (green << 8) | red) >>> 0, palette.faded)).toBeGreaterThanOrEqual(4.5);
    });
  }
});
