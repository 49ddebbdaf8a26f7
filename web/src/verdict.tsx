// SPDX-License-Identifier: Apache-2.0
// What limits the work, as the server's page and the one-file report both show it. Components without a state: Preact
// draws them on the server's page (views/verdict.tsx), plain_jsx.ts in the report (report.ts).

import type { ComponentChildren } from "preact";
import type { Advice, CauseShare, Verdict } from "./api";
import { duration, percent, tidy } from "./numbers";

/** A cause or a bound with less of the time is left out. */
export const LEAST_SHARE = 0.005;
/** Lines of evidence that are shown at first. */
const FIRST_LINES = 4;

/** What limits work other than waits, in words; waits are in the causes of a verdict. */
const BOUNDS: Record<string, string> = {
  compute: "kernels limited by arithmetic throughput", memory: "kernels limited by GPU memory bandwidth", kernels: "kernels; whether arithmetic or memory limits them is not known",
  throttled: "GPU clocks held down by power or temperature", "small kernels": "small kernels run one after another and leave most of the GPU idle", device: "the GPU’s own work, of which no run was timed",
  dependency: "a stream waits for work of another stream or GPU", unknown: "cause not known",
};

/** Which kind of stacks shows a cause. */
export function kindOfCause(cause: string): string {
  if (cause === "run queue") return "runqueue";
  if (["compute", "memory", "kernels", "small kernels", "throttled", "device"].includes(cause)) return "kernel";
  if (["synchronization", "copy", "allocation", "build"].includes(cause)) return "device";
  if (["lock", "pool", "gil", "io", "sleep", "page fault", "input", "full queue", "stopped"].includes(cause)) return "blocked";
  return "cpu";
}

/** The bounds of a verdict that none of its causes is about: the GPU's own work. */
export function ownBounds({ bounds, causes }: Pick<Verdict, "bounds" | "causes">): { key: string; share: number; title: string }[] {
  const known = new Set(causes.filter((cause) => cause.share >= LEAST_SHARE).map((cause) => cause.bound));
  return bounds.filter(({ key, share }) => !known.has(key) && share >= LEAST_SHARE).map(({ key, share }) => ({ key, share, title: BOUNDS[key] ?? key }));
}

/** The largest cause of the bound that is named first; none of the GPU's own work. */
export function mainCause({ bounds, causes }: Pick<Verdict, "bounds" | "causes">): CauseShare | undefined {
  return causes.filter((cause) => cause.bound === bounds[0]?.key && cause.share >= LEAST_SHARE).sort((a, b) => b.share - a.share)[0];
}

/** What to do next: the first step with those that go with it; and what to do then. */
export function stepsOf(advice: readonly Advice[]): { next: Advice[]; then: Advice[] } {
  const end = advice.findIndex((step, i) => i > 0 && !step.with_former);
  return { next: advice.slice(0, end < 0 ? undefined : end), then: end < 0 ? [] : advice.slice(end) };
}

/** Verdicts, below them the button that folds them. */
export function Folded({ isFolded, toggle, children }: { isFolded: boolean; toggle: () => void; children: ComponentChildren }): preact.JSX.Element {
  return (
    <section class={`verdict panel${isFolded ? " folded" : ""}`} aria-label="Verdict">
      {children}
      <button type="button" class="plain fold" aria-expanded={!isFolded} onClick={toggle}>
        {isFolded ? "Show causes and evidence" : "Hide causes and evidence"}
      </button>
    </section>
  );
}

/** A text with its parts between back-ticks as code. */
function marked(text: string): ComponentChildren[] {
  return tidy(text).split("`").map((part, i) => (i % 2 ? <code>{part}</code> : part));
}

/** A step with its label, and what it saves. */
function Step({ label, step }: { label: string; step: Advice }): preact.JSX.Element {
  return <p class="next"><b>{label}</b> {marked(step.text)}{step.gain ? ` (up to −${Math.round(100 * step.gain)} % time)` : ""}</p>;
}

/** The next steps of a verdict; those for later only where `all` are asked for. */
export function Steps({ advice, all }: { advice: readonly Advice[]; all: boolean }): preact.JSX.Element {
  const { next, then } = stepsOf(advice);
  return <>
    {next.map((step, i) => <Step label={i ? "And" : "Next"} step={step} />)}
    {all && then.map((step) => <Step label="Then" step={step} />)}
  </>;
}

/** A cause, or a bound, as a row: how much of the time it has, and what it is. */
function Row({ share, title, where, isPressed, about, choose }: { share: number; title: string; where?: string; isPressed: boolean; about: string; choose: () => void }): preact.JSX.Element {
  return (
    <button type="button" aria-pressed={isPressed} onClick={choose} title={about}>
      <span class="share"><i style={{ width: `${Math.min(100, 100 * share)}%` }} /></span>
      <b>{percent(share)}</b>
      <span class="what">{title}{where && <code>{where}</code>}</span>
    </button>
  );
}

/** Who is behind a cause; `open`: shows the stacks of that thread. */
export interface Reason { text: string; open?: () => void }

export interface ArticleParts {
  verdict: Verdict;
  notes: readonly string[];
  isFolded: boolean;
  /** The key of the cause that is shown elsewhere; '' none. */
  chosen: string;
  /** What choosing a cause does, in words. */
  about: string;
  aboutBound: string;
  choose(cause: CauseShare): void;
  chooseBound(key: string): void;
  reasons(cause: CauseShare): Reason[];
  /** Whether all lines of evidence are shown. */
  all: boolean;
  setAll(all: boolean): void;
}

function Reasons({ of }: { of: Reason[] }): preact.JSX.Element {
  return <>{of.map(({ text, open }) => <p class="reason">{tidy(text)}{open && <> <button type="button" class="link open" onClick={open}>Show its stacks</button></>}</p>)}</>;
}

/** One verdict: in a sentence what limits the work, where and by whom, and the next step; then its causes and evidence. */
export function Article({ verdict, notes, isFolded, chosen, about, aboutBound, choose, chooseBound, reasons, all, setAll }: ArticleParts): preact.JSX.Element {
  const others = (verdict.threads ?? 1) - 1;
  const name = verdict.device >= 0 ? `GPU ${verdict.device} ${verdict.device_name}` : `${verdict.device_name}${others > 0 ? ` and ${others} more` : ""}`;
  const shown = verdict.causes.filter((cause) => cause.share >= LEAST_SHARE).slice(0, 6);
  const own = ownBounds(verdict);
  const heading = verdict.bounds.slice(0, 2).map(({ key, share }) => (share >= LEAST_SHARE ? `${key} ${percent(share)}` : key)).join(" and ");
  const lines = [...verdict.evidence, ...notes];
  const main = isFolded ? mainCause(verdict) : undefined;
  return (
    <article class="one">
      <div class="heading">
        <h2>{name}: <em>{tidy(heading)}</em></h2>
        {main && <p class="main">{tidy(`${percent(main.share)} ${main.title}`)}{main.locations[0] && <> in <code>{main.locations[0].function}</code></>}</p>}
        {main && <Reasons of={main.facts.map((text) => ({ text }))} />}
        <p class="quiet">{verdict.without_device ? "over" : `${verdict.device >= 0 ? "computed" : "waited for its device"} ${percent(verdict.computing)} of`} {duration(verdict.window_ns)}</p>
        <Steps advice={verdict.advice} all={!isFolded} />
      </div>
      {!isFolded && <div>
        <h3>Causes, shares of {duration(verdict.window_ns)}</h3>
        <ul class="causes" aria-label="Causes">
          {own.map(({ key, share, title }) => (
            <li><Row share={share} title={title} isPressed={chosen === key} about={aboutBound} choose={() => chooseBound(key)} /></li>
          ))}
          {shown.map((cause) => (
            <li>
              <Row share={cause.share} title={cause.title} where={cause.locations[0]?.function ?? ""} isPressed={chosen === cause.key} about={about} choose={() => choose(cause)} />
              <Reasons of={reasons(cause)} />
            </li>
          ))}
          {!shown.length && !own.length && <li class="quiet">No cause has half a percent of the time.</li>}
        </ul>
      </div>}
      {!isFolded && <div class="evidence">
        <h3>Evidence</h3>
        <ul>{lines.slice(0, all ? 99 : FIRST_LINES).map((line) => <li>{marked(line)}</li>)}</ul>
        {lines.length > FIRST_LINES && <button type="button" class="link" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Less" : `All ${lines.length}`}</button>}
      </div>}
    </article>
  );
}
