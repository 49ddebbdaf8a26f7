// SPDX-License-Identifier: Apache-2.0
// What is shown, as the address of the page: back, reload and a copied link restore it.

export type View = "overview" | "node" | "range" | "compare" | "ranks" | "memory" | "fleet" | "incidents" | "file";
const VIEWS: readonly View[] = ["overview", "node", "range", "compare", "ranks", "memory", "fleet", "incidents", "file"];
/** What a heat map of ranks shows. */
export type Measure = "late" | "work" | "wait";

export interface Place {
  view: View;
  node: string;
  /** Seconds since 1970; 0: not chosen. */
  from: number;
  to: number;
  kind: string;
  search: string;
  /** Names of frames from the root to the one that is zoomed to. */
  focus: readonly string[];
  invert: boolean;
  hide: string;
  shape: "graph" | "table" | "kernels";
  cause: string;
  /** Process whose stacks are shown; '' all. */
  pid: string;
  /** Whose ranks are shown; '' the job with most. */
  job: string;
  measure: Measure;
  /** Of the fleet view; '' the newest. */
  release: string;
  /** Seconds that `from` and `to` follow the present by; 0: they stand still. */
  live: number;
  /** Of the timeline: seconds since 1970; 0: the whole range. */
  left: number;
  right: number;
}

export const START: Place = {
  view: "overview", node: "", from: 0, to: 0, kind: "cpu", search: "", focus: [], invert: false,
  hide: "", shape: "graph", cause: "", pid: "", live: 0, left: 0, right: 0,
  job: "", measure: "late", release: "",
};

export function parse(query: string): Place {
  const given = new URLSearchParams(query);
  const text = (name: string, otherwise = ""): string => given.get(name) ?? otherwise;
  const seconds = (name: string): number => {
    const value = Number(text(name, "0"));
    return Number.isFinite(value) && value > 0 && value < 9e9 ? value : 0;
  };
  const view = VIEWS.find((one) => one === text("view")) ?? "overview";
  const shape = (["graph", "table", "kernels"] as const).find((one) => one === text("shape")) ?? "graph";
  const measure = (["late", "work", "wait"] as const).find((one) => one === text("measure")) ?? "late";
  return {
    job: text("job"), measure, release: text("release"),
    view, shape, node: text("node"), from: seconds("from"), to: seconds("to"), kind: text("kind", "cpu"),
    search: text("search"), focus: given.getAll("focus"), invert: text("invert") === "1",
    hide: text("hide"), cause: text("cause"), pid: text("pid"), live: Math.min(86400, seconds("live")), left: seconds("left"), right: seconds("right"),
  };
}

export function format(place: Place): string {
  const query = new URLSearchParams();
  const put = (name: string, value: string, otherwise = ""): void => {
    if (value !== otherwise) query.append(name, value);
  };
  const time = (value: number): string => (value ? String(Math.round(value * 1e6) / 1e6) : "");
  put("view", place.view, "overview");
  put("node", place.node);
  put("from", time(place.from));
  put("to", time(place.to));
  put("kind", place.kind, "cpu");
  put("search", place.search);
  for (const one of place.focus) query.append("focus", one);
  put("invert", place.invert ? "1" : "");
  put("hide", place.hide);
  put("shape", place.shape, "graph");
  put("cause", place.cause);
  put("pid", place.pid);
  put("job", place.job);
  put("measure", place.measure, "late");
  put("release", place.release);
  put("live", time(place.live));
  put("left", time(place.left));
  put("right", time(place.right));
  const text = query.toString();
  return text ? `?${text}` : "";
}
