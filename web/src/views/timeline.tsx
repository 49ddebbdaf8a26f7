// SPDX-License-Identifier: Apache-2.0
// The timeline of a range or of a file: lanes on a canvas, with their names, an axis and what can be saved.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { TimelineAnswer } from "../api";
import type { BoxCanvas } from "../draw/canvas";
import { css } from "../draw/colours";
import { save, text, traceEvents } from "../exports";
import { Live, useLive } from "../live";
import { clock, duration } from "../numbers";
import { Empty, Tooltip } from "../parts";
import { useApp } from "../state";
import { coloursOf, layout, leftOutOf, type Lanes } from "../timeline";
import { Boxes } from "./canvas";
import { copyLink, SaveMenu } from "./save";

const LEGEND: readonly [string, string][] = [
  ["kernel", "kernel"], ["copy", "copy"], ["launch", "launch"], ["sync", "waits for the device"],
  ["runqueue", "waits for a CPU"], ["blocked", "blocked"], ["running", "on a CPU"], ["stall", "device idle"], ["step", "step"], ["odd step", "unlike step"],
];

/** The time in sight, in ns after the answer's origin. */
type Seen = readonly [left: number, right: number];
interface Hover { id: number; x: number; y: number }

export function TimelinePanel({ answer, name, isFile }: { answer: TimelineAnswer; name: string; isFile: boolean }): preact.JSX.Element {
  const { place, go, palette } = useApp();
  const lanes = useMemo(() => layout(answer), [answer]);
  const rows = useMemo(() => lanes.rows.map((row) => ({ ...row, background: palette.lane })), [lanes, palette]);
  const colours = useMemo(() => coloursOf(lanes, answer, palette, place.cause), [lanes, answer, palette, place.cause]);
  const scroller = useRef<HTMLDivElement>(null);
  const canvas = useRef<BoxCanvas | null>(null);
  const first = answer.begin_ns;
  const last = Math.max(answer.end_ns, first + 1);
  const originS = answer.origin_ns / 1e9;
  const chosenLeft = place.left ? (place.left - originS) * 1e9 : first;
  const chosenRight = place.right ? (place.right - originS) * 1e9 : last;
  const left = Math.max(first, Math.min(chosenLeft, last - 1));
  const right = Math.min(last, Math.max(chosenRight, left + 1));
  const [hover] = useState(() => new Live<Hover | null>(null));
  const [seen] = useState(() => new Live<Seen>([left, right]));
  const shown = useMemo(() => ({
    rows, colours, height: lanes.height, left, right, first, last, palette,
    labelOf: (id: number) => { const span = lanes.span(id); return span.name || span.kind; }, isFaded: () => false, linksOf: lanes.linksOf,
  }), [rows, colours, left, right, first, last]);
  useEffect(() => seen.set([left, right]), [left, right]);
  const leftOut = leftOutOf(answer, lanes);
  if (!lanes.spans) return <Empty title="No single interval was recorded here">The flame graph may still have samples. Choose a longer time to see more.</Empty>;
  const zoomTo = (from: number, to: number): void => {
    go({ left: originS + Math.max(first, from) / 1e9, right: originS + Math.min(last, to) / 1e9 });
  };
  const choices = [
    { name: "Perfetto", about: "Chrome's trace events of the time in sight, for ui.perfetto.dev", run: () => save(`${name}.trace.json`, text(traceEvents(lanes, ...seen.value), "application/json")) },
    { name: "PNG", about: "the picture", run: () => canvas.current!.picture().then((picture) => save(`${name}-timeline.png`, picture)) },
    ...(isFile ? [] : [copyLink]),
  ];
  return (
    <>
      <div class="tools">
        <h2>Timeline</h2>
        <Chosen seen={seen} originS={originS} />
        <span class="space" />
        <div class="segments" role="group" aria-label="Zoom of the timeline">
          <button onClick={() => canvas.current?.zoom(0.5)} aria-label="Zoom in">+</button>
          <button onClick={() => canvas.current?.zoom(2)} aria-label="Zoom out">−</button>
          <button disabled={!place.left} onClick={() => go({ left: 0, right: 0 })}>All</button>
        </div>
        {place.left > 0 && !isFile && <button onClick={() => go({ from: originS + seen.value[0] / 1e9, to: originS + seen.value[1] / 1e9, left: 0, right: 0, focus: [] })}>Stacks of this time</button>}
        <SaveMenu label="Save the timeline" choices={choices} />
      </div>
      <Axis seen={seen} originS={originS} />
      <div class="scroller lanes" ref={scroller}>
        <div class="spacer" style={{ height: `${lanes.height}px` }}>
          <div class="names" style={{ height: `${lanes.height}px` }}>
            {lanes.lanes.map((lane) => <div style={{ top: `${lane.top}px` }} title={`${lane.label} ${lane.detail}`}>{lane.label}<small> {lane.detail}</small></div>)}
          </div>
          <div class="canvas">
            <Boxes shown={shown} scroller={scroller} pans label={`Timeline with ${lanes.lanes.length} lanes and ${lanes.spans} spans. Arrow keys select a span, plus and minus zoom, a and d move.`}
              use={(one) => { canvas.current = one; }}
              events={{
                hover: (id, x, y) => hover.set(id < 0 ? null : { id, x, y }),
                click: (id) => { const one = lanes.span(id); const room = Math.max(1e3, (one.end - one.start) * 2); zoomTo(one.start - room, one.end + room); },
                moved: (from, to, done) => { seen.set([from, to]); if (done) go({ left: originS + from / 1e9, right: originS + to / 1e9 }, true); },
              }} />
          </div>
        </div>
      </div>
      <div class="under">
        {LEGEND.map(([kind, text]) => <span><i style={{ background: css(palette.span(kind)) }} />{text}</span>)}
        <span class="quiet">Ctrl+wheel zooms, drag moves; an arrow leads from who woke a thread, and from a launch to its run{leftOut ? `; ${leftOut.toLocaleString("en-US")} spans are not drawn: there are too many, or too many overlap` : ""}</span>
      </div>
      <Hovered hover={hover} lanes={lanes} originS={originS} />
    </>
  );
}

function Chosen({ seen, originS }: { seen: Live<Seen>; originS: number }): preact.JSX.Element {
  const [left, right] = useLive(seen);
  return <span class="quiet">{clock(originS + left / 1e9, 0.001)} for {duration(right - left)}</span>;
}

function Axis({ seen, originS }: { seen: Live<Seen>; originS: number }): preact.JSX.Element {
  const [left, right] = useLive(seen);
  const step = (right - left) / 5;
  return (
    <div class="axis" aria-hidden="true">
      {[0, 1, 2, 3, 4].map((i) => <span>{clock(originS + (left + step * i) / 1e9, Math.max(1e-6, step / 5e9))}</span>)}
    </div>
  );
}

function Hovered({ hover, lanes, originS }: { hover: Live<Hover | null>; lanes: Lanes; originS: number }): preact.JSX.Element | null {
  const at = useLive(hover);
  if (!at || at.id >= lanes.spans) return null;
  const span = lanes.span(at.id);
  return (
    <Tooltip x={at.x} y={at.y}>
      <strong>{span.name || span.kind}</strong>
      <p>{span.kind} · {lanes.lanes[span.lane]?.label}</p>
      <p>{duration(span.end - span.start)}, from {clock(originS + span.start / 1e9, 1e-6)}</p>
      {span.note && <p>{span.note}</p>}
    </Tooltip>
  );
}
