// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import { paletteOf } from "../src/draw/colours";
import type { RanksAnswer } from "../src/answers";
import { coloursOf, fullShare, gridOf, jobsOf, levelOf, LEVELS, rowsOf } from "../src/ranks";

const rank = (node: string, job = "a") => ({ node, pid: 1, start_ns: 0, device: 0, ns: 1, comm: "<b>", command: "", job, user: "", pod: "", container: "", all_timed: true });

/** Collective time by [rank][slot] in ms; null: not timed. Slots of 100 ms; what is left of them is work. */
function answerOf(waits: readonly (readonly (number | null)[])[], jobs: readonly string[] = []): RanksAnswer {
  const cells: RanksAnswer["cells"] = { rank: [], slot: [], work_ns: [], collective_ns: [], runs: [] };
  waits.forEach((row, number) => row.forEach((ms, slot) => {
    if (ms === null) return;
    cells.rank.push(number);
    cells.slot.push(slot);
    cells.collective_ns.push(ms * 1e6);
    cells.work_ns.push((100 - ms) * 1e6);
    cells.runs.push(1);
  }));
  const count = waits[0]!.length;
  const start_ns = Array.from({ length: count }, (_, slot) => 1e18 + slot * 1e8);
  return { by: "time", slots: { start_ns, end_ns: start_ns.map((time) => time + 1e8) }, ranks: waits.map((_, i) => rank(`n${i}`, jobs[i] ?? "a")), cells, collectives: 1, left_out: 0 };
}

describe("ranks", () => {
  it("are late where the others wait for them", () => {
    const grid = gridOf(answerOf([[50, 50, 4], [10, 50, 50], [50, 50, 50], [50, 50, 50]]), null);
    expect(grid.summaries.map((sum) => [sum.lateIn, Math.round(sum.late / 1e6)])).toEqual([[1, 46], [1, 40], [0, 0], [0, 0]]);
    expect(grid.cells[grid.summaries[1]!.worst]!.slot).toBe(0);
  });

  it("are not late when nothing is exchanged, alone, or within the noise", () => {
    for (const waits of [[[0, 0], [0, 0]], [[50, 10]], [[50, 49], [49, 50]]]) {
      expect(gridOf(answerOf(waits), null).summaries.every((sum) => sum.lateIn === 0)).toBe(true);
    }
  });

  it("are not known where little of long slots was timed", () => {
    const answer = answerOf([[50, 50], [50, 10], [50, 50]]);
    expect(gridOf(answer, null).isCoarse).toBe(false);
    const week = answer.slots.start_ns.map((time, slot) => time + slot * 5e12);
    const long = { ...answer, slots: { start_ns: week, end_ns: week.map((time) => time + 5e12) } };
    const grid = gridOf(long, null);
    expect([grid.isCoarse, grid.summaries.some((sum) => sum.lateIn > 0)]).toEqual([true, false]);
  });

  it("of another job do not count", () => {
    const answer = answerOf([[50], [10], [90], [90], [90]], ["a", "a", "b", "b", "b"]);
    expect(jobsOf(answer)).toEqual([{ job: "b", ranks: 3 }, { job: "a", ranks: 2 }]);
    const grid = gridOf(answer, "a");
    expect(grid.ranks.map((one) => one.node)).toEqual(["n0", "n1"]);
    expect(grid.cells.map((cell) => Math.round(cell.late / 1e6))).toEqual([0, 40]);
  });

  it("have no box where nothing was timed, and darker ones for more", () => {
    const grid = gridOf(answerOf([[50, null, 50], [0, 50, 50]]), null);
    const rows = rowsOf(grid, "late", 0, 7);
    expect(rows.map((row) => [...row.start])).toEqual([[0, 2e8], [0, 1e8, 2e8]]);
    expect([...rows[1]!.sum]).toEqual([0, 1e8, 2e8, 3e8]);
    expect(levelOf(grid.cells.find((cell) => cell.late > 0)!, grid, "late")).toBe(LEVELS - 1);
    expect(levelOf(grid.cells[0]!, grid, "late")).toBe(0);
  });

  it("have the ground of the page for nothing, and a scale that ends where the colour is strongest", () => {
    for (const dark of [false, true]) for (const measure of ["late", "work", "wait"] as const) expect(coloursOf(measure, dark)[0]).toBe(paletteOf(dark).background);
    const grid = gridOf(answerOf([[50, null, 50], [0, 50, 50]]), null);
    const cell = { ...grid.cells[0]!, late: fullShare("late") * grid.end[0]!, work: fullShare("work") * grid.end[0]! };
    expect([levelOf(cell, grid, "late"), levelOf(cell, grid, "work")]).toEqual([LEVELS - 1, LEVELS - 1]);
  });

  it("differ in lightness alone, in one direction, for both themes", () => {
    const light = (colour: number): number => (colour & 255) * 0.2126 + ((colour >>> 8) & 255) * 0.7152 + ((colour >>> 16) & 255) * 0.0722;
    for (const dark of [false, true]) for (const measure of ["late", "work", "wait"] as const) {
      const found = [...coloursOf(measure, dark)].map(light);
      const sorted = [...found].sort((a, b) => (dark ? a - b : b - a));
      expect(found).toEqual(sorted);
      expect(Math.abs(found[0]! - found[LEVELS - 1]!)).toBeGreaterThan(60);
    }
  });
});
