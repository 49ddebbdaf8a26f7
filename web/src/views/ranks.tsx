// SPDX-License-Identifier: Apache-2.0
// Ranks of a job: which is late, at work or waiting in collectives, by step or by time.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { NodesAnswer, RanksAnswer } from "../answers";
import { css } from "../draw/colours";
import { Live, useLive } from "../live";
import { clock, duration, percent } from "../numbers";
import { Answer, Empty, Meter, Tooltip } from "../parts";
import { coloursOf, gridOf, jobsOf, LEVELS, ROW_HEIGHT, rowsOf, type Cell, type Grid, type Rank, type Summary } from "../ranks";
import { useAnswer, useApp } from "../state";
import type { Measure } from "../url";
import { Boxes } from "./canvas";
import { TimeTools } from "./time";

const MEASURES: readonly [Measure, string, string][] = [
  ["late", "Late", "time that the other ranks spent in collectives beyond this one's: they waited for it"],
  ["work", "At work", "time in kernels and copies that are no collectives"],
  ["wait", "In collectives", "time in collectives: waiting for other ranks, and exchanging data with them"],
];
/** The length of the time shown, up to the last data, where none is chosen. */
const SPAN_S = 60;
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
  const isChosen = Boolean(place.from && place.to > place.from);
  const known = useAnswer<NodesAnswer>(isChosen ? null : "nodes", { from: 1, node: place.node });
  const last = Math.max(0, ...(known.answer ?? []).map((row) => row.last_ns / 1e9));
  const to = isChosen ? place.to : last && Math.ceil(last);
  const from = isChosen ? place.from : to - SPAN_S;
  const job = place.job === NO_JOB ? "" : place.job;
  const asked = useAnswer<RanksAnswer>(to ? "ranks" : null, { from, to, node: place.node, job, points: POINTS });
  if (!to) {
    return <Answer asked={known} loading="Asking when something was sent…">
      {() => <Empty title="No node has sent anything yet">Ranks are shown once their nodes send what runs on their devices: <code>sudo sonde agent --server {location.origin}</code></Empty>}
    </Answer>;
  }
  return (
    <>
      <div class="tools"><h1>Ranks</h1><TimeTools from={from} to={to} /></div>
      <Answer asked={asked} loading="Asking for the ranks…">{(answer) => <Ranks answer={answer} />}</Answer>
    </>
  );
}

function nameOf(rank: Rank, number: number): string {
  return `${number} · ${rank.node} GPU${rank.device}`;
}

function Ranks({ answer }: { answer: RanksAnswer }): preact.JSX.Element {
  const { place, go } = useApp();
  const jobs = useMemo(() => jobsOf(answer), [answer]);
  const job = (jobs.find((one) => (one.job || NO_JOB) === place.job) ?? jobs[0])?.job ?? null;
  const grid = useMemo(() => gridOf(answer, job), [answer, job]);
  if (!answer.ranks.length) {
    return <Empty title="No run on a device was timed here">Choose a longer or another time. Ranks are processes that work on devices: their nodes need an agent that times runs there.</Empty>;
  }
  const word = answer.by === "steps" ? "step" : "part of the time";
  const latest = [...grid.summaries].sort((a, b) => b.late - a.late)[0];
  return (
    <div class="stack">
      <section class="panel" aria-label="Heat map of ranks">
        <div class="tools">
          <label>Job <select class="broad" value={job || NO_JOB} onChange={(event) => go({ job: event.currentTarget.value === OTHERS ? "" : event.currentTarget.value })}>
            {place.job && place.job !== NO_JOB && <option value={OTHERS}>all jobs of this time</option>}
            {jobs.map((one) => <option value={one.job || NO_JOB}>{one.job || "no job named"} ({one.ranks})</option>)}</select></label>
          <div class="segments" role="group" aria-label="What is shown">
            {MEASURES.map(([measure, name, about]) => <button aria-pressed={place.measure === measure} title={about} onClick={() => go({ measure })}>{name}</button>)}
          </div>
          <LatestRank latest={latest} grid={grid} word={word} isKnown={answer.collectives > 0} />
        </div>
        <Map grid={grid} isSteps={answer.by === "steps"} />
      </section>
      <Table grid={grid} word={word} isKnown={answer.collectives > 0 && grid.ranks.length > 1} />
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
  const rows = useMemo(() => rowsOf(grid, place.measure, palette.lane), [grid, place.measure, palette]);
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
            {grid.ranks.map((rank, number) => <div style={{ top: `${number * ROW_HEIGHT}px` }} title={`${nameOf(rank, number)}: ${rank.comm} (${rank.pid})`}>{nameOf(rank, number)}</div>)}
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
        <span class="scale" aria-hidden="true">{[0, 4, 8, 12, LEVELS - 1].map((level) => <i style={{ background: css(colours[level]!) }} />)}</span>
        <span>{name}: from none of the {isSteps ? "step" : "time"} to {place.measure === "late" ? "half of it" : "all of it"}; no colour: nothing was timed there</span>
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
  return <p class="quiet cell-line" role="status">{useLive(cellLine)}</p>;
}

function Axis({ grid, right }: { grid: Grid; right: number }): preact.JSX.Element {
  const origin = grid.originNs / 1e9;
  const step = right / 5e9;
  return <div class="axis" aria-hidden="true">{[0, 1, 2, 3, 4].map((i) => <span>{clock(origin + i * step, Math.max(1e-3, step / 5))}</span>)}</div>;
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
      <p>{rank.comm} ({rank.pid})</p>
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

function Table({ grid, word, isKnown }: { grid: Grid; word: string; isKnown: boolean }): preact.JSX.Element {
  const open = useOpen(grid);
  const [most, setMost] = useState(FIRST_ROWS);
  const sorted = useMemo(() => [...grid.summaries].sort((a, b) => b.late - a.late || a.rank - b.rank), [grid]);
  return (
    <div class="sheet" tabIndex={0} role="region" aria-label="Ranks">
      <table>
        <thead><tr><th class="number">Rank</th><th>Node</th><th>Process</th><th class="number">Late by</th><th class="number">Late in</th><th title={OF_WHAT}>At work</th><th title={OF_WHAT}>In collectives</th><th>Its worst {word}</th></tr></thead>
        <tbody>{sorted.slice(0, most).map((sum) => {
          const rank = grid.ranks[sum.rank]!;
          const worst = grid.cells[sum.worst];
          return (
            <tr>
              <td class="number">{sum.rank}</td><td>{rank.node} <small>GPU{rank.device}</small></td><td title={rank.comm}>{rank.comm} <small>{rank.pid}{rank.user && ` · ${rank.user}`}</small></td>
              <td class="number">{isKnown ? duration(sum.late) : "–"}</td><td class="number">{isKnown ? `${sum.lateIn} of ${sum.timed}` : "–"}</td>
              <td><Meter share={sum.work / (sum.length || 1)} text={percent(sum.work / (sum.length || 1))} /></td>
              <td><Meter share={sum.collective / (sum.length || 1)} text={percent(sum.collective / (sum.length || 1))} /></td>
              <td>{worst && <button class="link open" onClick={() => open(worst)}>Open {clock((grid.originNs + grid.start[worst.slot]!) / 1e9)}</button>}</td>
            </tr>
          );
        })}</tbody>
      </table>
      <p class="quiet note">At work and in collectives: {OF_WHAT}.</p>
      {sorted.length > most && <button class="more" onClick={() => setMost(most + 500)}>Show {sorted.length - most} more</button>}
    </div>
  );
}
