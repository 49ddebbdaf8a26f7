// SPDX-License-Identifier: Apache-2.0
// Who holds GPUs and wastes them: owners, and the jobs of one or of all.

import { useMemo, useState } from "preact/hooks";
import type { OwnersAnswer } from "../answers";
import { save, text } from "../exports";
import { KIND_NAMES, sumOf } from "../gpu_hours";
import { count, energies, gpuTimes, grouped, percent } from "../numbers";
import { Answer, Empty, MoreRows } from "../parts";
import { useAnswer, useApp } from "../state";
import { START, type OwnerKind, type Place } from "../url";
import { NewestButton } from "./opening";
import { HoursBar, HoursLegend, RangeButtons, useRange } from "./hours";
import { copyLink, SaveMenu } from "./save";
import { inOrder, SortHead, type Keys } from "./sorting";

/** Rows that are asked for, those with the most waste; and those that are shown at first. */
const MAX_ROWS = 1000;
const FIRST_ROWS = 100;
/** Kinds that the views of owners and of jobs offer. */
const OF_OWNERS: readonly OwnerKind[] = ["user", "namespace", "unit", "comm", "exe"];
const OF_JOBS: readonly OwnerKind[] = ["job", "pod", "container"];
type Row = OwnersAnswer["owners"][number];

export function OwnersView(): preact.JSX.Element {
  const { place, go, attempt } = useApp();
  const isJobs = place.view === "jobs";
  const kinds = isJobs ? OF_JOBS : OF_OWNERS;
  const by = kinds.find((one) => one === place.by) ?? kinds[0]!;
  const now = useMemo(() => Math.ceil(Date.now() / 1000), [attempt, place.from, place.to]);
  const { from, to } = useRange(now);
  const among = isJobs && place.owner && place.ownerBy ? { [place.ownerBy]: place.owner } : {};
  const asked = useAnswer<OwnersAnswer>("owners", { from, to, by, limit: MAX_ROWS, ...among });
  return (
    <>
      <div class="tools">
        <h1>{isJobs ? "Jobs" : "Owners"}</h1>
        <RangeButtons nowS={now} from={from} to={to} />
        <label>By <select value={by} onChange={(event) => go({ by: event.currentTarget.value as OwnerKind })}>
          {kinds.map((one) => <option value={one}>{KIND_NAMES[one].toLowerCase()}</option>)}</select></label>
        {isJobs && place.owner && place.ownerBy && <button onClick={() => go({ owner: "", ownerBy: "" })} aria-label={`Jobs of ${place.ownerBy} ${place.owner}; show all`}>{KIND_NAMES[place.ownerBy]} {place.owner} ✕</button>}
        <label class="search">Filter <input type="search" value={place.search} placeholder={`name of ${isJobs ? "a job" : "an owner"}`}
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
        {asked.answer && <SaveMenu label="Save the table" choices={[
          { name: "JSON", about: "the server's answer", run: () => save(`${place.view}.json`, text(JSON.stringify(asked.answer, null, 1), "application/json")) }, copyLink]} />}
      </div>
      <Answer asked={asked} loading="Adding up GPU hours…">{(answer) => answer.owners.length ? <Table answer={answer} by={by} isJobs={isJobs} from={from} to={to} />
        : <Empty title="No process held a GPU in this time"><NewestButton /> Or choose a longer time. GPU hours are made of what <code>sudo sonde agent --server {location.origin}</code> polls of each process on each GPU.</Empty>}</Answer>
    </>
  );
}

const KEYS: Keys<Row> = {
  owner: (row) => row.owner || null, share: (row) => (row.held_h > 0 ? row.wasted_h / row.held_h : null), held: (row) => row.held_h,
  energy: (row) => row.joules, gpus: (row) => row.gpus, nodes: (row) => row.nodes,
};

/** Rows as they are; that of processes without an owner comes last. */
export function unnamedLast<T extends { owner: string }>(rows: readonly T[]): readonly T[] {
  return [...rows.filter((row) => row.owner), ...rows.filter((row) => !row.owner)];
}

/** How many owners the figures and the table are of, and how many there are. */
export function numberText(named: number, leftOut: number): string {
  return leftOut > 0 ? `${grouped(named)} of ${grouped(named + leftOut)}, with the most waste` : grouped(named);
}

/** What figures and table leave out: the owners (users, jobs, …: `title`) beyond those that were asked for. */
export function leftOutText(leftOut: number, title: string): string[] {
  return leftOut > 0 ? [`${count(leftOut, title.toLowerCase())} with less waste`] : [];
}

/** Where a row leads: the jobs of an owner, or the job. */
function leadsTo(row: Row, by: OwnerKind, isJobs: boolean): Partial<Place> {
  return isJobs ? { view: "job", by, id: row.owner } : { view: "jobs", by: "", owner: row.owner, ownerBy: by };
}

function Table({ answer, by, isJobs, from, to }: { answer: OwnersAnswer; by: OwnerKind; isJobs: boolean; from: number; to: number }): preact.JSX.Element {
  const { place, go } = useApp();
  const [most, setMost] = useState(FIRST_ROWS);
  const words = place.search.toLowerCase();
  const shown = inOrder(unnamedLast(words ? answer.owners.filter((row) => row.owner.toLowerCase().includes(words)) : answer.owners), place.sort, KEYS);
  const sum = sumOf(answer.owners);
  const named = answer.owners.filter((row) => row.owner).length;
  const gpuTime = gpuTimes([sum.held_h]);
  const energy = energies([sum.joules]);
  const widest = Math.max(1e-12, ...answer.owners.map((row) => row.wasted_h));
  const title = KIND_NAMES[by];
  return (
    <div class="stack">
      <dl class="figures">
        <div><dt>{title}s</dt><dd>{numberText(named, answer.left_out)}{named < answer.owners.length && <small> and processes of no {title.toLowerCase()}</small>}</dd></div>
        <div><dt>GPU time held</dt><dd>{gpuTime(sum.held_h)}</dd></div>
        <div><dt>GPU time wasted</dt><dd>{gpuTime(sum.wasted_h)} <small>{sum.held_h > 0 ? `${percent(sum.wasted_h / sum.held_h)} of it` : ""}</small></dd></div>
        <div><dt>Energy of the GPUs</dt><dd>{sum.joules === null ? "not known" : energy(sum.joules)}</dd></div>
      </dl>
      <div class="sheet" tabIndex={0} role="region" aria-label={isJobs ? "Jobs" : "Owners"}>
        <table class="owners">
          <thead><tr><SortHead name="owner" title={title} isName /><SortHead name="" title="GPU time wasted" about="The most first" /><SortHead name="share" title="Wasted, of held" isNumber /><th>GPU time held, by use</th><SortHead name="held" title="GPU time held" isNumber /><SortHead name="energy" title="Energy" isNumber /><SortHead name="gpus" title="GPUs" isNumber /><SortHead name="nodes" title="Nodes" isNumber /><th>Details</th></tr></thead>
          <tbody>{shown.slice(0, most).map((row) => (
            <tr key={row.owner}>
              <td class="name">{row.owner ? <OwnerLink row={row} by={by} isJobs={isJobs} from={from} to={to} /> : <span class="quiet">no {title.toLowerCase()} known</span>}</td>
              <td><span class="meter bad"><span class="bar-of" aria-hidden="true"><i style={{ width: `${(100 * row.wasted_h) / widest}%` }} /></span><b>{gpuTime(row.wasted_h)}</b></span></td>
              <td class="number">{row.held_h > 0 ? percent(row.wasted_h / row.held_h) : "–"}</td>
              <td><HoursBar hours={row} /></td>
              <td class="number">{gpuTime(row.held_h)}</td><td class="number">{row.joules === null ? "–" : energy(row.joules)}</td><td class="number">{row.gpus}</td><td class="number">{row.nodes}</td>
              <td>{row.owner && (isJobs
                ? <button class="link open" onClick={() => go({ ...START, view: "ranks", ...(by === "job" ? { job: row.owner } : { from, to }) })}>Ranks</button>
                : <button class="link open" onClick={() => go({ ...START, from, to, live: place.live, view: "job", by, id: row.owner })}>Why</button>)}</td>
            </tr>))}
          {!shown.length && <tr><td colSpan={9} class="none">Nothing matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></td></tr>}
          </tbody>
        </table>
        <MoreRows all={shown.length} shown={most} show={setMost} />
      </div>
      <HoursLegend />
      <NotCovered lines={answer.not_covered} more={leftOutText(answer.left_out, title)} />
    </div>
  );
}

function OwnerLink({ row, by, isJobs, from, to }: { row: Row; by: OwnerKind; isJobs: boolean; from: number; to: number }): preact.JSX.Element {
  const { place, go, hrefOf } = useApp();
  const target: Partial<Place> = { ...START, from, to, live: place.live, ...leadsTo(row, by, isJobs) };
  return <a href={hrefOf(target)} title={row.owner} onClick={(event) => { event.preventDefault(); go(target); }}>{row.owner}</a>;
}

export function NotCovered({ lines, more = [] }: { lines: readonly string[]; more?: readonly string[] }): preact.JSX.Element {
  return <p class="quiet">Not covered: {[...lines, ...more].join("; ")}.</p>;
}
