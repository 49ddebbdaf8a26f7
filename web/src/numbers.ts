// SPDX-License-Identifier: Apache-2.0
// Numbers and times as people read them. Shares are of 1; times of day are in seconds since 1970, in UTC, so that people
// in several zones, and the log files of nodes, have the same.

/** With three digits, or with all that stand before the point. */
function threeDigits(value: number): string {
  return value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : grouped(value);
}

/** `toLocaleString` looks for the locale and makes such an object at each call. */
const GROUPED = new Intl.NumberFormat("en-US");

export function grouped(value: number): string {
  return GROUPED.format(Math.round(value));
}

export function duration(ns: number): string {
  const size = Math.abs(ns);
  const sign = ns < 0 ? "−" : "";
  if (size >= 36e12) return `${sign}${threeDigits(size / 3.6e12)} h`;
  if (size >= 600e9) return `${sign}${grouped(size / 60e9)} min`;
  for (const [limit, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]] as const) {
    if (size >= limit * 0.9995) return `${sign}${threeDigits(size / limit)} ${unit}`;
  }
  return size ? `${sign}${Math.round(size)} ns` : "0";
}

/** With a decimal prefix (k, M, …). */
export function scaled(value: number, unit: string): string {
  for (const [limit, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(value) >= limit * 0.9995) return `${threeDigits(value / limit)} ${prefix}${unit}`;
  }
  return `${Number.isInteger(value) ? value : value.toFixed(value < 10 ? 2 : 1)} ${unit}`.trim();
}

/** Of a share that is not negative. */
export function percent(share: number): string {
  const value = 100 * share;
  if (value === 0 || value >= 99.95) return `${value.toFixed(0)} %`;
  return value >= 0.1 ? `${value.toFixed(1)} %` : "< 0.1 %";
}

const two = (value: number): string => String(value).padStart(2, "0");

/** Wall-clock time of day, with as many decimals as `stepS` asks for. */
export function clock(seconds: number, stepS = 1): string {
  const date = new Date(seconds * 1000);
  const text = `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}:${two(date.getUTCSeconds())}`;
  if (stepS >= 1) return text;
  const digits = Math.min(6, Math.ceil(-Math.log10(stepS)));
  const rest = (seconds - Math.floor(seconds)).toFixed(digits);
  return rest.startsWith("1") ? text : text + rest.slice(1); // rounded up to the next second: without decimals
}

export function day(seconds: number): string {
  const date = new Date(seconds * 1000);
  return `${date.getUTCFullYear()}-${two(date.getUTCMonth() + 1)}-${two(date.getUTCDate())}`;
}

/** From a time to another, with the days and the zone; the second day where it is another. */
export function period(from: number, to: number, stepS = 1): string {
  return `${day(from)} ${clock(from, stepS)} – ${day(to) === day(from) ? "" : `${day(to)} `}${clock(to, stepS)} UTC`;
}

/** A time on an axis from one time to another: with the day, to the minute, where these are of two days. */
export function dated(seconds: number, from: number, to: number, stepS = 1): string {
  return day(from) === day(to) ? clock(seconds, stepS) : `${day(seconds).slice(5)} ${clock(seconds).slice(0, 5)}`;
}

/** A time as a field takes it: with milliseconds where it has some. */
export function written(seconds: number): string {
  const ms = Math.round(seconds * 1000) / 1000;
  return `${day(ms)} ${clock(ms, Number.isInteger(ms) ? 1 : 0.001)}`;
}

/** The time that a text such as 2026-11-23 08:35:30.5 is in UTC, in seconds since 1970; NaN: it is none. */
export function timeOf(text: string): number {
  const found = /^\s*(\d{4}-\d\d-\d\d)[ T]+(\d\d:\d\d)(:\d\d)?(\.\d{1,6})?\s*(?:UTC|Z)?\s*$/i.exec(text);
  if (!found) return NaN;
  const [, date, minutes, seconds = ":00", rest = ""] = found;
  if (rest && !found[3]) return NaN;
  const whole = Date.parse(`${date}T${minutes}${seconds}Z`) / 1000;
  // Date.parse takes the 31st of a shorter month for a day of the next one.
  return Number.isFinite(whole) && day(whole) === date ? whole + Number(rest || 0) : NaN;
}

/** How long something is ago. */
export function ago(seconds: number): string {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** A sentence of the server with no line break between a number and its unit. */
export function tidy(text: string): string {
  return text.replace(/(\d) (?=%|ms|s\b|µs|MHz)/g, "$1\u00a0");
}

export function energy(joules: number): string {
  return joules >= 3600 ? scaled(joules / 3600, "Wh") : scaled(joules, "J");
}

type Unit = readonly [name: string, size: number];
/** Sizes in hours, and in joules. */
const GPU_TIME_UNITS: readonly Unit[] = [["h", 1], ["min", 1 / 60], ["s", 1 / 3600]];
const ENERGY_UNITS: readonly Unit[] = [["MWh", 3.6e9], ["kWh", 3.6e6], ["Wh", 3600], ["J", 1]];

/** Writes values of a column, all in the unit that fits its largest one, so that they can be compared by eye: the largest unit of
 * which that is at least `least`. */
function inOneUnit(units: readonly Unit[], largest: number, least: number): (value: number) => string {
  const [name, size] = units.find(([, one]) => largest >= one * least) ?? units[units.length - 1]!;
  return (value) => {
    const amount = value / size;
    return amount > 0 && amount < 0.005 ? `< 0.01 ${name}` : `${amount ? threeDigits(amount) : "0"} ${name}`;
  };
}

/** GPU hours of a column, in h, min (from ten minutes on) or s. */
export function gpuTimes(hours: readonly number[]): (hours: number) => string {
  const largest = Math.max(0, ...hours);
  return inOneUnit(largest >= 1 ? GPU_TIME_UNITS.slice(0, 1) : GPU_TIME_UNITS.slice(1), largest, 10);
}

/** Energy of a column, from joules. */
export function energies(joules: readonly (number | null)[]): (joules: number) => string {
  return inOneUnit(ENERGY_UNITS, Math.max(0, ...joules.map((one) => one ?? 0)), 1);
}

/** The text of a button that shows more of the rows that are left, at most `atOnce`. */
export function moreText(left: number, atOnce: number): string {
  return left > atOnce ? `Show ${grouped(atOnce)} more of ${grouped(left)}` : `Show ${grouped(left)} more`;
}

export function count(number: number, what: string): string {
  return `${grouped(number)} ${what}${number === 1 ? "" : "s"}`;
}
