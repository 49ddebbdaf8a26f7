// SPDX-License-Identifier: Apache-2.0
// Incidents that `sonde diagnose` kept: what became slower, why, who did it, and what speaks for that.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, duration, percent, tidy, written } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";
import { RangeButtons } from "./hours";

interface Candidate {
  cause: string; share: number; evidence: string[]; against: string[]; next_step: string;
  offender: { pid: number; name: string; owner: string; evidence: string; share: number } | null;
}
/** As `sonde.diagnose.incident` has it, but for times: the server has made them ns since 1970. */
interface Incident {
  id: string; node: string; victim: number; victim_name: string; victim_owner: string;
  began_ns: number; noticed_ns: number; explained_ns: number; noticed_by: string[]; left_out: number;
  verdict: { cause: string; candidates: Candidate[]; slowdown: number; lost: Record<string, number>; change: string | null; reason: string };
}
export interface Incidents { shown: boolean; incidents: Incident[]; older: number; unreadable: number }

/** "Explain this time" begins BEFORE_S before the incident and ends AFTER_S after it was explained. */
const BEFORE_S = 15;
const AFTER_S = 5;

/** Of a CPU's lack the stacks that were ready to run are shown, of garbage collection and changes those that ran; of others the waits. */
const OF_CPUS = new Set(["cpu-contention", "cpu-quota", "bad-pinning"]);
const OF_CODE = new Set(["garbage-collection", "unknown"]);
export const kindOfFault = (cause: string, change: string | null = null): string => (change || OF_CODE.has(cause) ? "cpu" : OF_CPUS.has(cause) ? "runqueue" : "blocked");

const causeText = (name: string): string => name.replaceAll("-", " ");

/** Parts of lost time and signs of a slowdown, by the keys of `sonde diagnose`, as people read them. */
const PARTS: Record<string, string> = {
  cpu: "on a CPU", garbage: "garbage collection", ready: "ready, no CPU free", sync: "writing to the disk", served: "waiting for another process",
  handed: "waiting within the program", asked: "waiting for who was asked", sleep: "sleeping", lock: "waiting for a lock",
};
/** What was noticed of a process, by the same keys, as an end of "Noticed, because …". */
const SIGNS: Record<string, string> = {
  cpu: "it needed more CPU time", garbage: "it spent more time in garbage collection", ready: "its threads were ready to run but waited longer for a free CPU",
  stopped: "it was stopped", disk: "it waited longer for the disk", sync: "it took longer to write to the disk", served: "it waited longer for another process",
  handed: "its processes waited longer for one another", network: "it waited longer for the network", asked: "it waited longer for an answer", sleep: "it slept longer",
  lock: "its threads waited longer for a lock", "interpreter-lock": "its threads waited longer for the interpreter's lock", reclaim: "it spent time on freeing memory",
  "progress of the job": "its job made no progress",
};

/** How an incident was noticed, as a sentence. */
export function noticedText(one: Pick<Incident, "began_ns" | "noticed_ns" | "explained_ns" | "noticed_by">): string {
  const why = one.noticed_by.map((sign) => SIGNS[sign] ?? `it changed: ${spoken(sign)}`);
  return `Noticed ${duration(one.noticed_ns - one.began_ns)} after it began${why.length ? `, because ${why.join(" and ")}` : ""}; explained ${duration(one.explained_ns - one.noticed_ns)} later.`;
}

/** Causes that are limits of the process's own group. */
const OWN_LIMITS: ReadonlySet<string> = new Set(["cpu-quota", "disk-throttle"]);

/** Who did it, where no offender is named. */
export function nobodyText(cause: string): string {
  return OWN_LIMITS.has(cause) ? "Nobody else: its own limit" : "Offender: none found";
}

const spoken = (name: string): string => PARTS[name] ?? name.replaceAll(/[-_]/g, " ");

/** Whether an incident overlaps a time, in seconds since 1970; both 0: any time. */
export function isDuring(one: { began_ns: number; explained_ns: number }, from: number, to: number): boolean {
  return !(from && to > from) || (one.began_ns / 1e9 < to && one.explained_ns / 1e9 >= from);
}

export function IncidentsView(): preact.JSX.Element {
  const { place, go, attempt } = useApp();
  const now = useMemo(() => Math.ceil(Date.now() / 1000), [attempt, place.from, place.to]);
  const isChosen = place.from > 0 && place.to > place.from;
  const asked = useAnswer<Incidents>("incidents", {});
  return (
    <>
      <div class="tools">
        <h1>Incidents</h1>
        <RangeButtons nowS={now} from={place.from} to={place.to} all={isChosen ? "" : "All that are kept"} />
        {isChosen && <button onClick={() => go({ from: 0, to: 0, live: 0 })}>All that are kept</button>}
        <label class="search">Filter <input type="search" value={place.search} placeholder="cause, process, owner, node or offender"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
      </div>
      <Answer asked={asked} loading="Asking for the incidents…">
        {(answer) => <List answer={answer} />}
      </Answer>
    </>
  );
}

/** Causes with how many incidents each has, the most frequent first. A change of the work itself is a cause, too. */
export function causesOf(incidents: readonly { verdict: { cause: string; change: string | null } }[]): [cause: string, count: number][] {
  const found = new Map<string, number>();
  for (const { verdict } of incidents) {
    const name = titleOf(verdict);
    found.set(name, (found.get(name) ?? 0) + 1);
  }
  return [...found].sort(([a, m], [b, n]) => n - m || (a < b ? -1 : 1));
}

const titleOf = (verdict: { cause: string; change: string | null }): string => (verdict.change ? `no fault: ${spoken(verdict.change)}` : causeText(verdict.cause));

/** In the address, in place of an incident: none is unfolded. */
const NONE = "-";

function List({ answer }: { answer: Incidents }): preact.JSX.Element {
  const { place, go } = useApp();
  if (!answer.shown) return <Empty title="This server shows no incidents">Watch a node with <code>sudo sonde diagnose --keep incidents.d</code>, and start the server with <code>--incidents incidents.d</code>.</Empty>;
  if (!answer.incidents.length) return <Empty title="No incident was kept">Nothing became slower without a reason while <code>sonde diagnose --keep</code> watched.</Empty>;
  const during = answer.incidents.filter((one) => isDuring(one, place.from, place.to));
  const words = place.search.toLowerCase();
  const shown = during.filter((one) => textOf(one).includes(words));
  const open = place.id || shown[0]?.id;
  const most = Math.max(1e-9, ...shown.flatMap((one) => lostOf(one).map(([, seconds]) => Math.abs(seconds))));
  const others = answer.incidents.length - during.length;
  const unnamed = shown.filter((one) => !one.node).length;
  return (
    <>
      <p class="tools causes-of"><b>{count(shown.length, "incident")}</b> <span class="quiet">of {answer.incidents.length}{others > 0 && `; ${others} at other times`}</span>
        {causesOf(during).map(([cause, number]) => <button aria-pressed={words === cause} onClick={() => go({ search: words === cause ? "" : cause, id: "" })}>{cause} <b>{number}</b></button>)}</p>
      {!during.length && <Empty title="No incident in this time">{count(others, "incident")} at other times. <button class="primary" onClick={() => go({ from: 0, to: 0, live: 0 })}>Show all that are kept</button></Empty>}
      {during.length > 0 && !shown.length && <p class="quiet">No incident matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></p>}
      <ul class="incidents">{shown.map((one) => <li key={one.id}><One one={one} most={most} isOpen={one.id === open} isLinked={one.id === place.id} fold={(isOpen) => go({ id: isOpen ? one.id : NONE }, true)} /></li>)}</ul>
      {unnamed > 0 && <p class="quiet">{count(unnamed, "incident")} here name no node, so that no time of a node can be opened for them: <code>sonde diagnose</code> of a newer version writes it.</p>}
      {(answer.older > 0 || answer.unreadable > 0) && <p class="quiet">{answer.older} older ones are not shown; {answer.unreadable} files could not be read.</p>}
    </>
  );
}

const LEAST_S = 0.005;

/** What took more time than before, in s of each second of work, the most first. */
function lostOf(one: Incident): [part: string, seconds: number][] {
  return Object.entries(one.verdict.lost).filter(([, seconds]) => Math.abs(seconds) >= LEAST_S).sort(([, a], [, b]) => b - a);
}

function textOf(one: Incident): string {
  const { candidates, cause } = one.verdict;
  return [cause, titleOf(one.verdict), causeText(cause), one.victim_name, one.victim_owner, one.node, ...candidates.map((candidate) => candidate.offender?.name ?? "")].join(" ").toLowerCase();
}

/** `most`: the longest bar of all incidents that are listed, in s. */
function One({ one, most, isOpen, isLinked, fold }: { one: Incident; most: number; isOpen: boolean; isLinked: boolean; fold: (isOpen: boolean) => void }): preact.JSX.Element {
  const { verdict } = one;
  const began = one.began_ns / 1e9;
  const article = useRef<HTMLElement>(null);
  // A link to one incident shows it, however many stand before it.
  useEffect(() => { if (isLinked) article.current?.scrollIntoView({ block: "center" }); }, []);
  return (
    <article ref={article} class="panel incident" aria-label={`Incident of ${one.victim_name}`}>
      <header>
        <h2><button class="fold" aria-expanded={isOpen} onClick={() => fold(!isOpen)}><span aria-hidden="true">{isOpen ? "▾" : "▸"}</span>{titleOf(verdict)}{one.node && ` on ${one.node}`}</button></h2>
        {verdict.slowdown > 1.05 && <span class={`tag ${verdict.change ? "fine" : "bad"}`}>{verdict.slowdown.toFixed(1)} times as slow</span>}
        <span>{one.victim_name} <small>{one.victim}{one.victim_owner && ` · ${one.victim_owner}`}</small></span>
        <span class="quiet when-of">{written(began)} UTC</span>
      </header>
      {isOpen && <Details one={one} most={most} />}
    </article>
  );
}

function Details({ one, most }: { one: Incident; most: number }): preact.JSX.Element {
  const { go } = useApp();
  const [all, setAll] = useState(false);
  const [first, ...others] = one.verdict.candidates;
  const began = one.began_ns / 1e9;
  const ended = one.explained_ns / 1e9;
  const lost = lostOf(one);
  const open = (view: "range" | "compare"): void => go({
    view, node: one.node, live: 0, from: view === "range" ? began - BEFORE_S : began, to: view === "range" ? ended + AFTER_S : ended,
    left: 0, right: 0, pid: String(one.victim), kind: kindOfFault(one.verdict.cause, one.verdict.change), search: "", cause: "", id: "", focus: [],
  });
  return (
    <div class="facts">
      <section>
        <h3>Evidence</h3>
        {one.verdict.reason && <p>{tidy(one.verdict.reason)}</p>}
        {first && !first.offender && !one.verdict.change && <p><b>{nobodyText(first.cause)}</b></p>}
        {first && <Why candidate={first} />}
        {others.length > 0 && <button class="link more-causes" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Only the likeliest cause" : `Other causes: ${others.map((other) => causeText(other.cause)).join(", ")}`}</button>}
        {all && others.map((other) => <><h3>{causeText(other.cause)}, {percent(other.share)} of the lost time</h3><Why candidate={other} /></>)}
        <p class="quiet">{noticedText(one)}{one.left_out > 0 && ` ${one.left_out} of its shortest waits and places in code are left out.`}</p>
      </section>
      <section>
        <h3>More time than before, in each second of work</h3>
        {lost.length ? <table class="lost"><tbody>{lost.map(([part, seconds]) => (
          <tr><th scope="row">{spoken(part)}</th><td><span class="bar-of" aria-hidden="true"><i class={seconds < 0 ? "less" : ""} style={{ width: `${(100 * Math.abs(seconds)) / most}%` }} /></span></td>
            <td class="number">{seconds < 0 ? "−" : "+"}{duration(Math.abs(seconds) * 1e9)}</td></tr>))}</tbody></table>
          : <p class="quiet">No part took more time than before.</p>}
        {lost.length > 0 && <p class="quiet">A full bar is {duration(most * 1e9)}, the most of the incidents listed.</p>}
        {one.node && <p class="links"><button onClick={() => open("range")}>Explain this time</button><button onClick={() => open("compare")}>Compare with the time before</button></p>}
      </section>
    </div>
  );
}

function Why({ candidate }: { candidate: Candidate }): preact.JSX.Element {
  const { offender } = candidate;
  return (
    <>
      {offender && <p>By <b>{offender.name}</b> <span class="quiet">({offender.pid}){offender.owner && ` of ${offender.owner}`}</span>: {tidy(offender.evidence)}</p>}
      <ul>{candidate.evidence.map((line) => <li>{tidy(line)}</li>)}{candidate.against.map((line) => <li class="quiet">Against: {tidy(line)}</li>)}</ul>
      {candidate.next_step && <p class="next"><b>Next</b> {tidy(candidate.next_step)}</p>}
    </>
  );
}
