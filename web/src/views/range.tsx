// SPDX-License-Identifier: Apache-2.0
// A range of time of one node: the verdict, the timeline, and beside it the flame graph.

import { useState } from "preact/hooks";
import type { CauseShare, Flame, TimelineAnswer, Verdict } from "../api";
import { duration, percent, tidy } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp, type Asked } from "../state";
import { kindOfCause } from "../timeline";
import { FlamePanel } from "./flame";
import { NothingOf } from "./recorded";
import { TimelinePanel } from "./timeline";

export function RangeView(): preact.JSX.Element {
  const { place } = useApp();
  const ready = Boolean(place.node && place.from && place.to > place.from);
  const asked = useAnswer<TimelineAnswer>(ready ? "timeline" : null, { node: place.node, from: place.from, to: place.to, format: "columns" });
  if (!ready) return <Empty title="No time is chosen">Choose a node on the overview, then drag over one of its charts.</Empty>;
  return (
    <>
      <NothingOf node={place.node} pid={place.pid} from={place.from} to={place.to} />
      <section class="verdict panel" aria-label="Verdict">
        <Answer asked={asked} loading="Working out the verdict…">{(answer) => <Verdicts answer={answer} />}</Answer>
      </section>
      <Sides timeline={asked} name={`${place.node}-${Math.round(place.from)}`} />
    </>
  );
}

/** The timeline, and beside it the stacks: of the server, or `flames` of a file. */
export function Sides({ timeline, flames, name }: { timeline: Asked<TimelineAnswer>; flames?: Record<string, Flame>; name: string }): preact.JSX.Element {
  const isAlone = flames !== undefined && !Object.keys(flames).length;
  return (
    <div class={isAlone ? "stack" : "sides"}>
      <section class="panel" aria-label="Timeline">
        <Answer asked={timeline} loading="Asking for the timeline…">{(answer) => <TimelinePanel answer={answer} name={name} isFile={flames !== undefined} />}</Answer>
      </section>
      {isAlone ? <p class="quiet">This file has no samples of stacks; what called what is in the lanes of its threads.</p>
        : <section class="panel" aria-label="Stacks"><FlamePanel name={name} {...(flames ? { flames } : {})} /></section>}
    </div>
  );
}

export function Verdicts({ answer }: { answer: TimelineAnswer }): preact.JSX.Element {
  const { place } = useApp();
  const { notes } = answer.explanation;
  const verdicts = chosenFirst(answer.explanation.verdicts, place.pid);
  if (!verdicts.length) return <p class="quiet">No verdict: {notes.join("; ") || "nothing was observed in this time"}. Choose a longer time.</p>;
  return <>{verdicts.slice(0, 3).map((verdict, number) => <One verdict={verdict} notes={number ? [] : notes} />)}</>;
}

/** Those on the chosen process before the others. */
export function chosenFirst<T extends Pick<Verdict, "device_name">>(verdicts: readonly T[], pid: string): T[] {
  const isIts = (one: T): boolean => pid !== "" && one.device_name.endsWith(`(${pid})`);
  return [...verdicts.filter(isIts), ...verdicts.filter((one) => !isIts(one))];
}

function One({ verdict, notes }: { verdict: Verdict; notes: string[] }): preact.JSX.Element {
  const { place, go } = useApp();
  const [all, setAll] = useState(false);
  const name = verdict.device >= 0 ? `GPU${verdict.device} ${verdict.device_name}` : verdict.device_name;
  const choose = (cause: CauseShare): void => {
    if (place.cause === cause.key) {
      go({ cause: "", search: "", focus: [] });
      return;
    }
    const where = cause.locations[0]?.function ?? "";
    go({ cause: cause.key, kind: kindOfCause(cause.key), focus: [], search: where.split(" ")[0] ?? "" });
  };
  const shown = verdict.causes.filter((cause) => cause.share >= 0.005).slice(0, 6);
  const heading = verdict.bounds.slice(0, 2).map((bound) => bound.key).join(" and ");
  return (
    <article class="one">
      <div class="heading">
        <h2>{name}: <em>{heading}</em></h2>
        <p class="quiet">{verdict.without_device ? "called no device in" : `${verdict.device >= 0 ? "computed" : "waited for its device"} ${percent(verdict.computing)} of`} {duration(verdict.window_ns)}</p>
        {verdict.advice[0] && <p class="next"><b>Next</b> {verdict.advice[0].text}{verdict.advice[0].gain ? ` (up to −${Math.round(100 * verdict.advice[0].gain)} % time)` : ""}</p>}
      </div>
      <ul class="causes" aria-label="Causes">
        {shown.map((cause) => (
          <li>
            <button aria-pressed={place.cause === cause.key} onClick={() => choose(cause)} title="Show where: in the timeline and in the stacks">
              <span class="share"><i style={{ width: `${Math.min(100, 100 * cause.share)}%` }} /></span>
              <b>{percent(cause.share)}</b>
              <span class="what">{cause.title}{cause.locations[0] && <code>{cause.locations[0].function}</code>}</span>
            </button>
          </li>
        ))}
        {!shown.length && <li class="quiet">No cause has half a percent of the time.</li>}
      </ul>
      <div class="evidence">
        <h3>Evidence</h3>
        <ul>{[...verdict.evidence, ...notes].slice(0, all ? 99 : 4).map((line) => <li>{tidy(line)}</li>)}</ul>
        {verdict.evidence.length + notes.length > 4 && <button class="link" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Less" : `All ${verdict.evidence.length + notes.length}`}</button>}
      </div>
    </article>
  );
}
