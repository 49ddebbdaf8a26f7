// SPDX-License-Identifier: Apache-2.0
// What is shown, in the formats of other tools. Names are text in all of them: JSON and XML are escaped.

import type { Lanes } from "./lanes";
import type { Tree } from "./flame";
import { css } from "./draw/colours";

/** Offers a file to be saved. Nothing is sent anywhere. */
export function save(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const text = (content: string, type = "text/plain"): Blob => new Blob([content], { type });

/** Nodes with own weight, of `top` and what it calls, each with its path of functions from the root. */
function* stacksOf(tree: Tree, top: number): Generator<[path: number[], own: number]> {
  const inside = new Uint8Array(tree.fn.length);
  inside[top] = 1;
  for (let node = 0; node < tree.fn.length; node++) {
    if (node !== top && node > 0 && inside[tree.parent[node]!]) inside[node] = 1;
    if (!inside[node] || !(tree.own[node]! > 0)) continue;
    const path: number[] = [];
    for (let at = node; at > 0; at = tree.parent[at]!) path.push(tree.fn[at]!);
    yield [path.reverse(), tree.own[node]!];
  }
}

/** Control characters, and spaces and line ends other than " ": `sonde report --format folded` replaces the same. */
const UNPRINTABLE = /(?! )[\p{C}\p{Z}]/gu;

/** Brendan Gregg's folded stacks: `a;b;c WEIGHT` a line, without those whose weight rounds to 0. */
export function folded(tree: Tree, top: number): string {
  const lines: string[] = [];
  const clean = tree.functions.map((fn) => fn.label.replace(UNPRINTABLE, "\ufffd").replaceAll(";", ":"));
  for (const [path, own] of stacksOf(tree, top)) {
    const weight = Math.round(own);
    if (weight) lines.push(`${path.map((fn) => clean[fn]).join(";")} ${weight}`);
  }
  return `${lines.join("\n")}\n`;
}

/** https://www.speedscope.app/file-format-schema.json */
export function speedscope(tree: Tree, top: number, name: string, unit: "bytes" | "nanoseconds"): string {
  const samples: number[][] = [];
  const weights: number[] = [];
  for (const [path, own] of stacksOf(tree, top)) {
    samples.push(path.map((fn) => fn - 1));
    weights.push(own);
  }
  const frames = tree.functions.slice(1).map((fn) => ({
    name: fn.name, ...(fn.file || fn.binary ? { file: fn.file || fn.binary } : {}), ...(fn.line ? { line: fn.line } : {}),
  }));
  return JSON.stringify({
    $schema: "https://www.speedscope.app/file-format-schema.json", exporter: "sonde", name, activeProfileIndex: 0,
    profiles: [{ type: "sampled", name, unit, startValue: 0, endValue: weights.reduce((sum, one) => sum + one, 0), samples, weights }],
    shared: { frames },
  });
}

const XML: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

export function xml(value: string): string {
  // eslint-disable-next-line no-control-regex
  return value.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ud800-\udfff\ufffe\uffff]/gu, "\ufffd").replace(/[&<>"]/g, (one) => XML[one]!);
}

/** Of the picture, of a row's height, of the narrowest frame that is drawn: units of the SVG, by default pixels. */
const WIDTH = 1200;
const ROW = 17;
const NARROW = 0.3;

/** A flame graph of `top` as a picture; frames below NARROW are left out. */
export function svg(tree: Tree, top: number, colours: Uint32Array, ink: string, background: string): string {
  const scale = WIDTH / (tree.total[top] || 1);
  const base = tree.depth[top]!;
  const shapes: string[] = [];
  let deepest = 0;
  for (let node = top; node < tree.fn.length; node++) {
    const width = tree.total[node]! * scale;
    const x = (tree.x[node]! - tree.x[top]!) * scale;
    const level = tree.depth[node]! - base;
    if (width < NARROW || level < 0 || x < -1e-6 || x + width > WIDTH * 1.000001) continue;
    deepest = Math.max(deepest, level);
    const fn = tree.functions[tree.fn[node]!]!;
    const share = ((100 * tree.total[node]!) / (tree.total[0] || 1)).toFixed(2);
    const room = Math.floor((width - 6) / 6.6); // characters of 6.6 units, with 3 at each side
    const label = room > 2 ? (fn.label.length > room ? `${fn.label.slice(0, room - 1)}…` : fn.label) : "";
    shapes.push(`<g><title>${xml(`${fn.label} ${fn.binary} ${share} %`)}</title><rect x="${x.toFixed(2)}" y="${level * ROW}" width="${Math.max(0.3, width - 0.5).toFixed(2)}" height="${ROW - 1}" fill="${css(colours[tree.fn[node]!]!)}"/>${label ? `<text x="${(x + 3).toFixed(2)}" y="${level * ROW + 12}">${xml(label)}</text>` : ""}</g>`);
  }
  const height = (deepest + 1) * ROW;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" font-family="monospace" font-size="11" fill="${ink}"><rect width="100%" height="100%" fill="${background}"/>${shapes.join("")}</svg>`;
}

/** Chrome's trace events (which Perfetto opens) of the spans that overlap a time; ns after the origin. */
export function traceEvents(lanes: Lanes, left: number, right: number): string {
  const events: object[] = [];
  lanes.lanes.forEach((lane, number) => {
    events.push({ ph: "M", name: "thread_name", pid: 1, tid: number + 1, args: { name: lane.full } });
    events.push({ ph: "M", name: "thread_sort_index", pid: 1, tid: number + 1, args: { sort_index: number } });
  });
  for (const row of lanes.rows) {
    for (let i = 0; i < row.start.length; i++) {
      if (row.end[i]! < left || row.start[i]! > right) continue;
      const span = lanes.span(row.id[i]!);
      if (span.value !== undefined) {
        events.push({ ph: "C", name: lanes.lanes[span.lane]!.full, pid: 1, ts: span.start / 1e3, args: { value: span.value } });
        continue;
      }
      events.push({
        ph: "X", name: span.name || span.kind, cat: span.kind, pid: 1, tid: span.lane + 1, ts: span.start / 1e3,
        dur: (span.end - span.start) / 1e3, ...(span.note ? { args: { note: span.note } } : {}),
      });
    }
  }
  return JSON.stringify({ displayTimeUnit: "ns", traceEvents: events });
}
