// SPDX-License-Identifier: Apache-2.0
// The answer `timeline` as lanes of boxes: threads with their waits and calls, streams with runs.

import type { CauseShare, RunColumns, SpanColumns, StepColumns, TimelineAnswer, Track, Verdict } from "./api";
import { drawCounters, isKey } from "./counters";
import type { Palette } from "./draw/colours";
import { CALL, doubles, HALF, LANE, Layout, MAX_CALLS, type Lanes, type Link, type Part, type Source } from "./lanes";
import { shortKernel } from "./kernels";
import { duration } from "./numbers";

const isWork = (kind: string): boolean => /^(kernel|replay|collective)$/.test(kind);

/** Which spans a cause or a bound is about, by its key; where a device's stalls are known, they are lit by their cause, too. */
const OF_CAUSE: Record<string, (kind: string, name: string) => boolean> = {
  compute: isWork, memory: isWork, kernels: isWork, "small kernels": isWork, throttled: isWork, device: isWork,
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

/** Which title a cause has in the stalls of devices. */
export function titleOf(verdicts: readonly Verdict[], key: string): string {
  for (const verdict of verdicts) {
    for (const cause of verdict.causes) if (cause.key === key) return cause.title;
  }
  return "";
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

/** Groups that are folded until somebody opens them, by the ends of their keys. */
const FOLDED = /^(counters|sonde)/;

/** A thread's name and number of a label as "python3 (7)". */
const THREAD = /^(.*) \((\d+)\)$/s;

/** A thread within its process: its name once, and its number. */
export function threadName({ label, process }: Track): string {
  const found = THREAD.exec(label);
  if (!found) return label;
  return found[1] === process || !found[1] ? `thread ${found[2]}` : `${found[1]} ${found[2]}`;
}

/** Where everything is put; colours are separate (`coloursOf`), so that a theme or a cause changes them alone.
 * `toggled`: keys of groups that are folded, or not, against what they are at first. */
export function layout(answer: TimelineAnswer, toggled: readonly string[] = []): Lanes {
  const made = new Layout();
  const { runs, stalls } = answer;
  const ofRuns = answer.names.length;
  const ofCauses = ofRuns + (runs?.names.length ?? 0);
  for (const list of [answer.names, runs?.names ?? [], answer.causes]) {
    for (const name of list) made.names.push(name);
  }
  const ofNothing = made.names.push("") - 1;
  const head = (key: string, label: string, rows: number, what: string): void =>
    made.head(key, label, `${rows} ${what}${rows === 1 ? "" : "s"}`, FOLDED.test(key) !== toggled.includes(key));
  if (answer.steps) steps(made, answer.steps, ofNothing);
  const counters = answer.counters?.filter((one) => one.time.length > 1 && Array.from(one.value).some((value) => value !== 0)) ?? [];
  const key = counters.filter(isKey).slice(0, MAX_ABOVE);
  const other = counters.filter((one) => !key.includes(one)).slice(0, MAX_BELOW);
  const numbers = Array.from(stalls.device);
  const stalledDevices = [...new Set(numbers)].sort((a, b) => a - b);
  const stalled = made.add({
    start: doubles(stalls.start), end: doubles(stalls.end), group: numbers.map((one) => stalledDevices.indexOf(one)),
    groups: stalledDevices.length, note: () => "", kinds: [made.kindOf("stall")], name: stalls.cause, named: ofCauses,
  });

  const spansOf = (spans: SpanColumns): Source => made.add({
    start: doubles(spans.start), end: doubles(spans.end), group: spans.track, groups: answer.tracks.length,
    kind: spans.kind, kinds: spans.kinds.map((kind) => made.kindOf(kind)), name: spans.name, named: 0,
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
  const timed = runs ? streams(made, runs, ofRuns) : null;
  const streamTracks = answer.tracks.flatMap((track, group) => (made.count(device, group) ? [{ track, group }] : []));
  const devices = [...new Set([
    ...stalledDevices, ...streamTracks.map(({ track }) => track.device), ...(timed?.keys ?? []).map((one) => one.device), ...[...key, ...other].map((one) => deviceOf(one.label)),
  ])].sort((a, b) => a - b);
  for (const number of devices) {
    const mine = streamTracks.filter(({ track }) => track.device === number);
    const sampled = timed?.keys.filter((one) => one.device === number) ?? [];
    const [above, below] = [key, other].map((list) => list.filter((one) => deviceOf(one.label) === number)) as [typeof key, typeof key];
    const at = stalledDevices.indexOf(number);
    const gpu = number < 0 ? "Node" : `GPU ${number}`;
    if (mine.length + sampled.length + above.length || at >= 0) head(`gpu ${number}`, gpu, mine.length + sampled.length + above.length + (at < 0 ? 0 : 1), "row");
    drawCounters(made, above, answer.end_ns, ofNothing);
    if (at >= 0) made.lane("idle", "why no kernel ran", `GPU${number} idle`, [{ name: "", source: stalled, group: at, height: LANE }]);
    for (const { track, group } of mine) made.lane(track.label.replace(/^GPU\d+ /, ""), track.process, track.label, [{ name: "", source: device, group, height: LANE }]);
    for (const { stream, group } of sampled) made.lane(`stream ${stream}`, "a sample of its runs", `GPU${number} stream ${stream}`, [{ name: "", source: timed!.source, group, height: LANE }]);
    if (below.length) {
      head(`counters ${number}`, `${gpu}, more counters`, below.length, "row");
      drawCounters(made, below, answer.end_ns, ofNothing);
    }
  }

  const calls = spansOf(answer.calls);
  const states = spansOf(answer.states);
  const host = answer.host ? spansOf(answer.host) : null;
  const weights = new Float64Array(answer.tracks.length);
  const ran = onCpu(made, answer, weights);
  const score = (track: number): number =>
    (made.count(calls, track) ? 1e18 : 0) + weights[track]! + made.count(states, track) + (host ? made.count(host, track) : 0);
  const order = answer.tracks.map((_, track) => track).filter((track) => score(track) > 0).sort((a, b) => score(b) - score(a) || a - b);
  const groupOf = (track: number): string => answer.tracks[track]!.owner === "sonde" ? "sonde" : `process ${answer.tracks[track]!.pid}`;
  // Processes in the order of their first thread, and the profiler's threads last.
  const groups = [...new Set(order.map(groupOf))].sort((a, b) => Number(a === "sonde") - Number(b === "sonde"));
  for (const key of groups) {
    const threads = order.filter((track) => groupOf(track) === key);
    const { process, pid } = answer.tracks[threads[0]!]!;
    head(key, key === "sonde" ? "Sonde’s own threads" : `${process || "process"} ${pid}`, threads.length, "thread");
    for (const group of threads) {
      const thread = answer.tracks[group]!;
      const parts: Part[] = [
        ...(host ? [{ name: "functions", source: host, group, height: CALL, layers: MAX_CALLS }] : []), { name: "calls", source: calls, group, height: LANE },
        { name: "waits", source: states, group, height: HALF }, { name: "on a CPU", source: ran, group, height: HALF },
      ].filter((part) => made.count(part.source, group));
      made.lane(threadName(thread), thread.owner === "program" ? "" : thread.owner, thread.label, parts);
      laneOfTrack[group] = parts[0]!.source.lanes[group]!;
    }
  }
  links = new Links(made, answer, calls, states, device, laneOfTrack);
  const arrows = links;
  return {
    lanes: made.lanes, rows: made.rows, laneOfRow: made.laneOfRow, height: made.top, spans: made.spans, hidden: made.hidden, laneOfTrack,
    kinds: made.kinds, names: made.names, drawn: made.drawn, span: (id) => made.span(id), linksOf: (id) => arrows.of(id),
  };
}

/** Of counters that are drawn above the streams, and below; the others are left out. */
const MAX_ABOVE = 3;
const MAX_BELOW = 12;

/** Which device a counter is of, by its label; -1: of none. */
function deviceOf(label: string): number {
  const found = /^GPU(\d+) /.exec(label);
  return found ? Number(found[1]) : -1;
}

function steps(made: Layout, { start, end, like, anchor }: StepColumns, name: number): void {
  if (!start.length) return;
  const kinds = [made.kindOf("odd step"), made.kindOf("step")];
  const source = made.add({
    start: doubles(start), end: doubles(end), group: new Uint8Array(start.length), groups: 1,
    kind: Uint8Array.from(like, (one) => (one ? 1 : 0)), kinds, named: name,
    note: (index) => `${duration(end[index]! - start[index]!)}${like[index] ? "" : ", unlike the typical step"}`,
    text: (index) => `step ${index + 1}`,
  });
  made.lane("Steps", anchor ? `by ${shortKernel(anchor)}` : "", "Steps", [{ name: "", source, group: 0, height: HALF + 3 }]);
}

/** Runs that were timed singly, by stream. */
interface Streams { source: Source; keys: { device: number; stream: number; group: number }[] }

function streams(made: Layout, runs: RunColumns, names: number): Streams {
  const keys = new Map<string, Streams["keys"][number]>();
  const group = new Int32Array(runs.start.length);
  for (let i = 0; i < group.length; i++) {
    // Waits for the device are on their threads' lanes.
    const isWait = runs.kinds[runs.kind[i]!] === "sync";
    const [device, stream] = [runs.device[i]!, runs.stream[i]!];
    const key = isWait ? "" : `${device} ${stream}`;
    let found = keys.get(key);
    if (!found) keys.set(key, (found = { device: isWait ? NaN : device, stream, group: keys.size }));
    group[i] = found.group;
  }
  const source = made.add({
    start: doubles(runs.start), end: doubles(runs.end), group, groups: keys.size,
    kind: runs.kind, kinds: runs.kinds.map((kind) => made.kindOf(kind)), name: runs.name, named: names,
    note: (index) => {
      const weight = runs.weight[index]!;
      return weight > 1.001 ? `timed for about ${weight.toFixed(1)} like it` : "";
    },
  });
  return { source, keys: [...keys.values()].filter((one) => !Number.isNaN(one.device)).sort((a, b) => a.stream - b.stream) };
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
    kinds: [made.kindOf("running")], name, named: 0,
    note: () => "estimate from samples of this second, not its place in it",
  });
}

/** Spans that are not drawn: the answer has not all, or too many overlap. */
export function leftOutOf({ calls, states, device, samples, host, runs }: TimelineAnswer, lanes: Lanes): number {
  return calls.left_out + states.left_out + device.left_out + samples.left_out + (host?.left_out ?? 0) + (runs?.left_out ?? 0) + lanes.hidden;
}

/** The time in which devices worked, or else that in which threads called them, with a little around it; all of it where that is most of it,
 * or nothing of the kind is known. In ns after the origin. */
export function workOf(answer: TimelineAnswer): readonly [left: number, right: number] {
  const [first, last] = [answer.begin_ns, answer.end_ns];
  let [left, right] = [Infinity, -Infinity];
  const ofDevices = [answer.device, answer.stalls, ...(answer.runs ? [answer.runs] : [])];
  const isDevice = ofDevices.some(({ start }) => start.length > 0);
  for (const { start, end } of isDevice ? ofDevices : [answer.calls]) {
    for (let i = 0; i < start.length; i++) {
      left = Math.min(left, start[i]!);
      right = Math.max(right, end[i]!);
    }
  }
  const room = (right - left) / 20;
  if (!(right > left) || right - left > (last - first) / 2) return [first, last];
  return [Math.max(first, left - room), Math.min(last, right + room)];
}

/** Where a cause is, in tracks: of the threads that it holds up, and of those that these waited for. */
export function tracksOf(answer: TimelineAnswer, key: string): { held: Set<number>; reason: Set<number> } {
  const found = { held: new Set<number>(), reason: new Set<number>() };
  for (const verdict of answer.explanation.verdicts) {
    for (const cause of verdict.causes) {
      if (cause.key !== key || !cause.thread) continue;
      const reason = reasonOf(answer, cause);
      answer.tracks.forEach(({ label }, track) => {
        if (label === cause.thread) found.held.add(track);
        if (label === reason?.thread) found.reason.add(track);
      });
    }
  }
  return found;
}

/** The thread that ended most of a cause's waits, and what it did meanwhile (`analyze` has both as one text). */
export function reasonOf(answer: TimelineAnswer, cause: CauseShare): { thread: string; text: string; where: string } | null {
  for (const fact of cause.facts) {
    const [, text] = /^\d+ % of it ended by (.+)$/s.exec(fact) ?? [];
    const track = text ? answer.tracks.find(({ label }) => text === label || text.startsWith(`${label}, `)) : undefined;
    if (!track) continue;
    const [, where = ""] = /^, on a CPU in (.+?)(?: ← .*)?$/s.exec(text!.slice(track.label.length)) ?? [];
    return { thread: track.label, text: fact, where };
  }
  return null;
}

/** Colours of the boxes, three times as many as kinds and names: where a cause is chosen, what it is not about is faded
 * in the first ones; in the second ones all is, in the third ones nothing. */
export function coloursOf(lanes: Lanes, answer: TimelineAnswer, palette: Palette, cause: string): Uint32Array {
  const { kinds, names } = lanes;
  const title = titleOf(answer.explanation.verdicts, cause);
  const hasStalls = answer.stalls.start.length > 0;
  const isOf = OF_CAUSE[cause] ?? (() => false);
  const isLit = (kind: string, name: string): boolean => (kind === "stall" ? name === title : isOf(kind, name));
  const isKnown = cause && (hasStalls || OF_CAUSE[cause]);
  const count = kinds.length * names.length;
  const colours = new Uint32Array(3 * count);
  kinds.forEach((kind, number) => {
    const colour = palette.span(kind);
    const from = number * names.length;
    for (const block of [0, 2]) colours.fill(colour, block * count + from, block * count + from + names.length);
    if (isKnown) names.forEach((name, i) => { colours[from + i] = !isLit(kind, name) ? palette.faded : kind === "blocked" ? palette.span("chosen wait") : colour; });
  });
  return colours.fill(palette.faded, count, 2 * count);
}

/** Which of the three parts of `coloursOf` each row has its colours from. */
export function offsetsOf(lanes: Lanes, answer: TimelineAnswer, cause: string): number[] {
  const count = lanes.kinds.length * lanes.names.length;
  const { held, reason } = tracksOf(answer, cause);
  const lanesOf = (tracks: Set<number>): Set<number> => new Set([...tracks].map((track) => lanes.laneOfTrack[track]!));
  const [heldLanes, reasonLanes, threads] = [lanesOf(held), lanesOf(reason), new Set(lanes.laneOfTrack)];
  return lanes.rows.map((row, number) => {
    const lane = lanes.laneOfRow[number]!;
    if (!cause || row.levels || reasonLanes.has(lane) || lanes.lanes[lane]!.label === "Steps") return 2 * count;
    return held.size && threads.has(lane) && !heldLanes.has(lane) ? count : 0;
  });
}
