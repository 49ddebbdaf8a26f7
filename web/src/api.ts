// SPDX-License-Identifier: Apache-2.0
// Questions to the server that this page came from. Nothing else is ever asked.

import type { DiffAnswer, FlamegraphAnswer, KernelsAnswer, LossesAnswer, NodesAnswer } from "./answers";
import { MEDIA_TYPE, unpacked, type Columns } from "./packed";

export type NodeRow = NodesAnswer[number];
export type LossRow = LossesAnswer[number];
/** A table that was asked for in columns. */
export type { Columns };
export type Flame = FlamegraphAnswer;
export type FrameRow = Flame["frames"][number];
export type KernelRow = KernelsAnswer[number];
export type DiffRow = DiffAnswer[number];
/** A cause of lost time, as `analyze` names it. `bound`: of which of the verdict's bounds; `share` of the window. */
export interface CauseShare {
  key: string; title: string; bound: string; detail: string; ns: number; share: number; count: number;
  longest_ns: number; thread: string; locations: { function: string; share: number }[]; facts: string[];
}
/** A next step. `gain`: the share of the time that it saves at most; `with_former`: it goes with the step before it. */
export interface Advice { text: string; gain: number; with_former?: boolean }
/** On one device, or on threads without one (`without_device`); shares are of `window_ns`. */
export interface Verdict {
  device: number; device_name: string; bound: string; bounds: { key: string; share: number }[];
  computing: number; idle: number; window_ns: number; causes: CauseShare[]; evidence: string[];
  advice: Advice[]; without_device: boolean;
  /** How many threads it is about; one where it is not given. */
  threads?: number;
}
export interface Explanation { verdicts: Verdict[]; notes: string[] }
/** Numbers of a JSON answer, or of one that came packed (packed.ts). */
export type Numbers = ArrayLike<number>;
/** Spans in columns: times in ns after the origin; `name`, `kind`, `track`: indices; `waker`: a track's index + 1, 0: none. */
export interface SpanColumns {
  kinds: string[]; left_out: number; start: Numbers; end: Numbers; kind: Numbers; name: Numbers;
  track: Numbers; waker: Numbers;
  /** Joins a call with the runs on devices for it; 0: none. */
  correlation?: Numbers;
}
export interface CounterColumns { label: string; time: Numbers; value: Numbers }
/** `like`: 1 where a step is like the typical one. */
export interface StepColumns { start: Numbers; end: Numbers; like: Numbers; anchor: string }
/** Timed runs on devices; `weight`: how many runs each stands for. */
export interface RunColumns {
  start: Numbers; end: Numbers; names: string[]; name: Numbers; kinds: string[]; kind: Numbers;
  pid: Numbers; device: Numbers; stream: Numbers; weight: Numbers; left_out: number;
}
export interface Track {
  kind: "thread" | "stream"; label: string; pid: number; device: number; process: string; owner: string;
}
/** `origin_ns`: since 1970; other times: ns after it. `tick_ns`: the time that rows of `samples` sum up. */
export interface TimelineAnswer {
  origin_ns: number; begin_ns: number; end_ns: number; names: string[]; tracks: Track[];
  calls: SpanColumns; states: SpanColumns; device: SpanColumns;
  /** Operators, Python functions and ranges of threads: of traces that have them. */
  host?: SpanColumns;
  counters?: CounterColumns[]; steps?: StepColumns;
  samples: { time: Numbers; track: Numbers; weight: Numbers; name: Numbers; left_out: number };
  sampled: boolean; runs: RunColumns | null; tick_ns: number; causes: string[];
  stalls: { device: Numbers; start: Numbers; end: Numbers; cause: Numbers };
  explanation: Explanation;
}

/** What went wrong, and what to do about it. `status`: of HTTP; 0: there was no answer, or none that can be read. */
export class AskError extends Error {
  constructor(readonly status: number, cause: string, readonly remedy: string) {
    super(cause);
  }
}

/** The key of the tab's session storage that has the token in use. */
const TOKEN = "sonde.token";

export const token = {
  get: (): string => sessionStorage.getItem(TOKEN) ?? "",
  set: (text: string): void => sessionStorage.setItem(TOKEN, text.trim()),
};

export type Parameters = Record<string, string | number | readonly string[] | undefined>;

/** Asks a question. With `format` columns the answer comes packed. Throws AskError. */
export async function ask<T>(question: string, parameters: Parameters, signal?: AbortSignal): Promise<T> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, String(one));
  }
  const response = await send(`/v1/${question}?${query}`, {}, signal);
  const isPacked = response.headers.get("Content-Type") === MEDIA_TYPE;
  const answer: unknown = isPacked ? unpacked(await response.arrayBuffer()) : await response.json();
  const text = lackText(Number(response.headers.get("X-Sonde-Rows-Left-Out")), Number(response.headers.get("X-Sonde-Files-Left-Out")));
  if (text && answer instanceof Object) lacks.set(answer, text);
  return answer as T;
}

/** Of answers that lack something: what that is. */
const lacks = new WeakMap<object, string>();

/** What an answer has no room for or cannot read, as its headers have it; "": nothing. */
export const lackOf = (answer: unknown): string => (answer instanceof Object ? lacks.get(answer) ?? "" : "");

export function lackText(rows: number, files: number): string {
  const parts = [];
  if (rows > 0) parts.push(`${rows} rows are left out, for which an answer has no room. Choose a shorter time or one node.`);
  if (files > 0) parts.push(`${files} damaged files are left out.`);
  return parts.join(" ");
}

/** A request with the token of this tab. Throws AskError. */
export async function send(path: string, given: RequestInit, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  let response: Response;
  try {
    response = await fetch(path, { ...given, headers, ...(signal ? { signal } : {}) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new AskError(0, "the server does not answer", "see whether `sonde serve` still runs, then try again");
  }
  if (response.ok) return response;
  let refusal: { error?: unknown; remedy?: unknown } = {};
  try {
    refusal = (await response.json()) as typeof refusal;
  } catch {
    // An answer of a proxy in between: its status is all there is.
  }
  throw new AskError(response.status, String(refusal.error ?? `HTTP status ${response.status}`), String(refusal.remedy ?? (response.status >= 500 ? "see the server's log" : "")));
}
