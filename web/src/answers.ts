// SPDX-License-Identifier: Apache-2.0
// Types of the server's answers as JSON. Generated from src/sonde/server/schemas.py by
// scripts/web_types.py; a test checks that it is current.
//
// Every property of an object is always there. Units are in the names: `_ns` and `_s` (of time
// points: since 1970), `_h` (hours of one GPU), `bytes`. Times of alerts are text (ISO 8601). What
// one property means stands beside it. Names that stand in several answers:
//
// - `boxes`, `cells`, `slots`: tables by column. Entry i of each list is of row i. `slots` are time
//   bins, `lanes` the rows of a timeline, `boxes` the spans in them.
// - `n`: how many events; `rows`: how many rows of the store they are in; `value`: in the unit of the
//   metric or of the answer's `unit`; `least`, `most`: the smallest and largest value.
// - `work`, `collective` (of a rank): shares of its time in kernels other than collectives, and in
//   collectives. `error` (of a count): half the width of its 95 % confidence interval.
// - `left_out`, `older`: how many entries there are beyond those in the answer. `not_shown`: what the
//   answer leaves out: a weight, in the flame tree's `unit`, or a number of alerts.
//   `in_noise`: how many classes of a release have a count within its noise, so that it is not shown.
//   `not_covered`: sentences on what the figures leave out.
// - `shown`: whether this server has a folder of such files at all. `open`: whether it needs no token.
//
// The answers by question. `pprof` is no JSON; `verdict` is what `sonde explain --json` writes, and is part of
// `timeline`, whose columns are described with the page (web/src).

/** A box of `flametree`: a function with all that it called. `self`: without that. */
export type FlameNode = {
  name: string; binary: string; kind: string; value: number; self: number; children?: FlameNode[];
};
/** Nodes and what they did, ns of each kind of sample. */
export type OverviewAnswer = ({
  node: string; chunks: number; first_ns: number; last_ns: number; seconds: number; cpu_ns: number | null;
  blocked_ns: number | null; runqueue_ns: number | null; device_ns: number | null; kernel_ns: number | null;
  lost: number;
})[];
/** Stacks with their weights: frames, stacks, total. */
export type FlamegraphAnswer = {
  total: { rows: number; n: number; ns: number; bytes: number };
  frames: { kind: string; function: string; binary: string; file: string; line: number }[];
  stacks: { frames: number[]; n: number; ns: number; bytes: number }[];
};
/** A flame graph as nested boxes: name, value, self, children. */
export type FlametreeAnswer = {
  unit: "ns" | "bytes"; total: number;
  /** Weight of the stacks that are not in the tree, in `unit`. */
  not_shown: number;
  /** Boxes too light to be in the tree; their weight is in `root`. */
  left_out: number;
  root: FlameNode;
};
/** Lanes of threads and devices, and the boxes in them. */
export type LanesAnswer = {
  start_ns: number; end_ns: number;
  lanes: {
    lane: number; node: string; lane_kind: string; pid: number; tid: number; comm: string; device: number;
    stream: number; ns: number;
  }[];
  boxes: {
    lane: number[]; start: number[]; end: number[]; name: string[]; n: number[]; ns: number[];
  };
};
/** Code locations by key. */
export type FramesAnswer = {
  key: number; kind: string; function: string; binary: string; file: string; line: number;
}[];
/** Sums of a selection. */
export type TotalsAnswer = { rows: number; n: number; ns: number; bytes: number };
/** Functions by own time. */
export type TopAnswer = { function: string; binary: string; own_ns: number; total_ns: number }[];
/** Kernels, reasons of waits or calls, by weight. */
export type NamesAnswer = { name: string; n: number; ns: number; bytes: number }[];
/** Processes by weight. */
export type ProcessesAnswer = ({
  node: string; pid: number; start_ns: number; n: number; ns: number; bytes: number; comm: string | null;
  exe: string | null; command: string | null; user: string | null; pod: string | null; namespace: string | null;
  job: string | null; container: string | null; unit: string | null;
})[];
/** Traced requests by observed time: on a CPU, blocked, ready. */
export type TracesAnswer = {
  trace_id: string; nodes: number; processes: number; first_ns: number; last_ns: number; n: number; cpu_ns: number;
  blocked_ns: number; runqueue_ns: number;
}[];
/** Functions whose share of the time changed. */
export type DiffAnswer = { function: string; binary: string; before: number; after: number }[];
/** A metric over time, by node and labels. */
export type SeriesAnswer = {
  node: string; labels: string; time_ns: number; value: number; least: number; most: number;
}[];
/** Several metrics, and what was observed, over time. */
export type ChartsAnswer = {
  node: string; series: string; labels: string; time_ns: number; value: number; least: number; most: number;
}[];
/** Metrics of devices: mean, least, most, last. */
export type DevicesAnswer = {
  node: string; series: string; labels: string; mean: number; least: number; most: number; last: number;
}[];
/** Kernels by device time. */
export type KernelsAnswer = {
  /** Kernel, replay (of a whole graph), copy or set (of memory). */
  kind: string;
  name: string;
  /** How many there were, estimated from those timed. */
  runs: number;
  ns: number; mean_ns: number;
  /** The longest. */
  most_ns: number;
  /** Runs whose time was measured. */
  timed: number;
}[];
/** Metrics that there are. */
export type MetricsAnswer = { series: string; nodes: number; rows: number }[];
/** Who sent what, and when last. */
export type NodesAnswer = {
  node: string; chunks: number; sample_rows: number; first_ns: number; last_ns: number; size_bytes: number;
  about: string;
}[];
/** Processes on devices by step or time: at work, in collectives. */
export type RanksAnswer = {
  by: "steps" | "time"; slots: { start_ns: number[]; end_ns: number[] };
  ranks: {
    node: string; pid: number; start_ns: number; device: number; ns: number; comm: string;
    /** Of an interpreter what it runs, and its rank. */
    command: string;
    job: string; user: string; pod: string; container: string;
    /** Whether every run of it was timed. */
    all_timed: boolean;
  }[];
  /** Cells of the heat map of ranks, a table by column: `rank` and `slot` are indices of `ranks` and `slots`, `runs`
   * those timed. A rank without a cell in a slot was not timed there. */
  cells: {
    rank: number[]; slot: number[]; work_ns: number[]; collective_ns: number[]; runs: number[];
  };
  /** Kernels (by name) that are collectives. */
  collectives: number;
  left_out: number;
};
/** Jobs whose runs on devices were timed: number of ranks, and when. */
export type JobsAnswer = { job: string; ranks: number; first_ns: number; last_ns: number; start_ns: number }[];
/** What processes mapped, gave back and touched, bytes. */
export type MemoryAnswer = ({
  node: string; pid: number; start_ns: number; mapped: number; unmapped: number;
  /** Mapped less unmapped. */
  grown: number;
  /** Touched first. */
  faulted: number;
  /** Mapped without access rights: addresses alone. */
  reserved: number;
  comm: string | null; exe: string | null; command: string | null; user: string | null; pod: string | null;
  namespace: string | null; job: string | null; container: string | null; unit: string | null;
})[];
/** GPU hours of one job, pod, container, unit or user: held, wasted by cause, functions. */
export type JobAnswer = {
  by: string; id: string; slot_s: number; nodes: string[]; gpus: number; held_h: number; productive_h: number;
  stalled_h: number; idle_h: number; unknown_h: number; wasted_h: number; joules: number | null;
  wasted: { cause: string; gpu_h: number }[];
  verdicts: { node: string; start_ns: number; end_ns: number; verdict: Record<string, unknown> }[];
  functions: { function: string; binary: string; own_ns: number; total_ns: number }[];
  waiting: {
    kind: string; text: string;
    /** How many ranks the others wait for. */
    count: number;
    /** Ranks that were timed at the same time. */
    compared: number;
    /** Of each step or second: see `per`. */
    lost_s: number;
    per: "step" | "second"; evidence: string[];
    /** Sentences: what is not known, or left out. */
    missing: string[];
    start_ns: number; end_ns: number;
    ranks: {
      node: string; pid: number; device: number; comm: string; command: string;
      /** The rank's number in the heat map of ranks. */
      number: number;
      /** Share of the slots (steps or parts of the time) in which the rank was timed; runs of several streams add up,
       * so it may be above 1. */
      work: number;
      /** Share of the slots (steps or parts of the time) in which the rank was timed; runs of several streams add up,
       * so it may be above 1. */
      collective: number;
    }[];
    /** What the data of the first rank's node shows. */
    node: Record<string, unknown> | null;
  };
  not_covered: string[];
};
/** GPU hours by owner: held, productive, stalled, idle, wasted. */
export type OwnersAnswer = {
  by: string; slot_s: number;
  owners: ({
    owner: string; nodes: number; gpus: number; held_h: number; productive_h: number; stalled_h: number; idle_h: number;
    unknown_h: number; wasted_h: number; joules: number | null;
  })[];
  left_out: number; not_covered: string[];
};
/** GPU hours by node and owner: who holds which node's GPUs, and wastes them. */
export type HoldersAnswer = {
  by: string;
  holders: ({
    node: string; owner: string; gpus: number; held_h: number; productive_h: number; stalled_h: number; idle_h: number;
    unknown_h: number; wasted_h: number; joules: number | null;
  })[];
};
/** What agents could not observe. */
export type LossesAnswer = { node: string; name: string; value: number }[];
/** Releases of the fleet protocol, from files. */
export type FleetAnswer = {
  shown: boolean;
  releases: ({
    id: string; task: string; start_s: number; duration_s: number; unit: string; privacy: string; delta: number;
    budget: number;
    /** The sum of all buckets: noised counts of samples. */
    samples: number;
    buckets: number;
    /** Releases that the collector has collected; 0 not known. */
    collected: number;
    /** Privacy budget (epsilon) that was spent on each unit of privacy; null: no bound is known. */
    spent: ({
      unit: string; one_release: number | null; worst_year: number | null; full_year: number | null;
    })[];
    applications: {
      rows: { name: string; count: number; error: number; share: number; share_error: number }[]; in_noise: number;
      left_out: number;
    };
    kernels: {
      rows: { name: string; count: number; error: number; share: number; share_error: number }[]; in_noise: number;
      left_out: number;
    };
  })[];
  older: number; unreadable: number;
};
/** Rules of alerts and their alerts. */
export type AlertsAnswer = {
  rules: ({
    name: string; question: string; measured: string; comparison: "above" | "below"; threshold: number; unit: string;
    /** The name of the metric, of a rule on one. */
    series: string;
    for_s: number; error: string;
    /** Values beyond those that the rule compares. */
    left_out: number;
  })[];
  alerts: ({
    status: "pending" | "firing" | "resolved"; labels: Record<string, string>; annotations: Record<string, string>;
    value: number; since: string; fired: string | null; resolved: string | null; page: string;
  })[];
  /** Alerts beyond those in `alerts`. */
  not_shown: number;
};
/** Whose data a caller sees. */
export type IdentityAnswer = { tenant: string; scopes: string[]; open: boolean };
