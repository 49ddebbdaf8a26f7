// SPDX-License-Identifier: Apache-2.0
import { lackText } from "../src/api";
import { describe, expect, it } from "vitest";
import { useText, type Chart } from "../src/charts";
import { states, type NodeState } from "../src/devices";
import { dated, energies, gpuTimes, moreText, period, timeOf, written } from "../src/numbers";
import { openedJob } from "../src/ranks";
import { format, parse, START } from "../src/url";
import { thresholdOf, valueText } from "../src/views/alerts";
import { causesOf, isDuring, nobodyText, noticedText } from "../src/views/incidents";
import { missingOf, observedIn, reasonOf } from "../src/views/job";
import { openingAt } from "../src/views/opening";
import { leftOutText, numberText, unnamedLast } from "../src/views/owners";
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

  it("offer no more rows than there are", () => {
    expect([moreText(37, 500), moreText(500, 500), moreText(1200, 500)]).toEqual(["Show 37 more", "Show 500 more", "Show 500 more of 1,200"]);
  });

  it("have figures of the owners that are listed, and name these", () => {
    expect([numberText(7, 0), numberText(1000, 234)]).toEqual(["7", "1,000 of 1,234, with the most waste"]);
    expect([leftOutText(0, "Job"), leftOutText(1, "Job"), leftOutText(234, "User")]).toEqual([[], ["1 job with less waste"], ["234 users with less waste"]]);
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
    expect([text(false), text(true)]).toEqual(["silent for 120 min", "silent for the last 120 min"]);
  });
});

describe("use of GPUs without dips", () => {
  const chart = (busy: number, sm?: number): Chart => ({
    title: "GPU use", unit: "%", percent: true, top: 1, stepped: false,
    lines: [{ label: "busy", times: [0, 1], values: [busy, busy] }, ...(sm === undefined ? [] : [{ label: "SM active", times: [0], values: [sm] }])],
  });

  it("is called low where it is", () => {
    expect(useText(chart(0.3, 0.01))).toBe("GPU use was low throughout: 30.0 % busy, 1.0 % SM active on average.");
    expect(useText(chart(1, 0.01))).toContain("low throughout");
    expect(useText(chart(0.9))).toBe("GPU use does not dip here: 90.0 % busy on average.");
    expect(useText(undefined)).toBe("");
  });
});

describe("alerts", () => {
  it("have values with their unit, and the comparison of their rule", () => {
    expect([valueText(0.31708, "1"), valueText(2.5e9, "ns"), valueText(81.26, "°C"), valueText(8e10, "By"), valueText(3, "")]).toEqual(["31.7 %", "2.50 s", "81.3 °C", "80.0 GB", "3"]);
    expect(thresholdOf({ comparison: "below", threshold: 0.5, unit: "", series: "hw.gpu.utilization" })).toBe("< 50.0 %");
    expect(thresholdOf({ comparison: "above", threshold: 300, unit: "", series: "hw.power" })).toBe("> 300 W");
  });
});

describe("incidents", () => {
  const incident = (cause: string, change: string | null = null) => ({ verdict: { cause, change } });

  it("are counted by cause, the most frequent first", () => {
    expect(causesOf([incident("cpu-quota"), incident("disk"), incident("cpu-quota"), incident("", "more_work")])).toEqual([["cpu quota", 2], ["disk", 1], ["no fault: more work", 1]]);
  });

  it("are of a time that they overlap", () => {
    const one = { began_ns: 10e9, explained_ns: 12e9 };
    expect([isDuring(one, 0, 0), isDuring(one, 11, 20), isDuring(one, 5, 10), isDuring(one, 13, 20)]).toEqual([true, true, false, false]);
  });
});

describe("what ranks wait for", () => {
  it("is written once where it is not known", () => {
    const unknown = { text: "not known: too few ranks", missing: ["too few ranks", "2 are left out"] };
    expect([reasonOf(unknown), missingOf(unknown)]).toEqual(["Too few ranks.", ["2 are left out"]]);
    expect(reasonOf({ text: "slow link: between a and b" })).toBe("slow link: between a and b");
  });
});

describe("where a view opens", () => {
  const NOW = Date.UTC(2026, 10, 26) / 1000;
  /** The opening where one node sent chunks that began at these times, each a second long; and how often it was asked. */
  const opened = async (...begins: readonly number[]) => {
    const asked: number[] = [];
    const opening = await openingAt(NOW, async (from) => {
      asked.push(from);
      const found = begins.filter((begin) => begin >= from && begin <= NOW);
      return found.length ? [{ last_ns: (Math.max(...found) + 1) * 1e9 }] : [];
    });
    return { opening, asked: asked.length };
  };

  it("is the shortest offered time up to the present that has data", async () => {
    for (const [ago, length, asked] of [[5, 900, 1], [900, 900, 1], [901, 3600, 2], [86_000, 86_400, 4], [2 * 86_400, 604_800, 5]] as const) {
      expect(await opened(1, NOW - ago)).toEqual({ opening: { from: NOW - length, to: NOW, isPast: false }, asked });
    }
  });

  it("is the day up to the newest data where all are older, and none where there are none", async () => {
    const last = NOW - 30 * 86_400;
    expect((await opened(last - 9e5, last)).opening).toEqual({ from: last + 2 - 86_400, to: last + 2, isPast: true });
    expect((await opened()).opening).toBeNull();
  });

  it("of ranks is the job with ranks to compare that was observed last", () => {
    const one = (job: string, ranks: number) => ({ job, ranks, first_ns: 1, last_ns: 2, start_ns: 1 });
    expect(openedJob([one("", 9), one("alone", 1), one("b", 2), one("c", 8)])?.job).toBe("b");
    expect(openedJob([one("", 9), one("alone", 1)])?.job).toBe("");
    expect(openedJob([])).toBeUndefined();
  });

  it("of a job's ranks is the time in which they were timed", () => {
    expect(observedIn({ start_ns: 5e9, end_ns: 17.5e9 })).toEqual({ from: 5, to: 17.5 });
    expect([observedIn(undefined), observedIn({ start_ns: 0, end_ns: 0 })]).toEqual([{}, {}]);
  });
});

describe("labels of an axis", () => {
  it("have the day where its ends are of two days", () => {
    const at = Date.UTC(2026, 10, 23, 8, 35, 30) / 1000;
    expect([dated(at, at, at + 12), dated(at, at, at + 0.5, 0.1)]).toEqual(["08:35:30", "08:35:30.0"]);
    expect([dated(at, at, at + 7 * 86_400), dated(at + 7 * 86_400, at, at + 7 * 86_400)]).toEqual(["11-23 08:35", "11-30 08:35"]);
  });
});

describe("an incident", () => {
  it("has how it was noticed in words", () => {
    const one = { began_ns: 1e9, noticed_ns: 1.251e9, explained_ns: 2.551e9 };
    expect(noticedText({ ...one, noticed_by: ["ready"] })).toBe("Noticed 251 ms after it began, because its threads were ready to run but waited longer for a free CPU; explained 1.30 s later.");
    expect(noticedText({ ...one, noticed_by: ["lock", "new-sign"] })).toContain("because its threads waited longer for a lock and it changed: new sign;");
    expect(noticedText({ ...one, noticed_by: [] })).toBe("Noticed 251 ms after it began; explained 1.30 s later.");
  });

  it("has where nobody did it", () => {
    expect(["cpu-quota", "lock"].map(nobodyText)).toEqual(["Nobody else: its own limit", "Offender: none found"]);
  });
});

describe("answers", () => {
  it("name what they have no room for", () => {
    expect(lackText(0, 0)).toBe("");
    expect(lackText(12, 0)).toBe("12 rows are left out, for which an answer has no room. Choose a shorter time or one node.");
    expect(lackText(12, 2)).toMatch(/^12 rows .* 2 damaged files are left out\.$/);
  });
});
