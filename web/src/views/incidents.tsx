// SPDX-License-Identifier: Apache-2.0
// Incidents that `sonde diagnose` kept: what became slower, why, who did it, and what speaks for that.

import { useState } from "preact/hooks";
import { clock, day, duration, percent, tidy } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";

interface Candidate {
  cause: string; share: number; evidence: string[]; against: string[]; next_step: string;
  offender: { pid: number; name: string; owner: string; evidence: string; share: number } | null;
}
/** As `sonde.diagnose.incident` has it, but for times: the server has made them ns since 1970. */
interface Incident {
  id: string; node: string; victim: number; victim_name: string; victim_owner: string;
  began_ns: number; noticed_ns: number; explained_ns: number; noticed_by: string[];
  verdict: { cause: string; candidates: Candidate[]; slowdown: number; lost: Record<string, number>; change: string | null; reason: string };
}
export interface Incidents { shown: boolean; incidents: Incident[]; older: number; unreadable: number }

/** "Open this time" begins BEFORE_S before the incident and ends AFTER_S after it was explained. */
const BEFORE_S = 15;
const AFTER_S = 5;

const causeText = (name: string): string => name.replaceAll("-", " ");

/** Parts of lost time and signs of a slowdown, by the keys of `sonde diagnose`, as people read them. */
const PARTS: Record<string, string> = {
  cpu: "on a CPU", garbage: "garbage collection", ready: "ready, no CPU free", sync: "writing to the disk", served: "waiting for another process",
  handed: "waiting within the program", asked: "waiting for who was asked", sleep: "sleeping", lock: "waiting for a lock",
};
const spoken = (name: string): string => PARTS[name] ?? name.replaceAll(/[-_]/g, " ");

export function IncidentsView(): preact.JSX.Element {
  const { place, go } = useApp();
  const asked = useAnswer<Incidents>("incidents", {});
  return (
    <>
      <div class="tools">
        <h1>Incidents</h1>
        <label class="search">Filter <input type="search" value={place.search} placeholder="cause, process, owner, node or offender"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
      </div>
      <Answer asked={asked} loading="Asking for the incidents…">
        {(answer) => <List answer={answer} />}
      </Answer>
    </>
  );
}

function List({ answer }: { answer: Incidents }): preact.JSX.Element {
  const { place, go } = useApp();
  if (!answer.shown) return <Empty title="This server shows no incidents">Watch a node with <code>sudo sonde diagnose --keep incidents.d</code>, and start the server with <code>--incidents incidents.d</code>.</Empty>;
  if (!answer.incidents.length) return <Empty title="No incident was kept">While <code>sonde diagnose --keep</code> watched, it found nothing that became slower.</Empty>;
  const words = place.search.toLowerCase();
  const shown = answer.incidents.filter((one) => textOf(one).includes(words));
  return (
    <>
      {!shown.length && <p class="quiet">No incident matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></p>}
      <ul class="incidents">{shown.map((one) => <li key={one.id}><One one={one} /></li>)}</ul>
      {(answer.older > 0 || answer.unreadable > 0) && <p class="quiet">{answer.older} older ones are not shown; {answer.unreadable} files could not be read.</p>}
    </>
  );
}

function textOf(one: Incident): string {
  const { candidates, cause } = one.verdict;
  return [cause, causeText(cause), one.victim_name, one.victim_owner, one.node, ...candidates.map((candidate) => candidate.offender?.name ?? "")].join(" ").toLowerCase();
}

function One({ one }: { one: Incident }): preact.JSX.Element {
  const { go } = useApp();
  const [all, setAll] = useState(false);
  const { verdict } = one;
  const [first, ...others] = verdict.candidates;
  const began = one.began_ns / 1e9;
  const ended = one.explained_ns / 1e9;
  const lost = Object.entries(verdict.lost).filter(([, seconds]) => Math.abs(seconds) >= 0.005).sort(([, a], [, b]) => b - a);
  const longest = Math.max(...lost.map(([, seconds]) => Math.abs(seconds)), 1e-9);
  const show = (view: "range" | "compare"): void => go({
    view, node: one.node, live: 0, from: view === "range" ? began - BEFORE_S : began, to: view === "range" ? ended + AFTER_S : ended,
    left: 0, right: 0, kind: "cpu", search: "", cause: "", focus: [],
  });
  return (
    <article class="panel incident" aria-label={`Incident of ${one.victim_name}`}>
      <header>
        <h2>{one.victim_name} <small>{one.victim}{one.victim_owner && ` · ${one.victim_owner}`}{one.node && ` on ${one.node}`}</small></h2>
        <p>{verdict.change ? <span class="tag fine">no fault: {spoken(verdict.change)}</span> : <span class="tag bad">{causeText(verdict.cause)}</span>}
          {verdict.slowdown > 1.05 && <b>{verdict.slowdown.toFixed(1)} times as slow</b>}{" "}
          <span class="quiet">{day(began)} {clock(began)}, noticed after {duration(one.noticed_ns - one.began_ns)} by {one.noticed_by.map(spoken).join(", ")}, explained {duration(one.explained_ns - one.noticed_ns)} later</span></p>
      </header>
      <div class="facts">
        <section>
          <h3>Evidence</h3>
          {verdict.reason && <p>{tidy(verdict.reason)}</p>}
          {first && <Why candidate={first} />}
          {others.length > 0 && <button class="link more-causes" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Only the likeliest cause" : `Other causes: ${others.map((other) => causeText(other.cause)).join(", ")}`}</button>}
          {all && others.map((other) => <><h3>{causeText(other.cause)}, {percent(other.share)} of the lost time</h3><Why candidate={other} /></>)}
        </section>
        <section>
          <h3>Before and after: more time in each second</h3>
          {lost.length ? <table class="lost"><tbody>{lost.map(([part, seconds]) => (
            <tr><th scope="row">{spoken(part)}</th><td><span class="bar-of" aria-hidden="true"><i class={seconds < 0 ? "less" : ""} style={{ width: `${(100 * Math.abs(seconds)) / longest}%` }} /></span></td>
              <td class="number">{seconds < 0 ? "−" : "+"}{duration(Math.abs(seconds) * 1e9)}</td></tr>))}</tbody></table>
            : <p class="quiet">No part took more time than before.</p>}
          <p class="links">{one.node ? <><button onClick={() => show("range")}>Open this time</button><button onClick={() => show("compare")}>Compare with the time before</button></>
            : <span class="quiet">The file does not name the node.</span>}</p>
        </section>
      </div>
    </article>
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
