// SPDX-License-Identifier: Apache-2.0
// A range of time of one node: the verdict, the timeline, and below it the stacks.

import { useMemo } from "preact/hooks";
import type { Flame, TimelineAnswer } from "../api";
import { clock, duration } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp, type Asked } from "../state";
import { START } from "../url";
import { FlamePanel } from "./flame";
import type { Incidents } from "./incidents";
import { NothingOf } from "./recorded";
import { TimelinePanel, type Mark } from "./timeline";
import { VerdictPanel, Verdicts } from "./verdict";

export function RangeView(): preact.JSX.Element {
  const { place } = useApp();
  const ready = Boolean(place.node && place.from && place.to > place.from);
  const asked = useAnswer<TimelineAnswer>(ready ? "timeline" : null, { node: place.node, from: place.from, to: place.to, format: "columns" });
  const marks = useMarks();
  if (!ready) return <Empty title="No time is chosen">Choose a node on the overview, then drag over one of its charts.</Empty>;
  return (
    <>
      <NothingOf node={place.node} pid={place.pid} from={place.from} to={place.to} />
      <VerdictPanel>
        <Answer asked={asked} loading="Working out the verdict…">{(answer) => <Verdicts answer={answer} />}</Answer>
        {marks.length > 0 && <div class="marked">
          <h3>Incidents in this time</h3>
          <ul>{marks.map((one) => <li>{clock(one.from)} for {duration((one.to - one.from) * 1e9)}: <button class="link open" onClick={one.open}>{one.text}</button></li>)}</ul>
        </div>}
      </VerdictPanel>
      <Sides timeline={asked} name={`${place.node}-${Math.round(place.from)}`} marks={marks} />
    </>
  );
}

/** Incidents of the place's node that overlap its time. */
function useMarks(): readonly Mark[] {
  const { place, go } = useApp();
  const asked = useAnswer<Incidents>("incidents", {});
  return useMemo(() => (asked.answer?.incidents ?? [])
    .filter((one) => one.node === place.node && one.began_ns / 1e9 < place.to && one.explained_ns / 1e9 > place.from)
    .map((one) => ({
      from: one.began_ns / 1e9, to: one.explained_ns / 1e9, text: `${(one.verdict.change ?? one.verdict.cause).replaceAll(/[-_]/g, " ")}, ${one.victim_name}`,
      open: () => go({ ...START, view: "incidents", search: one.victim_name }),
    })), [asked.answer, place.node, place.from, place.to]);
}

/** The timeline, and below it the stacks: of the server, or `flames` of a file. */
export function Sides({ timeline, flames, name, marks = [] }: { timeline: Asked<TimelineAnswer>; flames?: Record<string, Flame>; name: string; marks?: readonly Mark[] }): preact.JSX.Element {
  const isAlone = flames !== undefined && !Object.keys(flames).length;
  return (
    <div class="stack">
      <section class="panel" aria-label="Timeline">
        <Answer asked={timeline} loading="Asking for the timeline…">{(answer) => <TimelinePanel answer={answer} name={name} isFile={flames !== undefined} marks={marks} />}</Answer>
      </section>
      {isAlone ? <p class="quiet">This file has no samples of stacks; what called what is in the lanes of its threads.</p>
        : <section class="panel" aria-label="Stacks"><FlamePanel name={name} {...(flames ? { flames } : {})} /></section>}
    </div>
  );
}
