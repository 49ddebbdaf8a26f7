// SPDX-License-Identifier: Apache-2.0
// Spans of a table, which are in the order of their times, as rows of boxes need them: those of a group side by side.

import type { Numbers } from "./api";

/** Spans by group: those of group g are from `first[g]` to before `first[g + 1]`, in their order. */
export interface Grouped {
  first: Int32Array;
  start: Float64Array;
  end: Float64Array;
  /** As a row has it; those of group g from `first[g] + g` on, as each group has one more. */
  sum: Float64Array;
  colourIndex: Uint32Array;
  id: Int32Array;
  /** By group: 1 where no span begins before all before it have ended. */
  isFlat: Uint8Array;
  /** By group and kind: 1 where it has a span of that kind. */
  seen: Uint8Array;
}

/** What is known of the spans; see `Source` in lanes.ts. */
export interface Given {
  start: Float64Array; end: Float64Array; group: ArrayLike<number>; groups: number; first: number;
  kind?: Numbers; kinds: readonly number[]; name?: Numbers; named: number;
}

/** The spans by group. One pass, which reads each column once and in order: to gather a group at a time would read the
 * whole of memory for each. `names`: how many names there are. */
export function byGroup(given: Given, names: number): Grouped {
  const count = given.start.length;
  // Always of the same types, so that the loops are compiled for these alone.
  const group = given.group instanceof Int32Array ? given.group : Int32Array.from(given.group);
  const kind = given.kind instanceof Uint8Array ? given.kind : given.kind ? Uint8Array.from(given.kind) : new Uint8Array(count);
  const name = given.name instanceof Int32Array ? given.name : given.name ? Int32Array.from(given.name) : new Int32Array(count);
  const first = new Int32Array(given.groups + 1);
  for (let i = 0; i < group.length; i++) first[group[i]! + 1]!++;
  for (let i = 0; i < given.groups; i++) first[i + 1]! += first[i]!;
  const colours = Int32Array.from(given.kinds, (one) => one * names + given.named);
  const made: Grouped = {
    first, start: new Float64Array(count), end: new Float64Array(count), sum: new Float64Array(count + given.groups),
    colourIndex: new Uint32Array(count), id: new Int32Array(count), isFlat: new Uint8Array(given.groups).fill(1),
    seen: new Uint8Array(given.groups * colours.length),
  };
  put(made, given.start, given.end, group, kind, name, colours, given.first);
  return made;
}

function put(
  made: Grouped, start: Float64Array, end: Float64Array, group: Int32Array, kind: Uint8Array, name: Int32Array, colours: Int32Array, id: number,
): void {
  const groups = made.first.length - 1;
  const next = made.first.slice(0, groups);
  const last = new Float64Array(groups).fill(-Infinity);
  const total = new Float64Array(groups);
  const kinds = colours.length;
  for (let i = 0; i < start.length; i++) {
    const at = group[i]!;
    const to = next[at]!;
    const from = start[i]!;
    const until = end[i]!;
    next[at] = to + 1;
    made.start[to] = from;
    made.end[to] = until;
    made.sum[to + at + 1] = total[at]! += until - from;
    made.colourIndex[to] = colours[kind[i]!]! + name[i]!;
    made.id[to] = id + i;
    made.seen[at * kinds + kind[i]!] = 1;
    if (from < last[at]!) made.isFlat[at] = 0;
    if (until > last[at]!) last[at] = until;
  }
}
