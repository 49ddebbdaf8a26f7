// SPDX-License-Identifier: Apache-2.0
// Stacks as a tree in columns, and the tree as rows of boxes.

import type { Flame, FrameRow } from "./api";
import { makeRow, type Row } from "./draw/boxes";
import type { Palette } from "./draw/colours";

export const ROW_HEIGHT = 19;
export type Weight = "ns" | "bytes";
export type Hide = "" | "kernel" | "runtime" | "python";

export interface Function {
  name: string;
  label: string;
  kind: string;
  binary: string;
  file: string;
  line: number;
  /** Whether a symbol gave it its name; else that is its binary's. */
  named: boolean;
}

/** Node 0 is the root; a parent comes before its children. */
export interface Tree {
  functions: Function[];
  parent: Int32Array;
  fn: Int32Array;
  depth: Int32Array;
  total: Float64Array;
  own: Float64Array;
  count: Float64Array;
  x: Float64Array;
  levels: number;
}

const RUNTIME = /^(libc[.-]|libpthread|ld-linux|ld-musl|libpython|python3|\[vdso\]|libstdc\+\+|libgcc_s)/;

function isHidden(frame: FrameRow, hide: Hide): boolean {
  if (hide === "python") return frame.kind !== "python";
  if (frame.kind === "kernel") return hide === "kernel" || hide === "runtime";
  return hide === "runtime" && frame.kind !== "python" && RUNTIME.test(frame.binary);
}

function shortFile(file: string): string {
  return file.slice(file.lastIndexOf("/") + 1);
}

function described(frame: FrameRow): Function {
  const name = frame.function || frame.binary || "[unknown]";
  const place = frame.kind === "python" && frame.file ? `  ${shortFile(frame.file)}:${frame.line}` : "";
  return {
    name, label: name + place, kind: frame.kind, binary: frame.binary, file: frame.file, line: frame.line,
    named: frame.function !== "",
  };
}

/** Python frames are told apart by line, others by function. */
function keyOf(frame: FrameRow): string {
  const line = frame.kind === "python" ? frame.line : 0;
  return `${frame.function || "\u0001"}\u0000${frame.binary}\u0000${frame.file}\u0000${line}`;
}

export function build(flame: Flame, weight: Weight, invert: boolean, hide: Hide): Tree {
  const functions: Function[] = [{ name: "all", label: "all", kind: "root", binary: "", file: "", line: 0, named: true }];
  const known = new Map<string, number>();
  const numberOf = flame.frames.map((frame) => {
    if (isHidden(frame, hide)) return -1;
    const key = keyOf(frame);
    let number = known.get(key);
    if (number === undefined) {
      number = functions.push(described(frame)) - 1;
      known.set(key, number);
    }
    return number;
  });
  const parent = [-1];
  const fn = [0];
  const depth = [0];
  const own = [0];
  const total = [0];
  const count = [0];
  const children: Map<number, number>[] = [new Map()];
  for (const stack of flame.stacks) {
    const amount = weight === "bytes" ? stack.bytes : stack.ns;
    if (!(amount > 0)) continue;
    let node = 0;
    total[0]! += amount;
    count[0]! += stack.n;
    const length = stack.frames.length;
    for (let i = 0; i < length; i++) {
      const frame = numberOf[stack.frames[invert ? i : length - 1 - i]!] ?? -1;
      if (frame < 0 || (frame === fn[node] && !functions[frame]!.named)) continue;
      let child = children[node]!.get(frame);
      if (child === undefined) {
        child = parent.push(node) - 1;
        fn.push(frame);
        depth.push(depth[node]! + 1);
        own.push(0);
        total.push(0);
        count.push(0);
        children.push(new Map());
        children[node]!.set(frame, child);
      }
      node = child;
      total[node]! += amount;
      count[node]! += stack.n;
    }
    own[node]! += amount;
  }
  const totals = Float64Array.from(total);
  const x = new Float64Array(parent.length);
  let levels = 1;
  for (let node = 0; node < parent.length; node++) {
    let at = x[node]!;
    levels = Math.max(levels, depth[node]! + 1);
    const below = [...children[node]!.values()].sort((a, b) => totals[b]! - totals[a]! || a - b);
    for (const child of below) {
      x[child] = at;
      at += totals[child]!;
    }
  }
  return {
    functions, parent: Int32Array.from(parent), fn: Int32Array.from(fn), depth: Int32Array.from(depth),
    total: totals, own: Float64Array.from(own), count: Float64Array.from(count), x, levels,
  };
}

/** Text or, between slashes, a regular expression; null for none, or where it is no expression. */
export function matcher(search: string): ((fn: Function) => boolean) | null {
  const text = search.trim();
  if (!text) return null;
  const expression = /^\/(.*)\/$/.exec(text);
  if (expression) {
    try {
      const pattern = new RegExp(expression[1]!, "i");
      return (fn) => pattern.test(fn.label) || pattern.test(fn.binary) || pattern.test(fn.file);
    } catch {
      return null;
    }
  }
  const lower = text.toLowerCase();
  return (fn) =>
    fn.label.toLowerCase().includes(lower) || fn.binary.toLowerCase().includes(lower) ||
    fn.file.toLowerCase().includes(lower);
}

/** Which nodes match, and how much of the whole is under them (nested matches count once). */
export function found(tree: Tree, matches: (fn: Function) => boolean): { lit: Uint8Array; weight: number } {
  const byFunction = tree.functions.map((fn, number) => number > 0 && matches(fn));
  const lit = new Uint8Array(tree.parent.length);
  const inside = new Uint8Array(tree.parent.length);
  let weight = 0;
  for (let node = 1; node < lit.length; node++) {
    const above = inside[tree.parent[node]!]!;
    if (byFunction[tree.fn[node]!]) {
      lit[node] = 1;
      if (!above) weight += tree.total[node]!;
      inside[node] = 1;
    } else inside[node] = above;
  }
  return { lit, weight };
}

/** Own and whole weight of each function; one that is nested in itself counts once. */
export function table(tree: Tree): { fn: number; own: number; total: number; count: number }[] {
  const rows = tree.functions.map((_, fn) => ({ fn, own: 0, total: 0, count: 0 }));
  for (let node = 1; node < tree.parent.length; node++) {
    const row = rows[tree.fn[node]!]!;
    row.own += tree.own[node]!;
    let above = tree.parent[node]!;
    while (above > 0 && tree.fn[above] !== tree.fn[node]) above = tree.parent[above]!;
    if (above <= 0) {
      row.total += tree.total[node]!;
      row.count += tree.count[node]!;
    }
  }
  return rows.slice(1).sort((a, b) => b.own - a.own || b.total - a.total);
}

export function rowsOf(tree: Tree, palette: Palette, lit: Uint8Array | null): Row[] {
  const at: number[][] = Array.from({ length: tree.levels }, () => []);
  for (let node = 0; node < tree.parent.length; node++) at[tree.depth[node]!]!.push(node);
  const colours = tree.functions.map((fn) => palette.frame(fn.kind, fn.binary, fn.name));
  return at.map((nodes, level) => {
    nodes.sort((a, b) => tree.x[a]! - tree.x[b]!);
    const id = Int32Array.from(nodes);
    const start = Float64Array.from(nodes, (node) => tree.x[node]!);
    const end = Float64Array.from(nodes, (node) => tree.x[node]! + tree.total[node]!);
    const colour = Uint32Array.from(nodes, (node) =>
      lit && !lit[node] ? palette.faded : colours[tree.fn[node]!]!);
    return makeRow(start, end, colour, id, level * ROW_HEIGHT, ROW_HEIGHT - 1, palette.ground);
  });
}

/** Labels from the root to a node, the root left out. */
export function pathOf(tree: Tree, node: number): string[] {
  const path: string[] = [];
  for (let at = node; at > 0; at = tree.parent[at]!) path.push(tree.functions[tree.fn[at]!]!.label);
  return path.reverse();
}

/** The node that such a path leads to, as far as it goes. */
export function nodeOf(tree: Tree, path: readonly string[]): number {
  let node = 0;
  for (const label of path) {
    let next = -1;
    for (let child = node + 1; child < tree.parent.length; child++) {
      if (tree.parent[child] === node && tree.functions[tree.fn[child]!]!.label === label) {
        next = child;
        break;
      }
    }
    if (next < 0) break;
    node = next;
  }
  return node;
}
