// SPDX-License-Identifier: Apache-2.0
// Counters of a timeline as areas: each value until the next one, as high as its share of the scale.

import type { CounterColumns } from "./api";
import { doubles, HALF, type Layout } from "./lanes";
import { percent, scaled } from "./numbers";

/** The height of a counter's lane. */
const HEIGHT = 2 * HALF;
/** From this share on, the scale of shares ends at 100 %; below it at the highest value. */
const LARGE = 0.2;

/** Counters that stand above the streams. */
export function isKey({ label }: CounterColumns): boolean {
  return /gpu\.utilization|sm\.active|hw\.power/.test(label);
}

const UNITS: readonly [RegExp, string][] = [
  [/clock/, "Hz"], [/power/, "W"], [/energy/, "J"], [/temperature/, "°C"], [/throughput|io\b/, "B/s"], [/memory/, "B"], [/launches/, "/s"],
];

/** Names of counters without their device, as people read them. */
const NAMES: Record<string, string> = {
  utilization: "busy", "clock sm": "SM clock", "clock memory": "memory clock", "clock video": "video clock", "sm active": "SMs active", "dram active": "memory bus active",
  "clock limit sm": "SM clock, limit", "clock limit memory": "memory clock, limit", "clock limit video": "video clock, limit",
  "tensor active any": "tensor cores active", "tensor active hmma": "tensor cores, 16-bit float", "tensor active imma": "tensor cores, integer", "tensor active dfma": "tensor cores, 64-bit float",
};

/** What a counter is called within its group, and its unit ('%': shares of 1). */
export function counterName(label: string, most: number): { short: string; full: string; unit: string } {
  const full = label.replace(/\b(hw\.gpu|sonde\.gpu|hw|sonde)\./, "").replaceAll(/[._]/g, " ");
  const short = full.replace(/^GPU\d+ /, "");
  const isShare = most <= 1 && /utilization|active|throttled/.test(label);
  return { full, short: NAMES[short] ?? short, unit: isShare ? "%" : UNITS.find(([pattern]) => pattern.test(label))?.[1] ?? "" };
}

export function drawCounters(made: Layout, counters: readonly CounterColumns[], end: number, name: number): void {
  const kind = made.kindOf("counter");
  for (const { label, time, value } of counters) {
    const most = Array.from(value).reduce((all, one) => Math.max(all, one), 0);
    const { short, full, unit } = counterName(label, most);
    const top = unit === "%" && most >= LARGE ? 1 : most || 1;
    const text = (one: number): string => (unit === "%" ? percent(one) : scaled(one, unit));
    const start = doubles(time);
    const source = made.add({
      start, end: Float64Array.from(start, (from, i) => (i + 1 < start.length ? start[i + 1]! : Math.max(from, end))),
      group: new Uint8Array(start.length), groups: 1, text: (index) => text(value[index]!), value, note: () => full,
      level: Float32Array.from(value, (one) => Math.max(0, Math.min(1, one / top))),
      kinds: [kind], named: name,
    });
    const valueAt = (at: number): string => {
      let [low, high] = [0, start.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (start[middle]! <= at) low = middle + 1;
        else high = middle;
      }
      return low ? text(value[low - 1]!) : "";
    };
    made.lane(short, `0 to ${text(top)}`, full, [{ name: "", source, group: 0, height: HEIGHT }], valueAt);
  }
}
