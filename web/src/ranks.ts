// SPDX-License-Identifier: Apache-2.0
// Ranks of a job by time: which is late, from time at work and time in collectives.

import type { JobsAnswer, RanksAnswer } from "./answers";
import type { Row } from "./draw/boxes";
import { abgr, paletteOf } from "./draw/colours";
import type { Measure } from "./url";

export type Rank = RanksAnswer["ranks"][number];

/** A cell of the heat map, one rank in one slot; times in ns. `late`: how much less time than the others it spent in
 * collectives; `work`: time in other kernels; `rank`: an index into `Grid.ranks`. */
export interface Cell { rank: number; slot: number; work: number; collective: number; late: number; runs: number }

/** Of a rank: sums over its cells, of `late` over those in which it was late; `lateIn`: how many these are of `timed`, all its
 * cells; `worst`: the index of one, -1: none. */
export interface Summary { rank: number; late: number; lateIn: number; timed: number; work: number; collective: number; length: number; worst: number }

export interface Grid {
  ranks: readonly Rank[];
  cells: readonly Cell[];
  summaries: readonly Summary[];
  /** Of slots: ns after the first one's begin. */
  start: readonly number[];
  end: readonly number[];
  originNs: number;
  /** The share of a slot from which on a rank counts as late in it. */
  leastShare: number;
  /** Whether the slots are so long, for what was timed in them, that a late rank would not be seen. */
  isCoarse: boolean;
}

const LEAST_SHARE = 0.05;
/** Slots longer than this are too coarse where devices were seen busy for less than this share of each of them. */
const LONG_NS = 5e9;
const SEEN_SHARE = 0.1;
/** Of colours. */
export const LEVELS = 16;
export const ROW_HEIGHT = 20;

export function jobsOf(answer: RanksAnswer): { job: string; ranks: number }[] {
  const count = new Map<string, number>();
  for (const { job } of answer.ranks) count.set(job, (count.get(job) ?? 0) + 1);
  return [...count].map(([job, ranks]) => ({ job, ranks })).sort((a, b) => b.ranks - a.ranks || (a.job < b.job ? -1 : 1));
}

export type RankJob = JobsAnswer[number];

/** The job that is shown where none is chosen: the latest with a name and ranks to compare, else the latest. */
export function openedJob(jobs: readonly RankJob[]): RankJob | undefined {
  return jobs.find((one) => one.job && one.ranks > 1) ?? jobs[0];
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/**
 * The ranks of one job; null: all.
 *
 * Ranks wait for one another in collectives, so who comes last spends the least time there. A rank is
 * late by what the others spent there more than it, by their median.
 */
export function gridOf(answer: RanksAnswer, job: string | null): Grid {
  const origin = answer.slots.start_ns[0] ?? 0;
  const chosen = answer.ranks.flatMap((rank, number) => (job === null || rank.job === job ? [number] : []));
  const indexOf = new Map(chosen.map((number, at) => [number, at]));
  const { cells } = answer;
  const found: Cell[] = [];
  const bySlot = new Map<number, Cell[]>();
  for (let i = 0; i < cells.rank.length; i++) {
    const rank = indexOf.get(cells.rank[i]!);
    if (rank === undefined) continue;
    const cell = { rank, slot: cells.slot[i]!, work: cells.work_ns[i]!, collective: cells.collective_ns[i]!, late: 0, runs: cells.runs[i]! };
    found.push(cell);
    const others = bySlot.get(cell.slot);
    if (others) others.push(cell);
    else bySlot.set(cell.slot, [cell]);
  }
  for (const together of bySlot.values()) {
    if (together.length < 2 || !together.some((cell) => cell.collective > 0)) continue;
    const times = together.map((cell) => cell.collective);
    const ofAll = median(times);
    // With few ranks a rank's own time would move the median towards it, so the others' median is taken.
    for (const cell of together) {
      const usual = together.length > 16 ? ofAll : median(times.filter((_, at) => together[at] !== cell));
      cell.late = Math.max(0, usual - cell.collective);
    }
  }
  const length = (slot: number): number => Math.max(1, answer.slots.end_ns[slot]! - answer.slots.start_ns[slot]!);
  const summaries = chosen.map((_, rank): Summary => ({ rank, late: 0, lateIn: 0, timed: 0, work: 0, collective: 0, length: 0, worst: -1 }));
  const worst = new Float64Array(chosen.length).fill(-1);
  found.forEach((cell, at) => {
    const sum = summaries[cell.rank]!;
    const isLate = cell.late >= LEAST_SHARE * length(cell.slot);
    sum.late += isLate ? cell.late : 0;
    sum.lateIn += isLate ? 1 : 0;
    sum.timed += 1;
    sum.work += cell.work;
    sum.collective += cell.collective;
    sum.length += length(cell.slot);
    // The cell that is latest; of those that are not late at all, where most was computed, a millionth as bad.
    const badness = cell.late || cell.work / 1e6;
    if (badness > worst[cell.rank]!) {
      worst[cell.rank] = badness;
      sum.worst = at;
    }
  });
  const longest = Math.max(0, ...found.map((cell) => length(cell.slot)));
  const seen = Math.max(0, ...summaries.map((sum) => (sum.work + sum.collective) / (sum.length || 1)));
  return {
    isCoarse: longest > LONG_NS && seen < SEEN_SHARE,
    ranks: chosen.map((number) => answer.ranks[number]!), cells: found, summaries, originNs: origin, leastShare: LEAST_SHARE,
    start: answer.slots.start_ns.map((time) => time - origin), end: answer.slots.end_ns.map((time) => time - origin),
  };
}

/** What a measure shows of a cell, in ns. */
export function amount(cell: Cell, measure: Measure): number {
  return measure === "late" ? cell.late : measure === "work" ? cell.work : cell.collective;
}

/** How dark a cell is: 0 to LEVELS - 1. Late ranks are seen from half a slot on at full strength. */
export function levelOf(cell: Cell, grid: Grid, measure: Measure): number {
  const length = Math.max(1, grid.end[cell.slot]! - grid.start[cell.slot]!);
  const share = amount(cell, measure) / length / fullShare(measure);
  return Math.max(0, Math.min(LEVELS - 1, Math.round(share * (LEVELS - 1))));
}

/** The share of a slot from which on a cell has the strongest colour. */
export const fullShare = (measure: Measure): number => (measure === "late" ? 0.5 : 1);

const HUES: Record<Measure, number> = { late: 22, work: 212, wait: 268 };

/** One hue from hardly seen to strong, so that only lightness has to be distinguished; nothing has the colour of the page. */
export function coloursOf(measure: Measure, dark: boolean): Uint32Array {
  const hue = HUES[measure];
  return Uint32Array.from({ length: LEVELS }, (_, level) => {
    if (level === 0) return paletteOf(dark).background;
    const share = level / (LEVELS - 1);
    return dark ? abgr(hue, 30 + 45 * share, 22 + 46 * share) : abgr(hue, 40 + 45 * share, 93 - 53 * share);
  });
}

/** Colours (draw/boxes.ts): `background` of time without a cell, `hatch` of lines where nothing was timed. */
export function rowsOf(grid: Grid, measure: Measure, background: number, hatch: number): Row[] {
  const byRank: number[][] = grid.ranks.map(() => []);
  grid.cells.forEach((cell, at) => byRank[cell.rank]!.push(at));
  return byRank.map((cells, rank) => {
    cells.sort((a, b) => grid.cells[a]!.slot - grid.cells[b]!.slot);
    const count = cells.length;
    const row: Row = {
      start: new Float64Array(count), end: new Float64Array(count), sum: new Float64Array(count + 1), colourIndex: new Uint32Array(count),
      id: Int32Array.from(cells), top: rank * ROW_HEIGHT, height: ROW_HEIGHT - 2, background, hatch,
    };
    cells.forEach((at, i) => {
      const cell = grid.cells[at]!;
      row.start[i] = grid.start[cell.slot]!;
      row.end[i] = grid.end[cell.slot]!;
      row.sum[i + 1] = row.sum[i]! + row.end[i]! - row.start[i]!;
      row.colourIndex[i] = levelOf(cell, grid, measure);
    });
    return row;
  });
}
