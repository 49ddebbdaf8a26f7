// SPDX-License-Identifier: Apache-2.0
// One node: its series on one axis of time, one cursor over all; a time that is dragged over opens.

import { useMemo, useState } from "preact/hooks";
import { send, type Columns, type NodeRow } from "../api";
import { chartsOf, dips, SERIES, useText, type Dip } from "../charts";
import { save } from "../exports";
import { clock, dated, duration, percent } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";
import { START } from "../url";
import type { Incidents } from "./incidents";
import { Plot } from "./plot";
import { copyLink, SaveMenu } from "./save";
import { TimeTools } from "./time";

/** A time shorter than this opens with this much around it. */
const SHORT_S = 4;
const AROUND_S = 1;

export function NodeView(): preact.JSX.Element {
  const { place } = useApp();
  const known = useAnswer<NodeRow[]>(place.from && place.to ? null : "nodes", { from: 1, node: place.node });
  const row = known.answer?.[0];
  const last = row ? row.last_ns / 1e9 + 1 : 0;
  const to = place.to || last;
  const from = place.from || (row ? Math.max(row.first_ns / 1e9 - 1, last - 3600) : 0);
  if (!(from && to)) {
    return <Answer asked={known} loading="Asking when this node sent something…">
      {() => <Empty title={`${place.node || "This node"} has sent nothing`}>Choose another node on the overview.</Empty>}
    </Answer>;
  }
  return <Series from={from} to={to} />;
}

function Series({ from, to }: { from: number; to: number }): preact.JSX.Element {
  const { place, go } = useApp();
  const asked = useAnswer<Columns>("charts", { node: place.node, from, to, series: SERIES, points: 1000, format: "columns" });
  const open = (left: number, right: number): void => {
    // Totals and samples are kept by the second: a verdict needs some whole ones around a short time.
    const around = right - left < SHORT_S ? AROUND_S : 0;
    go({
      view: "range", live: 0, from: left - around, to: right + around, kind: "cpu", focus: [], search: "", cause: "",
      left: around ? left : 0, right: around ? right : 0,
    });
  };
  return (
    <>
      <div class="tools">
        <h1>{place.node}</h1>
        <TimeTools from={from} to={to} />
        <button class="primary" onClick={() => open(from, to)}>Explain this time</button>
        <SaveMenu label="Save the series" choices={[
          { name: "Arrow", about: "the series of this time, as an Arrow stream", run: async () => {
            const query = new URLSearchParams([["node", place.node], ["from", String(from)], ["to", String(to)], ["points", "1440"], ["format", "arrow"], ...SERIES.map((one) => ["series", one])]);
            save(`${place.node}-${Math.round(from)}.arrows`, await (await send(`/v1/charts?${query}`, {})).blob());
          } }, copyLink]} />
        <button onClick={() => go({ view: "memory", live: 0, from, to, kind: "mapped", focus: [], search: "", pid: "" })}>Memory</button>
      </div>
      <Answer asked={asked} loading="Asking for the series…">
        {(table) => <Charts table={table} from={from} to={to} open={open} />}
      </Answer>
    </>
  );
}

function Charts(props: { table: Columns; from: number; to: number; open: (from: number, to: number) => void }): preact.JSX.Element {
  const { charts, missing } = useMemo(() => chartsOf(props.table), [props.table]);
  const [at, setAt] = useState<number | null>(null);
  const use = charts.find((chart) => chart.title === "GPU use");
  const found = useMemo(() => {
    const line = use?.lines[0] ?? charts.find((chart) => chart.title === "Runs on devices")?.lines[0];
    return line ? dips(line) : [];
  }, [charts]);
  const incidents = useIncidents(props.from, props.to);
  if (!charts.length) return <Empty title="Nothing was measured here in this time">Go earlier or wider, or choose another node.</Empty>;
  return (
    <>
      <section class="dips" aria-label="Dips of GPU use">
        <strong>{found.length ? "GPU use dips" : useText(use) || "GPU use is not known here."}</strong>
        {found.map((dip) => <DipButton dip={dip} open={props.open} />)}
        {incidents.length > 0 && <strong>Incidents</strong>}
        {incidents.slice(0, 4).map((one) => <IncidentButton one={one} from={props.from} to={props.to} />)}
        {incidents.length > 4 && <span class="quiet">and {incidents.length - 4} more, marked in the charts</span>}
        <span class="quiet">or drag over a chart to open a time</span>
      </section>
      <div class="charts panel">
        {charts.map((chart, number) => (
          <Plot key={chart.title} chart={chart} from={props.from} to={props.to} first={number === 0} last={number === 0 || number === charts.length - 1} at={at} setAt={setAt} open={props.open} marks={incidents} />
        ))}
      </div>
      {missing.length > 0 && <p class="quiet">Not recorded here: {missing.join(", ")}.</p>}
    </>
  );
}

/** An incident as charts mark it. */
interface Marked { id: string; from: number; to: number; cause: string; victim: string }

/** Incidents of this node that overlap a time. */
function useIncidents(from: number, to: number): readonly Marked[] {
  const { place } = useApp();
  const asked = useAnswer<Incidents>("incidents", {});
  return useMemo(() => (asked.answer?.incidents ?? [])
    .filter((one) => one.node === place.node && one.began_ns / 1e9 < to && one.explained_ns / 1e9 > from)
    .map((one) => ({ id: one.id, from: one.began_ns / 1e9, to: one.explained_ns / 1e9, victim: one.victim_name, cause: one.verdict.change ?? one.verdict.cause })), [asked.answer, place.node, from, to]);
}

function IncidentButton({ one, from, to }: { one: Marked; from: number; to: number }): preact.JSX.Element {
  const { go } = useApp();
  return (
    <button class="dip incident-at" title="Show its evidence" onClick={() => go({ ...START, view: "incidents", id: one.id, from, to })}>
      {dated(one.from, from, to)} {one.victim}: {one.cause.replaceAll(/[-_]/g, " ")}
    </button>
  );
}

function DipButton({ dip, open }: { dip: Dip; open: (from: number, to: number) => void }): preact.JSX.Element {
  return (
    <button class="dip" onClick={() => open(dip.from, dip.to)}>
      {clock(dip.from)} for {duration((dip.to - dip.from) * 1e9)}, down to {percent(dip.lowest)}
    </button>
  );
}

