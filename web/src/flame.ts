// SPDX-License-Identifier: Apache-2.0
// Stacks as a tree in columns, and the tree as rows of boxes.

import type { Flame, FrameRow } from "./api";
import type { Row } from "./draw/boxes";
import type { Palette } from "./draw/colours";

/** A stack of a comparison (compare.ts): its weight is the mean of its two shares, `before` the first of them. */
interface Compared { before?: number }

export const ROW_HEIGHT = 19;
export type Weight = "ns" | "bytes";
/** Which frames are left out: none, the kernel's, those and the runtime's, all but Python's. */
export type Hide = "" | "kernel" | "runtime" | "python";

/** A function of a tree; `label`: its name and, of Python's, the line. */
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
  /** How many events its samples stand for. */
  count: Float64Array;
  /** Of a comparison: the share of each node in the stacks before. */
  before: Float64Array;
  /** Where its box begins, in the unit of the weights. */
  x: Float64Array;
  levels: number;
  /** The heaviest child of each node, and the next lighter child of its parent; -1: none. */
  child: Int32Array;
  sibling: Int32Array;
  /** Nodes level by level, from left to right; those of level i are `order[first[i]]` to `order[first[i + 1] - 1]`. */
  order: Int32Array;
  first: Int32Array;
}

/** Kinds of frames that stand for what stacks are kept apart by: they stay outermost when the tree is inverted. */
const GROUP_KINDS = new Set(["process", "thread", "binary"]);

const RUNTIME = /^(libc[.-]|libpthread|ld-linux|ld-musl|libpython|python3|\[vdso\]|libstdc\+\+|libgcc_s)/;

function isHidden(frame: FrameRow, hide: Hide): boolean {
  if (GROUP_KINDS.has(frame.kind)) return false;
  if (hide === "python") return frame.kind !== "python";
  if (frame.kind === "kernel") return hide === "kernel" || hide === "runtime";
  return hide === "runtime" && frame.kind !== "python" && RUNTIME.test(frame.binary);
}

/** The binary of what Sonde puts into a program. */
const SONDE = "[memfd:sonde-library]";

function shortFile(file: string): string {
  return file.slice(file.lastIndexOf("/") + 1);
}

function functionOf(frame: FrameRow): Function {
  const name = frame.function || (frame.binary ? `${frame.binary === SONDE ? "Sonde’s own library" : frame.binary} (no symbols)` : "[unknown]");
  const place = frame.kind === "python" && frame.file ? `  ${shortFile(frame.file)}:${frame.line}` : "";
  return {
    name, label: name + place, kind: frame.kind, binary: frame.binary, file: frame.file, line: frame.line,
    named: frame.function !== "",
  };
}

/** Python frames are distinguished by line, others by function. */
function keyOf(frame: FrameRow): string {
  const line = frame.kind === "python" ? frame.line : 0;
  return `${frame.function || "\u0001"}\u0000${frame.binary}\u0000${frame.file}\u0000${line}`;
}

/** The tree of stacks, or of their reverse (`invert`), without the frames that are left out. */
export function build(flame: Flame, weight: Weight, invert: boolean, hide: Hide): Tree {
  const functions: Function[] = [{ name: "all", label: "all", kind: "root", binary: "", file: "", line: 0, named: true }];
  const known = new Map<string, number>();
  const numberOf = flame.frames.map((frame) => {
    if (isHidden(frame, hide)) return -1;
    const key = keyOf(frame);
    let number = known.get(key);
    if (number === undefined) {
      number = functions.push(functionOf(frame)) - 1;
      known.set(key, number);
    }
    return number;
  });
  const grown = new Grown(nodesAtMost(flame));
  const { frames } = flame;
  for (const stack of flame.stacks) {
    const amount = weight === "bytes" ? stack.bytes : stack.ns;
    if (!(amount > 0)) continue;
    const { frames: inner, n } = stack;
    const last = inner.length - 1;
    const isGrouped = last >= 0 && GROUP_KINDS.has(frames[inner[last]!]!.kind);
    let node = isGrouped ? grown.under(0, numberOf[inner[last]!]!) : 0;
    const length = isGrouped ? last : last + 1;
    for (let i = 0; i < length; i++) {
      const frame = numberOf[inner[invert ? i : length - 1 - i]!] ?? -1;
      if (frame < 0 || (frame === grown.fn[node] && !functions[frame]!.named)) continue;
      node = grown.under(node, frame);
    }
    grown.own[node]! += amount;
    grown.before[node]! += (stack as Compared).before ?? 0;
    grown.count[node]! += n;
  }
  return arranged(functions, grown);
}

/** The same stacks, each under the binary of its innermost frame that is not left out: where the time was spent. */
export function byBinary(flame: Flame, hide: Hide): Flame {
  const frames = [...flame.frames];
  const numbers = new Map<string, number>();
  const stacks = flame.stacks.map((stack) => {
    const at = stack.frames.find((number) => !isHidden(flame.frames[number]!, hide));
    const name = (at === undefined ? "" : flame.frames[at]!.binary) || "[no binary]";
    let number = numbers.get(name);
    if (number === undefined) {
      number = frames.push({ kind: "binary", function: name, binary: "", file: "", line: 0 }) - 1;
      numbers.set(name, number);
    }
    return { ...stack, frames: [...stack.frames, number] };
  });
  return { ...flame, frames, stacks };
}

/** Stacks with a function, cut at its outermost call: `callers` from it outwards, `callees` from it inwards. */
export function around(flame: Flame, label: string): { callers: Flame; callees: Flame; weight: { ns: number; bytes: number; n: number } } {
  const isIt = flame.frames.map((frame) => functionOf(frame).label === label);
  const callers: Flame["stacks"] = [];
  const callees: Flame["stacks"] = [];
  const weight = { ns: 0, bytes: 0, n: 0 };
  for (const stack of flame.stacks) {
    let at = stack.frames.length - 1;
    while (at >= 0 && !isIt[stack.frames[at]!]) at--;
    if (at < 0) continue;
    const { length } = stack.frames;
    const end = GROUP_KINDS.has(flame.frames[stack.frames[length - 1]!]!.kind) ? length - 1 : length;
    callers.push({ ...stack, frames: stack.frames.slice(at, end) });
    callees.push({ ...stack, frames: stack.frames.slice(0, at + 1) });
    weight.ns += stack.ns;
    weight.bytes += stack.bytes;
    weight.n += stack.n;
  }
  return { callers: { ...flame, stacks: callers }, callees: { ...flame, stacks: callees }, weight };
}

/** Nodes that a tree has room for at first. */
const LEAST_NODES = 1024;
const MOST_NODES = 1 << 18;

/** How many nodes a tree of stacks may have, as far as room for them is made before they are known. */
function nodesAtMost({ stacks }: Flame): number {
  let frames = 1;
  for (let i = 0; i < stacks.length && frames < MOST_NODES; i++) frames += stacks[i]!.frames.length;
  return Math.max(LEAST_NODES, Math.min(MOST_NODES, 2 ** Math.ceil(Math.log2(frames))));
}

/** Children of nodes that were made one after another are far apart in the table, those of one node side by side. */
const SPREAD = 0x9e3779b1;

/** A tree while it grows. Which child of a node has a function is looked up in one table for all nodes. */
class Grown {
  size = 1;
  parent: Int32Array;
  fn: Int32Array;
  /** Of the stacks that end at a node. */
  own: Float64Array;
  count: Float64Array;
  before: Float64Array;
  private table: Int32Array;

  /** `room`: a power of two. */
  constructor(room: number) {
    this.parent = new Int32Array(room).fill(-1, 0, 1);
    this.fn = new Int32Array(room);
    this.own = new Float64Array(room);
    this.count = new Float64Array(room);
    this.before = new Float64Array(room);
    this.table = new Int32Array(2 * room);
  }

  /** The child of a node with this function; made where there is none. */
  under(node: number, fn: number): number {
    const { table } = this;
    const mask = table.length - 1;
    let at = (Math.imul(node, SPREAD) + fn) & mask;
    for (let found = table[at]!; found !== 0; found = table[at]!) {
      if (this.parent[found] === node && this.fn[found] === fn) return found;
      at = (at + 1) & mask;
    }
    if (this.size === this.parent.length) this.grow();
    const made = this.size++;
    this.parent[made] = node;
    this.fn[made] = fn;
    if (this.table === table) table[at] = made;
    else this.put(made);
    return made;
  }

  private put(node: number): void {
    const mask = this.table.length - 1;
    let at = (Math.imul(this.parent[node]!, SPREAD) + this.fn[node]!) & mask;
    while (this.table[at] !== 0) at = (at + 1) & mask;
    this.table[at] = node;
  }

  private grow(): void {
    const size = 2 * this.parent.length;
    this.parent = longer(this.parent, new Int32Array(size));
    this.fn = longer(this.fn, new Int32Array(size));
    this.own = longer(this.own, new Float64Array(size));
    this.count = longer(this.count, new Float64Array(size));
    this.before = longer(this.before, new Float64Array(size));
    this.table = new Int32Array(2 * size);
    for (let node = 1; node < this.size; node++) this.put(node);
  }
}

function longer<T extends Int32Array | Float64Array>(from: T, into: T): T {
  into.set(from);
  return into;
}

/** Children up to this many are sorted as a list: that takes less than to copy them for the engine. */
const MOST_AS_LIST = 24;

/** A tree in which each node's children are sorted by weight, the heaviest first; of the same weight, the one that was
 * made first. Each loop is a function: a tree is built once, and the engine has a short one compiled before it ends. */
class Arranged {
  readonly child: Int32Array;
  readonly sibling: Int32Array;
  readonly depth: Int32Array;
  readonly x: Float64Array;
  readonly order: Int32Array;
  private readonly size: number;

  constructor(private readonly parent: Int32Array, private readonly total: Float64Array) {
    const size = this.size = parent.length;
    this.child = new Int32Array(size).fill(-1);
    this.sibling = new Int32Array(size).fill(-1);
    this.depth = new Int32Array(size);
    this.x = new Float64Array(size);
    this.order = new Int32Array(size);
  }

  /** Children of each node in the order in which they were made; their weights are added to what `total` has. */
  link(): void {
    const { parent, child, sibling, total } = this;
    for (let node = this.size - 1; node > 0; node--) {
      const above = parent[node]!;
      sibling[node] = child[above]!;
      child[above] = node;
      total[above]! += total[node]!;
    }
  }

  sort(): void {
    const { child, sibling } = this;
    for (let node = this.size - 1; node >= 0; node--) {
      const first = child[node]!;
      if (first >= 0 && sibling[first]! >= 0) this.sortChildren(node);
    }
  }

  private sortChildren(node: number): void {
    const { child, sibling, total } = this;
    let count = 0;
    let last = -1; // of those that are sorted
    for (let one = child[node]!; one >= 0;) {
      if (++count > MOST_AS_LIST) return this.sortMany(node);
      const after = sibling[one]!;
      const weight = total[one]!;
      if (last < 0 || total[last]! >= weight) last = one;
      else {
        let before = -1;
        let behind = child[node]!;
        while (total[behind]! >= weight) {
          before = behind;
          behind = sibling[behind]!;
        }
        sibling[last] = after;
        sibling[one] = behind;
        if (before < 0) child[node] = one;
        else sibling[before] = one;
      }
      one = after;
    }
  }

  private sortMany(node: number): void {
    const { child, sibling, total } = this;
    const all: number[] = [];
    for (let one = child[node]!; one >= 0; one = sibling[one]!) all.push(one);
    all.sort((a, b) => total[b]! - total[a]! || a - b);
    child[node] = all[0]!;
    all.forEach((one, i) => { sibling[one] = all[i + 1] ?? -1; });
  }

  /** Nodes level by level; gives where each level begins. */
  place(): Int32Array {
    const first = [0, 1];
    for (let from = 0, to = 1; from < to;) {
      const end = this.placeLevel(from, to, first.length - 1);
      from = to;
      to = end;
      if (end > from) first.push(end);
    }
    return Int32Array.from(first);
  }

  private placeLevel(from: number, to: number, level: number): number {
    const { child, sibling, total, depth, x, order } = this;
    let end = to;
    for (let i = from; i < to; i++) {
      const node = order[i]!;
      let at = x[node]!;
      for (let below = child[node]!; below >= 0; below = sibling[below]!) {
        depth[below] = level;
        x[below] = at;
        at += total[below]!;
        order[end++] = below;
      }
    }
    return end;
  }
}

/** Adds what each node has to what the node above it has. */
function addUp(parent: Int32Array, values: Float64Array): Float64Array {
  for (let node = values.length - 1; node > 0; node--) values[parent[node]!]! += values[node]!;
  return values;
}

/** The finished tree. */
function arranged(functions: Function[], grown: Grown): Tree {
  const size = grown.size;
  const parent = grown.parent.slice(0, size);
  const own = grown.own.slice(0, size);
  const total = own.slice();
  const made = new Arranged(parent, total);
  made.link();
  made.sort();
  const first = made.place();
  const { depth, x, child, sibling, order } = made;
  return {
    functions, parent, fn: grown.fn.slice(0, size), depth, total, own, count: addUp(parent, grown.count.slice(0, size)),
    before: addUp(parent, grown.before.slice(0, size)), x, levels: first.length - 1, child, sibling, order, first,
  };
}

/** In lower case, with single spaces: a place is searched for as verdicts and tables write it. */
const plain = (text: string): string => text.toLowerCase().replaceAll(/\s+/g, " ");

/** What matches a search: a text or, between slashes, a regular expression; null where it is empty, or no valid one. */
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
  const lower = plain(text);
  return (fn) =>
    plain(fn.label).includes(lower) || fn.binary.toLowerCase().includes(lower) ||
    fn.file.toLowerCase().includes(lower);
}

/** Which nodes match (`lit`), and how much weight is under them (nested matches count once), below `top` alone. */
export function found(tree: Tree, matches: (fn: Function) => boolean, top = 0): { lit: Uint8Array; weight: number } {
  const byFunction = tree.functions.map((fn, number) => number > 0 && matches(fn));
  const lit = new Uint8Array(tree.parent.length);
  const inside = new Uint8Array(tree.parent.length);
  const below = new Uint8Array(tree.parent.length);
  below[top] = 1;
  let weight = 0;
  for (let node = 1; node < lit.length; node++) {
    const parent = tree.parent[node]!;
    const above = inside[parent]!;
    if (below[parent]) below[node] = 1;
    if (byFunction[tree.fn[node]!]) {
      lit[node] = 1;
      // Of a match above `top`, all of `top` is inside.
      if (node === top ? true : !above && below[parent]) weight += tree.total[node]!;
      inside[node] = 1;
    } else {
      if (node === top && above) weight += tree.total[node]!;
      inside[node] = above;
    }
  }
  return { lit, weight };
}

/** Own and total weight of each function, the one with most own weight first; recursive calls count once. */
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

/** The levels as rows, without the first `skip`, one below another or (`upwards`) one above another; in both cases the
 * uppermost row is the first one. A colourIndex is that of a function, plus their number where a search faded the node. */
export function rowsOf(tree: Tree, background: number, lit: Uint8Array | null, skip = 0, upwards = false): Row[] {
  const { order, first, x, total, fn } = tree;
  const faded = tree.functions.length;
  const count = Math.max(0, tree.levels - skip);
  const from = first[Math.min(skip, tree.levels)]!;
  const boxes = order.length - from;
  const start = new Float64Array(boxes);
  const end = new Float64Array(boxes);
  const colourIndex = new Uint32Array(boxes);
  const sum = new Float64Array(boxes + count);
  for (let level = skip, i = 0; level < tree.levels; level++) {
    let covered = 0;
    for (const until = first[level + 1]! - from; i < until; i++) {
      const node = order[from + i]!;
      const left = start[i] = x[node]!;
      const right = end[i] = left + total[node]!;
      colourIndex[i] = fn[node]! + (lit !== null && lit[node] === 0 ? faded : 0);
      sum[i + level - skip + 1] = covered += right - left;
    }
  }
  return Array.from({ length: count }, (_, number): Row => {
    const below = upwards ? count - 1 - number : number;
    const [a, b] = [first[skip + below]! - from, first[skip + below + 1]! - from];
    return {
      start: start.subarray(a, b), end: end.subarray(a, b), sum: sum.subarray(a + below, b + below + 1), colourIndex: colourIndex.subarray(a, b),
      id: order.subarray(from + a, from + b), top: number * ROW_HEIGHT, height: ROW_HEIGHT - 1, background,
    };
  });
}

/** The colours of such rows: of each function, then as often the faded one. */
export function coloursOf(tree: Tree, palette: Palette): Uint32Array {
  const count = tree.functions.length;
  const colours = new Uint32Array(2 * count).fill(palette.faded);
  tree.functions.forEach((fn, number) => { colours[number] = palette.frame(fn.kind, fn.binary, fn.name); });
  return colours;
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
    let next = tree.child[node]!;
    while (next >= 0 && tree.functions[tree.fn[next]!]!.label !== label) next = tree.sibling[next]!;
    if (next < 0) break;
    node = next;
  }
  return node;
}
