// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import type { Flame } from "../src/api";
import { build, found, matcher, nodeOf, pathOf, rowsOf, table } from "../src/flame";
import { paletteOf } from "../src/draw/colours";

const frame = (name: string, kind = "user", binary = "program", line = 0) =>
  ({ kind, function: name, binary, file: kind === "python" ? "/a/train.py" : "", line });
const FLAME: Flame = {
  total: { rows: 3, n: 6, ns: 100, bytes: 0 },
  frames: [frame("main"), frame("step", "python", "", 7), frame("read", "kernel", "[kernel]"), frame("", "user", "libc.so.6"), frame("step", "python", "", 9)],
  // Leaf first, as the server sends them.
  stacks: [
    { frames: [2, 1, 0], n: 3, ns: 60, bytes: 1 },
    { frames: [4, 0], n: 2, ns: 30, bytes: 2 },
    { frames: [3, 3, 0], n: 1, ns: 10, bytes: 0 },
  ],
};

describe("tree", () => {
  it("keeps sums, puts the heaviest first, and keeps Python lines apart", () => {
    const tree = build(FLAME, "ns", false, "");
    expect(tree.total[0]).toBe(100);
    expect(tree.own.reduce((sum, one) => sum + one, 0)).toBe(100);
    const rows = rowsOf(tree, paletteOf(false).background, null);
    expect([...rows[2]!.id].map((node) => tree.functions[tree.fn[node]!]!.label)).toEqual(["step  train.py:7", "step  train.py:9", "libc.so.6 (no symbols)"]);
    expect([...rows[2]!.start]).toEqual([0, 60, 90]);
  });

  it("takes frames without a name of one binary together", () => {
    expect(build(FLAME, "ns", false, "").levels).toBe(4);
  });

  it("inverts, hides and weighs by bytes", () => {
    const inverted = build(FLAME, "ns", true, "");
    expect(pathOf(inverted, nodeOf(inverted, ["read", "step  train.py:7"]))).toEqual(["read", "step  train.py:7"]);
    expect(build(FLAME, "ns", false, "python").functions.map((fn) => fn.name)).toEqual(["all", "step", "step"]);
    expect(build(FLAME, "bytes", false, "").total[0]).toBe(3);
  });

  it("finds by text and by expression, and counts nested matches once", () => {
    const tree = build(FLAME, "ns", false, "");
    expect(found(tree, matcher("STEP")!).weight).toBe(90);
    expect(found(tree, matcher("/main|step/")!).weight).toBe(100);
    expect(matcher("/(/")).toBeNull();
    expect(matcher("  ")).toBeNull();
  });

  it("adds own and whole weight by function", () => {
    const tree = build(FLAME, "ns", false, "");
    const rows = table(tree).map((row) => [tree.functions[row.fn]!.label, row.own, row.total]);
    expect(rows).toContainEqual(["main", 0, 100]);
    expect(rows[0]).toEqual(["read", 60, 60]);
  });

  it("goes as far along a path as it leads", () => {
    const tree = build(FLAME, "ns", false, "");
    expect(pathOf(tree, nodeOf(tree, ["main", "gone", "step"]))).toEqual(["main"]);
  });

  it("finds a place as verdicts write it, and weighs what is zoomed to alone", () => {
    const tree = build(FLAME, "ns", false, "");
    expect(found(tree, matcher("step train.py:7")!).weight).toBe(60);
    const step = nodeOf(tree, ["main", "step  train.py:9"]);
    expect(found(tree, matcher("step")!, step).weight).toBe(30);
    expect(found(tree, matcher("main")!, step).weight).toBe(30);
    expect(found(tree, matcher("read")!, step).weight).toBe(0);
    expect(found(tree, matcher("read")!, nodeOf(tree, ["main"])).weight).toBe(60);
  });

  it("stands as rows upwards or downwards, without its first levels", () => {
    const tree = build(FLAME, "ns", false, "");
    const names = (rows: ReturnType<typeof rowsOf>) => rows.map((row) => [tree.functions[tree.fn[row.id[0]!]!]!.name, row.top]);
    const down = names(rowsOf(tree, 0, null, 1));
    expect(down.map(([name]) => name)).toEqual(["main", "step", "read"]);
    expect(names(rowsOf(tree, 0, null, 1, true)).map(([name]) => name)).toEqual(["read", "step", "main"]);
    expect(names(rowsOf(tree, 0, null, 1, true)).map(([, top]) => top)).toEqual(down.map(([, top]) => top));
  });

  it("names the binary of what has no symbols", () => {
    const label = (binary: string) => build({ ...FLAME, frames: [frame("", "user", binary)], stacks: [{ frames: [0], n: 1, ns: 1, bytes: 0 }] }, "ns", false, "").functions[1]!.label;
    expect([label("libz.so.1.3"), label("[memfd:sonde-library]"), label("")]).toEqual(["libz.so.1.3 (no symbols)", "Sonde’s own library (no symbols)", "[unknown]"]);
  });
});
