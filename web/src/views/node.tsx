// SPDX-License-Identifier: Apache-2.0
// One node: its series on one axis of time, one cursor over all; a brushed time opens.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { Columns, NodeRow } from "../api";
import { aligned, chartsOf, dips, SERIES, type Chart, type Dip } from "../charts";
import { clock, day, duration, percent, scaled } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";

const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195", "#8a8a8a"];
const LINES_DARK = ["#56b4e9", "#ff9e58", "#3ddc9f", "#f0a6cf", "#f0e442", "#8ecbff", "#c39bff", "#b5b5b5"];

/** Lines of a chart up to which they are wide and some dashed: with more that costs seconds, and tells nobody them apart. */
const MOST_DASHED = 8;
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
  const wider = (factor: number): void => {
    const middle = (from + to) / 2;
    const half = ((to - from) / 2) * factor;
    go({ live: 0, from: middle - half, to: middle + half });
  };
  const move = (share: number): void => go({ live: 0, from: from + share * (to - from), to: to + share * (to - from) });
  return (
    <>
      <div class="tools">
        <h1>{place.node}</h1>
        <span class="quiet">{day(from)} {clock(from)} – {clock(to)}, {duration((to - from) * 1e9)}</span>
        <div class="segments" role="group" aria-label="Time">
          <button onClick={() => move(-0.5)} aria-label="Earlier">← Earlier</button>
          <button onClick={() => wider(2)}>Wider</button>
          <button onClick={() => wider(0.5)}>Narrower</button>
          <button onClick={() => move(0.5)} aria-label="Later">Later →</button>
        </div>
        <button class="primary" onClick={() => open(from, to)}>Open all of it</button>
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
  const found = useMemo(() => {
    const line = charts.find((chart) => chart.title === "GPU use")?.lines[0] ?? charts.find((chart) => chart.title === "Runs on devices")?.lines[0];
    return line ? dips(line) : [];
  }, [charts]);
  if (!charts.length) return <Empty title="Nothing was measured here in this time">Go earlier or wider, or choose another node.</Empty>;
  return (
    <>
      <section class="dips" aria-label="Dips of GPU use">
        <strong>{found.length ? "GPU use dips" : "GPU use does not dip here."}</strong>
        {found.map((dip) => <DipButton dip={dip} open={props.open} />)}
        <span class="quiet">or drag over a chart to open a time</span>
      </section>
      <div class="charts panel">
        {charts.map((chart, number) => (
          <Plot key={chart.title} chart={chart} from={props.from} to={props.to} first={number === 0} last={number === 0 || number === charts.length - 1} at={at} setAt={setAt} open={props.open} />
        ))}
      </div>
      {missing.length > 0 && <p class="quiet">Not recorded here: {missing.join(", ")}.</p>}
    </>
  );
}

function DipButton({ dip, open }: { dip: Dip; open: (from: number, to: number) => void }): preact.JSX.Element {
  return (
    <button class="dip" onClick={() => open(dip.from, dip.to)}>
      {clock(dip.from)} for {duration((dip.to - dip.from) * 1e9)}, down to {percent(dip.lowest)}
    </button>
  );
}

function valueText(chart: Chart, value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return chart.percent ? percent(value) : scaled(value, chart.unit === "at once" ? "" : chart.unit);
}

function Plot(props: {
  chart: Chart; from: number; to: number; first: boolean; last: boolean; at: number | null;
  setAt: (at: number | null) => void; open: (from: number, to: number) => void;
}): preact.JSX.Element {
  const { chart, from, to, last } = props;
  const { palette } = useApp();
  const holder = useRef<HTMLDivElement>(null);
  const latest = useRef(props);
  latest.current = props;
  const data = useMemo(() => aligned(chart.lines), [chart]);
  const colours = palette.dark ? LINES_DARK : LINES;
  useEffect(() => {
    const box = holder.current!;
    const quiet = palette.dark ? "#98a2b5" : "#5d6678";
    const grid = palette.dark ? "#262c39" : "#eceff4";
    const axis = { stroke: quiet, font: "11px system-ui", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const height = (): number => (props.first ? 156 : last ? 108 : 84);
    const plot = new uPlot({
      width: box.clientWidth, height: height(), legend: { show: false },
      cursor: {
        sync: { key: "node" }, drag: { x: true, y: false, setScale: false }, points: { size: 5 }, focus: { prox: 16 },
      },
      scales: {
        x: { time: true, min: from, max: to, range: () => [latest.current.from, latest.current.to] },
        y: { range: (_, low, high) => [Math.min(0, low ?? 0), chart.top ?? Math.max((high ?? 1) * 1.08, 1e-9)] },
      },
      axes: [
        { ...axis, show: true, size: last ? 28 : 8, values: (_, ticks) => ticks.map((tick) => last ? clock(tick, (ticks[1] ?? tick + 1) - (ticks[0] ?? tick) < 1 ? 0.1 : 1) : "") },
        { ...axis, size: 66, values: (_, ticks) => ticks.map((tick) => chart.percent ? `${Math.round(tick * 100)} %` : scaled(tick, chart.unit === "at once" ? "" : chart.unit)), space: 22 },
      ],
      series: [{}, ...chart.lines.map((line, i) => ({
        label: line.label, stroke: colours[i % colours.length]!, width: chart.lines.length <= MOST_DASHED ? 1.5 : 1 / devicePixelRatio, spanGaps: false, ...(chart.stepped ? { paths: uPlot.paths.stepped!({ align: 1 }) } : {}), points: { show: line.times.length < 2, size: 4 },
        ...(i >= 4 && chart.lines.length <= MOST_DASHED ? { dash: [4, 3] } : {}), ...(i === 0 && chart.lines.length < 5 ? { fill: `${colours[0]!}1f` } : {}),
      }))],
      hooks: {
        setCursor: [(one) => {
          const index = one.cursor.idx;
          const left = one.cursor.left ?? -1;
          latest.current.setAt(index === null || index === undefined || left < 0 ? null : one.posToVal(left, "x"));
        }],
        setSelect: [(one) => {
          if (one.select.width < 4) return;
          const start = one.posToVal(one.select.left, "x");
          const end = one.posToVal(one.select.left + one.select.width, "x");
          one.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          latest.current.open(start, end);
        }],
      },
    }, data as uPlot.AlignedData, box);
    const observer = new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: height() }));
    observer.observe(box);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [data, palette, last]);
  const value = (line: Chart["lines"][number]): number | null => {
    if (props.at === null) return null;
    let low = 0;
    let high = line.times.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (line.times[middle]! <= props.at) low = middle;
      else high = middle - 1;
    }
    return line.values[low] ?? null;
  };
  return (
    <section class="chart" aria-label={`${chart.title}, ${chart.unit}`}>
      <div class="legend">
        <h2>{chart.title}</h2>
        {chart.lines.slice(0, 6).map((line, i) => (
          <span><i style={{ background: colours[i % colours.length] ?? "" }} />{line.label} <b>{props.at === null ? "" : valueText(chart, value(line))}</b></span>
        ))}
        {chart.lines.length > 6 && <span class="quiet">and {chart.lines.length - 6} more</span>}
      </div>
      <div class="plot" ref={holder} />
    </section>
  );
}
