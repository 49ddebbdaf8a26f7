// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import { aligned, chartsOf, dips } from "../src/charts";
import { states } from "../src/devices";
import { duration, percent, scaled } from "../src/numbers";
import type { Columns } from "../src/packed";
import { layered } from "../src/lanes";
import { format, parse, START } from "../src/url";

/** Rows as an answer in columns has them. */
function columnsOf(rows: readonly Record<string, string | number>[]): Columns {
  const table: Columns = { rows: rows.length, numbers: {}, texts: {} };
  for (const name of Object.keys(rows[0] ?? {})) {
    const cells = rows.map((row) => row[name]!);
    if (typeof cells[0] === "number") table.numbers[name] = cells as number[];
    else {
      const values = [...new Set(cells as string[])];
      table.texts[name] = { values, index: cells.map((cell) => values.indexOf(cell as string)) };
    }
  }
  return table;
}

describe("address", () => {
  it("gives back every place", () => {
    const place = {
      ...START, view: "range" as const, node: "a&b=<c>", from: 1795312870.606, to: 1795312880.606123, kind: "kernel",
      search: "/x|y/", focus: ["main", "step  a.py:1 & more"], toggled: ["verdict", "process 7"], invert: true, hide: "python", shape: "table" as const,
      cause: "run queue", pid: "12", live: 900, job: "a<b>&", measure: "work" as const, release: "2026 & more", left: 1795312871.5, right: 1795312872.25,
    };
    expect(parse(format(place))).toEqual(place);
    expect(format(START)).toBe("");
  });

  it("takes nonsense for what is not chosen", () => {
    expect(parse("?view=evil&from=NaN&to=-3&shape=x&left=1e99&measure=x")).toEqual(START);
    expect(["ranks", "memory", "fleet"].map((view) => parse(`?view=${view}`).view)).toEqual(["ranks", "memory", "fleet"]);
  });
});

describe("numbers", () => {
  it("are as people read them", () => {
    expect([0, 999, 1500, 2.5e6, 61e9, 7.2e12].map(duration)).toEqual(["0", "999 ns", "1.50 µs", "2.50 ms", "61.0 s", "120 min"]);
    expect([0, 0.0004, 0.5, 1].map(percent)).toEqual(["0 %", "< 0.1 %", "50.0 %", "100 %"]);
    expect(scaled(1.5e9, "B")).toBe("1.50 GB");
  });
});

describe("dips", () => {
  const line = (values: number[]) => ({ label: "", times: values.map((_, i) => i), values });

  it("are where a series stays below half of what it usually reaches", () => {
    const found = dips(line([0.9, 0.9, 0.1, 0.1, 0.1, 0.9, 0.9, 0.3, 0.9, 0.9]));
    expect(found.map((dip) => [dip.from, dip.to, dip.lowest])).toEqual([[1, 5, 0.1], [6, 8, 0.3]]);
  });

  it("need a series that is used at all", () => {
    expect(dips(line([0, 0, 0, 0.01, 0]))).toEqual([]);
    expect(dips(line([0.9]))).toEqual([]);
  });
});

describe("nodes", () => {
  const node = (name: string, lastS: number) =>
    ({ node: name, chunks: 1, sample_rows: 1, first_ns: (lastS - 100) * 1e9, last_ns: lastS * 1e9, size_bytes: 1, about: "" });
  const of = (name: string, series: string, labels: object, mean: number) =>
    ({ node: name, series, labels: JSON.stringify({ "hw.id": "GPU-1", ...labels }), mean, least: mean, most: mean, last: mean });

  it("stand with what is wrong first, and show it", () => {
    const found = states([node("fine", 1000), node("idle", 1000), node("broken", 1000)], columnsOf([
      of("fine", "hw.gpu.utilization", { "hw.gpu.task": "general" }, 0.95),
      of("idle", "hw.gpu.utilization", { "hw.gpu.task": "general" }, 0.1),
      of("broken", "hw.errors", { "error.type": "uncorrected" }, 2),
    ]), [], 1001);
    expect(found.map((one) => one.node)).toEqual(["broken", "idle", "fine"]);
    expect(found[2]!.troubles).toEqual([]);
    expect(found[1]!.idleGpuS).toBeCloseTo(90);
  });

  it("survive labels that are no JSON", () => {
    expect(states([node("a", 1)], columnsOf([{ ...of("a", "hw.power", {}, 1), labels: "{<script>" }]), [], 2)[0]!.devices).toEqual([]);
  });
});

describe("charts and lanes", () => {
  it("name what was not recorded", () => {
    const { charts, missing } = chartsOf(columnsOf([{ node: "a", series: "hw.power", labels: '{"hw.id":"1"}', time_ns: 1e9, value: 1, least: 1, most: 1 }]));
    expect(charts.map((chart) => chart.title)).toEqual(["Power"]);
    expect(missing).toContain("NVLink");
  });

  it("never put overlapping spans on one layer", () => {
    const spans = [[0, 10], [2, 3], [3, 4], [10, 12], [11, 13]] as const;
    const start = Float64Array.from(spans, ([from]) => from);
    const end = Float64Array.from(spans, ([, to]) => to);
    const shown = (order: number[]) => layered(start, end, Int32Array.from(order)).map((layer) => [...layer].map((at) => spans[at]));
    const expected = [[[0, 10], [10, 12]], [[2, 3], [3, 4], [11, 13]]];
    expect(shown([0, 1, 2, 3, 4])).toEqual(expected);
    expect(shown([4, 2, 0, 3, 1])).toEqual(expected);
    expect(shown([0, 3])).toEqual([[[0, 10], [10, 12]]]);
    expect(shown([])).toEqual([]);
  });

  it("share an axis of time, and keep their own rates", () => {
    const line = (times: number[]) => ({ label: "", times, values: times });
    expect(aligned([line([1, 2]), line([1, 2])])).toEqual([[1, 2], [1, 2], [1, 2]]);
    expect(aligned([line([1, 3]), line([2])])).toEqual([[1, 2, 3], [1, undefined, 3], [undefined, 2, undefined]]);
  });
});
