// SPDX-License-Identifier: Apache-2.0
// Which series a node's page shows together, and where a series dips.

import type { Columns } from "./api";
import { labelsOf, shortId } from "./devices";
import { percent } from "./numbers";

/** Times in seconds since 1970. */
export interface Line { label: string; times: number[]; values: number[] }
/** `percent`: values are shares of 1; `top`: the end of the axis, null: as the values need; `stepped`: see README.md. */
export interface Chart { title: string; unit: string; percent: boolean; lines: Line[]; top: number | null; stepped: boolean }

/** A line's last value up to a time; null before its first one. */
export function valueAt(line: Line, at: number): number | null {
  let low = 0;
  let high = line.times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.times[middle]! <= at) low = middle + 1;
    else high = middle;
  }
  return line.values[low - 1] ?? null;
}

/**
 * A series of a chart: with `where`, only rows that have this label; `by`: a line for each value of this label, named
 * by it; `skip`: names that get no line.
 */
interface Wanted { series: string; label: string; where?: [string, string]; by?: string; skip?: readonly string[] }
/** The series of one chart. */
export interface Group { title: string; unit: string; percent?: boolean; stepped?: boolean; wanted: readonly Wanted[] }

export const GROUPS: readonly Group[] = [
  { title: "GPU use", unit: "%", percent: true, wanted: [
    { series: "hw.gpu.utilization", label: "busy", where: ["hw.gpu.task", "general"] },
    { series: "sonde.gpu.sm.active", label: "SM active" },
    { series: "sonde.gpu.tensor.active", label: "tensor cores", where: ["sonde.gpu.precision", "any"] },
    { series: "sonde.gpu.dram.active", label: "memory bus" }] },
  { title: "Runs on devices", unit: "at once", stepped: true, wanted: [{ series: "sonde.device.busy", label: "" }] },
  { title: "Launches", unit: "/s", stepped: true, wanted: [{ series: "sonde.device.launches", label: "launches" }] },
  { title: "Threads", unit: "at once", stepped: true, wanted: [{ series: "sonde.cpu", label: "", skip: ["blocked"] }] },
  { title: "GPU memory", unit: "B", wanted: [
    { series: "hw.gpu.memory.usage", label: "used" }, { series: "hw.gpu.memory.limit", label: "limit" }] },
  { title: "Power", unit: "W", wanted: [
    { series: "hw.power", label: "drawn" }, { series: "sonde.gpu.power.limit", label: "limit" }] },
  { title: "Clocks", unit: "Hz", wanted: [{ series: "sonde.gpu.clock", label: "", by: "sonde.gpu.clock.domain", skip: ["video"] }] },
  { title: "Throttled", unit: "%", percent: true, stepped: true, wanted: [{ series: "sonde.gpu.throttled", label: "", by: "sonde.gpu.throttle.reason" }] },
  { title: "Temperature", unit: "°C", wanted: [{ series: "hw.temperature", label: "", by: "hw.sensor_location" }] },
  { title: "PCIe", unit: "B/s", wanted: [{ series: "sonde.gpu.pcie.throughput", label: "", by: "network.io.direction" }] },
  { title: "NVLink", unit: "B/s", wanted: [{ series: "sonde.gpu.nvlink.throughput", label: "", by: "network.io.direction" }] },
];

/** Host and device memory: of the node, of limited control groups, of processes. */
export const MEMORY_GROUPS: readonly Group[] = [
  { title: "Host memory", unit: "B", wanted: [
    { series: "system.memory.usage", label: "", by: "system.memory.state", skip: ["dirty", "writeback", "buffers"] },
    { series: "sonde.host.memory.available", label: "available" }, { series: "system.memory.limit", label: "installed" }] },
  { title: "Limited groups", unit: "B", wanted: [{ series: "sonde.cgroup.memory.usage", label: "", by: "sonde.cgroup" }] },
  { title: "GPU memory", unit: "B", wanted: [
    { series: "hw.gpu.memory.usage", label: "used" }, { series: "hw.gpu.memory.limit", label: "limit" }] },
  { title: "GPU memory by process", unit: "B", wanted: [{ series: "sonde.process.gpu.memory", label: "", by: "process.pid" }] },
];

export function seriesOf(groups: readonly Group[]): readonly string[] {
  return [...new Set(groups.flatMap((group) => group.wanted.map((one) => one.series)))];
}

export const SERIES = seriesOf(GROUPS);

/** The unit of a series that charts have: 1 is a share of 1; '' not known. */
export function unitOf(series: string): string {
  const group = [...GROUPS, ...MEMORY_GROUPS].find((one) => one.wanted.some((wanted) => wanted.series === series));
  return group?.percent ? "1" : group && group.unit !== "at once" ? group.unit : "";
}

const LABELS: Record<string, string> = { cpu: "on a CPU", runqueue: "waiting for a CPU", kernel: "kernels", copy: "copies", set: "memory sets", replay: "graphs" };

/** Rows of one series and one set of labels: they follow each other in an answer, sorted by time. */
interface Part { labels: string; first: number; end: number }

function partsOf({ rows, texts }: Columns): Map<string, Part[]> {
  const { series, labels } = texts as Record<"series" | "labels", Columns["texts"][string]>;
  const found = new Map<string, Part[]>();
  for (let first = 0; first < rows;) {
    let end = first + 1;
    while (end < rows && series.index[end] === series.index[first] && labels.index[end] === labels.index[first]) end++;
    const name = series.values[series.index[first]!]!;
    const part = { labels: labels.values[labels.index[first]!] ?? "", first, end };
    const parts = found.get(name);
    if (parts) parts.push(part);
    else found.set(name, [part]);
    first = end;
  }
  return found;
}

/** The charts that a table of series gives, and the titles of those that it has no rows for. */
export function chartsOf(table: Columns, groups: readonly Group[] = GROUPS): { charts: Chart[]; missing: string[] } {
  const series = partsOf(table);
  const { time_ns: time, value, most } = table.numbers as Record<"time_ns" | "value" | "most", ArrayLike<number>>;
  const devices = new Set<string>();
  for (const [name, parts] of series) {
    if (name.startsWith("hw.gpu")) for (const part of parts) devices.add(String(labelsOf(part.labels)["hw.id"] ?? ""));
  }
  const charts: Chart[] = [];
  const missing: string[] = [];
  let times: Times = { first: 0, end: 0, seconds: [] };
  for (const group of groups) {
    const lines: Line[] = [];
    for (const wanted of group.wanted) {
      for (const { labels: text, first, end } of series.get(wanted.series) ?? []) {
        const labels = labelsOf(text);
        if (wanted.where && labels[wanted.where[0]] !== wanted.where[1]) continue;
        const key = wanted.by ? String(labels[wanted.by] ?? "") : wanted.label || text;
        if (wanted.skip?.includes(key)) continue;
        if (wanted.series === "sonde.gpu.throttled" && isZero(most, first, end)) continue;
        const device = devices.size > 1 && labels["hw.id"] ? ` ${shortId(String(labels["hw.id"]))}` : "";
        times = timesOf(time, first, end, times);
        const values = new Array<number>(end - first);
        for (let i = first; i < end; i++) values[i - first] = value[i]!;
        lines.push({ label: (LABELS[key] ?? key.replaceAll("_", " ")) + device, times: times.seconds, values });
      }
    }
    if (lines.length) charts.push({ title: group.title, unit: group.unit, percent: group.percent ?? false, lines, top: group.percent ? 1 : null, stepped: group.stepped ?? false });
    else missing.push(group.title);
  }
  return { charts, missing };
}

/** Times of rows, in seconds. */
interface Times { first: number; end: number; seconds: number[] }

/** Those of other rows again where they are the same: most series are measured at the same times. */
function timesOf(ns: ArrayLike<number>, first: number, end: number, other: Times): Times {
  const count = end - first;
  let same = other.end - other.first === count ? 0 : -1;
  while (same >= 0 && same < count && ns[first + same] === ns[other.first + same]) same++;
  if (same === count) return other;
  const seconds = new Array<number>(count);
  for (let i = 0; i < count; i++) seconds[i] = ns[first + i]! / 1e9;
  return { first, end, seconds };
}

function isZero(values: ArrayLike<number>, first: number, end: number): boolean {
  for (let i = first; i < end; i++) if (values[i] !== 0) return false;
  return true;
}

/** The lines of a chart on one axis of time, as uPlot takes them: undefined where only other lines have a value, which
 * uPlot draws a line through. */
export function aligned(lines: readonly Line[]): [number[], ...(number | null | undefined)[][]] {
  const first = lines[0]?.times ?? [];
  if (lines.every(({ times }) => times === first || times.length === first.length && times.every((time, i) => time === first[i]))) {
    return [first, ...lines.map((line) => line.values)];
  }
  const times = [...new Set(lines.flatMap((line) => line.times))].sort((a, b) => a - b);
  const columns = lines.map((line) => {
    const column: (number | null | undefined)[] = new Array<undefined>(times.length).fill(undefined);
    for (let i = 0, at = 0; i < line.times.length; i++) {
      while (times[at]! < line.times[i]!) at++;
      column[at] = line.values[i]!;
    }
    return column;
  });
  return [times, ...columns];
}

/** A GPU that is used less than this, of 1, is hardly used. */
const LOW_USE = 0.5;

/** How much GPUs were used over a time without dips; '': not known. `chart`: that of GPU use. */
export function useText(chart: Chart | undefined): string {
  const meanOf = (label: string): number | null => {
    const lines = chart?.lines.filter((line) => line.label === label || line.label.startsWith(`${label} `)) ?? [];
    const values = lines.flatMap((line) => line.values).filter(Number.isFinite);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const [busy, sm] = [meanOf("busy"), meanOf("SM active")];
  const known = [busy === null ? "" : `${percent(busy)} busy`, sm === null ? "" : `${percent(sm)} SM active`].filter(Boolean).join(", ");
  if (!known) return "";
  const isLow = (sm ?? busy ?? 0) < LOW_USE;
  return `${isLow ? "GPU use was low throughout" : "GPU use does not dip here"}: ${known} on average.`;
}

/** `from`, `to`: seconds since 1970; `lost`: what is missing to the usual value, summed over its seconds. */
export interface Dip { from: number; to: number; lowest: number; lost: number }

/** Where a series stays below half of what it usually reaches (its 90th percentile), the costliest `most` first. */
export function dips(line: Line, most = 4): Dip[] {
  const { values } = line;
  if (values.length < 4) return [];
  const sorted = [...values].sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.9 * (sorted.length - 1))]!;
  if (usual < 0.05) return []; // hardly used at all
  const found: Dip[] = [];
  let first = -1;
  for (let i = 0; i <= values.length; i++) {
    const isLow = i < values.length && values[i]! < 0.5 * usual;
    if (isLow && first < 0) first = i;
    if (!isLow && first >= 0) {
      const from = line.times[Math.max(0, first - 1)]!;
      const to = line.times[Math.min(line.times.length - 1, i)]!;
      const part = values.slice(first, i);
      const step = (line.times[line.times.length - 1]! - line.times[0]!) / (values.length - 1);
      found.push({ from, to, lowest: Math.min(...part), lost: part.reduce((sum, value) => sum + (usual - value), 0) * step });
      first = -1;
    }
  }
  return found.filter((dip) => dip.to > dip.from).sort((a, b) => b.lost - a.lost).slice(0, most);
}
