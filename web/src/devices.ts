// SPDX-License-Identifier: Apache-2.0
// Figures of nodes and their devices, and what is wrong with them, worst first.

import type { Columns, LossRow, NodeRow } from "./api";
import { duration, grouped, percent } from "./numbers";

/** A GPU in the time shown: shares of 1 and watts are means; memory (bytes) is the last, temperature (°C) the highest value.
 * Null: not measured. */
export interface Device {
  id: string;
  utilization: number | null;
  smActive: number | null;
  tensor: number | null;
  memory: number | null;
  memoryLimit: number | null;
  power: number | null;
  temperature: number | null;
}

/** What is wrong. `tone`: the class of its tag, which gives its colour; `device`: the id of the GPU that it is about; '' the
 * whole node. */
export interface Trouble { readonly text: string; score: number; tone: "bad" | "warn"; device: string }

/** A GPU that is used less than half. Its text is written when it is shown or searched: a fleet has many of them. */
class Idle implements Trouble {
  constructor(private readonly which: string, private readonly what: string, private readonly used: number, readonly device: string) {}

  get text(): string { return `${this.which}${this.what} ${percent(1 - this.used)}`; }
  get score(): number { return 60 * (1 - this.used); }
  get tone(): Trouble["tone"] { return this.used < 0.2 ? "bad" : "warn"; }
}

/** Who holds GPUs of a node, most wasted hours first. */
export interface Holder { owner: string; heldH: number; wastedH: number }

/** What is known of nodes beside their metrics. */
export interface Known {
  holders: readonly { node: string; owner: string; held_h: number; wasted_h: number }[];
  incidents: readonly { node: string; began_ns: number; verdict: { cause: string; change: string | null } }[];
  /** Whether the time shown ended before the present: what was silent then is not silent for as long now. */
  isPast?: boolean;
}
const NOTHING_MORE: Known = { holders: [], incidents: [] };

/** A node in the time shown, with what is wrong with it, worst first; `score`: the sum of that, and up to 20 each for GPU
 * hours that were idle by the metrics, and that owners wasted. */
export interface NodeState {
  node: string;
  firstS: number;
  lastS: number;
  devices: Device[];
  troubles: Trouble[];
  /** GPU seconds that were not used, by the metrics. */
  idleGpuS: number;
  holders: Holder[];
  /** Null: nobody is known to have held a GPU here. */
  wastedH: number | null;
  incidents: number;
  score: number;
}

const FAULT_SCORE = 100;

/** How bad the worst trouble is: 3 a fault of the hardware, 2 bad, 1 a warning, 0 none. */
function severity(troubles: readonly Trouble[]): number {
  let worst = 0;
  for (const one of troubles) worst = Math.max(worst, one.score >= FAULT_SCORE ? 3 : one.tone === "bad" ? 2 : 1);
  return worst;
}

/** GPU hours: those that owners wasted; where none is known, those that were not used. */
export const wasteOf = (node: NodeState): number => node.wastedH ?? node.idleGpuS / 3600;

/** By severity, then by waste: what the table shows. */
function byNeed(nodes: readonly NodeState[]): NodeState[] {
  // What is compared is looked up once for each, not at each comparison.
  return nodes.map((node) => ({ node, severity: severity(node.troubles), waste: wasteOf(node) }))
    .sort((a, b) => b.severity - a.severity || b.waste - a.waste || b.node.score - a.node.score || BY_NAME.compare(a.node.node, b.node.node))
    .map(({ node }) => node);
}

/** One GPU of a node, with what is wrong with it. */
export interface DeviceState { node: NodeState; device: Device; troubles: Trouble[]; score: number }

/** All devices of nodes, what is wrong first. */
export function devicesOf(nodes: readonly NodeState[]): DeviceState[] {
  const all = nodes.flatMap((node) => node.devices.map((device): DeviceState => {
    const troubles = node.troubles.filter((one) => one.device === device.id);
    return { node, device, troubles, score: troubles.reduce((sum, one) => sum + one.score, 0) };
  }));
  return all.map((one) => ({ one, severity: severity(one.troubles) })).sort((a, b) => b.severity - a.severity || b.one.score - a.one.score).map(({ one }) => one);
}

function groupedByNode<T extends { node: string }>(rows: readonly T[]): Map<string, T[]> {
  const found = new Map<string, T[]>();
  for (const row of rows) {
    const some = found.get(row.node);
    if (some) some.push(row);
    else found.set(row.node, [row]);
  }
  return found;
}

function textAt(column: Columns["texts"][string] | undefined, row: number): string {
  return column?.values[column.index[row]!] ?? "";
}

/** The labels of a row, which are JSON. */
export function labelsOf(text: string): Record<string, string> {
  try {
    const found: unknown = text ? JSON.parse(text) : {};
    return typeof found === "object" && found !== null ? (found as Record<string, string>) : {};
  } catch {
    return {};
  }
}

/** One label, without parsing the others: a fleet has a million rows. */
function labelOf(text: string, name: string): string {
  const key = text.indexOf(`"${name}"`);
  if (key < 0) return "";
  const from = text.indexOf('"', text.indexOf(":", key + name.length + 2)) + 1;
  const to = text.indexOf('"', from);
  const value = text.slice(from, to);
  return from > 0 && to > from && !text.includes("\\") ? value : String(labelsOf(text)[name] ?? "");
}

/** Reasons for a lower clock that somebody chose, or that come with idling: nothing is wrong then. */
const REASONS_OF_CHOICE = new Set(["gpu_idle", "idle", "application_clocks", "display_clock", "sync_boost", "none"]);

const KNOWN_SERIES = [
  "hw.gpu.utilization", "sonde.gpu.sm.active", "sonde.gpu.tensor.active", "hw.gpu.memory.usage", "hw.gpu.memory.limit", "hw.power", "hw.temperature",
  "sonde.gpu.throttled", "hw.errors",
] as const;
/** A series that the states of nodes are made of, as this text itself: a name of an answer is another one, and compared letter by
 * letter; '': another series. */
type Series = (typeof KNOWN_SERIES)[number] | "";

/** The states of nodes (`NodeState`), worst first. */
export function states(nodes: readonly NodeRow[], table: Columns | null, losses: readonly LossRow[], nowS: number, known: Known = NOTHING_MORE): NodeState[] {
  return ranked(measured(nodes, table, losses, nowS, known.isPast), known);
}

/** Nodes by what was measured, worst first, with what is known of them beside. */
export function ranked(nodes: readonly NodeState[], known: Known): NodeState[] {
  const holders = groupedByNode(known.holders);
  const incidents = groupedByNode(known.incidents);
  return byNeed(nodes.map((node) => withOwners(node, holders.get(node.node) ?? [], incidents.get(node.node) ?? [])));
}

/** The states of nodes by their metrics and losses alone, in the order of `nodes`. `isPast`: see `Known`. */
export function measured(nodes: readonly NodeRow[], table: Columns | null, losses: readonly LossRow[], nowS: number, isPast = false): NodeState[] {
  const byNode = rowsByNode(table);
  const series = (table?.texts["series"]?.values ?? []).map((name) => KNOWN_SERIES.find((one) => one === name) ?? "");
  const lost = new Map<string, number>();
  for (const row of losses) lost.set(row.node, (lost.get(row.node) ?? 0) + row.value);
  return nodes.map((node) => stateOf(node, table, series, byNode.get(node.node) ?? NO_ROWS, lost.get(node.node) ?? 0, nowS, isPast));
}

/** A node with who holds its GPUs, and with its incidents that are faults of what runs there, not changes of the work itself;
 * however many, they are less than a fault of the hardware. */
function withOwners(state: NodeState, holders: Known["holders"], incidents: Known["incidents"]): NodeState {
  const faults = incidents.filter((one) => one.began_ns / 1e9 <= state.lastS && !one.verdict.change);
  const troubles = [...state.troubles];
  if (faults.length) {
    const causes = [...new Set(faults.map((one) => one.verdict.cause.replaceAll("-", " ")))];
    troubles.push({ text: `${faults.length} incident${faults.length > 1 ? "s" : ""}: ${causes.slice(0, 2).join(", ")}`, score: Math.min(99, 50 + faults.length), tone: "bad", device: "" });
    troubles.sort((a, b) => b.score - a.score);
  }
  const wastedH = holders.length ? holders.reduce((sum, one) => sum + one.wasted_h, 0) : null;
  return {
    ...state, troubles, incidents: faults.length, wastedH,
    holders: holders.map((one) => ({ owner: one.owner, heldH: one.held_h, wastedH: one.wasted_h })).sort((a, b) => b.wastedH - a.wastedH || b.heldH - a.heldH),
    score: state.score + (faults.length ? 50 + faults.length : 0) + Math.min(20, wastedH ?? 0),
  };
}

const BY_NAME = new Intl.Collator("en", { numeric: true });

/** First row of each node, and the one behind its last: rows of a node follow each other in an answer. */
type Rows = readonly [first: number, end: number];
const NO_ROWS: Rows = [0, 0];

function rowsByNode(table: Columns | null): Map<string, Rows> {
  const found = new Map<string, Rows>();
  const nodes = table?.texts["node"];
  for (let first = 0; nodes && first < table!.rows;) {
    let end = first + 1;
    while (end < table!.rows && nodes.index[end] === nodes.index[first]) end++;
    found.set(nodes.values[nodes.index[first]!]!, [first, end]);
    first = end;
  }
  return found;
}

/** A node by its metrics and losses. Scores: 100 memory errors, 30 to 60 a GPU used less than half (bad below 20 %), up to 40
 * throttled from 5 % of the time on, 30 silent for 2 min, 3 losses; incidents: 50 and more (withOwners). */
function stateOf(node: NodeRow, table: Columns | null, seriesOf: readonly Series[], [first, end]: Rows, lost: number, nowS: number, isPast: boolean): NodeState {
  const devices = new Map<string, Device>();
  const troubles: Trouble[] = [];
  const throttled = new Map<string, { share: number; device: string }>();
  const errors = new Map<string, number>();
  const { mean, most, last } = (table?.numbers ?? {}) as Record<"mean" | "most" | "last", ArrayLike<number>>;
  const { labels: labelTexts, series } = table?.texts ?? {};
  for (let i = first; i < end; i++) {
    const labels = textAt(labelTexts, i);
    const id = labelOf(labels, "hw.id");
    if (!id) continue;
    let device = devices.get(id);
    if (!device) {
      device = { id, utilization: null, smActive: null, tensor: null, memory: null, memoryLimit: null, power: null, temperature: null };
      devices.set(id, device);
    }
    switch (seriesOf[series!.index[i]!]) {
      case "hw.gpu.utilization": if (labelOf(labels, "hw.gpu.task") === "general") device.utilization = mean[i]!; break;
      case "sonde.gpu.sm.active": device.smActive = mean[i]!; break;
      case "sonde.gpu.tensor.active": if (labelOf(labels, "sonde.gpu.precision") === "any") device.tensor = mean[i]!; break;
      case "hw.gpu.memory.usage": device.memory = last[i]!; break;
      case "hw.gpu.memory.limit": device.memoryLimit = last[i]!; break;
      case "hw.power": device.power = mean[i]!; break;
      case "hw.temperature": if (labelOf(labels, "hw.sensor_location") === "gpu") device.temperature = most[i]!; break;
      case "sonde.gpu.throttled": {
        const reason = labelOf(labels, "sonde.gpu.throttle.reason");
        if (mean[i]! > 0 && !REASONS_OF_CHOICE.has(reason)) {
          const worst = throttled.get(reason);
          if (!worst || mean[i]! > worst.share) throttled.set(reason, { share: mean[i]!, device: id });
        }
        break;
      }
      case "hw.errors": if (labelOf(labels, "error.type") === "uncorrected") errors.set(id, (errors.get(id) ?? 0) + most[i]!); break;
    }
  }
  const lastS = node.last_ns / 1e9;
  const firstS = node.first_ns / 1e9;
  for (const [device, number] of errors) {
    if (number > 0) troubles.push({ text: `${number} uncorrected memory error${number > 1 ? "s" : ""}`, score: FAULT_SCORE, tone: "bad", device });
  }
  if (nowS - lastS > 120) troubles.push({ text: `silent for ${isPast ? "the last " : ""}${duration((nowS - lastS) * 1e9)}`, score: 30, tone: "warn", device: "" });
  for (const [reason, { share, device }] of throttled) {
    if (share >= 0.05) troubles.push({ text: `throttled ${percent(share)}: ${reason.replaceAll("_", " ")}`, score: 40 * share, tone: "warn", device });
  }
  let idle = 0;
  for (const device of devices.values()) {
    const used = device.smActive ?? device.utilization;
    if (used !== null) idle += 1 - used;
    if (used !== null && used < 0.5) {
      const which = devices.size > 1 ? `${shortId(device.id)} ` : "";
      troubles.push(new Idle(which, device.smActive === null ? "idle" : "SMs idle", used, device.id));
    }
  }
  if (lost > 0) troubles.push({ text: `${grouped(lost)} events not observed`, score: 3, tone: "warn", device: "" });
  troubles.sort((a, b) => b.score - a.score);
  const idleGpuS = idle * Math.max(0, lastS - firstS);
  return {
    node: node.node, firstS, lastS, devices: [...devices.values()], troubles, idleGpuS, holders: [], wastedH: null, incidents: 0,
    score: troubles.reduce((sum, one) => sum + one.score, 0) + Math.min(20, idleGpuS / 3600),
  };
}

export function shortId(id: string): string {
  return id.length > 14 ? id.slice(0, 12) : id;
}
