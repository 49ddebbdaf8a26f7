// SPDX-License-Identifier: Apache-2.0
// Numbers and times as people read them. Shares are of 1; times of day are in seconds since 1970, in this
// browser's zone.

/** With three digits, or with all that stand before the point. */
function threeDigits(value: number): string {
  return value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : grouped(value);
}

export function grouped(value: number): string {
  return Math.round(value).toLocaleString("en-US");
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
  const text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (stepS >= 1) return text;
  const digits = Math.min(6, Math.ceil(-Math.log10(stepS)));
  const rest = (seconds - Math.floor(seconds)).toFixed(digits);
  return rest.startsWith("1") ? text : text + rest.slice(1); // rounded up to the next second: without decimals
}

export function day(seconds: number): string {
  const date = new Date(seconds * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
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

/** GPU hours; below one as a duration in smaller units. */
export function gpuHours(hours: number): string {
  return hours >= 1 ? `${threeDigits(hours)} h` : duration(hours * 3.6e12);
}

/** In Wh from 0.1 kWh on (the command line prints kWh). */
export function energy(joules: number): string {
  return joules >= 3.6e5 ? scaled(joules / 3600, "Wh") : scaled(joules, "J");
}

export function count(number: number, what: string): string {
  return `${grouped(number)} ${what}${number === 1 ? "" : "s"}`;
}
