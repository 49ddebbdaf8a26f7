// SPDX-License-Identifier: Apache-2.0
// Two selections of stacks against each other: shares of each, as one tree and as a table of functions.

import type { Flame } from "./api";
import { abgr } from "./draw/colours";
import { build, table, type Function, type Hide, type Tree, type Weight } from "./flame";

/** The stacks of both, each with the mean of its two shares as weight, and as `before` the first of them; null where a
 * side has no stacks. */
export function compared(before: Flame, after: Flame, weight: Weight): Flame | null {
  const sum = (flame: Flame): number => flame.stacks.reduce((all, stack) => all + stack[weight], 0);
  const [sumBefore, sumAfter] = [sum(before), sum(after)];
  if (!(sumBefore > 0) || !(sumAfter > 0)) return null;
  const shift = before.frames.length;
  const stacks = [
    ...before.stacks.map((stack) => ({ ...stack, [weight]: stack[weight] / sumBefore / 2, before: stack[weight] / sumBefore })),
    ...after.stacks.map((stack) => ({ ...stack, frames: stack.frames.map((frame) => frame + shift), [weight]: stack[weight] / sumAfter / 2 })),
  ];
  return { total: after.total, frames: [...before.frames, ...after.frames], stacks };
}

/** A node's share on the side after, from the mean and the share before. */
export function afterOf(tree: Tree, node: number): number {
  return Math.max(0, 2 * tree.total[node]! - tree.before[node]!);
}

export interface Change { fn: Function; before: number; after: number; change: number }

/** Functions by how much their share of own time changed, the largest change first. */
export function changes(before: Flame, after: Flame, weight: Weight, hide: Hide): Change[] {
  const found = new Map<string, Change>();
  for (const [flame, side] of [[before, "before"], [after, "after"]] as const) {
    const tree = build(flame, weight, false, hide);
    for (const row of table(tree)) {
      const fn = tree.functions[row.fn]!;
      const key = `${fn.label}\0${fn.binary}`;
      let one = found.get(key);
      if (!one) found.set(key, (one = { fn, before: 0, after: 0, change: 0 }));
      one[side] += row.own / (tree.total[0] || 1);
    }
  }
  const all = [...found.values()];
  for (const one of all) one.change = one.after - one.before;
  return all.filter((one) => one.before > 0 || one.after > 0).sort((a, b) => Math.abs(b.change) - Math.abs(a.change) || b.after - a.after);
}

/** Of colours; an odd number: the one in the middle is no change. */
export const LEVELS = 15;
/** The change of a share from which on the colour is strongest. */
const STRONGEST = 0.1;

/** From much less (0) to much more (LEVELS - 1), by the root of the change, so that small ones are seen. */
export function levelOf(tree: Tree, node: number): number {
  const change = afterOf(tree, node) - tree.before[node]!;
  const half = (LEVELS - 1) / 2;
  return half + Math.max(-half, Math.min(half, Math.round((Math.sign(change) * Math.sqrt(Math.min(1, Math.abs(change) / STRONGEST))) * half)));
}

/** Blue for less, orange for more: people with colour-blindness distinguish them, and lightness has how much. */
export function changeColours(dark: boolean): Uint32Array {
  const half = (LEVELS - 1) / 2;
  return Uint32Array.from({ length: LEVELS }, (_, level) => {
    const share = Math.abs(level - half) / half;
    const hue = level < half ? 212 : 24;
    return dark ? abgr(hue, 8 + 50 * share, 26 + 22 * share) : abgr(hue, 12 + 76 * share, 92 - 32 * share);
  });
}
