// SPDX-License-Identifier: Apache-2.0
// GPU hours of owners, and the parts that they consist of.

import type { OwnerKind } from "./url";

/** What every answer about GPU hours has: hours of GPUs in which an owner had memory on them, and their parts. */
export interface Hours {
  held_h: number; productive_h: number; stalled_h: number; idle_h: number; unknown_h: number; wasted_h: number; joules: number | null;
}

export type Part = "productive" | "stalled" | "idle" | "unknown";
/** Each with its title and what it is. */
export const PARTS: readonly [Part, string, string][] = [
  ["productive", "Productive", "kernels ran"],
  ["stalled", "Stalled", "no kernel ran, while the owner used or called the GPU"],
  ["idle", "Idle", "the owner had memory on the GPU and neither used nor called it"],
  ["unknown", "Unknown", "the GPU was used, and its driver does not report by whom"],
];

export const KIND_NAMES: Record<OwnerKind, string> = {
  user: "User", job: "Job", pod: "Pod", namespace: "Namespace", container: "Container", unit: "Unit", comm: "Process name", exe: "Executable",
};

/** The parts of the hours held as shares of 1, none left out; [] where nothing was held. */
export function sharesOf(hours: Hours): { part: Part; title: string; about: string; hours: number; share: number }[] {
  if (!(hours.held_h > 0)) return [];
  return PARTS.map(([part, title, about]) => {
    const amount = hours[`${part}_h`];
    return { part, title, about, hours: amount, share: Math.max(0, Math.min(1, amount / hours.held_h)) };
  });
}

export function sumOf(rows: readonly Hours[]): Hours {
  const sum: Hours = { held_h: 0, productive_h: 0, stalled_h: 0, idle_h: 0, unknown_h: 0, wasted_h: 0, joules: null };
  for (const row of rows) {
    for (const name of ["held_h", "productive_h", "stalled_h", "idle_h", "unknown_h", "wasted_h"] as const) sum[name] += row[name];
    if (row.joules !== null) sum.joules = (sum.joules ?? 0) + row.joules;
  }
  return sum;
}
