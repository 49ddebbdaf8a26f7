// SPDX-License-Identifier: Apache-2.0
// The answer `timeline` as lanes of boxes: threads with their waits and calls, streams with runs.

import type { CounterColumns, Numbers, RunColumns, SpanColumns, StepColumns, TimelineAnswer, Verdict } from "./api";
import { makeRow, type Row } from "./draw/boxes";
import type { Palette } from "./draw/colours";
import { duration, percent, scaled } from "./numbers";

/** Heights in CSS pixels: of a box of a lane, between lanes, of waits and samples, which are lower. */
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
  /** Of a counter. */
  value?: number;
}

export interface Lane {
  label: string;
  detail: string;
  top: number;
  height: number;
}

/** Why something ran: from a thread that woke another, or from a launch to its run on the device. */
export interface Link { fromX: number; fromY: number; toX: number; toY: number; kind: "wake" | "launch" }

export interface Lanes {
  lanes: Lane[];
  rows: Row[];
  height: number;
  /** What a box is, by its id. */
  span(id: number): Span;
  /** The arrows from and to a box. */
  linksOf(id: number): readonly Link[];
  spans: number;
  /** Spans that are not drawn, as too many overlap. */
  hidden: number;
  /** A colourIndex is the index of a kind times the number of names, plus the index of a name. */
  kinds: readonly string[];
  names: readonly string[];
}

/** Which spans a cause is about, by the cause's key, where a verdict is on threads and no device has stalls. */
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

/** Which kind of stacks shows a cause. */
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

/** One table of the answer as spans in columns. */
interface Source {
  start: Float64Array;
  end: Float64Array;
  /** What the box looks like: its kind and its name, as one number. */
  colourIndex: Uint32Array;
  /** Per span: which of the `groups` it is in, each of which has a lane (a track, a stream, a device). */
  group: ArrayLike<number>;
  groups: number;
  note(index: number): string;
  /** Of counters. */
  value?: Numbers;
  /** In place of the name of its `colourIndex`. */
  text?(index: number): string;
  /** Set by the layout: the lane of each group, and the id of the first span. */
  lanes: Int32Array;
  first: number;
}

/** Of a lane; spans that overlap more deeply are hidden, and counted. */
const MAX_LAYERS = 6;
/** The same of operators and functions, which call one another: as deep as stacks of frameworks are. */
const MAX_CALLS = 40;
/** The height of their boxes. */
const CALL = 16;

/** The spans `order` as layers without overlaps: each goes into the first layer that is free. */
export function layered(start: Float64Array, end: Float64Array, order: Int32Array, most = MAX_LAYERS): Int32Array[] {
  let last = -Infinity;
  let isSorted = true;
  let isFlat = true;
  for (let i = 0; i < order.length; i++) {
    const at = order[i]!;
    if (i && start[at]! < start[order[i - 1]!]!) isSorted = false;
    if (start[at]! < last) isFlat = false;
    last = Math.max(last, end[at]!);
  }
  if (isFlat) return order.length ? [order] : [];
  const sorted = isSorted ? order : order.slice().sort((a, b) => start[a]! - start[b]! || end[b]! - end[a]!);
  const layer = new Uint8Array(sorted.length);
  const ends: number[] = [];
  const counts: number[] = [];
  for (let i = 0; i < sorted.length; i++) {
    const from = start[sorted[i]!]!;
    let at = 0;
    while (at < ends.length && ends[at]! > from) at++;
    layer[i] = at;
    if (at === most) continue;
    ends[at] = Math.max(from, end[sorted[i]!]!);
    counts[at] = (counts[at] ?? 0) + 1;
  }
  const layers = counts.map((count) => new Int32Array(count));
  const filled = counts.map(() => 0);
  for (let i = 0; i < sorted.length; i++) {
    const at = layer[i]!;
    if (at < most) layers[at]![filled[at]!++] = sorted[i]!;
  }
  return layers;
}

/** Indices of the spans of each group, in their order. */
function grouped(group: ArrayLike<number>, groups: number): Int32Array[] {
  const counts = new Int32Array(groups);
  for (let i = 0; i < group.length; i++) counts[group[i]!]!++;
  const lists = Array.from(counts, (count) => new Int32Array(count));
  counts.fill(0);
  for (let i = 0; i < group.length; i++) lists[group[i]!]![counts[group[i]!]!++] = i;
  return lists;
}

/** Where lanes and rows are put, one below another. */
class Layout {
  readonly lanes: Lane[] = [];
  readonly rows: Row[] = [];
  readonly sources: Source[] = [];
  readonly kinds: string[] = [];
  readonly names: string[] = [];
  private readonly byGroup = new Map<Source, Int32Array[]>();
  spans = 0;
  hidden = 0;
  top = 4;

  /** The index of a kind, which is added where it is new. */
  kindOf(kind: string): number {
    const at = this.kinds.indexOf(kind);
    return at < 0 ? this.kinds.push(kind) - 1 : at;
  }

  add(given: Omit<Source, "lanes" | "first">): Source {
    const source = { ...given, lanes: new Int32Array(given.groups), first: this.spans };
    this.spans += given.start.length;
    this.sources.push(source);
    this.byGroup.set(source, grouped(given.group, given.groups));
    return source;
  }

  of(source: Source, group: number): Int32Array {
    return this.byGroup.get(source)![group] ?? new Int32Array(0);
  }

  lane(label: string, detail: string, parts: readonly { source: Source; group: number; height: number; layers?: number }[]): void {
    const lane = this.lanes.length;
    const from = this.top;
    for (const { source, group, height, layers } of parts) {
      source.lanes[group] = lane;
      const spans = this.of(source, group);
      let shown = 0;
      for (const layer of layered(source.start, source.end, spans, layers)) {
        this.row(source, layer, height);
        this.top += height + 1;
        shown += layer.length;
      }
      this.hidden += spans.length - shown;
    }
    const height = Math.max(LANE, this.top - from);
    this.lanes.push({ label, detail, top: from, height });
    this.top = from + height + GAP;
  }

  private row(source: Source, spans: Int32Array, height: number): void {
    const count = spans.length;
    const start = new Float64Array(count);
    const end = new Float64Array(count);
    const colourIndex = new Uint32Array(count);
    const id = new Int32Array(count);
    for (let i = 0; i < count; i++) {
      const at = spans[i]!;
      start[i] = source.start[at]!;
      end[i] = source.end[at]!;
      colourIndex[i] = source.colourIndex[at]!;
      id[i] = source.first + at;
    }
    this.rows.push(makeRow(start, end, colourIndex, id, this.top, height, 0));
  }

  /** The source of a box, and which one of it. */
  placed(id: number): [source: Source, index: number] {
    const { sources } = this;
    let at = sources.length - 1;
    while (at > 0 && sources[at]!.first > id) at--;
    return [sources[at]!, id - sources[at]!.first];
  }

  span(id: number): Span {
    const { names } = this;
    const [source, index] = this.placed(id);
    const colourIndex = source.colourIndex[index]!;
    return {
      name: source.text?.(index) ?? names[colourIndex % names.length]!, kind: this.kinds[Math.floor(colourIndex / names.length)]!,
      start: source.start[index]!, end: source.end[index]!, note: source.note(index),
      lane: source.lanes[source.group[index]!]!, ...(source.value ? { value: source.value[index]! } : {}),
    };
  }
}

/** Where arrows begin and end. Which run belongs to which launch is looked up once somebody asks. */
class Links {
  private launches: Map<number, number> | null = null;
  private runs: Map<number, number> | null = null;

  constructor(
    private readonly made: Layout, private readonly answer: TimelineAnswer, private readonly calls: Source,
    private readonly states: Source, private readonly device: Source, private readonly laneOfTrack: Int32Array,
  ) {}

  of(id: number): Link[] {
    const [source, index] = this.made.placed(id);
    if (source === this.states) return this.wake(index);
    if (source === this.calls) return this.launch(index, this.runOf(index));
    if (source === this.device) return this.launch(this.launchOf(index), index);
    return [];
  }

  /** The run of a call on a device, and the other way round; -1: none is known. */
  runOf(call: number): number {
    this.runs ??= byCorrelation(this.answer.device);
    return this.runs.get(this.answer.calls.correlation?.[call] || -1) ?? -1;
  }

  launchOf(run: number): number {
    this.launches ??= byCorrelation(this.answer.calls);
    return this.launches.get(this.answer.device.correlation?.[run] || -1) ?? -1;
  }

  private middle(lane: number): number {
    return this.made.lanes[lane]!.top + LANE / 2;
  }

  private wake(index: number): Link[] {
    const { waker, track } = this.answer.states;
    const from = waker[index]! > 0 ? this.laneOfTrack[waker[index]! - 1]! : -1;
    const to = this.laneOfTrack[track[index]!]!;
    if (from < 0 || to < 0 || from === to) return [];
    const x = this.states.end[index]!;
    return [{ fromX: x, fromY: this.middle(from), toX: x, toY: this.middle(to), kind: "wake" }];
  }

  private launch(call: number, run: number): Link[] {
    if (call < 0 || run < 0) return [];
    const from = this.calls.lanes[this.calls.group[call]!]!;
    const to = this.device.lanes[this.device.group[run]!]!;
    return [{ fromX: this.calls.start[call]!, fromY: this.middle(from), toX: this.device.start[run]!, toY: this.middle(to), kind: "launch" }];
  }
}

function byCorrelation({ correlation, start }: SpanColumns): Map<number, number> {
  const found = new Map<number, number>();
  for (let i = 0; correlation && i < start.length; i++) {
    const key = correlation[i]!;
    if (key && !found.has(key)) found.set(key, i);
  }
  return found;
}

const doubles = (values: ArrayLike<number>): Float64Array => values instanceof Float64Array ? values : Float64Array.from(values);

function colourIndicesOf(kind: ArrayLike<number>, kinds: readonly number[], name: ArrayLike<number>, from: number, names: number): Uint32Array {
  const colourIndex = new Uint32Array(kind.length);
  for (let i = 0; i < colourIndex.length; i++) colourIndex[i] = kinds[kind[i]!]! * names + from + name[i]!;
  return colourIndex;
}

/** Where everything is put; colours are separate (`coloursOf`), so that a theme or a cause changes them alone. */
export function layout(answer: TimelineAnswer): Lanes {
  const made = new Layout();
  const { runs, stalls } = answer;
  const ofRuns = answer.names.length;
  const ofCauses = ofRuns + (runs?.names.length ?? 0);
  for (const list of [answer.names, runs?.names ?? [], answer.causes]) {
    for (const name of list) made.names.push(name);
  }
  const ofNothing = made.names.push("") - 1;
  const names = made.names.length;
  const none = (): string => "";
  if (answer.steps) steps(made, answer.steps, ofNothing);
  const counters = answer.counters?.filter((one) => one.time.length > 1 && Array.from(one.value).some((value) => value !== 0)) ?? [];
  // Key counters stand above the devices, the others below all threads.
  const [above, below] = [counters.filter(({ label }) => KEY_COUNTERS.test(label)), counters.filter(({ label }) => !KEY_COUNTERS.test(label))];
  drawCounters(made, above.slice(0, MAX_ABOVE), answer.end_ns, ofNothing);

  const devices = [...new Set(Array.from(stalls.device))].sort((a, b) => a - b);
  const stalled = made.add({
    start: doubles(stalls.start), end: doubles(stalls.end), group: Array.from(stalls.device, (one) => devices.indexOf(one)),
    groups: devices.length, note: none, colourIndex: colourIndicesOf(new Uint8Array(stalls.start.length), [made.kindOf("stall")], stalls.cause, ofCauses, names),
  });
  devices.forEach((device, group) => made.lane(`GPU${device} idle`, "why no kernel ran", [{ source: stalled, group, height: LANE }]));

  const spansOf = (spans: SpanColumns): Source => made.add({
    start: doubles(spans.start), end: doubles(spans.end), group: spans.track, groups: answer.tracks.length,
    colourIndex: colourIndicesOf(spans.kind, spans.kinds.map((kind) => made.kindOf(kind)), spans.name, 0, names),
    note: (index) => {
      if (spans === answer.device || spans === answer.calls) return launchNote(spans === answer.calls, index);
      const waker = spans.waker[index]! > 0 ? answer.tracks[spans.waker[index]! - 1] : undefined;
      return waker ? `woken by ${waker.label}` : "";
    },
  });
  const laneOfTrack = new Int32Array(answer.tracks.length).fill(-1);
  let links: Links | null = null;
  const launchNote = (isCall: boolean, index: number): string => {
    const [call, run] = isCall ? [index, links!.runOf(index)] : [links!.launchOf(index), index];
    if (call < 0 || run < 0) return "";
    const ago = duration(device.start[run]! - calls.start[call]!);
    const where = answer.tracks[isCall ? answer.device.track[run]! : answer.calls.track[call]!]?.label ?? "";
    return isCall ? `runs ${ago} later on ${where}` : `launched ${ago} before by ${where}`;
  };
  const device = spansOf(answer.device);
  answer.tracks.forEach((track, group) => {
    if (made.of(device, group).length) made.lane(track.label, track.process, [{ source: device, group, height: LANE }]);
  });
  if (runs) streams(made, runs, ofRuns);

  const calls = spansOf(answer.calls);
  const states = spansOf(answer.states);
  const host = answer.host ? spansOf(answer.host) : null;
  const weights = new Float64Array(answer.tracks.length);
  const ran = onCpu(made, answer, weights);
  const score = (track: number): number =>
    (made.of(calls, track).length ? 1e18 : 0) + weights[track]! + made.of(states, track).length + (host ? made.of(host, track).length : 0);
  const order = answer.tracks.map((_, track) => track).filter((track) => score(track) > 0).sort((a, b) => score(b) - score(a) || a - b);
  for (const group of order) {
    const thread = answer.tracks[group]!;
    const parts = [
      ...(host ? [{ source: host, group, height: CALL, layers: MAX_CALLS }] : []), { source: calls, group, height: LANE }, { source: states, group, height: HALF }, { source: ran, group, height: HALF },
    ].filter((part) => made.of(part.source, group).length);
    laneOfTrack[group] = made.lanes.length;
    made.lane(thread.label, `${thread.process}${thread.owner === "program" ? "" : ` · ${thread.owner}`}`, parts);
  }
  drawCounters(made, below.slice(0, MAX_BELOW), answer.end_ns, ofNothing);
  links = new Links(made, answer, calls, states, device, laneOfTrack);
  const arrows = links;
  return {
    lanes: made.lanes, rows: made.rows, height: made.top, spans: made.spans, hidden: made.hidden,
    kinds: made.kinds, names: made.names, span: (id) => made.span(id), linksOf: (id) => arrows.of(id),
  };
}

/** Counters that are worth a place beside the idle gaps. */
const KEY_COUNTERS = /gpu\.utilization|sm\.active|hw\.power/;
/** Of counters that are drawn; the others are left out. */
const MAX_ABOVE = 3;
const MAX_BELOW = 12;
/** Of colours. */
export const COUNTER_LEVELS = 8;

function steps(made: Layout, { start, end, like, anchor }: StepColumns, name: number): void {
  if (!start.length) return;
  const kinds = [made.kindOf("odd step"), made.kindOf("step")];
  const names = made.names.length;
  const source = made.add({
    start: doubles(start), end: doubles(end), group: new Uint8Array(start.length), groups: 1,
    colourIndex: Uint32Array.from(start, (_, i) => kinds[like[i] ? 1 : 0]! * names + name),
    note: (index) => `${duration(end[index]! - start[index]!)}${like[index] ? "" : ", unlike the typical step"}`,
    text: (index) => `step ${index + 1}`,
  });
  made.lane("Steps", anchor ? `by ${anchor}` : "", [{ source, group: 0, height: HALF + 3 }]);
}

/** Each value as a box until the next one, the darker the higher: beside spans a shade is read at once. */
function drawCounters(made: Layout, counters: readonly CounterColumns[], end: number, name: number): void {
  const kinds = Array.from({ length: COUNTER_LEVELS }, (_, level) => made.kindOf(`counter ${level}`));
  const names = made.names.length;
  for (const { label, time, value } of counters) {
    const most = Array.from(value).reduce((all, one) => Math.max(all, one), 0);
    const start = doubles(time);
    const isShare = most <= 1 && /utilization|active|throttled/.test(label);
    const shown = (index: number): string => (isShare ? percent(value[index]!) : scaled(value[index]!, ""));
    const source = made.add({
      start, end: Float64Array.from(start, (from, i) => (i + 1 < start.length ? start[i + 1]! : Math.max(from, end))),
      group: new Uint8Array(start.length), groups: 1, text: shown, value, note: () => label,
      colourIndex: Uint32Array.from(start, (_, i) => kinds[most > 0 ? Math.max(0, Math.min(COUNTER_LEVELS - 1, Math.round((value[i]! / most) * (COUNTER_LEVELS - 1)))) : 0]! * names + name),
    });
    made.lane(label.replace(/\b(hw\.gpu|sonde\.gpu|hw|sonde)\./, "").replaceAll(/[._]/g, " "), `up to ${isShare ? percent(most) : scaled(most, "")}`, [{ source, group: 0, height: HALF + 3 }]);
  }
}

function streams(made: Layout, runs: RunColumns, names: number): void {
  const keys = new Map<string, number>();
  const group = new Int32Array(runs.start.length);
  for (let i = 0; i < group.length; i++) {
    // Waits for the device are on their threads' lanes.
    const key = runs.kinds[runs.kind[i]!] === "sync" ? "" : `GPU${runs.device[i]} stream ${runs.stream[i]}`;
    let number = keys.get(key);
    if (number === undefined) keys.set(key, (number = keys.size));
    group[i] = number;
  }
  const source = made.add({
    start: doubles(runs.start), end: doubles(runs.end), group, groups: keys.size,
    colourIndex: colourIndicesOf(runs.kind, runs.kinds.map((kind) => made.kindOf(kind)), runs.name, names, made.names.length),
    note: (index) => {
      const weight = runs.weight[index]!;
      return weight > 1.001 ? `timed for about ${weight.toFixed(1)} like it` : "";
    },
  });
  for (const [key, number] of [...keys].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }))) {
    if (key) made.lane(key, "timed runs, a sample", [{ source, group: number, height: LANE }]);
  }
}

/** Samples sum up an interval: they are drawn as that interval, as wide as the time on a CPU. */
function onCpu(made: Layout, answer: TimelineAnswer, weights: Float64Array): Source {
  const { time, track, weight, name } = answer.samples;
  const start = new Float64Array(time.length);
  const end = new Float64Array(time.length);
  const filled = answer.tracks.map(() => new Map<number, number>());
  for (let i = 0; i < time.length; i++) {
    const until = filled[track[i]!]!;
    start[i] = until.get(time[i]!) ?? time[i]!;
    end[i] = start[i]! + Math.min(weight[i]!, Math.max(0, time[i]! + answer.tick_ns - start[i]!));
    until.set(time[i]!, end[i]!);
    weights[track[i]!]! += weight[i]!;
  }
  return made.add({
    start, end, group: track, groups: answer.tracks.length,
    colourIndex: colourIndicesOf(new Uint8Array(time.length), [made.kindOf("running")], name, 0, made.names.length),
    note: () => "estimate from samples of this second, not its place in it",
  });
}

/** Spans that are not drawn: the answer has not all, or too many overlap. */
export function leftOutOf({ calls, states, device, samples, host, runs }: TimelineAnswer, lanes: Lanes): number {
  return calls.left_out + states.left_out + device.left_out + samples.left_out + (host?.left_out ?? 0) + (runs?.left_out ?? 0) + lanes.hidden;
}

/** Colours of the boxes; where a cause is chosen, what it is not about is faded. */
export function coloursOf(lanes: Lanes, answer: TimelineAnswer, palette: Palette, cause: string): Uint32Array {
  const { kinds, names } = lanes;
  const title = titleOf(answer.explanation.verdicts, cause);
  const isLit = !cause ? null
    : answer.stalls.start.length > 0 ? (kind: string, name: string): boolean => kind === "stall" && name === title
    : (OF_CAUSE[cause] ?? null);
  const colours = new Uint32Array(kinds.length * names.length);
  kinds.forEach((kind, number) => {
    const from = number * names.length;
    const colour = palette.span(kind);
    colours.fill(colour, from, from + names.length);
    if (isLit && !/^(counter|step|odd step)/.test(kind)) names.forEach((name, i) => { if (!isLit(kind, name)) colours[from + i] = palette.faded; });
  });
  return colours;
}
