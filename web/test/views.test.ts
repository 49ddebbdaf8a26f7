// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it, vi } from "vitest";
import type { MemoryAnswer } from "../src/answers";
import { token, type Flame, type SpanColumns, type TimelineAnswer } from "../src/api";
import { valueAt } from "../src/charts";
import { afterOf, changes, compared, levelOf, LEVELS } from "../src/compare";
import { devicesOf, states } from "../src/devices";
import { traceEvents } from "../src/exports";
import { inWords, keyOf, lastMinute } from "../src/last_minute";
import { around, build, byBinary, nodeOf, pathOf } from "../src/flame";
import { sharesOf, sumOf, type Hours } from "../src/gpu_hours";
import { energy } from "../src/numbers";
import { forget, held, hold } from "../src/tenants";
import { LANE } from "../src/lanes";
import { coloursOf, layout, leftOutOf, offsetsOf, reasonOf, threadName, tracksOf, workOf } from "../src/timeline";
import { counterName } from "../src/counters";
import { paletteOf } from "../src/draw/colours";
import { mainCause, ownBounds, stepsOf } from "../src/verdict";
import { crumbsOf } from "../src/trail";
import { format, parse, START } from "../src/url";
import { placeOf } from "../src/views/alerts";
import { epsilon, power } from "../src/views/fleet";
import { kindOfFault } from "../src/views/incidents";
import { reused } from "../src/views/memory";
import { chosenFirst } from "../src/views/verdict";
import { FIRST_KIND, isNothing, OTHER_KINDS } from "../src/views/recorded";

const frame = (name: string, binary = "app", kind = "user") => ({ kind, function: name, binary, file: "", line: 0 });
const stack = (frames: number[], ns: number) => ({ frames, n: 1, ns, bytes: 0 });
/** main → work → {read, read → work}, in innermost-first order. */
const FLAME: Flame = {
  total: { rows: 3, n: 3, ns: 10, bytes: 0 }, frames: [frame("main"), frame("work"), frame("read", "libc.so.6"), frame("idle")],
  stacks: [stack([2, 1, 0], 6), stack([1, 2, 1, 0], 3), stack([3, 0], 1)],
};

describe("address", () => {
  it("gives back what owners, jobs, comparisons and groups add", () => {
    const place = {
      ...START, view: "job" as const, by: "user" as const, id: "a&b", owner: "o<p>", ownerBy: "namespace" as const, list: "gpus" as const, group: "thread" as const,
      fn: "f  a.py:3", node2: "n", pid2: "7", job2: "j", from2: 5, to2: 9.5, shape: "sandwich" as const,
    };
    expect(parse(format(place))).toEqual(place);
    expect(parse("?view=jobs&by=evil&ownerBy=x&group=x&list=x&from2=-1")).toEqual({ ...START, view: "jobs" });
  });
});

describe("the way back", () => {
  it("goes on following the present, and is of one node or one job", () => {
    const now = { ...START, from: 5, to: 9, live: 60 };
    expect(crumbsOf({ ...now, view: "job", id: "7" }, "")).toEqual([["Jobs", { view: "jobs", by: "", from: 5, to: 9, live: 60 }], ["job 7", null]]);
    expect(crumbsOf({ ...now, view: "job", by: "user", id: "ada" }, "")).toEqual([["Owners", { view: "owners", by: "user", from: 5, to: 9, live: 60 }], ["user ada", null]]);
    expect(crumbsOf({ ...now, view: "jobs", owner: "o", ownerBy: "user" }, "")[0]).toEqual(["Owners", { view: "owners", by: "user", from: 5, to: 9, live: 60 }]);
    expect(crumbsOf({ ...now, view: "range", node: "n" }, "5 – 9").map(([name]) => name)).toEqual(["Overview", "n", "5 – 9"]);
    expect(crumbsOf({ ...now, view: "range", node: "n" }, "")[1]).toEqual(["n", { view: "node", node: "n", from: 5, to: 9, live: 60 }]);
    expect([crumbsOf(START, ""), crumbsOf({ ...START, view: "ranks", node: "n" }, "")]).toEqual([[], []]);
  });
});

describe("an incident", () => {
  it("opens what ran, what waited, or what had no CPU, by its cause", () => {
    expect(["cpu-quota", "cpu-contention", "bad-pinning"].map((cause) => kindOfFault(cause))).toEqual(["runqueue", "runqueue", "runqueue"]);
    expect(["lock", "disk-contention", "frozen", "remote-dependency"].map((cause) => kindOfFault(cause))).toEqual(["blocked", "blocked", "blocked", "blocked"]);
    expect([kindOfFault("garbage-collection"), kindOfFault("unknown"), kindOfFault("lock", "own-work")]).toEqual(["cpu", "cpu", "cpu"]);
  });

  it("has the verdict on its process first, and a notice where nothing of it was recorded", () => {
    const of = (name: string) => ({ device_name: name });
    expect(chosenFirst([of("a (12)"), of("b (2)"), of("c (312)")], "2").map((one) => one.device_name)).toEqual(["b (2)", "a (12)", "c (312)"]);
    expect(chosenFirst([of("a ()"), of("b (2)")], "").map((one) => one.device_name)).toEqual(["a ()", "b (2)"]);
    expect([isNothing([[], []]), isNothing([[], null]), isNothing([[], [{}]])]).toEqual([true, false, false]);
    // What was only timed on a GPU, or only mapped memory, was recorded, too.
    expect([FIRST_KIND, ...OTHER_KINDS].sort()).toEqual(["blocked", "cpu", "device", "faulted", "kernel", "mapped", "runqueue", "unmapped"]);
  });
});

describe("the verdict on the last minute", () => {
  it("is on the last data within the range, and is asked for once a minute", () => {
    expect(lastMinute(1000.5, 0)).toEqual({ from: 940.5, to: 1002 });
    expect(lastMinute(1000.5, 5000)).toEqual({ from: 940.5, to: 1002 });
    expect(lastMinute(1000.5, 500)).toEqual({ from: 440, to: 500 });
    expect(keyOf("n", 1021, 0)).toBe(keyOf("n", 1024, 0));
    expect(keyOf("n", 1021, 0)).not.toBe(keyOf("n", 1021, 500));
  });

  it("is the title of the largest cause, or that there is none", () => {
    const verdict = { bounds: [{ key: "host", share: 1 }], causes: [{ bound: "host", title: "a lock" }] };
    expect(inWords({ verdicts: [verdict as never] })).toBe("a lock");
    expect(inWords({ verdicts: [{ ...verdict, causes: [] } as never] })).toBe("host");
    expect(inWords({ verdicts: [] })).toBe("nothing to explain");
  });
});

describe("charts", () => {
  it("show no value before a line's first point", () => {
    const line = { label: "", times: [10, 20, 30], values: [1, 2, 3] };
    expect([9, 10, 19.9, 20, 99].map((at) => valueAt(line, at))).toEqual([null, 1, 1, 2, 3]);
    expect(valueAt({ label: "", times: [], values: [] }, 5)).toBeNull();
  });
});

describe("memory", () => {
  it("knows numbers that several processes had", () => {
    const row = (pid: number, start_ns: number): MemoryAnswer[number] => ({
      node: "n", pid, start_ns, mapped: 0, unmapped: 0, grown: 0, faulted: 0, reserved: 0, comm: null, exe: null, command: null,
      user: null, pod: null, namespace: null, job: null, container: null, unit: null,
    });
    expect([...reused([row(7, 1), row(8, 1), row(7, 2), row(7, 3)])]).toEqual([7]);
  });
});

describe("tenants", () => {
  it("lose the token in use only where it is theirs", () => {
    const kept = new Map<string, string>();
    vi.stubGlobal("sessionStorage", { getItem: (key: string) => kept.get(key) ?? null, setItem: (key: string, text: string) => kept.set(key, text) });
    for (const name of ["a", "b"]) {
      token.set(`token of ${name}`);
      hold(name);
    }
    forget("a");
    expect([token.get(), Object.keys(held())]).toEqual(["token of b", ["b"]]);
    forget("b");
    expect([token.get(), held()]).toEqual(["", {}]);
    vi.unstubAllGlobals();
  });
});

describe("a privacy loss", () => {
  it("is rounded up, never down", () => {
    expect([null, 0, 0.07, 0.0701, 0.0999, 1.1, 1.101].map(epsilon)).toEqual(["not bounded", "0.00", "0.070", "0.071", "0.10", "1.10", "1.11"]);
    expect([1e-6, 1.4e-6, 9.1e-7].map(power)).toEqual(["1 × 10⁻⁶", "2 × 10⁻⁶", "1 × 10⁻⁶"]);
  });
});

describe("GPU hours", () => {
  const row: Hours = { held_h: 4, productive_h: 1, stalled_h: 2, idle_h: 1, unknown_h: 0, wasted_h: 3, joules: null };

  it("are parts of what was held", () => {
    expect(sharesOf(row).map(({ part, share }) => [part, share])).toEqual([["productive", 0.25], ["stalled", 0.5], ["idle", 0.25], ["unknown", 0]]);
    expect(sharesOf({ ...row, held_h: 0 })).toEqual([]);
    expect(sumOf([row, { ...row, joules: 5 }])).toEqual({ held_h: 8, productive_h: 2, stalled_h: 4, idle_h: 2, unknown_h: 0, wasted_h: 6, joules: 5 });
    expect(sumOf([row]).joules).toBeNull();
  });

  it("are written as people read them", () => {
    expect([500, 56000, 7.2e6].map(energy)).toEqual(["500 J", "15.6 Wh", "2.00 kWh"]);
  });
});

describe("stacks", () => {
  it("are kept apart by the binary in which the time was spent", () => {
    const tree = build(byBinary(FLAME, ""), "ns", false, "");
    const share = (...path: string[]): number => tree.total[nodeOf(tree, path)]!;
    expect([share("libc.so.6"), share("app"), share("libc.so.6", "main", "work", "read")]).toEqual([6, 4, 6]);
    const inverted = build(byBinary(FLAME, ""), "ns", true, "");
    expect(pathOf(inverted, nodeOf(inverted, ["libc.so.6", "read"]))).toEqual(["libc.so.6", "read"]);
  });

  it("keep their group where only Python is shown", () => {
    const flame: Flame = { ...FLAME, frames: [...FLAME.frames, frame("python3 (7)", "", "process")], stacks: [stack([2, 1, 0, 4], 5)] };
    const tree = build(flame, "ns", false, "python");
    expect(pathOf(tree, 1)).toEqual(["python3 (7)"]);
    expect(tree.total[1]).toBe(5);
  });

  it("are cut at the outermost call of a function, counted once", () => {
    const { callers, callees, weight } = around(FLAME, "work");
    expect(weight.ns).toBe(9);
    const [out, into] = [build(callers, "ns", true, ""), build(callees, "ns", false, "")];
    expect(out.total[nodeOf(out, ["work", "main"])]).toBe(9);
    expect(into.total[nodeOf(into, ["work", "read"])]).toBe(9);
    expect(into.total[nodeOf(into, ["work", "read", "work"])]).toBe(3);
    expect(around(FLAME, "nothing").callers.stacks).toEqual([]);
  });
});

describe("a comparison", () => {
  const after: Flame = { ...FLAME, frames: [frame("idle"), frame("main")], stacks: [stack([0, 1], 100)] };

  it("is of shares, whatever the lengths are", () => {
    const both = build(compared(FLAME, after, "ns")!, "ns", false, "");
    const idle = nodeOf(both, ["main", "idle"]);
    expect(both.before[idle]).toBeCloseTo(0.1);
    expect(afterOf(both, idle)).toBeCloseTo(1);
    expect(levelOf(both, idle)).toBe(LEVELS - 1);
    expect(levelOf(both, nodeOf(both, ["main", "work"]))).toBe(0);
    expect(levelOf(both, nodeOf(both, ["main"]))).toBe((LEVELS - 1) / 2);
    expect(compared(FLAME, { ...after, stacks: [] }, "ns")).toBeNull();
  });

  it("lists functions by how much their own time changed", () => {
    const rows = changes(FLAME, after, "ns", "").map(({ fn, before, after: now }) => [fn.label, Math.round(100 * before), Math.round(100 * now)]);
    expect(rows).toEqual([["idle", 10, 100], ["read", 60, 0], ["work", 30, 0]]);
  });
});

describe("nodes", () => {
  const node = { node: "a", chunks: 1, sample_rows: 1, first_ns: 0, last_ns: 100e9, size_bytes: 1, about: "" };
  const holder = (owner: string, wasted_h: number) => ({ node: "a", owner, held_h: 5, wasted_h });

  it("have owners by waste, and incidents that are no change of work as troubles", () => {
    const incident = (change: string | null) => ({ node: "a", began_ns: 50e9, verdict: { cause: "cpu-quota", change } });
    const [one] = states([node], null, [], 100, { holders: [holder("ada", 1), holder("bob", 4)], incidents: [incident(null), incident("more-work"), { ...incident(null), node: "b" }] });
    expect(one!.holders.map(({ owner }) => owner)).toEqual(["bob", "ada"]);
    expect([one!.wastedH, one!.incidents]).toEqual([5, 1]);
    expect(one!.troubles[0]!.text).toBe("1 incident: cpu quota");
    expect(states([node], null, [], 100)[0]!.wastedH).toBeNull();
    expect(devicesOf([one!])).toEqual([]);
  });
});

describe("an alert", () => {
  const alert = { status: "firing" as const, annotations: {}, value: 1, since: "2026-01-01T00:00:00Z", fired: "2026-01-01T00:10:00Z", resolved: null, page: "" };

  it("leads to its node, to its owner, or to its time", () => {
    const from = Date.parse(alert.fired) / 1000 - 300;
    expect(placeOf({ ...alert, labels: { node: "n1" } })).toMatchObject({ view: "node", node: "n1", from });
    expect(placeOf({ ...alert, labels: { user: "ada" } })).toMatchObject({ view: "job", by: "user", id: "ada", from });
    expect(placeOf({ ...alert, labels: {} })).toMatchObject({ view: "overview", from });
    expect(placeOf({ ...alert, since: "nonsense", fired: null, labels: {} })).toEqual({ view: "overview" });
  });
});

describe("a timeline", () => {
  const none = (): SpanColumns => ({ kinds: [], left_out: 0, start: [], end: [], kind: [], name: [], track: [], waker: [], correlation: [] });
  const track = (label: string, kind: "thread" | "stream") => ({ kind, label, pid: 1, device: 0, process: "python3", owner: "program" });
  const answer: TimelineAnswer = {
    origin_ns: 0, begin_ns: 0, end_ns: 100, names: ["launch", "gemm", "futex"], tracks: [track("main", "thread"), track("loader", "thread"), track("GPU0 stream 7", "stream")],
    calls: { ...none(), kinds: ["launch"], start: [10], end: [12], kind: [0], name: [0], track: [0], waker: [0], correlation: [5] },
    device: { ...none(), kinds: ["kernel"], start: [30], end: [50], kind: [0], name: [1], track: [2], waker: [0], correlation: [5] },
    states: { ...none(), kinds: ["blocked"], start: [60], end: [80], kind: [0], name: [2], track: [0], waker: [2], correlation: [0] },
    samples: { time: [60], track: [1], weight: [10], name: [2], left_out: 0 }, sampled: false, runs: null, tick_ns: 10, causes: [],
    stalls: { device: [], start: [], end: [], cause: [] }, explanation: { verdicts: [], notes: [] },
    counters: [{ label: "GPU0 hw.gpu.utilization", time: [0, 50], value: [0.25, 1] }, { label: "GPU0 sonde.gpu.clock sm", time: [0, 50], value: [0, 0] }],
    steps: { start: [0, 50], end: [50, 90], like: [1, 0], anchor: "gemm" },
  };
  const lanes = layout(answer);
  const laneOf = (label: string) => lanes.lanes.findIndex((lane) => lane.label === label);
  const middle = (label: string): number => lanes.lanes[laneOf(label)]!.top + LANE / 2;
  const idOf = (kind: string): number => Array.from({ length: lanes.spans }, (_, id) => id).find((id) => lanes.span(id).kind === kind)!;

  it("has arrows from a launch to its run, from either end, and from who woke a thread", () => {
    const launch = [{ fromX: 10, fromY: middle("main"), toX: 30, toY: middle("stream 7"), kind: "launch" }];
    expect(lanes.linksOf(idOf("launch"))).toEqual(launch);
    expect(lanes.linksOf(idOf("kernel"))).toEqual(launch);
    expect(lanes.linksOf(idOf("blocked"))).toEqual([{ fromX: 80, fromY: middle("loader"), toX: 80, toY: middle("main"), kind: "wake" }]);
    expect(lanes.linksOf(idOf("step"))).toEqual([]);
    expect(lanes.span(idOf("kernel")).note).toBe("launched 20 ns before by main");
    expect(lanes.span(idOf("launch")).note).toBe("runs 20 ns later on GPU0 stream 7");
    expect(lanes.span(idOf("blocked")).note).toBe("woken by loader");
  });

  it("has steps, and counters that are ever above nothing", () => {
    expect(lanes.span(idOf("step"))).toMatchObject({ name: "step 1", start: 0, end: 50 });
    expect(lanes.span(idOf("odd step"))).toMatchObject({ name: "step 2", note: "40 ns, unlike the typical step" });
    expect(lanes.span(idOf("counter") + 1)).toMatchObject({ name: "100 %", start: 50, end: 100, value: 1 });
    expect(lanes.lanes.map((lane) => lane.full)).not.toContain("GPU0 clock sm");
    const events = JSON.parse(traceEvents(lanes, 0, 100)).traceEvents as { ph: string; name: string; args?: { value?: number } }[];
    expect(events.filter(({ ph }) => ph === "C").map(({ name, args }) => [name, args?.value])).toEqual([["GPU0 utilization", 0.25], ["GPU0 utilization", 1]]);
  });

  it("counts what is left out, of operators and functions too", () => {
    expect(leftOutOf({ ...answer, host: { ...none(), left_out: 5 }, calls: { ...answer.calls, left_out: 2 } }, lanes)).toBe(7);
  });

  it("has groups: devices, then processes with their threads, each of which can be folded", () => {
    expect(lanes.lanes.map(({ label, group }) => group ?? label)).toEqual(["Steps", "gpu 0", "busy", "stream 7", "process 1", "main", "loader"]);
    const folded = layout(answer, ["process 1"]);
    expect(folded.lanes.map(({ label, isFolded }) => [label, isFolded])).toEqual([["Steps", undefined], ["GPU 0", false], ["busy", undefined], ["stream 7", undefined], ["python3 1", true]]);
    // A thread that is folded stands for itself by its group's head.
    expect(folded.linksOf(idOf("launch"))[0]!.fromY).toBe(folded.lanes[4]!.top + LANE / 2);
    expect(folded.spans).toBe(lanes.spans);
    const own = { ...answer, tracks: answer.tracks.map((one, i) => (i === 1 ? { ...one, owner: "sonde" } : one)) };
    expect(layout(own).lanes.at(-1)).toMatchObject({ label: "Sonde’s own threads", isFolded: true });
  });

  it("names a thread once within its process", () => {
    const name = (label: string, process: string) => threadName({ ...track(label, "thread"), process });
    expect([name("python3 (7)", "python3"), name("loader (8)", "python3"), name(" (9)", "x"), name("odd", "x")]).toEqual(["thread 7", "loader 8", "thread 9", "odd"]);
  });

  it("has counters as levels of a scale, with units", () => {
    const [busy] = lanes.lanes.filter((lane) => lane.label === "busy");
    expect([busy!.detail, busy!.valueAt!(-1), busy!.valueAt!(10), busy!.valueAt!(60)]).toEqual(["0 to 100 %", "", "25.0 %", "100 %"]);
    const row = lanes.rows.find((one) => one.levels)!;
    expect([...row.levels!]).toEqual([0.25, 1]);
    expect(counterName("GPU0 sonde.gpu.clock sm", 1.98e9)).toEqual({ full: "GPU0 clock sm", short: "SM clock", unit: "Hz" });
    expect(counterName("GPU0 hw.power", 576.6).unit).toBe("W");
  });

  it("lights a cause in the threads that wait and in those that they waited for, and fades the others", () => {
    const cause = {
      key: "input", title: "input pipeline", bound: "input", detail: "", ns: 1, share: 0.6, count: 1, longest_ns: 1, thread: "main", locations: [],
      facts: ["100 % of it ended by loader, on a CPU in load a b.py:3 ← run b.py:9"],
    };
    const verdict = {
      device: -1, device_name: "main", bound: "input", bounds: [{ key: "input", share: 0.6 }, { key: "memory", share: 0.3 }], computing: 0, idle: 0, window_ns: 100,
      causes: [cause], evidence: [], advice: [], without_device: false,
    };
    const given: TimelineAnswer = { ...answer, explanation: { verdicts: [verdict], notes: [] } };
    expect(tracksOf(given, "input")).toEqual({ held: new Set([0]), reason: new Set([1]) });
    expect(reasonOf(given, cause)).toEqual({ thread: "loader", text: cause.facts[0], where: "load a b.py:3" });
    expect(reasonOf(given, { ...cause, facts: ["<b>loader</b>", "9 % of it ended by gone (4)"] })).toBeNull();
    expect(ownBounds(verdict).map(({ key, share }) => [key, share])).toEqual([["memory", 0.3]]);
    expect(mainCause(verdict)).toBe(cause);
    expect(mainCause({ ...verdict, bounds: [{ key: "memory", share: 0.3 }] })).toBeUndefined();
    const palette = paletteOf(false);
    const colours = coloursOf(lanes, given, palette, "input");
    const offsets = offsetsOf(lanes, given, "input");
    const shown = (label: string, kind: string): boolean => {
      const at = lanes.rows.findIndex((row, i) => lanes.laneOfRow[i] === laneOf(label) && lanes.kinds[Math.floor(row.colourIndex[0]! / lanes.names.length)] === kind);
      return colours[lanes.rows[at]!.colourIndex[0]! + offsets[at]!] !== palette.faded;
    };
    expect([shown("main", "blocked"), shown("main", "launch"), shown("loader", "running"), shown("stream 7", "kernel")]).toEqual([true, false, true, false]);
    expect(offsetsOf(lanes, given, "").every((one) => one === offsetsOf(lanes, given, "")[0])).toBe(true);
  });

  it("has all steps of a verdict: those that go together first", () => {
    const step = (text: string, with_former = false) => ({ text, gain: 0, with_former });
    const [cpu, io, lock] = [step("cpu"), step("io", true), step("lock")];
    expect(stepsOf([cpu, io, lock])).toEqual({ next: [cpu, io], then: [lock] });
    expect(stepsOf([cpu, lock, io])).toEqual({ next: [cpu], then: [lock, io] });
    expect(stepsOf([{ text: "older", gain: 0 }])).toEqual({ next: [{ text: "older", gain: 0 }], then: [] });
    expect(stepsOf([])).toEqual({ next: [], then: [] });
  });

  it("begins with the work of a file, where that is a small part of it", () => {
    expect(workOf({ ...answer, end_ns: 10_000 })).toEqual([29, 51]);
    expect(workOf(answer)).toEqual([29, 51]);
    expect(workOf({ ...answer, device: none() })).toEqual([9.9, 12.1]);
    expect(workOf({ ...answer, device: none(), calls: none() })).toEqual([0, 100]);
  });

  it("has counters of any length", () => {
    const time = Float64Array.from({ length: 500_000 }, (_, i) => i);
    expect(layout({ ...answer, counters: [{ label: "GPU0 hw.power", time, value: time }] }).spans).toBeGreaterThan(500_000);
  });

  it("is drawn from answers without what is newer, too", () => {
    const { host: _, counters: __, steps: ___, ...older } = { host: undefined, ...answer };
    expect(layout({ ...older, calls: { ...answer.calls, correlation: undefined! } }).lanes.map((lane) => lane.label)).toEqual(["GPU 0", "stream 7", "python3 1", "main", "loader"]);
  });
});
