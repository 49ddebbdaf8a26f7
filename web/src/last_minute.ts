// SPDX-License-Identifier: Apache-2.0
// The verdict on the last minute in which a node sent something.

import type { Explanation } from "./api";

const MINUTE_S = 60;

/** The minute before a node's last data within a range that ends at `endS`, in seconds since 1970; `endS` 0: the present. */
export function lastMinute(lastS: number, endS: number): { from: number; to: number } {
  const end = endS > 0 ? Math.min(lastS, endS) : lastS;
  // Rows of samples sum up a second and are selected by its start.
  return { from: end - MINUTE_S, to: end < lastS ? end : Math.ceil(end) + 1 };
}

/** By which questions about a node differ: in live mode its last time moves on every few seconds, and it is asked once a minute. */
export function keyOf(node: string, lastS: number, endS: number): string {
  return `${node} ${Math.floor(lastMinute(lastS, endS).from / MINUTE_S)}`;
}

/** A verdict in a few words. */
export function inWords({ verdicts: [verdict] }: Pick<Explanation, "verdicts">): string {
  if (!verdict) return "nothing to explain";
  const bound = verdict.bounds[0]?.key ?? "not known";
  return verdict.causes.find((one) => one.bound === bound)?.title ?? bound;
}
