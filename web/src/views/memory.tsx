// SPDX-License-Identifier: Apache-2.0
// Memory of a node: its series, what processes mapped and touched, and the stacks that did.

import { useEffect, useMemo, useState } from "preact/hooks";
import type { MemoryAnswer, NodesAnswer } from "../answers";
import type { Columns } from "../api";
import { chartsOf, MEMORY_GROUPS, seriesOf } from "../charts";
import { scaled } from "../numbers";
import { Answer, Empty } from "../parts";
import { programOf } from "../programs";
import { useAnswer, useApp } from "../state";
import { FlamePanel } from "./flame";
import { Plot } from "./plot";
import { TimeTools } from "./time";

const SERIES = seriesOf(MEMORY_GROUPS);
/** Of processes that are listed: those that mapped and touched most. */
const MAX_ROWS = 200;
const HOUR_S = 3600;

export function MemoryView(): preact.JSX.Element {
  const { place, go } = useApp();
  const isChosen = Boolean(place.from && place.to > place.from);
  const known = useAnswer<NodesAnswer>(place.node && !isChosen ? "nodes" : null, { from: 1, node: place.node });
  const row = known.answer?.[0];
  useEffect(() => {
    if (!row || isChosen) return;
    const to = Math.ceil(row.last_ns / 1e9) + 1;
    go({ from: Math.max(Math.floor(row.first_ns / 1e9) - 1, to - HOUR_S), to }, true);
  }, [row]);
  if (!place.node) return <Empty title="No node is chosen">Choose one on the overview, then “Memory”.</Empty>;
  if (!isChosen) {
    return <Answer asked={known} loading="Asking when this node sent something…">
      {(rows) => rows.length ? null : <Empty title={`${place.node} has sent nothing`}>Choose another node on the overview.</Empty>}
    </Answer>;
  }
  return (
    <>
      <div class="tools"><h1>Memory of {place.node}</h1><TimeTools from={place.from} to={place.to} />
        <button class="primary" onClick={() => go({ view: "range", live: 0, kind: "mapped", focus: [], search: "", cause: "" })}>Explain this time</button></div>
      <Charts />
      <div class="sides">
        <Processes />
        <section class="panel" aria-label="Stacks"><FlamePanel name={`${place.node}-${Math.round(place.from)}`} memory /></section>
      </div>
    </>
  );
}

function Charts(): preact.JSX.Element {
  const { place } = useApp();
  const asked = useAnswer<Columns>("charts", { node: place.node, from: place.from, to: place.to, series: SERIES, points: 1000, format: "columns" });
  return <Answer asked={asked} loading="Asking for the series…">{(table) => <Drawn table={table} />}</Answer>;
}

function Drawn({ table }: { table: Columns }): preact.JSX.Element {
  const { place, go } = useApp();
  const [at, setAt] = useState<number | null>(null);
  const { charts, missing } = useMemo(() => chartsOf(table, MEMORY_GROUPS), [table]);
  const open = (from: number, to: number): void => go({ from, to, live: 0, focus: [] });
  return (
    <div class="stack">
      {charts.length > 0 && <div class="charts panel">
        {charts.map((chart, number) => (
          <Plot key={chart.title} chart={chart} from={place.from} to={place.to} first={number === 0} last={number === charts.length - 1} at={at} setAt={setAt} open={open} />
        ))}
      </div>}
      <p class="quiet">{charts.length > 0 && "Drag over a chart to choose a time. "}{missing.length > 0 && `Not recorded here: ${missing.join(", ")}.`}</p>
    </div>
  );
}

function Processes(): preact.JSX.Element {
  const { place } = useApp();
  const asked = useAnswer<MemoryAnswer>("memory", { node: place.node, from: place.from, to: place.to, limit: MAX_ROWS + 1 });
  return (
    <section class="panel" aria-label="Processes">
      <div class="tools"><h2>Processes</h2><span class="quiet">what they did in this time; the name selects whose stacks are shown</span></div>
      <Answer asked={asked} loading="Asking for the processes…">{(rows) => rows.length ? <Table rows={rows.slice(0, MAX_ROWS)} isCut={rows.length > MAX_ROWS} /> : (
        <Empty title="No allocation was recorded here">Mappings and first touches are recorded with <code>sudo sonde record --memory -o run.sonde -- CMD</code>; then <code>sonde upload run.sonde</code>. What a node has in use is in the charts above.</Empty>
      )}</Answer>
    </section>
  );
}

/** Process ids that several of these processes had, one after another. */
export function reused(rows: MemoryAnswer): Set<number> {
  const seen = new Set<number>();
  return new Set(rows.map((row) => row.pid).filter((pid) => seen.size === seen.add(pid).size));
}

function Table({ rows, isCut }: { rows: MemoryAnswer; isCut: boolean }): preact.JSX.Element {
  const { place, go } = useApp();
  const shared = useMemo(() => reused(rows), [rows]);
  const size = (bytes: number): string => (bytes < 0 ? `−${scaled(-bytes, "B")}` : scaled(Math.round(bytes), "B"));
  return (
    <div class="sheet tall" tabIndex={0} role="region" aria-label="Processes by memory">
      <table>
        <thead><tr><th>Process</th><th class="number">Mapped</th><th class="number">Given back</th><th class="number">Grown by</th><th class="number">Touched</th></tr></thead>
        <tbody>{rows.map((row) => {
          // Stacks are asked for by process id, so they are of all processes that had it.
          const isShown = place.pid === String(row.pid);
          return (
            <tr key={`${row.pid}.${row.start_ns}`}>
              <td><button class="link" aria-pressed={isShown} title={row.exe ?? ""} onClick={() => go({ pid: isShown ? "" : String(row.pid), focus: [] })}>{programOf(row)}</button> <small>{row.pid}{shared.has(row.pid) && " (number used again; stacks are of all that had it)"}{row.user && ` · ${row.user}`}{row.job && ` · ${row.job}`}</small></td>
              <td class="number">{size(row.mapped)}</td><td class="number">{size(row.unmapped)}</td><td class="number">{size(row.grown)}</td><td class="number">{size(row.faulted)}</td>
            </tr>
          );
        })}</tbody>
      </table>
      {isCut && <p class="quiet">The {MAX_ROWS} that mapped and touched most; there are more.</p>}
    </div>
  );
}
