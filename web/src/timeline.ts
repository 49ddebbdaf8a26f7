// SPDX-License-Identifier: Apache-2.0
// The answer `timeline` as lanes of boxes: threads with their waits and calls, streams with runs.

import type { SpanColumns, TimelineAnswer, Verdict } from "./api";
import { makeRow, type Row } from "./draw/boxes";
import type { Palette } from "./draw/colours";

export const LANE = 22;
const GAP = 8;
const HALF = 13;

export interface Span {
  name: string;
  kind: string;
  start: number;
  end: number;
  note: string;
  lane: number;
}

export interface Lane {
  label: string;
  detail: string;
  top: number;
  height: number;
}

export interface Lanes {
  lanes: Lane[];
  rows: Row[];
  height: number;
  /** What a box is, by its id. */
  span(id: number): Span;
  spans: number;
}

interface Pending { start: number; end: number; name: number; kind: number; note: number }

/** Which spans a cause is about, where a verdict is on threads and has no stalls of its own. */
const OF_CAUSE: Record<string, (kind: string, name: string) => boolean> = {
  "run queue": (kind) => kind === "runqueue",
  synchronization: (kind) => kind === "sync",
  copy: (kind) => kind === "copy",
  launch: (kind) => kind === "launch" || kind === "graph_launch",
  allocation: (kind) => kind === "alloc" || kind === "free" || kind === "pin",
  build: (kind) => kind === "build",
  lock: (kind, name) => kind === "blocked" && /futex|lock/i.test(name),
  gil: (kind, name) => kind === "blocked" && /futex|lock/i.test(name),
  io: (kind, name) => kind === "blocked" && /read|write|io|poll|recv|send|pipe|socket|disk/i.test(name),
  sleep: (kind, name) => kind === "blocked" && /sleep|nano/i.test(name),
  "page fault": (kind, name) => kind === "blocked" && /fault|memory/i.test(name),
  input: (kind) => kind === "blocked",
  stopped: (kind, name) => kind === "blocked" && /stop/i.test(name),
};

export function kindOfCause(cause: string): string {
  if (cause === "run queue") return "runqueue";
  if (["synchronization", "copy", "allocation", "build"].includes(cause)) return "device";
  if (["lock", "gil", "io", "sleep", "page fault", "input", "stopped"].includes(cause)) return "blocked";
  return "cpu";
}

/** Which title a cause has in the stalls of devices. */
export function titleOf(verdicts: readonly Verdict[], key: string): string {
  for (const verdict of verdicts) {
    for (const cause of verdict.causes) if (cause.key === key) return cause.title;
  }
  return "";
}

class Builder {
  readonly lanes: Lane[] = [];
  readonly rows: Row[] = [];
  readonly texts: string[] = [];
  private readonly numbers = new Map<string, number>();
  private readonly of: { column: Pending[]; lane: number; first: number }[] = [];
  private count = 0;
  top = 4;

  constructor(private readonly palette: Palette, private readonly isLit: ((kind: string, name: string) => boolean) | null) {}

  text(value: string): number {
    let number = this.numbers.get(value);
    if (number === undefined) {
      number = this.texts.push(value) - 1;
      this.numbers.set(value, number);
    }
    return number;
  }

  lane(label: string, detail: string, parts: readonly { spans: Pending[]; height: number }[]): void {
    const lane = this.lanes.length;
    const from = this.top;
    for (const part of parts) {
      for (const layer of layered(part.spans)) {
        this.row(layer, lane, part.height);
        this.top += part.height + 1;
      }
    }
    this.lanes.push({ label, detail, top: from, height: Math.max(LANE, this.top - from) });
    this.top = from + Math.max(LANE, this.top - from) + GAP;
  }

  private row(spans: Pending[], lane: number, height: number): void {
    const first = this.count;
    this.of.push({ column: spans, lane, first });
    this.count += spans.length;
    const colours = new Map<number, number>();
    const colour = Uint32Array.from(spans, (span) => {
      const key = this.isLit ? span.kind * 65536 + span.name : span.kind;
      let one = colours.get(key);
      if (one === undefined) {
        const kind = this.texts[span.kind]!;
        const faded = this.isLit !== null && !this.isLit(kind, this.texts[span.name]!);
        one = faded ? this.palette.faded : this.palette.span(kind);
        colours.set(key, one);
      }
      return one;
    });
    const start = Float64Array.from(spans, (span) => span.start);
    const end = Float64Array.from(spans, (span) => span.end);
    const id = Int32Array.from(spans, (_, i) => first + i);
    this.rows.push(makeRow(start, end, colour, id, this.top, height, this.palette.lane));
  }

  done(): Lanes {
    const { of, texts } = this;
    return {
      lanes: this.lanes, rows: this.rows, height: this.top, spans: this.count,
      span(id) {
        let low = 0;
        let high = of.length - 1;
        while (low < high) {
          const middle = (low + high + 1) >> 1;
          if (of[middle]!.first <= id) low = middle;
          else high = middle - 1;
        }
        const { column, lane, first } = of[low]!;
        const span = column[id - first]!;
        return {
          name: texts[span.name]!, kind: texts[span.kind]!, start: span.start, end: span.end,
          note: texts[span.note]!, lane,
        };
      },
    };
  }
}

const MOST_LAYERS = 6;

/** Spans as layers without overlaps: each goes into the first layer that is free. */
export function layered<T extends { start: number; end: number }>(spans: T[]): T[][] {
  spans.sort((a, b) => a.start - b.start || b.end - a.end);
  const layers: T[][] = [];
  const ends: number[] = [];
  for (const span of spans) {
    let at = ends.findIndex((end) => end <= span.start);
    if (at < 0 && layers.length < MOST_LAYERS) at = layers.push([]) - 1;
    if (at < 0) continue;
    layers[at]!.push(span);
    ends[at] = Math.max(span.end, span.start);
  }
  return layers;
}

export function build(answer: TimelineAnswer, palette: Palette, cause: string): Lanes {
  const title = titleOf(answer.explanation.verdicts, cause);
  const hasStalls = answer.stalls.start.length > 0;
  const isLit = !cause ? null
    : hasStalls ? (kind: string, name: string): boolean => kind === "stall" && name === title
    : (OF_CAUSE[cause] ?? null);
  const builder = new Builder(palette, isLit);
  const none = builder.text("");
  stalls(answer, builder, none);
  streams(answer, builder, none);
  threads(answer, builder, none);
  return builder.done();
}

function stalls(answer: TimelineAnswer, builder: Builder, none: number): void {
  const by = new Map<number, Pending[]>();
  const { start, end, cause, device } = answer.stalls;
  const kind = builder.text("stall");
  for (let i = 0; i < start.length; i++) {
    const spans = by.get(device[i]!) ?? by.set(device[i]!, []).get(device[i]!)!;
    spans.push({ start: start[i]!, end: end[i]!, name: builder.text(answer.causes[cause[i]!]!), kind, note: none });
  }
  for (const [one, spans] of by) builder.lane(`GPU${one} idle`, "why no kernel ran", [{ spans, height: LANE }]);
}

function streams(answer: TimelineAnswer, builder: Builder, none: number): void {
  const { device, runs } = answer;
  const by = columnsByTrack(answer, device, builder, none);
  for (const [track, spans] of by) {
    builder.lane(answer.tracks[track]!.label, answer.tracks[track]!.process, [{ spans, height: LANE }]);
  }
  if (!runs) return;
  const lanes = new Map<string, Pending[]>();
  for (let i = 0; i < runs.start.length; i++) {
    const key = `GPU${runs.device[i]} stream ${runs.stream[i]}`;
    const kind = runs.kinds[runs.kind[i]!]!;
    if (kind === "sync") continue;
    const spans = lanes.get(key) ?? lanes.set(key, []).get(key)!;
    const weight = runs.weight[i]!;
    spans.push({
      start: runs.start[i]!, end: runs.end[i]!, name: builder.text(runs.names[runs.name[i]!] || kind),
      kind: builder.text(kind),
      note: weight > 1.001 ? builder.text(`timed for about ${weight.toFixed(1)} like it`) : none,
    });
  }
  for (const [key, spans] of [...lanes].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }))) {
    builder.lane(key, "timed runs, a sample", [{ spans, height: LANE }]);
  }
}

function columnsByTrack(
  answer: TimelineAnswer, spans: SpanColumns, builder: Builder, none: number,
): Map<number, Pending[]> {
  const kinds = spans.kinds.map((kind) => builder.text(kind));
  const names = new Map<number, number>();
  const by = new Map<number, Pending[]>();
  for (let i = 0; i < spans.start.length; i++) {
    const track = spans.track[i]!;
    let name = names.get(spans.name[i]!);
    if (name === undefined) names.set(spans.name[i]!, (name = builder.text(answer.names[spans.name[i]!]!)));
    const waker = spans.waker[i]! > 0 ? answer.tracks[spans.waker[i]! - 1] : undefined;
    const list = by.get(track) ?? by.set(track, []).get(track)!;
    list.push({
      start: spans.start[i]!, end: spans.end[i]!, name, kind: kinds[spans.kind[i]!]!,
      note: waker ? builder.text(`woken by ${waker.label}`) : none,
    });
  }
  return by;
}

function threads(answer: TimelineAnswer, builder: Builder, none: number): void {
  const calls = columnsByTrack(answer, answer.calls, builder, none);
  const states = columnsByTrack(answer, answer.states, builder, none);
  const weight = new Map<number, number>();
  const { time, track, weight: ns, name } = answer.samples;
  const ran = new Map<number, Pending[]>();
  const kind = builder.text("running");
  // Samples sum up an interval: they are drawn as that interval, as wide as the time on a CPU.
  const filled = new Map<string, number>();
  for (let i = 0; i < time.length; i++) {
    const key = `${track[i]}:${time[i]}`;
    const start = filled.get(key) ?? time[i]!;
    const end = start + Math.min(ns[i]!, Math.max(0, time[i]! + answer.tick_ns - start));
    filled.set(key, end);
    const list = ran.get(track[i]!) ?? ran.set(track[i]!, []).get(track[i]!)!;
    const text = answer.names[name[i]!] || "[no name]";
    list.push({ start, end, name: builder.text(text), kind, note: builder.text("estimate from samples of this second, not its place in it") });
    weight.set(track[i]!, (weight.get(track[i]!) ?? 0) + ns[i]!);
  }
  const order = [...new Set([...calls.keys(), ...states.keys(), ...ran.keys()])];
  const score = (one: number): number => (calls.get(one)?.length ? 1e18 : 0) + (weight.get(one) ?? 0) + (states.get(one)?.length ?? 0);
  order.sort((a, b) => score(b) - score(a));
  for (const one of order) {
    const thread = answer.tracks[one]!;
    const parts = [
      { spans: calls.get(one) ?? [], height: LANE },
      { spans: states.get(one) ?? [], height: HALF },
      { spans: ran.get(one) ?? [], height: HALF },
    ].filter((part) => part.spans.length);
    const owner = thread.owner === "program" ? "" : ` · ${thread.owner}`;
    builder.lane(thread.label, `${thread.process}${owner}`, parts);
  }
}
