// SPDX-License-Identifier: Apache-2.0
// Figures of nodes and their devices, and what is wrong with them, worst first.

import type { Columns, LossRow, NodeRow } from "./api";
import { duration, percent } from "./numbers";

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

export interface Trouble { text: string; score: number; tone: "bad" | "warn" }

export interface NodeState {
  node: string;
  firstS: number;
  lastS: number;
  devices: Device[];
  troubles: Trouble[];
  idleGpuS: number;
  score: number;
}

function textAt(column: Columns["texts"][string] | undefined, row: number): string {
  return column?.values[column.index[row]!] ?? "";
}

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

const REASONS_OF_CHOICE = new Set(["gpu_idle", "idle", "application_clocks", "display_clock", "sync_boost", "none"]);

export function states(nodes: readonly NodeRow[], table: Columns | null, losses: readonly LossRow[], nowS: number): NodeState[] {
  const byNode = rowsByNode(table);
  const lost = new Map<string, number>();
  for (const row of losses) lost.set(row.node, (lost.get(row.node) ?? 0) + row.value);
  return nodes.map((node) => stateOf(node, table, byNode.get(node.node) ?? NONE, lost.get(node.node) ?? 0, nowS))
    .sort((a, b) => b.score - a.score || BY_NAME.compare(a.node, b.node));
}

const BY_NAME = new Intl.Collator("en", { numeric: true });

/** First row of each node, and the one behind its last: rows of a node follow each other in an answer. */
type Rows = readonly [first: number, end: number];
const NONE: Rows = [0, 0];

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

function stateOf(node: NodeRow, table: Columns | null, [first, end]: Rows, lost: number, nowS: number): NodeState {
  const devices = new Map<string, Device>();
  const troubles: Trouble[] = [];
  const throttled = new Map<string, number>();
  let errors = 0;
  for (let i = first; i < end; i++) {
    const { numbers, texts } = table!;
    const labels = textAt(texts["labels"], i);
    const row = { mean: numbers["mean"]![i]!, most: numbers["most"]![i]!, last: numbers["last"]![i]! };
    const id = labelOf(labels, "hw.id");
    if (!id) continue;
    let device = devices.get(id);
    if (!device) {
      device = { id, utilization: null, smActive: null, tensor: null, memory: null, memoryLimit: null, power: null, temperature: null };
      devices.set(id, device);
    }
    switch (textAt(texts["series"], i)) {
      case "hw.gpu.utilization": if (labelOf(labels, "hw.gpu.task") === "general") device.utilization = row.mean; break;
      case "sonde.gpu.sm.active": device.smActive = row.mean; break;
      case "sonde.gpu.tensor.active": if (labelOf(labels, "sonde.gpu.precision") === "any") device.tensor = row.mean; break;
      case "hw.gpu.memory.usage": device.memory = row.last; break;
      case "hw.gpu.memory.limit": device.memoryLimit = row.last; break;
      case "hw.power": device.power = row.mean; break;
      case "hw.temperature": if (labelOf(labels, "hw.sensor_location") === "gpu") device.temperature = row.most; break;
      case "sonde.gpu.throttled": {
        const reason = labelOf(labels, "sonde.gpu.throttle.reason");
        if (row.mean > 0 && !REASONS_OF_CHOICE.has(reason)) throttled.set(reason, Math.max(row.mean, throttled.get(reason) ?? 0));
        break;
      }
      case "hw.errors": if (labelOf(labels, "error.type") === "uncorrected") errors += row.most; break;
    }
  }
  const lastS = node.last_ns / 1e9;
  const firstS = node.first_ns / 1e9;
  if (errors > 0) troubles.push({ text: `${errors} uncorrected memory error${errors > 1 ? "s" : ""}`, score: 100, tone: "bad" });
  if (nowS - lastS > 120) troubles.push({ text: `nothing sent for ${duration((nowS - lastS) * 1e9)}`, score: 30, tone: "warn" });
  for (const [reason, share] of throttled) {
    if (share >= 0.05) troubles.push({ text: `throttled ${percent(share)} of the time: ${reason.replaceAll("_", " ")}`, score: 40 * share, tone: "warn" });
  }
  let idle = 0;
  for (const device of devices.values()) {
    const used = device.smActive ?? device.utilization;
    if (used !== null) idle += 1 - used;
    if (used !== null && used < 0.5) {
      troubles.push({ text: `${shortId(device.id)} ${device.smActive === null ? "idle" : "SMs idle"} ${percent(1 - used)} of the time`, score: 60 * (1 - used), tone: used < 0.2 ? "bad" : "warn" });
    }
  }
  if (lost > 0) troubles.push({ text: `${Math.round(lost).toLocaleString("en-US")} events not observed`, score: 3, tone: "warn" });
  troubles.sort((a, b) => b.score - a.score);
  const idleGpuS = idle * Math.max(0, lastS - firstS);
  return {
    node: node.node, firstS, lastS, devices: [...devices.values()], troubles, idleGpuS,
    score: troubles.reduce((sum, one) => sum + one.score, 0) + Math.min(20, idleGpuS / 3600),
  };
}

export function shortId(id: string): string {
  return id.length > 14 ? id.slice(0, 12) : id;
}
