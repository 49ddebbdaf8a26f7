// SPDX-License-Identifier: Apache-2.0
// What is shown, as the address of the page: the back button, a reload and a copied link restore it.

const VIEWS = [
  "overview", "node", "range", "compare", "ranks", "memory", "fleet", "incidents", "alerts", "owners", "jobs", "job", "file",
] as const;
export type View = (typeof VIEWS)[number];
const MEASURES = ["late", "work", "wait"] as const;
/** What a heat map of ranks shows. */
export type Measure = (typeof MEASURES)[number];
const SHAPES = ["graph", "table", "sandwich", "kernels"] as const;
const GROUPS = ["", "binary", "process", "thread"] as const;
/** What stacks are kept apart by. */
export type Group = (typeof GROUPS)[number];
const LISTS = ["nodes", "gpus"] as const;
export const OWNER_KINDS = ["user", "job", "pod", "namespace", "container", "unit", "comm", "exe"] as const;
export type OwnerKind = (typeof OWNER_KINDS)[number];
const JOB_KINDS: readonly string[] = ["", "job", "pod", "container"];
/** Whether a kind is of owners of jobs, not of jobs. */
export const isOwnerKind = (kind: OwnerKind | ""): boolean => !JOB_KINDS.includes(kind);

export interface Place {
  view: View;
  node: string;
  /** Seconds since 1970; 0: not chosen. */
  from: number;
  to: number;
  /** Of stacks: cpu, blocked, runqueue, device (calls), kernel (GPU time), mapped, …. */
  kind: string;
  search: string;
  /** Names of frames from the root to the one that is zoomed to. */
  focus: readonly string[];
  /** Whether the flame graph has callees as roots. */
  invert: boolean;
  /** Frames that are left out (`Hide` of flame.ts). */
  hide: string;
  /** How stacks are shown. */
  shape: (typeof SHAPES)[number];
  group: Group;
  /** The function that is shown between its callers and callees, by its label. */
  fn: string;
  /** Key of the chosen cause of a verdict. */
  cause: string;
  /** Process whose stacks are shown; '' all. */
  pid: string;
  /** Whose ranks are shown; '' the job with most of them. In a comparison: whose stacks. */
  job: string;
  measure: Measure;
  /** The id of the one that the fleet view shows; '' the newest. */
  release: string;
  /** What the tables of owners and jobs, and a job's view, name their rows by; '' the view's usual kind. */
  by: OwnerKind | "";
  /** Which one a job's view is about. */
  id: string;
  /** Whose jobs are listed, and what kind of owner that is; '' all. */
  owner: string;
  ownerBy: OwnerKind | "";
  /** What the overview lists. */
  list: (typeof LISTS)[number];
  /** The column that the overview is sorted by (`views/sorting.tsx`); '' what is wrong first. */
  sort: string;
  /** What a comparison compares with; '' and 0: the same node and process, the time just before. */
  node2: string;
  pid2: string;
  job2: string;
  from2: number;
  to2: number;
  /** Seconds that `from` and `to` follow the present by; 0: they stand still. */
  live: number;
  /** Of the timeline: seconds since 1970; 0: the whole range. */
  left: number;
  right: number;
}

export const START: Place = {
  view: "overview", node: "", from: 0, to: 0, kind: "cpu", search: "", focus: [], invert: false,
  hide: "", shape: "graph", group: "", fn: "", cause: "", pid: "", live: 0, left: 0, right: 0,
  job: "", measure: "late", release: "", by: "", id: "", owner: "", ownerBy: "", list: "nodes", sort: "",
  node2: "", pid2: "", job2: "", from2: 0, to2: 0,
};

const TEXTS = ["node", "kind", "search", "hide", "fn", "cause", "pid", "job", "release", "id", "owner", "sort", "node2", "pid2", "job2"] as const;
const TIMES = ["from", "to", "live", "left", "right", "from2", "to2"] as const;
const DAY_S = 86_400;

export function parse(query: string): Place {
  const given = new URLSearchParams(query);
  const one = <T extends string>(name: string, known: readonly T[], otherwise: T): T => known.find((value) => value === given.get(name)) ?? otherwise;
  const place: Place = {
    ...START, view: one("view", VIEWS, "overview"), shape: one("shape", SHAPES, "graph"), measure: one("measure", MEASURES, "late"),
    group: one("group", GROUPS, ""), by: one("by", OWNER_KINDS, "" as OwnerKind), ownerBy: one("ownerBy", OWNER_KINDS, "" as OwnerKind),
    list: one("list", LISTS, "nodes"), focus: given.getAll("focus"), invert: given.get("invert") === "1",
  };
  for (const name of TEXTS) place[name] = given.get(name) ?? START[name];
  for (const name of TIMES) {
    const value = Number(given.get(name) ?? 0);
    place[name] = Number.isFinite(value) && value > 0 && value < 9e9 ? value : 0;
  }
  place.live = Math.min(DAY_S, place.live);
  return place;
}

export function format(place: Place): string {
  const query = new URLSearchParams();
  const names: readonly (keyof Place)[] = ["view", ...TEXTS, ...TIMES, "focus", "invert", "shape", "group", "measure", "by", "ownerBy", "list"];
  for (const name of names) {
    const value = place[name];
    if (value === START[name]) continue;
    if (typeof value === "number") query.append(name, String(Math.round(value * 1e6) / 1e6));
    else if (typeof value === "boolean") query.append(name, "1");
    else if (typeof value === "string") query.append(name, value);
    else for (const text of value) query.append(name, text);
  }
  const text = query.toString();
  return text ? `?${text}` : "";
}
