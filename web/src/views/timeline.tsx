// SPDX-License-Identifier: Apache-2.0
// The timeline of a range or of a file: lanes on a canvas, with their names, an axis and what can be saved.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { TimelineAnswer } from "../api";
import type { BoxCanvas } from "../draw/canvas";
import { css } from "../draw/colours";
import { save, text, traceEvents } from "../exports";
import { Live, useLive } from "../live";
import type { Lane, Lanes } from "../lanes";
import { clock, duration, grouped } from "../numbers";
import { Empty, Tooltip } from "../parts";
import { useApp } from "../state";
import { ticks } from "../ticks";
import { coloursOf, layout, leftOutOf, offsetsOf, workOf } from "../timeline";
import { Boxes } from "./canvas";
import { copyLink, SaveMenu } from "./save";

/** What a kind of span is called, in the order of the legend. */
const LEGEND: readonly [string, string][] = [
  ["stall", "GPU idle"], ["kernel", "GPU kernel"], ["collective", "collective"], ["copy", "copy"], ["set", "memory set"], ["replay", "graph"],
  ["launch", "launch"], ["graph_launch", "launch of a graph"], ["sync", "waits for the GPU"], ["alloc", "allocates"], ["free", "frees"], ["pin", "pins memory"],
  ["event", "event"], ["build", "loads kernels"], ["other", "other call"], ["operator", "operator"], ["python", "Python function"], ["range", "range"],
  ["running", "on a CPU"], ["runqueue", "waits for a CPU"], ["blocked", "blocked"], ["step", "step"], ["odd step", "unlike step"], ["counter", "counter"],
];

/** The time in sight, in ns after the answer's origin. */
type Seen = readonly [left: number, right: number];
interface Hover { id: number; x: number; y: number }
/** Of the column of names, in CSS pixels. */
const WIDTHS = { least: 120, most: 600, first: 240, step: 20 };
const WIDTH_KEY = "sonde.names";

export function TimelinePanel({ answer, name, isFile, marks = [] }: { answer: TimelineAnswer; name: string; isFile: boolean; marks?: readonly Mark[] }): preact.JSX.Element {
  const { place, go, palette } = useApp();
  const lanes = useMemo(() => layout(answer, place.toggled), [answer, place.toggled.join("\n")]);
  const offsets = useMemo(() => offsetsOf(lanes, answer, place.cause), [lanes, answer, place.cause]);
  const rows = useMemo(() => lanes.rows.map((row, i) => ({ ...row, background: palette.lane, offset: offsets[i]! })), [lanes, palette, offsets]);
  const colours = useMemo(() => coloursOf(lanes, answer, palette, place.cause), [lanes, answer, palette, place.cause]);
  const scroller = useRef<HTMLDivElement>(null);
  const canvas = useRef<BoxCanvas | null>(null);
  const first = answer.begin_ns;
  const last = Math.max(answer.end_ns, first + 1);
  const originS = answer.origin_ns / 1e9;
  const [workLeft, workRight] = useMemo(() => (isFile ? workOf(answer) : [first, last]), [answer, isFile]);
  const chosenLeft = place.left ? (place.left - originS) * 1e9 : workLeft;
  const chosenRight = place.right ? (place.right - originS) * 1e9 : workRight;
  const left = Math.max(first, Math.min(chosenLeft, last - 1));
  const right = Math.min(last, Math.max(chosenRight, left + 1));
  const [hover] = useState(() => new Live<Hover | null>(null));
  const [seen] = useState(() => new Live<Seen>([left, right]));
  const [cursor] = useState(() => new Live<number | null>(null));
  const [width, setWidth] = useState(() => Number(localStorage.getItem(WIDTH_KEY)) || WIDTHS.first);
  const shown = useMemo(() => ({
    rows, colours, height: lanes.height, left, right, first, last, palette,
    labelOf: (id: number) => { const span = lanes.span(id); return span.value === undefined ? span.name || span.kind : ""; }, isFaded: () => false, linksOf: lanes.linksOf,
  }), [rows, colours, left, right, first, last]);
  useEffect(() => seen.set([left, right]), [left, right]);
  const leftOut = leftOutOf(answer, lanes);
  if (!lanes.spans) return <Empty title="No single interval was recorded here">The flame graph may still have samples. Choose a longer time to see more.</Empty>;
  const zoomTo = (from: number, to: number): void => {
    go({ left: originS + Math.max(first, from) / 1e9, right: originS + Math.min(last, to) / 1e9 });
  };
  const widen = (to: number): void => {
    const next = Math.max(WIDTHS.least, Math.min(WIDTHS.most, Math.round(to)));
    localStorage.setItem(WIDTH_KEY, String(next));
    setWidth(next);
  };
  const choices = [
    { name: "Perfetto", about: "Chrome's trace events of the time in sight, for ui.perfetto.dev", run: () => save(`${name}.trace.json`, text(traceEvents(lanes, ...seen.value), "application/json")) },
    { name: "PNG", about: "the picture", run: () => canvas.current!.picture().then((picture) => save(`${name}-timeline.png`, picture)) },
    ...(isFile ? [] : [copyLink]),
  ];
  const isWhole = left <= first && right >= last;
  return (
    <>
      <div class="tools">
        <h2>Timeline</h2>
        <Chosen seen={seen} originS={originS} />
        <span class="space" />
        <div class="segments" role="group" aria-label="Zoom of the timeline">
          <button onClick={() => canvas.current?.zoom(0.5)} aria-label="Zoom in">+</button>
          <button onClick={() => canvas.current?.zoom(2)} aria-label="Zoom out">−</button>
          <button disabled={isWhole} onClick={() => (isFile ? zoomTo(first, last) : go({ left: 0, right: 0 }))}>All</button>
        </div>
        {place.left > 0 && !isFile && <button onClick={() => go({ from: originS + seen.value[0] / 1e9, to: originS + seen.value[1] / 1e9, left: 0, right: 0, focus: [] })}>Stacks of this time</button>}
        <SaveMenu label="Save the timeline" choices={choices} />
      </div>
      <div class="ruler" style={{ paddingLeft: `${width}px` }}>
        <Axis seen={seen} originS={originS} />
        {marks.length > 0 && <Marks seen={seen} originS={originS} marks={marks} />}
      </div>
      <div class="scroller lanes" ref={scroller} style={{ height: `min(${lanes.height + 2}px, max(300px, 58vh))` }}>
        <div class="spacer" style={{ height: `${lanes.height}px` }}>
          <div class="names" style={{ height: `${lanes.height}px`, width: `${width}px` }}>
            {lanes.lanes.map((lane) => <Name lane={lane} cursor={cursor} />)}
          </div>
          <Splitter width={width} widen={widen} />
          <div class="canvas" onPointerMove={(event) => cursor.set(timeAt(event, seen.value))} onPointerLeave={() => cursor.set(null)}>
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
        {LEGEND.filter(([kind]) => lanes.drawn.has(kind)).map(([kind, text]) => <span><i style={{ background: css(palette.span(kind)) }} />{text}</span>)}
        <span class="quiet">What is narrower than a pixel is as high as the share of the pixel that it covers. Ctrl+wheel zooms, drag moves; an arrow leads from who woke a thread, and from a launch to its run{leftOut ? `; ${grouped(leftOut)} spans are not drawn: there are too many, or too many overlap` : ""}</span>
      </div>
      <Hovered hover={hover} lanes={lanes} originS={originS} />
    </>
  );
}

/** An incident in the time of a timeline; seconds since 1970. */
export interface Mark { from: number; to: number; text: string; open(): void }

function timeAt(event: PointerEvent & { currentTarget: HTMLElement }, [left, right]: Seen): number {
  const box = event.currentTarget.getBoundingClientRect();
  return left + ((event.clientX - box.left) / Math.max(1, box.width)) * (right - left);
}

/** The name of a lane, or the head of a group, which folds it. */
function Name({ lane, cursor }: { lane: Lane; cursor: Live<number | null> }): preact.JSX.Element {
  const { place, go } = useApp();
  const style = { top: `${lane.top}px` };
  if (lane.group !== undefined) {
    const key = lane.group;
    return (
      <div class="group" style={style}>
        <button class="link" aria-expanded={!lane.isFolded} title={`${lane.isFolded ? "Show" : "Hide"} the ${lane.detail} of ${lane.full}`}
          onClick={() => go({ toggled: place.toggled.includes(key) ? place.toggled.filter((one) => one !== key) : [...place.toggled, key] }, true)}>
          <span aria-hidden="true">{lane.isFolded ? "▸" : "▾"}</span> {lane.label}<small> {lane.detail}</small></button>
      </div>
    );
  }
  return (
    <div style={style} title={`${lane.full} ${lane.detail}`.trim()}>
      {lane.label}{lane.valueAt ? <Value lane={lane} cursor={cursor} /> : <small> {lane.detail}</small>}
      {lane.parts.map(({ name, below }) => <small class="part" style={{ top: `${below}px` }}>{name}</small>)}
    </div>
  );
}

/** The scale of a counter, and its value under the pointer. */
function Value({ lane, cursor }: { lane: Lane; cursor: Live<number | null> }): preact.JSX.Element {
  const at = useLive(cursor);
  const value = at === null ? "" : lane.valueAt!(at);
  return value ? <small class="value"> {value}</small> : <small> {lane.detail}</small>;
}

/** Between names and lanes: moved by dragging, or by the arrow keys. */
function Splitter({ width, widen }: { width: number; widen: (to: number) => void }): preact.JSX.Element {
  const drag = useRef<{ x: number; width: number } | null>(null);
  return (
    <div class="splitter" role="separator" tabIndex={0} aria-orientation="vertical" aria-label="Width of the names" aria-valuenow={width} aria-valuemin={WIDTHS.least} aria-valuemax={WIDTHS.most}
      onPointerDown={(event) => { drag.current = { x: event.clientX, width }; event.currentTarget.setPointerCapture(event.pointerId); event.preventDefault(); }}
      onPointerMove={(event) => { if (drag.current) widen(drag.current.width + event.clientX - drag.current.x); }}
      onPointerUp={() => { drag.current = null; }}
      onKeyDown={(event) => {
        const step = { ArrowLeft: -WIDTHS.step, ArrowRight: WIDTHS.step }[event.key];
        if (!step) return;
        event.preventDefault();
        widen(width + step);
      }} />
  );
}

function Chosen({ seen, originS }: { seen: Live<Seen>; originS: number }): preact.JSX.Element {
  const [left, right] = useLive(seen);
  return <span class="quiet">{clock(originS + left / 1e9, 0.001)} for {duration(right - left)}</span>;
}

function Axis({ seen, originS }: { seen: Live<Seen>; originS: number }): preact.JSX.Element {
  const [left, right] = useLive(seen);
  return (
    <div class="axis" aria-hidden="true">
      {ticks(originS + left / 1e9, originS + right / 1e9, 8).map(({ at, text }) => <span class={at > 0.95 ? "end" : ""} style={{ left: `${100 * at}%` }}>{text}</span>)}
    </div>
  );
}

/** Incidents as bands above the lanes. */
function Marks({ seen, originS, marks }: { seen: Live<Seen>; originS: number; marks: readonly Mark[] }): preact.JSX.Element {
  const [left, right] = useLive(seen);
  const share = (time: number): number => Math.max(0, Math.min(1, ((time - originS) * 1e9 - left) / (right - left)));
  return (
    <div class="marks">
      {marks.map((one) => [one, share(one.from), share(one.to)] as const).filter(([, from, to]) => to > 0 && from < 1).map(([one, from, to]) => (
        <button style={{ left: `${100 * from}%`, width: `${Math.max(0.5, 100 * (to - from))}%` }} title={`Incident: ${one.text}. Show its evidence`} onClick={one.open}>{one.text}</button>
      ))}
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
      <p>{span.kind} · {lanes.lanes[span.lane]?.full}</p>
      <p>{duration(span.end - span.start)}, from {clock(originS + span.start / 1e9, 1e-6)}</p>
      {span.note && <p>{span.note}</p>}
    </Tooltip>
  );
}
