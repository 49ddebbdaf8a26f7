// SPDX-License-Identifier: Apache-2.0
// Ranks of a job: which is late, at work or waiting in collectives, by step or by time.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { NodesAnswer, JobsAnswer, RanksAnswer } from "../answers";
import { css } from "../draw/colours";
import { Live, useLive } from "../live";
import { clock, count, dated, duration, percent, period } from "../numbers";
import { Answer, Empty, Meter, MoreRows, Tooltip } from "../parts";
import { coloursOf, fullShare, gridOf, jobsOf, LEVELS, openedJob, ROW_HEIGHT, rowsOf, type Cell, type Grid, type Rank, type RankJob, type Summary } from "../ranks";
import { programOf } from "../programs";
import { useAnswer, useApp } from "../state";
import type { Measure } from "../url";
import { Boxes } from "./canvas";
import { newestOf } from "./opening";
import { TimeTools } from "./time";

const MEASURES: readonly [Measure, string, string][] = [
  ["late", "Late", "time that the other ranks spent in collectives beyond this one's: they waited for it"],
  ["work", "At work", "time in kernels and copies that are no collectives"],
  ["wait", "In collectives", "time in collectives: waiting for other ranks, and exchanging data with them"],
];
/** Jobs that are listed: those of this time before the newest data; at most MAX_JOBS. */
const LISTED_S = 604_800;
const MAX_JOBS = 1000;
/** Columns of the heat map that are asked for, where no steps are known. */
const POINTS = 120;
/** Rows are kept by the second, so this much around a cell's time is shown, too. */
const AROUND_S = 1;
/** What shares of a rank are of. */
export const OF_WHAT = "shares of the time of those columns in which the rank was timed; runs of several streams add up";
/** Rows of the table at first. */
const FIRST_ROWS = 64;
/** In the address, in place of a job: processes of no job. */
const NO_JOB = "-";
/** In the list of jobs: ask for all of them again. */
const OTHERS = "*";

interface Hover { id: number; x: number; y: number }

export function RanksView(): preact.JSX.Element {
  const { place } = useApp();
  const isChosen = place.from > 0 && place.to > place.from;
  const nodes = useAnswer<NodesAnswer>("nodes", { from: 1, node: place.node });
  const newest = Math.ceil(newestOf(nodes.answer ?? []));
  const listed = useAnswer<JobsAnswer>(newest ? "jobs" : null, { from: newest - LISTED_S, to: newest + 1, node: place.node, limit: MAX_JOBS });
  const jobs = listed.answer ?? [];
  const opened = place.job ? jobs.find((one) => (one.job || NO_JOB) === place.job) : openedJob(jobs);
  const { from, to } = isChosen ? place : opened ? timeOf(opened) : { from: 0, to: 0 };
  const name = isChosen ? place.job : opened ? opened.job || NO_JOB : "";
  const asked = useAnswer<RanksAnswer>(to ? "ranks" : null, { from, to, node: place.node, job: name === NO_JOB ? "" : name, points: POINTS });
  if (isChosen || opened) {
    return (
      <>
        <div class="tools"><h1>Ranks</h1><TimeTools from={from} to={to} /></div>
        <Answer asked={asked} loading="Asking for the ranks…">{(answer) => <Ranks answer={answer} listed={jobs} name={name} />}</Answer>
      </>
    );
  }
  return (
    <>
      <div class="tools"><h1>Ranks</h1>{jobs.length > 0 && <JobSelect jobs={jobs} job={place.job} />}</div>
      {nodes.answer?.length === 0
        ? <Empty title="No node has sent anything yet">Ranks are shown once their nodes send what runs on their devices: <code>sudo sonde agent --server {location.origin}</code></Empty>
        : <Answer<unknown> asked={nodes.error ? nodes : listed} loading="Asking for jobs and their times…">{() => jobs.length
          ? <Empty title={`No run of job ${place.job} was timed in the last 7 days of data`}>Choose another job.</Empty>
          : <Empty title="No run on a device was timed in the last 7 days of data">Ranks are processes that work on devices: their nodes need an agent that times runs there.</Empty>}</Answer>}
    </>
  );
}

const timeOf = (job: RankJob): { from: number; to: number } => ({ from: job.start_ns / 1e9, to: job.last_ns / 1e9 });

/** Jobs by the time in which they were observed, and behind them those of the time shown, if they are not among these. */
function JobSelect({ jobs, others = [], job }: { jobs: readonly RankJob[]; others?: readonly { job: string; ranks: number }[]; job: string }): preact.JSX.Element {
  const { place, go } = useApp();
  const known = new Set(jobs.map((one) => one.job));
  const choose = (name: string): void => {
    if (name === OTHERS) return go({ job: "" });
    const chosen = jobs.find((one) => (one.job || NO_JOB) === name);
    go({ job: name, live: 0, left: 0, right: 0, ...(chosen ? timeOf(chosen) : {}) });
  };
  const nameOfJob = (name: string): string => name || "no job named";
  return (
    <label>Job <select class="broad" value={job} onChange={(event) => choose(event.currentTarget.value)}>
      {jobs.every((one) => (one.job || NO_JOB) !== job) && others.every((one) => (one.job || NO_JOB) !== job) && <option value={job}>{job || "choose one"}</option>}
      {others.length > 0 && place.from > 0 && place.job && place.job !== NO_JOB && <option value={OTHERS}>all jobs of this time</option>}
      {jobs.map((one) => <option value={one.job || NO_JOB}>{nameOfJob(one.job)}, {count(one.ranks, "rank")}, {period(one.first_ns / 1e9, one.last_ns / 1e9)}</option>)}
      {others.filter((one) => !known.has(one.job)).map((one) => <option value={one.job || NO_JOB}>{nameOfJob(one.job)}, {count(one.ranks, "rank")}, in this time</option>)}
    </select></label>
  );
}

function nameOf(rank: Rank, number: number): string {
  return `${number} · ${rank.node} GPU${rank.device}`;
}

function Ranks({ answer, listed, name }: { answer: RanksAnswer; listed: readonly RankJob[]; name: string }): preact.JSX.Element {
  const { place, go } = useApp();
  const jobs = useMemo(() => jobsOf(answer), [answer]);
  const job = (jobs.find((one) => (one.job || NO_JOB) === name) ?? jobs[0])?.job ?? null;
  const grid = useMemo(() => gridOf(answer, job), [answer, job]);
  if (!answer.ranks.length) {
    return <Empty title="No run on a device was timed here">{listed.length > 0 && <JobSelect jobs={listed} job={name} />} Choose a longer or another time. Ranks are processes that work on devices: their nodes need an agent that times runs there.</Empty>;
  }
  const word = answer.by === "steps" ? "step" : "part of the time";
  const latest = [...grid.summaries].sort((a, b) => b.late - a.late)[0];
  return (
    <div class="stack">
      <section class="panel" aria-label="Heat map of ranks">
        <div class="tools">
          <JobSelect jobs={listed} others={jobs} job={job || NO_JOB} />
          <div class="segments" role="group" aria-label="What is shown">
            {MEASURES.map(([measure, name, about]) => <button aria-pressed={place.measure === measure} title={about} onClick={() => go({ measure })}>{name}</button>)}
          </div>
          <LatestRank latest={latest} grid={grid} word={word} isKnown={answer.collectives > 0} />
        </div>
        <Map grid={grid} isSteps={answer.by === "steps"} />
      </section>
      <Table grid={grid} isKnown={answer.collectives > 0 && grid.ranks.length > 1} />
      {answer.left_out > 0 && <p class="quiet">{answer.left_out} more with less device time are not shown. Choose a node or a shorter time.</p>}
    </div>
  );
}

function LatestRank({ latest, grid, word, isKnown }: { latest: Summary | undefined; grid: Grid; word: string; isKnown: boolean }): preact.JSX.Element {
  if (grid.ranks.length < 2) return <span class="quiet">One rank: there is no other to wait for it.</span>;
  if (!isKnown) return <span class="quiet">No collective was timed: which rank is late is not known.</span>;
  if (!latest?.lateIn && grid.isCoarse) return <span class="quiet"><b>Too coarse to find a late rank:</b> little of each {word} was timed. Choose a shorter time, or one job.</span>;
  if (!latest || !latest.lateIn) return <span><b>No rank is late:</b> they spend the same time in collectives.</span>;
  return <span><b>Rank {latest.rank} is latest:</b> in {latest.lateIn} of {latest.timed} {word === "step" ? "steps" : "parts of the time"} the others waited for it, {duration(latest.late)} in all.</span>;
}

function useOpen(grid: Grid): (cell: Cell) => void {
  const { go } = useApp();
  return (cell) => {
    const rank = grid.ranks[cell.rank]!;
    const begin = (grid.originNs + grid.start[cell.slot]!) / 1e9;
    const end = (grid.originNs + grid.end[cell.slot]!) / 1e9;
    go({
      view: "range", node: rank.node, live: 0, from: begin - AROUND_S, to: end + AROUND_S, left: begin, right: end, pid: String(rank.pid),
      kind: "cpu", focus: [], search: "", cause: "",
    });
  };
}

function Map({ grid, isSteps }: { grid: Grid; isSteps: boolean }): preact.JSX.Element {
  const { place, palette } = useApp();
  const open = useOpen(grid);
  const scroller = useRef<HTMLDivElement>(null);
  const [hover] = useState(() => new Live<Hover | null>(null));
  const [cellLine] = useState(() => new Live<string>(""));
  const colours = useMemo(() => coloursOf(place.measure, palette.dark), [place.measure, palette]);
  const rows = useMemo(() => rowsOf(grid, place.measure, palette.lane, palette.hatch), [grid, place.measure, palette]);
  const height = grid.ranks.length * ROW_HEIGHT;
  const right = Math.max(1, ...grid.end);
  const shown = useMemo(() => ({
    rows, colours, height, left: 0, right, first: 0, last: right, palette, labelOf: () => "", isFaded: () => false,
  }), [rows, colours, height, right]);
  useEffect(() => hover.set(null), [grid]);
  const name = MEASURES.find(([measure]) => measure === place.measure)![1];
  return (
    <>
      <Axis grid={grid} right={right} />
      <div class="scroller ranks" ref={scroller} style={{ height: `${Math.min(height, 30 * ROW_HEIGHT) + 2}px` }}>
        <div class="spacer" style={{ height: `${height}px` }}>
          <div class="names" style={{ height: `${height}px` }}>
            {grid.ranks.map((rank, number) => <div style={{ top: `${number * ROW_HEIGHT}px` }} title={`${nameOf(rank, number)}: ${programOf(rank)} (${rank.pid})`}>{nameOf(rank, number)}</div>)}
          </div>
          <div class="canvas">
            <Boxes shown={shown} scroller={scroller} pans={false}
              label={`Heat map of ${grid.ranks.length} ranks by ${isSteps ? "step" : "time"}, showing ${name}. Arrow keys select a cell, Enter opens its node and time. The table below has the sums of each rank.`}
              events={{
                hover: (id, x, y) => hover.set(id < 0 ? null : { id, x, y }),
                click: (id) => { const cell = grid.cells[id]; if (cell) open(cell); },
                selected: (id) => cellLine.set(id < 0 ? "" : lineOf(grid, grid.cells[id]!, isSteps)),
              }} />
          </div>
        </div>
      </div>
      <CellLine cellLine={cellLine} />
      <div class="under">
        <span>{name}: 0 %</span>
        <span class="scale" aria-hidden="true">{[0, 4, 8, 12, LEVELS - 1].map((level) => <i style={{ background: css(colours[level]!) }} />)}</span>
        <span>{percent(fullShare(place.measure))} of the {isSteps ? "step" : "time"}{place.measure === "late" && " or more"}</span>
        <span><i class="hatched" />nothing was timed</span>
        <span class="quiet">Runs are timed in part: times are estimates. A click opens the node at that time.</span>
      </div>
      <Hovered hover={hover} grid={grid} isSteps={isSteps} />
    </>
  );
}

function lineOf(grid: Grid, cell: Cell, isSteps: boolean): string {
  const rank = grid.ranks[cell.rank]!;
  const what = isSteps ? `step ${cell.slot + 1}` : clock((grid.originNs + grid.start[cell.slot]!) / 1e9);
  return `Rank ${nameOf(rank, cell.rank)}, ${what}: at work ${duration(cell.work)}, in collectives ${duration(cell.collective)}, late by ${duration(cell.late)}`;
}

function CellLine({ cellLine }: { cellLine: Live<string> }): preact.JSX.Element {
  const line = useLive(cellLine);
  return <p class="quiet cell-line" role="status">{line || "Point at a cell, or select one by the arrow keys, for its numbers."}</p>;
}

function Axis({ grid, right }: { grid: Grid; right: number }): preact.JSX.Element {
  const origin = grid.originNs / 1e9;
  const step = right / 5e9;
  return <div class="axis" aria-hidden="true">{[0, 1, 2, 3, 4].map((i) => <span>{dated(origin + i * step, origin, origin + 5 * step, Math.max(1e-3, step / 5))}</span>)}</div>;
}

function Hovered({ hover, grid, isSteps }: { hover: Live<Hover | null>; grid: Grid; isSteps: boolean }): preact.JSX.Element | null {
  const at = useLive(hover);
  const cell = at ? grid.cells[at.id] : undefined;
  if (!at || !cell) return null;
  const rank = grid.ranks[cell.rank]!;
  const length = grid.end[cell.slot]! - grid.start[cell.slot]!;
  return (
    <Tooltip x={at.x} y={at.y}>
      <strong>{nameOf(rank, cell.rank)}</strong>
      <p>{programOf(rank)} ({rank.pid})</p>
      <p>{isSteps ? `Step ${cell.slot + 1}, ` : ""}{clock((grid.originNs + grid.start[cell.slot]!) / 1e9, 0.001)} for {duration(length)}</p>
      <dl>
        <dt>At work</dt><dd>{duration(cell.work)}, {percent(cell.work / length)}</dd>
        <dt>In collectives</dt><dd>{duration(cell.collective)}, {percent(cell.collective / length)}</dd>
        <dt>Late by</dt><dd>{duration(cell.late)}</dd>
        <dt>Timed runs</dt><dd>{cell.runs}</dd>
      </dl>
    </Tooltip>
  );
}

function Table({ grid, isKnown }: { grid: Grid; isKnown: boolean }): preact.JSX.Element {
  const open = useOpen(grid);
  const [most, setMost] = useState(FIRST_ROWS);
  const sorted = useMemo(() => [...grid.summaries].sort((a, b) => b.late - a.late || a.rank - b.rank), [grid]);
  return (
    <div class="sheet" tabIndex={0} role="region" aria-label="Ranks">
      <table>
        <thead><tr><th class="number">Rank</th><th>Node</th><th>Process</th><th class="number">Late by</th><th class="number">Late in</th><th title={OF_WHAT}>At work</th><th title={OF_WHAT}>In collectives</th><th>{isKnown ? "Latest at" : "Most at work at"}</th></tr></thead>
        <tbody>{sorted.slice(0, most).map((sum) => {
          const rank = grid.ranks[sum.rank]!;
          const worst = grid.cells[sum.worst];
          return (
            <tr>
              <td class="number">{sum.rank}</td><td>{rank.node} <small>GPU{rank.device}</small></td><td title={programOf(rank)}>{programOf(rank)} <small>{rank.pid}{rank.user && ` · ${rank.user}`}</small></td>
              <td class="number">{isKnown ? duration(sum.late) : "–"}</td><td class="number">{isKnown ? `${sum.lateIn} of ${sum.timed}` : "–"}</td>
              <td><Meter share={sum.work / (sum.length || 1)} text={percent(sum.work / (sum.length || 1))} /></td>
              <td><Meter share={sum.collective / (sum.length || 1)} text={percent(sum.collective / (sum.length || 1))} /></td>
              <td>{worst && !(isKnown && sum.lateIn === 0) ? <button class="link open" onClick={() => open(worst)}>{clock((grid.originNs + grid.start[worst.slot]!) / 1e9, 0.1)}</button> : <span class="quiet">–</span>}</td>
            </tr>
          );
        })}</tbody>
      </table>
      <p class="quiet note">At work and in collectives: {OF_WHAT}.</p>
      <MoreRows all={sorted.length} shown={most} show={setMost} />
    </div>
  );
}
