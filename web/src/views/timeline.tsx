// SPDX-License-Identifier: Apache-2.0
import { useMemo, useRef, useState } from "preact/hooks";
import type { TimelineAnswer } from "../api";
import type { BoxCanvas } from "../draw/canvas";
import { css } from "../draw/colours";
import { clock, duration } from "../numbers";
import { Empty, Tooltip } from "../parts";
import { useApp } from "../state";
import { build } from "../timeline";
import { Boxes } from "./canvas";

const LEGEND: readonly [string, string][] = [
  ["kernel", "kernel"], ["copy", "copy"], ["launch", "launch"], ["sync", "waits for the device"],
  ["runqueue", "waits for a CPU"], ["blocked", "blocked"], ["running", "on a CPU"], ["stall", "device idle"],
];

export function TimelinePanel({ answer }: { answer: TimelineAnswer }): preact.JSX.Element {
  const { place, go, palette } = useApp();
  const lanes = useMemo(() => build(answer, palette, place.cause), [answer, palette, place.cause]);
  const scroller = useRef<HTMLDivElement>(null);
  const canvas = useRef<BoxCanvas | null>(null);
  const [hover, setHover] = useState<{ id: number; x: number; y: number } | null>(null);
  const first = answer.begin_ns;
  const last = Math.max(answer.end_ns, first + 1);
  const originS = answer.origin_ns / 1e9;
  const chosenLeft = place.left ? (place.left - originS) * 1e9 : first;
  const chosenRight = place.right ? (place.right - originS) * 1e9 : last;
  const left = Math.max(first, Math.min(chosenLeft, last - 1));
  const right = Math.min(last, Math.max(chosenRight, left + 1));
  const [seen, setSeen] = useState<[number, number] | null>(null);
  const shown = useMemo(() => ({
    rows: lanes.rows, height: lanes.height, left, right, first, last, palette,
    labelOf: (id: number) => lanes.span(id).name || lanes.span(id).kind, isFaded: () => false,
  }), [lanes, left, right, first, last, palette]);
  const [a, b] = seen ?? [left, right];
  const step = (b - a) / 5 / 1e9;
  const leftOut = answer.calls.left_out + answer.states.left_out + answer.device.left_out + (answer.runs?.left_out ?? 0);
  if (!lanes.spans) return <Empty title="No single interval was recorded here">The flame graph may still have samples. Choose a longer time to see more.</Empty>;
  const span = hover && hover.id >= 0 && hover.id < lanes.spans ? lanes.span(hover.id) : null;
  return (
    <>
      <div class="tools">
        <h2>Timeline</h2>
        <span class="quiet">{clock(originS + a / 1e9, 0.001)} for {duration(b - a)}</span>
        <span class="space" />
        <div class="segments" role="group" aria-label="Zoom of the timeline">
          <button onClick={() => canvas.current?.zoom(0.5)} aria-label="Zoom in">+</button>
          <button onClick={() => canvas.current?.zoom(2)} aria-label="Zoom out">−</button>
          <button disabled={!place.left && !seen} onClick={() => { setSeen(null); go({ left: 0, right: 0 }); }}>All</button>
        </div>
        {(place.left > 0 || seen) && <button onClick={() => go({ from: originS + a / 1e9, to: originS + b / 1e9, left: 0, right: 0, focus: [] })}>Stacks of this time</button>}
      </div>
      <div class="axis" aria-hidden="true">{[0, 1, 2, 3, 4].map((i) => <span>{clock(originS + (a + ((b - a) * i) / 5) / 1e9, Math.max(1e-6, step / 5))}</span>)}</div>
      <div class="scroller lanes" ref={scroller}>
        <div class="spacer" style={{ height: `${lanes.height}px` }}>
          <div class="names" style={{ height: `${lanes.height}px` }}>
            {lanes.lanes.map((lane) => <div style={{ top: `${lane.top}px` }} title={`${lane.label} ${lane.detail}`}>{lane.label}<small> {lane.detail}</small></div>)}
          </div>
          <div class="canvas">
            <Boxes shown={shown} scroller={scroller} pans label={`Timeline with ${lanes.lanes.length} lanes and ${lanes.spans} spans. Arrow keys select a span, plus and minus zoom, a and d move.`}
              use={(one) => { canvas.current = one; }}
              events={{
                hover: (id, x, y) => setHover(id < 0 ? null : { id, x, y }),
                click: (id) => { const one = lanes.span(id); const room = Math.max(1e3, (one.end - one.start) * 2); zoomTo(one.start - room, one.end + room); },
                moved: (from, to, done) => { setSeen([from, to]); if (done) go({ left: originS + from / 1e9, right: originS + to / 1e9 }, true); },
              }} />
          </div>
        </div>
      </div>
      <div class="under">
        {LEGEND.map(([kind, text]) => <span><i style={{ background: css(palette.span(kind)) }} />{text}</span>)}
        <span class="quiet">Ctrl+wheel zooms, drag moves{leftOut ? `; ${leftOut.toLocaleString("en-US")} shorter spans are not drawn` : ""}</span>
      </div>
      {span && hover && (
        <Tooltip x={hover.x} y={hover.y}>
          <strong>{span.name || span.kind}</strong>
          <p>{span.kind} · {lanes.lanes[span.lane]?.label}</p>
          <p>{duration(span.end - span.start)}, from {clock(originS + span.start / 1e9, 1e-6)}</p>
          {span.note && <p>{span.note}</p>}
        </Tooltip>
      )}
    </>
  );

  function zoomTo(from: number, to: number): void {
    const low = Math.max(first, from);
    const high = Math.min(last, to);
    setSeen([low, high]);
    go({ left: originS + low / 1e9, right: originS + high / 1e9 });
  }
}
