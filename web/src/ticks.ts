// SPDX-License-Identifier: Apache-2.0
// Round times on an axis.

import { clock } from "./numbers";

/** A place on an axis, as a share of its width, and its text. */
export interface Tick { at: number; text: string }

/** Steps above a second, in seconds; below it they are 1, 2 or 5 times a power of ten. */
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400];

/** The smallest round step with which a time has at most `most` ticks; in seconds. */
export function stepOf(lengthS: number, most: number): number {
  const least = lengthS / Math.max(1, most);
  if (least > 0.5) return STEPS_S.find((step) => step >= least) ?? Math.ceil(least / 86_400) * 86_400;
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-9)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999_999)!;
}

/** Round times of day between two times (seconds since 1970), both ends included; `zoneS`: what is added to a time for its
 * time of day. */
export function ticks(left: number, right: number, most: number, zoneS = -60 * new Date(left * 1000).getTimezoneOffset()): Tick[] {
  const length = right - left;
  if (!(length > 0)) return [];
  const step = stepOf(length, most);
  const found: Tick[] = [];
  // From the start of the day: numbers of seconds since 1970 are too large for parts of a microsecond.
  const origin = Math.floor((left + zoneS) / 86_400) * 86_400 - zoneS;
  const first = Math.ceil((left - origin) / step - 1e-6);
  const last = Math.floor((right - origin) / step + 1e-6);
  for (let number = first; number <= last; number++) {
    const time = origin + number * step;
    found.push({ at: Math.max(0, Math.min(1, (time - left) / length)), text: clock(time + step * 1e-3, step) });
  }
  return found;
}
