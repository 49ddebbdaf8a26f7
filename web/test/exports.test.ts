// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import type { Flame } from "../src/api";
import { paletteOf } from "../src/draw/colours";
import { folded, speedscope, svg, xml } from "../src/exports";
import { build, coloursOf, nodeOf } from "../src/flame";
import { unpacked } from "../src/packed";

const EVIL = `</text><script>alert(1)</script>;\n"&`;
const frame = (name: string) => ({ kind: "user", function: name, binary: "app", file: "", line: 0 });
const FLAME: Flame = {
  total: { rows: 2, n: 2, ns: 100, bytes: 0 }, frames: [frame("main"), frame("a"), frame(EVIL)],
  stacks: [{ frames: [1, 0], n: 1, ns: 60, bytes: 0 }, { frames: [2, 1, 0], n: 1, ns: 40, bytes: 0 }],
};
const tree = build(FLAME, "ns", false, "");

describe("what is saved", () => {
  it("has every stack once, with its own weight", () => {
    expect(folded(tree, 0).split("\n")).toEqual(["main;a 60", `main;a;</text><script>alert(1)</script>:\ufffd"& 40`, ""]);
    expect(folded(tree, nodeOf(tree, ["main", "a", EVIL])).split(" ").at(-1)).toBe("40\n");
    const scope = JSON.parse(speedscope(tree, 0, "x", "nanoseconds")) as { profiles: { samples: number[][]; weights: number[] }[]; shared: { frames: { name: string }[] } };
    expect(scope.profiles[0]!.weights).toEqual([60, 40]);
    expect(scope.profiles[0]!.samples[1]!.map((at) => scope.shared.frames[at]!.name)).toEqual(["main", "a", EVIL]);
  });

  it("has no stack that weighs nothing, and one line each, whatever names hold", () => {
    const flame: Flame = {
      ...FLAME, frames: [frame("main"), frame("b\u2028c\u00a0d\u200be f;g")],
      stacks: [{ frames: [0], n: 1, ns: 0.4, bytes: 0 }, { frames: [1, 0], n: 1, ns: 2.4, bytes: 0 }],
    };
    expect(folded(build(flame, "ns", false, ""), 0)).toBe("main;b\ufffdc\ufffdd\ufffde f:g 2\n");
  });

  it("has no name as markup", () => {
    const picture = svg(tree, 0, coloursOf(tree, paletteOf(false)), "black", "white");
    expect(picture).not.toContain("<script");
    expect(picture.match(/<rect /g)).toHaveLength(5);
    expect(xml("\u0000\ud800<&>")).toBe("\ufffd\ufffd&lt;&amp;&gt;");
  });
});

describe("packed answers", () => {
  it("give columns in place of their marks, and text as it is", () => {
    const head = new TextEncoder().encode('{"a":{"$":["f64",0,2]},"b":[{"c":{"$":["u8",16,3]}}],"names":["{$}"],"none":null}');
    const base = 8 + Math.ceil(head.length / 8) * 8;
    const bytes = new Uint8Array(base + 24).fill(32, 8, base);
    new DataView(bytes.buffer).setUint32(0, head.length, true);
    bytes.set(head, 8);
    bytes.set(new Uint8Array(Float64Array.of(1.5, 2 ** 53).buffer), base);
    bytes.set([7, 8, 9], base + 16);
    expect(unpacked(bytes.buffer)).toEqual({ a: Float64Array.of(1.5, 2 ** 53), b: [{ c: Uint8Array.of(7, 8, 9) }], names: ["{$}"], none: null });
    expect(() => unpacked(bytes.buffer.slice(0, base + 8))).toThrow(RangeError);
  });
});
