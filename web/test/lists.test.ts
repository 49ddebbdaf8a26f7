// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import { useText, type Chart } from "../src/charts";
import { states, type NodeState } from "../src/devices";
import { energies, gpuTimes, period, timeOf, written } from "../src/numbers";
import { format, parse, START } from "../src/url";
import { missingOf, reasonOf } from "../src/views/job";
import { unnamedLast } from "../src/views/owners";
import { inOrder } from "../src/views/sorting";

describe("times", () => {
  const at = Date.UTC(2026, 10, 23, 8, 35, 30) / 1000;

  it("are written in UTC, with the second day where it is another", () => {
    expect(period(at, at + 12)).toBe("2026-11-23 08:35:30 – 08:35:42 UTC");
    expect(period(at, at + 86_400)).toBe("2026-11-23 08:35:30 – 2026-11-24 08:35:30 UTC");
  });

  it("are read as they are written", () => {
    for (const seconds of [at, at + 0.5, at + 59.999]) expect(timeOf(written(seconds))).toBeCloseTo(seconds, 6);
    expect(timeOf(" 2026-11-23T08:35Z ")).toBe(at - 30);
    expect(["", "now", "2026-02-31 10:00", "2026-11-23 25:00", "2026-11-23 08:35.5", "11/23/2026, 08:35:35.801 AM"].map(timeOf)).toEqual(Array(6).fill(NaN));
  });
});

describe("columns", () => {
  it("have one unit, which fits their largest value", () => {
    expect([488 / 3600, 96 / 3600, 1e-6, 0].map(gpuTimes([488 / 3600, 96 / 3600]))).toEqual(["488 s", "96.0 s", "< 0.01 s", "0 s"]);
    expect([5, 0.01].map(gpuTimes([5]))).toEqual(["5.00 h", "0.01 h"]);
    expect([244_000, 48_000, 10].map(energies([244_000, null]))).toEqual(["67.8 Wh", "13.3 Wh", "< 0.01 Wh"]);
  });

  it("sort rows in both directions, those without a value last", () => {
    const rows = [{ n: 2 }, { n: null }, { n: 10 }, { n: 7 }];
    const keys = { n: (row: { n: number | null }) => row.n, name: (row: { n: number | null }) => `node-${row.n ?? "x"}` };
    expect(inOrder(rows, "n", keys).map((row) => row.n)).toEqual([10, 7, 2, null]);
    expect(inOrder(rows, "n.up", keys).map((row) => row.n)).toEqual([2, 7, 10, null]);
    expect(inOrder(rows, "name", keys).map((row) => row.n)).toEqual([2, 7, 10, null]);
    expect([inOrder(rows, "", keys), inOrder(rows, "constructor", keys)]).toEqual([rows, rows]);
    expect(parse(format({ ...START, sort: "wasted.up" })).sort).toBe("wasted.up");
  });

  it("have the processes of no owner last", () => {
    expect(unnamedLast([{ owner: "" }, { owner: "b" }, { owner: "a" }]).map((row) => row.owner)).toEqual(["b", "a", ""]);
  });
});

describe("nodes", () => {
  const node = (name: string, lastS: number) => ({ node: name, chunks: 1, sample_rows: 1, first_ns: (lastS - 10) * 1e9, last_ns: lastS * 1e9, size_bytes: 1, about: "" });
  const holder = (name: string, wasted_h: number) => ({ node: name, owner: "o", held_h: 9, wasted_h });
  const incident = (name: string) => ({ node: name, began_ns: 995e9, verdict: { cause: "cpu-quota", change: null } });

  it("stand by severity, then by waste", () => {
    const found = states([node("calm", 1000), node("wastes", 1000), node("bad", 1000), node("worse", 1000)], null, [], 1001,
      { holders: [holder("wastes", 3), holder("bad", 1), holder("worse", 2)], incidents: [incident("bad"), incident("worse")] });
    expect(found.map((one: NodeState) => one.node)).toEqual(["worse", "bad", "wastes", "calm"]);
  });

  it("are silent up to the end of a time that is over", () => {
    const text = (isPast: boolean) => states([node("n", 1000)], null, [], 8200, { holders: [], incidents: [], isPast })[0]!.troubles[0]!.text;
    expect([text(false), text(true)]).toEqual(["nothing sent for 120 min", "nothing sent in the last 120 min of this time"]);
  });
});

describe("use of GPUs without dips", () => {
  const chart = (busy: number, sm?: number): Chart => ({
    title: "GPU use", unit: "%", percent: true, top: 1, stepped: false,
    lines: [{ label: "busy", times: [0, 1], values: [busy, busy] }, ...(sm === undefined ? [] : [{ label: "SM active", times: [0], values: [sm] }])],
  });

  it("is said to be low where it is", () => {
    expect(useText(chart(0.3, 0.01))).toBe("GPU use was low throughout: 30.0 % busy, 1.0 % SM active on average.");
    expect(useText(chart(1, 0.01))).toContain("low throughout");
    expect(useText(chart(0.9))).toBe("GPU use does not dip here: 90.0 % busy on average.");
    expect(useText(undefined)).toBe("");
  });
});

describe("what ranks wait for", () => {
  it("is said once where it is not known", () => {
    const unknown = { text: "not known: too few ranks", missing: ["too few ranks", "2 are left out"] };
    expect([reasonOf(unknown), missingOf(unknown)]).toEqual(["Too few ranks.", ["2 are left out"]]);
    expect(reasonOf({ text: "slow link: between a and b" })).toBe("slow link: between a and b");
  });
});
