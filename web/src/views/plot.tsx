// SPDX-License-Identifier: Apache-2.0
// One chart of several lines; charts of a view share the cursor.

import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { aligned, valueAt, type Chart } from "../charts";
import { dated, percent, scaled } from "../numbers";
import { useApp } from "../state";

const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195", "#8a8a8a"];
const LINES_DARK = ["#56b4e9", "#ff9e58", "#3ddc9f", "#f0a6cf", "#f0e442", "#8ecbff", "#c39bff", "#b5b5b5"];

/** With more lines than this, all are thin and none is dashed: else drawing them takes seconds, and nobody can distinguish
 * them anyway. */
const MAX_DASHED = 8;
/** Width of a label of the axis of time, with room around it. */
const LABEL_PX = 84;
/** Room to the right of a plot: half of the last label of its axis of time. */
const RIGHT_PX = 30;

function valueText(chart: Chart, value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return chart.percent ? percent(value) : scaled(value, chart.unit === "at once" ? "" : chart.unit);
}

/** A time that is marked in all charts, such as an incident. */
export interface Mark { from: number; to: number }

function drawMarks(plot: uPlot, marks: readonly Mark[], colour: string): void {
  const { left, top, width, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.beginPath();
  plot.ctx.rect(left, top, width, height);
  plot.ctx.clip();
  for (const { from, to } of marks) {
    const x0 = plot.valToPos(from, "x", true);
    const x1 = Math.max(x0 + 2 * devicePixelRatio, plot.valToPos(to, "x", true));
    plot.ctx.fillStyle = `${colour}26`;
    plot.ctx.fillRect(x0, top, x1 - x0, height);
    plot.ctx.fillStyle = colour;
    plot.ctx.fillRect(x0, top, 2 * devicePixelRatio, height);
  }
  plot.ctx.restore();
}

export function Plot(props: {
  chart: Chart; from: number; to: number; first: boolean; last: boolean; at: number | null;
  setAt: (at: number | null) => void; open: (from: number, to: number) => void; marks?: readonly Mark[];
}): preact.JSX.Element {
  const { chart, from, to, last } = props;
  const { palette } = useApp();
  const holder = useRef<HTMLDivElement>(null);
  const drawn = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const data = useMemo(() => aligned(chart.lines), [chart]);
  const colours = palette.dark ? LINES_DARK : LINES;
  useEffect(() => {
    const box = holder.current!;
    const quiet = palette.dark ? "#98a2b5" : "#5d6678";
    const grid = palette.dark ? "#262c39" : "#eceff4";
    const axis = { stroke: quiet, font: "11px system-ui", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const height = (): number => (latest.current.first ? 156 : last ? 108 : 84);
    const plot = new uPlot({
      width: box.clientWidth, height: height(), legend: { show: false },
      cursor: {
        sync: { key: "node" }, drag: { x: true, y: false, setScale: false }, points: { size: 5 }, focus: { prox: 16 },
      },
      padding: [null, RIGHT_PX, null, null],
      scales: {
        x: { time: true, min: from, max: to, range: () => [latest.current.from, latest.current.to] },
        y: { range: (_, low, high) => [Math.min(0, low ?? 0), chart.top ?? Math.max((high ?? 1) * 1.08, 1e-9)] },
      },
      axes: [
        { ...axis, show: true, size: last ? 28 : 8, space: LABEL_PX, values: (_, ticks) => ticks.map((tick) => last ? dated(tick, latest.current.from, latest.current.to, (ticks[1] ?? tick + 1) - (ticks[0] ?? tick) < 1 ? 0.1 : 1) : "") },
        { ...axis, size: 66, values: (_, ticks) => ticks.map((tick) => chart.percent ? `${Math.round(tick * 100)} %` : scaled(tick, chart.unit === "at once" ? "" : chart.unit)), space: 22 },
      ],
      series: [{}, ...chart.lines.map((line, i) => ({
        label: line.label, stroke: colours[i % colours.length]!, width: chart.lines.length <= MAX_DASHED ? 1.5 : 1 / devicePixelRatio, spanGaps: false, ...(chart.stepped ? { paths: uPlot.paths.stepped!({ align: 1 }) } : {}), points: { show: line.times.length < 2, size: 4 },
        ...(i >= 4 && chart.lines.length <= MAX_DASHED ? { dash: [4, 3] } : {}), ...(i === 0 && chart.lines.length < 5 ? { fill: `${colours[0]!}1f` } : {}),
      }))],
      hooks: {
        drawClear: [(one) => drawMarks(one, latest.current.marks ?? [], palette.dark ? "#ff9a90" : "#b0201a")],
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
    drawn.current = plot;
    // The size that it has is reported, too, at first: to set that would draw all again.
    const observer = new ResizeObserver(() => {
      const [width, high] = [box.clientWidth, height()];
      if (width !== plot.width || high !== plot.height) plot.setSize({ width, height: high });
    });
    observer.observe(box);
    return () => {
      observer.disconnect();
      drawn.current = null;
      plot.destroy();
    };
  }, [data, palette, props.first, last]);
  const marks = useRef(props.marks);
  useEffect(() => {
    // Most often there are none, before they were asked for and after; what is new was drawn with them.
    if (marks.current !== props.marks && (marks.current?.length || props.marks?.length)) drawn.current?.redraw(false);
    marks.current = props.marks;
  }, [props.marks]);
  return (
    <section class="chart" aria-label={`${chart.title}, ${chart.unit}`}>
      <div class="legend">
        <h2>{chart.title}</h2>
        {chart.lines.slice(0, 6).map((line, i) => (
          <span><i style={{ background: colours[i % colours.length] ?? "" }} />{line.label} <b>{props.at === null ? "" : valueText(chart, valueAt(line, props.at))}</b></span>
        ))}
        {chart.lines.length > 6 && <span class="quiet">and {chart.lines.length - 6} more</span>}
      </div>
      <div class="plot" ref={holder} />
    </section>
  );
}
