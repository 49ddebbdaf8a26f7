// SPDX-License-Identifier: Apache-2.0
// Questions to the server that this page came from. Nothing else is ever asked.

export interface NodeRow {
  node: string; chunks: number; sample_rows: number; first_ns: number; last_ns: number;
  size_bytes: number; about: string;
}
export interface DeviceRow {
  node: string; series: string; labels: string; mean: number; least: number; most: number; last: number;
}
export interface LossRow { node: string; name: string; value: number }
export interface ChartRow {
  node: string; series: string; labels: string; time_ns: number; value: number; least: number; most: number;
}
export interface FrameRow { kind: string; function: string; binary: string; file: string; line: number }
export interface Flame {
  total: { rows: number; n: number; ns: number; bytes: number };
  frames: FrameRow[];
  stacks: { frames: number[]; n: number; ns: number; bytes: number }[];
}
export interface KernelRow {
  kind: string; name: string; runs: number; ns: number; mean_ns: number; most_ns: number; timed: number;
}
export interface DiffRow { function: string; binary: string; before: number; after: number }
export interface CauseShare {
  key: string; title: string; bound: string; detail: string; ns: number; share: number; count: number;
  longest_ns: number; thread: string; locations: { function: string; share: number }[]; facts: string[];
}
export interface Verdict {
  device: number; device_name: string; bound: string; bounds: { key: string; share: number }[];
  computing: number; idle: number; window_ns: number; causes: CauseShare[]; evidence: string[];
  advice: { text: string; gain: number }[]; without_device: boolean;
}
export interface Explanation { verdicts: Verdict[]; notes: string[] }
export interface SpanColumns {
  kinds: string[]; left_out: number; start: number[]; end: number[]; kind: number[]; name: number[];
  track: number[]; correlation: number[]; waker: number[];
}
export interface RunColumns {
  start: number[]; end: number[]; names: string[]; name: number[]; kinds: string[]; kind: number[];
  pid: number[]; device: number[]; stream: number[]; weight: number[]; left_out: number;
}
export interface Track {
  kind: "thread" | "stream"; label: string; pid: number; device: number; process: string; owner: string;
}
export interface TimelineAnswer {
  origin_ns: number; begin_ns: number; end_ns: number; names: string[]; tracks: Track[];
  calls: SpanColumns; states: SpanColumns; device: SpanColumns;
  samples: { time: number[]; track: number[]; weight: number[]; name: number[]; left_out: number };
  sampled: boolean; runs: RunColumns | null; tick_ns: number; causes: string[];
  stalls: { device: number[]; start: number[]; end: number[]; cause: number[] };
  explanation: Explanation;
}

/** What went wrong, and what to do about it. */
export class AskError extends Error {
  constructor(readonly status: number, cause: string, readonly remedy: string) {
    super(cause);
  }
}

const TOKEN = "sonde.token";

export const token = {
  get: (): string => sessionStorage.getItem(TOKEN) ?? "",
  set: (text: string): void => sessionStorage.setItem(TOKEN, text.trim()),
};

export type Parameters = Record<string, string | number | readonly string[] | undefined>;

export async function ask<T>(question: string, parameters: Parameters, signal?: AbortSignal): Promise<T> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, String(one));
  }
  const headers: Record<string, string> = { Accept: "application/json" };
  if (token.get()) headers["Authorization"] = `Bearer ${token.get()}`;
  let response: Response;
  try {
    response = await fetch(`/v1/${question}?${query}`, { headers, ...(signal ? { signal } : {}) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new AskError(0, "the server does not answer", "see whether `sonde serve` still runs, then try again");
  }
  if (response.ok) return (await response.json()) as T;
  let told: { error?: unknown; remedy?: unknown } = {};
  try {
    told = (await response.json()) as typeof told;
  } catch {
    // An answer of a proxy in between: its status is all there is.
  }
  throw new AskError(response.status, String(told.error ?? `HTTP status ${response.status}`), String(told.remedy ?? (response.status >= 500 ? "see the server's log" : "")));
}
