// SPDX-License-Identifier: Apache-2.0
// One job, or another owner: its GPU hours, why they were wasted, whom its ranks wait for, its functions.

import { useMemo } from "preact/hooks";
import type { JobAnswer } from "../answers";
import type { Verdict } from "../api";
import { save, text } from "../exports";
import { KIND_NAMES } from "../gpu_hours";
import { clock, count, duration, energy, gpuTimes, percent, period, tidy } from "../numbers";
import { Answer, Empty, Meter } from "../parts";
import { programOf } from "../programs";
import { useAnswer, useApp } from "../state";
import { isOwnerKind, OWNER_KINDS, START, type OwnerKind, type Place } from "../url";
import { Steps } from "../verdict";
import { HoursBar, HoursParts, RangeButtons, useRange } from "./hours";
import { NotCovered } from "./owners";
import { OF_WHAT } from "./ranks";
import { copyLink, SaveMenu } from "./save";

type Waiting = JobAnswer["waiting"];
/** What is known of the node of the rank that the others wait for. */
interface OnNode { node: string; bound: string; evidence: string[]; next: string; incidents: { time_ns: number; cause: string }[] }

/** Rows that are asked for, and nodes that are listed. */
const MAX_FUNCTIONS = 20;
const MAX_NODES = 40;
/** Rows are kept by the second, so this much around a rank's time is shown, too. */
const AROUND_S = 1;

/** By the `kind` of what ranks wait for. */
const TITLES: Record<string, [string, "bad" | "warn" | "fine"]> = {
  "slow-worker": ["slow worker", "bad"], "slow-stage": ["slow stage", "bad"], "slow-link": ["slow link", "bad"],
  "unequal-sequences": ["unequal sequences", "warn"], "unequal-work": ["unequal work", "warn"],
  nothing: ["no rank is slow", "fine"], unknown: ["not known", "warn"],
};

/** The time in which ranks of a job were timed, at most the last minute of it, to open them in; not known: none. */
export function observedIn(waiting: Pick<Waiting, "start_ns" | "end_ns"> | undefined): Partial<Place> {
  return waiting && waiting.end_ns > waiting.start_ns ? { from: waiting.start_ns / 1e9, to: waiting.end_ns / 1e9 } : {};
}

export function JobView(): preact.JSX.Element {
  const { place, go, attempt } = useApp();
  const by: OwnerKind = place.by || "job";
  const now = useMemo(() => Math.ceil(Date.now() / 1000), [attempt, place.from, place.to]);
  const { from, to } = useRange(now);
  const asked = useAnswer<JobAnswer>(place.id ? "job" : null, { from, to, [by]: place.id, limit: MAX_FUNCTIONS });
  if (!place.id) {
    return <Empty title="No job is chosen">Choose one among the <button class="link open" onClick={() => go({ ...START, view: "jobs", from: place.from, to: place.to })}>jobs</button> or the <button class="link open" onClick={() => go({ ...START, view: "owners", from: place.from, to: place.to })}>owners</button>.</Empty>;
  }
  return (
    <>
      <div class="tools">
        <h1>{KIND_NAMES[by]} {place.id}</h1>
        <RangeButtons nowS={now} from={from} to={to} />
        {isOwnerKind(by) && <button onClick={() => go({ ...START, view: "jobs", owner: place.id, ownerBy: by, from, to })}>Jobs</button>}
        {by === "job" && <button onClick={() => go({ ...START, view: "ranks", job: place.id, ...observedIn(asked.answer?.waiting) })}>Ranks</button>}
        {asked.answer && <SaveMenu label="Save the job" choices={[
          { name: "JSON", about: "the server's answer, as sonde job --json", run: () => save(`${by}-${place.id}.json`, text(JSON.stringify(asked.answer, null, 1), "application/json")) }, copyLink]} />}
      </div>
      <Answer asked={asked} loading="Adding up GPU hours and asking its ranks…">{(answer) => <Job answer={answer} from={from} to={to} />}</Answer>
    </>
  );
}

function Job({ answer, from, to }: { answer: JobAnswer; from: number; to: number }): preact.JSX.Element {
  const by = OWNER_KINDS.find((kind) => kind === answer.by) ?? "job";
  if (!answer.nodes.length && !(answer.held_h > 0)) {
    return <Empty title={`Nothing of ${KIND_NAMES[by].toLowerCase()} ${answer.id} was seen in this time`}>Choose a longer time. The views Jobs and Owners list the names that were seen.</Empty>;
  }
  const gpuTime = gpuTimes([answer.held_h]);
  return (
    <div class="stack">
      <dl class="figures">
        <div><dt>GPUs</dt><dd>{answer.gpus} <small>of {count(answer.nodes.length, "node")}</small></dd></div>
        <div><dt>GPU time held</dt><dd>{gpuTime(answer.held_h)}</dd></div>
        <div><dt>Productive</dt><dd>{answer.held_h > 0 ? percent(answer.productive_h / answer.held_h) : "–"} <small>{gpuTime(answer.productive_h)}</small></dd></div>
        <div><dt>GPU time wasted</dt><dd class={answer.wasted_h > 0 ? "is-bad" : ""}>{gpuTime(answer.wasted_h)} <small>{answer.held_h > 0 ? `${percent(answer.wasted_h / answer.held_h)} of it` : ""}</small></dd></div>
        <div><dt>Energy of the GPUs</dt><dd>{answer.joules === null ? "not known" : energy(answer.joules)}</dd></div>
      </dl>
      <div class="sides level">
        <section class="panel pad" aria-label="GPU time held">
          <h2>GPU time held, by use</h2>
          {answer.held_h > 0 ? <><HoursBar hours={answer} /><HoursParts hours={answer} /></> : <p class="quiet">No process of it had memory on a GPU in this time.</p>}
        </section>
        <Wasted answer={answer} />
      </div>
      <Waits waiting={answer.waiting} by={by} id={answer.id} />
      <div class="sides level">
        <Verdicts answer={answer} />
        <Functions answer={answer} />
      </div>
      <Nodes answer={answer} from={from} to={to} />
      <NotCovered lines={answer.not_covered} />
    </div>
  );
}

function Wasted({ answer }: { answer: JobAnswer }): preact.JSX.Element {
  const most = Math.max(1e-12, ...answer.wasted.map((one) => one.gpu_h));
  const gpuTime = gpuTimes([answer.held_h]);
  return (
    <section class="panel pad" aria-label="Wasted hours by cause">
      <h2>GPU time wasted, by cause</h2>
      {answer.wasted.length ? <table class="plain-rows">
        <thead class="unseen"><tr><th>Cause</th><th>Share</th><th>GPU hours</th><th>Share of the hours held</th></tr></thead>
        <tbody>{answer.wasted.map((one) => (
          <tr><th scope="row">{one.cause}</th><td class="of-most"><span class="bar-of" aria-hidden="true"><i style={{ width: `${(100 * one.gpu_h) / most}%` }} /></span></td><td class="number">{gpuTime(one.gpu_h)}</td><td class="number">{answer.held_h > 0 ? percent(one.gpu_h / answer.held_h) : "–"}</td></tr>))}</tbody>
      </table> : <p class="quiet">Nothing of it was wasted.</p>}
    </section>
  );
}

const NOT_KNOWN = /^not known: /;

/** What ranks wait for, or why that is not known: the title has that already. */
export function reasonOf({ text }: Pick<Waiting, "text">): string {
  const reason = text.replace(NOT_KNOWN, "");
  return reason === text ? text : `${reason.charAt(0).toUpperCase()}${reason.slice(1)}.`;
}

/** What is missing beside that reason. */
export function missingOf({ text, missing }: Pick<Waiting, "text" | "missing">): string[] {
  return missing.filter((line) => line !== text.replace(NOT_KNOWN, ""));
}

function Waits({ waiting, by, id }: { waiting: Waiting; by: OwnerKind; id: string }): preact.JSX.Element {
  const { go } = useApp();
  const [title, tone] = TITLES[waiting.kind] ?? [waiting.kind, "warn"];
  const begin = waiting.start_ns / 1e9;
  const end = waiting.end_ns / 1e9;
  const about = waiting.node as OnNode | null;
  const missing = missingOf(waiting);
  const open = (node: string, pid: number): void => go({ ...START, view: "range", node, from: begin - AROUND_S, to: end + AROUND_S, left: begin, right: end, pid: String(pid) });
  return (
    <section class="panel pad waits" aria-label="What its ranks wait for">
      <div class="tools bare"><h2>What its ranks wait for</h2><span class={`tag ${tone}`}>{title}</span>
        {waiting.lost_s > 0 && <b>{duration(waiting.lost_s * 1e9)} lost in each {waiting.per}</b>}
        <span class="quiet">{period(begin, end)}{waiting.compared > 0 && `, ${count(waiting.compared, "rank")} compared`}</span>
        {by === "job" && <button onClick={() => go({ ...START, view: "ranks", job: id, from: begin, to: end })}>Heat map of this time</button>}</div>
      <p>{tidy(reasonOf(waiting))}</p>
      <div class="facts">
        <div>
          {(waiting.evidence.length > 0 || waiting.kind !== "unknown") && <h3>Evidence</h3>}
          {waiting.evidence.length ? <ul>{waiting.evidence.map((line) => <li>{tidy(line)}</li>)}</ul> : waiting.kind !== "unknown" && <p class="quiet">None.</p>}
          {missing.length > 0 && <><h3>Missing</h3><ul class="quiet">{missing.map((line) => <li>{tidy(line)}</li>)}</ul></>}
        </div>
        {about && <div>
          <h3>Its node {about.node}</h3>
          <p>{about.bound ? <span class="tag bad">{about.bound}</span> : <span class="quiet">No verdict on this rank.</span>}</p>
          <ul>{about.evidence.map((line) => <li>{tidy(line)}</li>)}
            {about.incidents.map((one) => <li>Incident at {clock(one.time_ns / 1e9)}: {one.cause.replaceAll("-", " ")}</li>)}</ul>
          {about.next && <p class="next"><b>Next</b> {tidy(about.next)}</p>}
        </div>}
      </div>
      {waiting.ranks.length > 0 && <div class="sheet" tabIndex={0} role="region" aria-label="Ranks that the others wait for"><table>
        <thead><tr><th class="number">Rank</th><th>Node</th><th>Process</th><th>At work</th><th>In collectives</th><th>Details</th></tr></thead>
        <tbody>{waiting.ranks.map((rank) => (
          <tr><td class="number">{rank.number}</td><td>{rank.node} <small>GPU{rank.device}</small></td><td title={programOf(rank)}>{programOf(rank)} <small>{rank.pid}</small></td>
            <td><Meter share={rank.work} text={percent(rank.work)} /></td><td><Meter share={rank.collective} text={percent(rank.collective)} /></td>
            <td><button class="link open" onClick={() => open(rank.node, rank.pid)}>Its time</button></td></tr>))}</tbody>
      </table>{waiting.count > waiting.ranks.length && <p class="quiet note">and {count(waiting.count - waiting.ranks.length, "more rank")}</p>}<p class="quiet note">At work and in collectives: {OF_WHAT}.</p></div>}
    </section>
  );
}

function Verdicts({ answer }: { answer: JobAnswer }): preact.JSX.Element {
  const { go } = useApp();
  return (
    <section class="panel pad" aria-label="Verdicts">
      <h2>Verdicts on the worst minutes</h2>
      {!answer.verdicts.length && <p class="quiet">None: no GPU of it stalled, or nothing explains it.</p>}
      {answer.verdicts.map((one) => {
        const verdict = one.verdict as unknown as Verdict;
        const open = (): void => go({ ...START, view: "range", node: one.node, from: one.start_ns / 1e9, to: one.end_ns / 1e9 });
        return (
          <article class="verdict-on">
            <div class="tools bare"><h3>{one.node}, {verdict.device_name}</h3><span class="tag bad">{verdict.bounds[0]?.key ?? "not known"}</span><button onClick={open}>Open {clock(one.start_ns / 1e9)}</button></div>
            <ul>{verdict.evidence.slice(0, 4).map((line) => <li>{tidy(line)}</li>)}</ul>
            <Steps advice={verdict.advice} all={false} />
          </article>
        );
      })}
    </section>
  );
}

function Functions({ answer }: { answer: JobAnswer }): preact.JSX.Element {
  return (
    <section class="panel pad" aria-label="Functions">
      <h2>Functions by own time on CPUs</h2>
      {answer.functions.length ? <div class="sheet" tabIndex={0} role="region" aria-label="Functions by own time"><table>
        <thead><tr><th class="number">By itself</th><th class="number">With callees</th><th>Function</th><th>Binary</th></tr></thead>
        <tbody>{answer.functions.map((one) => <tr><td class="number">{duration(one.own_ns)}</td><td class="number">{duration(one.total_ns)}</td><td class="code" title={one.function}>{one.function || `${one.binary.slice(one.binary.lastIndexOf("/") + 1) || "unknown binary"} (no symbols)`}</td><td class="quiet clipped" title={one.binary}>{one.binary}</td></tr>)}</tbody>
      </table></div> : <p class="quiet">No sample of its processes on a CPU was sent in this time.</p>}
    </section>
  );
}

function Nodes({ answer, from, to }: { answer: JobAnswer; from: number; to: number }): preact.JSX.Element {
  const { go, hrefOf } = useApp();
  const target = (node: string): Partial<Place> => ({ ...START, view: "node", node, from, to });
  return (
    <section class="panel pad" aria-label="Nodes">
      <h2>Nodes</h2>
      <p class="links">{answer.nodes.slice(0, MAX_NODES).map((node) => <a href={hrefOf(target(node))} onClick={(event) => { event.preventDefault(); go(target(node)); }}>{node}</a>)}
        {answer.nodes.length > MAX_NODES && <span class="quiet">and {answer.nodes.length - MAX_NODES} more</span>}</p>
    </section>
  );
}
