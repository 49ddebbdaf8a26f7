// SPDX-License-Identifier: Apache-2.0
// What limits the work in a time: its causes with their shares, what to do next, and the evidence.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { CauseShare, TimelineAnswer, Verdict } from "../api";
import { duration, percent, tidy } from "../numbers";
import { useApp } from "../state";
import { kindOfCause, reasonOf } from "../timeline";

/** The key of the verdict among the parts that are folded. */
const KEY = "verdict";
/** A cause or a bound with less of the time is left out. */
const LEAST_SHARE = 0.005;

/** What limits work other than waits, in words; waits are in the causes of a verdict. */
const BOUNDS: Record<string, string> = {
  compute: "kernels limited by arithmetic throughput", memory: "kernels limited by GPU memory bandwidth", kernels: "kernels; whether arithmetic or memory limits them is not known",
  throttled: "GPU clocks held down by power or temperature", "small kernels": "small kernels run one after another and leave most of the GPU idle", device: "the GPU’s own work, of which no run was timed",
  dependency: "a stream waits for work of another stream or GPU", unknown: "cause not known",
};

/** The bounds of a verdict that none of its causes is about: the GPU's own work. */
export function ownBounds({ bounds, causes }: Verdict): { key: string; share: number; title: string }[] {
  const known = new Set(causes.filter((cause) => cause.share >= LEAST_SHARE).map((cause) => cause.bound));
  return bounds.filter(({ key, share }) => !known.has(key) && share >= LEAST_SHARE).map(({ key, share }) => ({ key, share, title: BOUNDS[key] ?? key }));
}

/** The panel of verdicts, which can be folded. */
export function VerdictPanel({ children }: { children: ComponentChildren }): preact.JSX.Element {
  const { place, go } = useApp();
  const isFolded = place.toggled.includes(KEY);
  return (
    <section class={`verdict panel${isFolded ? " folded" : ""}`} aria-label="Verdict">
      {children}
      <button class="plain fold" aria-expanded={!isFolded} onClick={() => go({ toggled: isFolded ? place.toggled.filter((one) => one !== KEY) : [...place.toggled, KEY] }, true)}>
        {isFolded ? "Show causes and evidence" : "Hide causes and evidence"}
      </button>
    </section>
  );
}

/** A text with its parts between back-ticks as code. */
function marked(text: string): ComponentChildren[] {
  return tidy(text).split("`").map((part, i) => (i % 2 ? <code>{part}</code> : part));
}

export function Verdicts({ answer }: { answer: TimelineAnswer }): preact.JSX.Element {
  const { place } = useApp();
  const { notes } = answer.explanation;
  const verdicts = chosenFirst(answer.explanation.verdicts, place.pid);
  if (!verdicts.length) return <p class="quiet">No verdict: {notes.join("; ") || "nothing was observed in this time"}. Choose a longer time.</p>;
  return <>{verdicts.slice(0, 3).map((verdict, number) => <One answer={answer} verdict={verdict} notes={number ? [] : notes} />)}</>;
}

/** Those on the chosen process before the others. */
export function chosenFirst<T extends Pick<Verdict, "device_name">>(verdicts: readonly T[], pid: string): T[] {
  const isIts = (one: T): boolean => pid !== "" && one.device_name.endsWith(`(${pid})`);
  return [...verdicts.filter(isIts), ...verdicts.filter((one) => !isIts(one))];
}

/** A cause, or a bound, as a row: how much of the time it has, and what it is. */
function Row({ share, title, where, isPressed, about, choose }: { share: number; title: string; where?: string; isPressed: boolean; about: string; choose: () => void }): preact.JSX.Element {
  return (
    <button aria-pressed={isPressed} onClick={choose} title={about}>
      <span class="share"><i style={{ width: `${Math.min(100, 100 * share)}%` }} /></span>
      <b>{percent(share)}</b>
      <span class="what">{title}{where && <code>{where}</code>}</span>
    </button>
  );
}

function One({ answer, verdict, notes }: { answer: TimelineAnswer; verdict: Verdict; notes: string[] }): preact.JSX.Element {
  const { place, go } = useApp();
  const [all, setAll] = useState(false);
  const isFolded = place.toggled.includes(KEY);
  const hasThreads = place.view === "range";
  const name = verdict.device >= 0 ? `GPU ${verdict.device} ${verdict.device_name}` : verdict.device_name;
  const shape = place.shape === "kernels" ? "graph" : place.shape;
  /** Shows stacks of one thread, or of all where it is not known, and what matches a place in the code among them. */
  const stacksOf = (cause: string, kind: string, thread: string, where: string): void => {
    const isThread = hasThreads && thread !== "";
    go({ cause, kind, shape, search: where, group: isThread ? "thread" : "", focus: isThread ? [thread] : [] });
  };
  const clear = (): void => go({ cause: "", search: "", focus: [], group: "" });
  const choose = (cause: CauseShare): void => {
    if (place.cause === cause.key) {
      clear();
      return;
    }
    stacksOf(cause.key, kindOfCause(cause.key), cause.thread, cause.locations[0]?.function ?? "");
  };
  const shown = verdict.causes.filter((cause) => cause.share >= LEAST_SHARE).slice(0, 6);
  const own = ownBounds(verdict);
  const heading = verdict.bounds.slice(0, 2).map((bound) => bound.key).join(" and ");
  const lines = [...verdict.evidence, ...notes];
  return (
    <article class="one">
      <div class="heading">
        <h2>{name}: <em>{heading}</em></h2>
        <p class="quiet">{verdict.without_device ? "called no device in" : `${verdict.device >= 0 ? "computed" : "waited for its device"} ${percent(verdict.computing)} of`} {duration(verdict.window_ns)}</p>
        {verdict.advice[0] && <p class="next"><b>Next</b> {marked(verdict.advice[0].text)}{verdict.advice[0].gain ? ` (up to −${Math.round(100 * verdict.advice[0].gain)} % time)` : ""}</p>}
      </div>
      {!isFolded && <div>
        <h3>Causes, shares of {duration(verdict.window_ns)}</h3>
        <ul class="causes" aria-label="Causes">
          {own.map(({ key, share, title }) => (
            <li><Row share={share} title={title} isPressed={place.cause === key} about="Show where: in the timeline, and in the GPU time by the code that launched the work" choose={() => (place.cause === key ? clear() : stacksOf(key, "kernel", "", ""))} /></li>
          ))}
          {shown.map((cause) => {
            const reason = reasonOf(answer, cause);
            return (
              <li>
                <Row share={cause.share} title={cause.title} where={cause.locations[0]?.function ?? ""} isPressed={place.cause === cause.key} about="Show where: in the timeline and in the stacks" choose={() => choose(cause)} />
                {reason && <p class="reason">{tidy(reason.text)}{reason.where && <> <button class="link open" onClick={() => {
                  stacksOf(cause.key, "cpu", reason.thread, reason.where);
                  document.getElementById("stacks")?.scrollIntoView(); // they lie below the timeline
                }}>Show its stacks</button></>}</p>}
              </li>
            );
          })}
          {!shown.length && !own.length && <li class="quiet">No cause has half a percent of the time.</li>}
        </ul>
      </div>}
      {!isFolded && <div class="evidence">
        <h3>Evidence</h3>
        <ul>{lines.slice(0, all ? 99 : 4).map((line) => <li>{marked(line)}</li>)}</ul>
        {lines.length > 4 && <button class="link" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Less" : `All ${lines.length}`}</button>}
      </div>}
    </article>
  );
}
