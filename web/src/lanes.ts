// SPDX-License-Identifier: Apache-2.0
// Lanes of rows, in groups: where each row is put, one below another.

import type { Numbers } from "./api";
import { byGroup, type Grouped } from "./columns";
import { makeRow, type Row } from "./draw/boxes";

/** The height of a box of a lane, in CSS pixels. */
export const LANE = 22;
/** Between lanes of a group, and before the head of one. */
const GAP = 6;
/** Of waits and samples, and of steps, which are lower. */
export const HALF = 13;
/** The height of a group's head. */
const HEAD = 20;

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

/** A lane, or the head of a group of lanes. */
export interface Lane {
  /** Within its group. */
  label: string;
  detail: string;
  /** Names it outside its group, too. */
  full: string;
  top: number;
  height: number;
  /** Of a head: the key of its group, and whether its lanes are left out. */
  group?: string;
  isFolded?: boolean;
  /** What its rows are, where it has several kinds of them: a name, and its place below the lane's top. */
  parts: readonly { name: string; below: number }[];
  /** Of a counter: its value at a time, with its unit; '' before the first. */
  valueAt?(time: number): string;
}

/** Part of a lane: the spans of one group of a source. */
export interface Part { name: string; source: Source; group: number; height: number; layers?: number }

/** Why something ran: from a thread that woke another, or from a launch to its run on the device. */
export interface Link { fromX: number; fromY: number; toX: number; toY: number; kind: "wake" | "launch" }

export interface Lanes {
  lanes: Lane[];
  rows: Row[];
  /** The lane of each row. */
  laneOfRow: readonly number[];
  /** The lane of each thread's track; -1: it has none. */
  laneOfTrack: Int32Array;
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
  /** Kinds of which at least one span is drawn. */
  drawn: ReadonlySet<string>;
}

/** One table of the answer as spans in columns. */
export interface Source {
  start: Float64Array;
  end: Float64Array;
  /** What a span looks like: its kind, of `kinds`, which has the layout's, and its name, of the layout's from `named` on.
   * Without `kind` or `name` all have the first one. */
  kind?: Numbers;
  kinds: readonly number[];
  name?: Numbers;
  named: number;
  /** Per span: which of the `groups` it is in, each of which has a lane (a track, a stream, a device). */
  group: ArrayLike<number>;
  groups: number;
  note(index: number): string;
  /** Of counters: the values, and what share of its lane each one fills. */
  value?: Numbers;
  level?: Float32Array;
  /** In place of its name. */
  text?(index: number): string;
  /** Set by the layout: the lane of each group, and the id of the first span. */
  lanes: Int32Array;
  first: number;
}

/** Of a lane; spans that overlap more deeply are hidden, and counted. */
const MAX_LAYERS = 6;
/** The same of operators and functions, which call one another: as deep as stacks of frameworks are. */
export const MAX_CALLS = 40;
/** The height of their boxes. */
export const CALL = 16;

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

export const doubles = (values: ArrayLike<number>): Float64Array => values instanceof Float64Array ? values : Float64Array.from(values);

/** Where lanes and rows are put, one below another. */
export class Layout {
  readonly lanes: Lane[] = [];
  readonly rows: Row[] = [];
  readonly laneOfRow: number[] = [];
  readonly sources: Source[] = [];
  readonly kinds: string[] = [];
  readonly names: string[] = [];
  private readonly drawnKinds = new Set<number>();
  private readonly columns = new Map<Source, Grouped>();
  spans = 0;
  hidden = 0;
  top = 4;
  /** The head whose lanes are left out now; -1: they are drawn. */
  private folded = -1;

  /** The index of a kind, which is added where it is new. */
  kindOf(kind: string): number {
    const at = this.kinds.indexOf(kind);
    return at < 0 ? this.kinds.push(kind) - 1 : at;
  }

  add(given: Omit<Source, "lanes" | "first">): Source {
    const source = { ...given, lanes: new Int32Array(given.groups), first: this.spans };
    this.spans += given.start.length;
    this.sources.push(source);
    this.columns.set(source, byGroup(source, this.names.length));
    return source;
  }

  /** How many spans a group has. */
  count(source: Source, group: number): number {
    const { first } = this.columns.get(source)!;
    return group < source.groups ? first[group + 1]! - first[group]! : 0;
  }

  get drawn(): Set<string> {
    return new Set(this.kinds.filter((_, number) => this.drawnKinds.has(number)));
  }

  /** Puts a group's head; lanes that follow are in it, until the next head. `isFolded`: they are left out. */
  head(group: string, label: string, detail: string, isFolded: boolean): void {
    this.lanes.push({ label, detail, full: label, top: this.top, height: HEAD, group, isFolded, parts: [] });
    this.top += HEAD + 2;
    this.folded = isFolded ? this.lanes.length - 1 : -1;
  }

  lane(label: string, detail: string, full: string, parts: readonly Part[], valueAt?: (time: number) => string): void {
    if (this.folded >= 0) {
      for (const { source, group } of parts) source.lanes[group] = this.folded;
      return;
    }
    const lane = this.lanes.length;
    const from = this.top;
    const named: { name: string; below: number }[] = [];
    for (const { name, source, group, height, layers } of parts) {
      source.lanes[group] = lane;
      const count = this.count(source, group);
      if (parts.length > 1) named.push({ name, below: this.top - from });
      const rows = this.columns.get(source)!.isFlat[group] ? [this.whole(source, group)] : this.layers(source, group, layers);
      let shown = 0;
      for (const row of count ? rows : []) {
        shown += row.id.length;
        this.rows.push({ ...row, top: this.top, height, ...(row.levels ? {} : { fills: true }) });
        this.laneOfRow.push(lane);
        this.top += height + 1;
      }
      this.hidden += count - shown;
    }
    const height = Math.max(LANE, this.top - from);
    this.lanes.push({ label, detail, full, top: from, height, parts: named, ...(valueAt ? { valueAt } : {}) });
    this.top = from + height + GAP;
  }

  /** The columns of a group, as they are. */
  private whole(source: Source, group: number): Row {
    const { first, start, end, sum, colourIndex, id, seen } = this.columns.get(source)!;
    const [from, to] = [first[group]!, first[group + 1]!];
    source.kinds.forEach((kind, number) => { if (seen[group * source.kinds.length + number]) this.drawnKinds.add(kind); });
    const ids = id.subarray(from, to);
    return {
      start: start.subarray(from, to), end: end.subarray(from, to), sum: sum.subarray(from + group, to + group + 1),
      colourIndex: colourIndex.subarray(from, to), id: ids, top: 0, height: 0, background: 0, ...this.levels(source, ids),
    };
  }

  /** The columns of a group in which spans overlap, by layer. */
  private layers(source: Source, group: number, most?: number): Row[] {
    const all = this.whole(source, group);
    const order = Int32Array.from(all.id, (_, i) => i);
    return layered(all.start, all.end, order, most).map((layer) => {
      const start = Float64Array.from(layer, (at) => all.start[at]!);
      const end = Float64Array.from(layer, (at) => all.end[at]!);
      const ids = Int32Array.from(layer, (at) => all.id[at]!);
      return { ...makeRow(start, end, Uint32Array.from(layer, (at) => all.colourIndex[at]!), ids, 0, 0, 0), ...this.levels(source, ids) };
    });
  }

  private levels({ level, first }: Source, ids: Int32Array): { levels?: Float32Array } {
    return level ? { levels: Float32Array.from(ids, (id) => level[id - first]!) } : {};
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
    return {
      name: source.text?.(index) ?? names[source.named + (source.name?.[index] ?? 0)]!, kind: this.kinds[source.kinds[source.kind?.[index] ?? 0]!]!,
      start: source.start[index]!, end: source.end[index]!, note: source.note(index),
      lane: source.lanes[source.group[index]!]!, ...(source.value ? { value: source.value[index]! } : {}),
    };
  }
}

