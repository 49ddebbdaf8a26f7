// SPDX-License-Identifier: Apache-2.0
// What changed between two selections of stacks: times, nodes, processes (ranks), or jobs (versions).

import { useMemo, useState } from "preact/hooks";
import type { NodesAnswer, ProcessesAnswer } from "../answers";
import type { Flame } from "../api";
import { afterOf, changeColours, changes, compared, levelOf, LEVELS } from "../compare";
import { css } from "../draw/colours";
import { save, text } from "../exports";
import { build, matcher } from "../flame";
import { duration, percent, scaled, timeOf, written } from "../numbers";
import { Answer, Empty, MoreRows, ROWS_AT_ONCE } from "../parts";
import { programOf } from "../programs";
import { useAnswer, useApp } from "../state";
import type { Place } from "../url";
import { Drawn, KINDS } from "./flame";
import { NothingOf } from "./recorded";
import { copyLink, SaveMenu } from "./save";

/** What one side of the comparison selects. */
interface Side { node: string; pid: string; job: string; from: number; to: number }

/** By how many seconds the side before is earlier; 0: it ends where the side after begins. */
const EARLIER: readonly [string, number][] = [["The time before", 0], ["An hour earlier", 3600], ["A day earlier", 86_400]];

/** Both sides of a place: what it leaves open of the side before is that of the side after. */
function sidesOf(place: Place): [before: Side, after: Side] {
  const after = { node: place.node, pid: place.pid, job: place.job, from: place.from, to: place.to };
  const isOwnTime = place.from2 > 0 && place.to2 > place.from2;
  const isOther = Boolean(place.node2 || place.pid2 || place.job2);
  const length = place.to - place.from;
  const [from, to] = isOwnTime ? [place.from2, place.to2] : isOther ? [place.from, place.to] : [place.from - length, place.from];
  // A process id is of its node, so it is not taken over to another node or job.
  const pid = place.pid2 || (place.node2 || place.job2 ? "" : place.pid);
  return [{ node: place.node2 || (place.job2 ? "" : place.node), pid, job: place.job2 || (place.node2 || place.pid2 ? "" : place.job), from, to }, after];
}

export function CompareView(): preact.JSX.Element {
  const { place, go } = useApp();
  const ready = place.from > 0 && place.to > place.from;
  const [before, after] = sidesOf(place);
  const [kind, title, weight, hint] = KINDS.find(([one]) => one === place.kind) ?? KINDS[0]!;
  const asked = useAnswer<Flame>(ready ? "flamegraph" : null, { ...before, kind });
  const askedAfter = useAnswer<Flame>(ready ? "flamegraph" : null, { ...after, kind });
  if (!ready) return <Empty title="No time is chosen">Choose a node, drag over one of its charts, then “Compare with the time before”.</Empty>;
  const shape = place.shape === "table" ? "table" : "graph";
  return (
    <>
      <div class="tools">
        <h1>What changed</h1>
        <div class="segments" role="group" aria-label="Shape">
          <button aria-pressed={shape === "graph"} onClick={() => go({ shape: "graph" })}>Graph</button>
          <button aria-pressed={shape === "table"} onClick={() => go({ shape: "table" })}>Table</button>
        </div>
        <div class="segments" role="group" aria-label="What is counted">
          {KINDS.map(([one, name, , about]) => <button aria-pressed={one === kind} title={about} onClick={() => go({ kind: one, focus: [] })}>{name}</button>)}
        </div>
        {place.node && <button onClick={() => go({ view: "range", shape: "graph" })}>Back to the range</button>}
      </div>
      {before.node === after.node && before.pid === after.pid
        && <NothingOf node={place.node} pid={place.pid} from={Math.min(before.from, after.from)} to={Math.max(before.to, after.to)} />}
      <div class="sides">
        <SideForm title="Before" side={before} set={(side) => go({ node2: side.node, pid2: side.pid, job2: side.job, from2: side.from, to2: side.to, focus: [] })} />
        <SideForm title="After" side={after} set={(side) => go({ ...side, focus: [] })} />
      </div>
      <div class="tools"><span class="quiet">Compare with</span>
        {EARLIER.map(([name, shiftS]) => <button onClick={() => go({ node2: "", pid2: "", job2: "", from2: shiftS ? place.from - shiftS : 0, to2: shiftS ? place.to - shiftS : 0, focus: [] })}>{name}</button>)}
        <button onClick={() => go({ node: before.node, pid: before.pid, job: before.job, from: before.from, to: before.to, node2: after.node, pid2: after.pid, job2: after.job, from2: after.from, to2: after.to, focus: [] })}>Swap the two</button></div>
      <Answer asked={asked} loading="Asking for the stacks before…">
        {(flame) => <Answer asked={askedAfter} loading="Asking for the stacks after…">
          {(flameAfter) => <Change before={flame} after={flameAfter} weight={weight} title={title} hint={hint} isTable={shape === "table"} />}
        </Answer>}
      </Answer>
    </>
  );
}

function Change(props: { before: Flame; after: Flame; weight: "ns" | "bytes"; title: string; hint: string; isTable: boolean }): preact.JSX.Element {
  const { before, after, weight, hint, isTable } = props;
  const { place, go, palette } = useApp();
  const both = useMemo(() => compared(before, after, weight), [before, after, weight]);
  const tree = useMemo(() => (both ? build(both, weight, place.invert, "") : null), [both, weight, place.invert]);
  const rows = useMemo(() => changes(before, after, weight, ""), [before, after, weight]);
  const [count, setCount] = useState(ROWS_AT_ONCE);
  const shade = useMemo(() => (tree ? {
    colours: changeColours(palette.dark), levelOf: (node: number) => levelOf(tree, node),
    lines: (node: number): [string, string][] => [["Before", percent(tree.before[node]!)], ["After", percent(afterOf(tree, node))], ["Change", points(afterOf(tree, node) - tree.before[node]!)]],
  } : null), [tree, palette]);
  if (!both || !tree || !shade) {
    const empty = before.stacks.length ? (after.stacks.length ? "Neither" : "The selection after") : after.stacks.length ? "The selection before" : "Neither selection";
    return <Empty title="Nothing to compare">{empty} has stacks of “{props.title}”, which counts {hint}. Choose another kind, time, node or process.</Empty>;
  }
  const size = (flame: Flame): string => (weight === "ns" ? duration(flame.total.ns) : scaled(flame.total.bytes, "B"));
  const search = matcher(place.search);
  const matching = rows.filter((row) => !search || search(row.fn));
  const shown = matching.slice(0, count);
  return (
    <section class="panel" aria-label="Changes">
      <div class="tools">
        <label class="search">Search <input type="search" value={place.search} placeholder="function, file or binary" onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
        <label class="check"><input type="checkbox" checked={place.invert} onChange={(event) => go({ invert: event.currentTarget.checked, focus: [] })} /> Invert</label>
        <span>{isTable ? "" : "Whole width: "}before <b>{size(before)}</b>, after <b>{size(after)}</b> <span class="quiet">of {props.title}; changes are in points of these totals</span></span>
        <SaveMenu label="Save the changes" choices={[
          { name: "CSV", about: "functions and their shares before and after", run: () => save("changes.csv", text(csv(rows), "text/csv")) }, copyLink]} />
      </div>
      {isTable ? <div class="sheet tall" tabIndex={0} role="region" aria-label="Functions by change"><table>
        <thead><tr><th>Function</th><th>Binary</th><th class="number">Before</th><th class="number">After</th><th class="number">Change of own time</th></tr></thead>
        <tbody>{shown.map((row) => <tr><td class="code" title={row.fn.file}>{row.fn.label}</td><td class="quiet">{row.fn.binary}</td><td class="number">{percent(row.before)}</td><td class="number">{percent(row.after)}</td><td class="number">{points(row.change)}</td></tr>)}
          {!shown.length && <tr><td colSpan={5} class="none">No function matches. Clear the search.</td></tr>}</tbody>
      </table><MoreRows all={matching.length} shown={count} show={setCount} /></div> : <>
        <Drawn tree={tree} lit={null} show={percent} focus={place.focus} zoom={(focus) => go({ focus })} name="Flame graph of changes" shade={shade} />
        <div class="under">
          <span>−10 points or less</span>
          <span class="scale" aria-hidden="true">{[0, 3, 7, 11, LEVELS - 1].map((level) => <i style={{ background: css(shade.colours[level]!) }} />)}</span>
          <span>+10 points or more</span>
          <span class="quiet">change of the share of all {weight === "ns" ? "time" : "bytes"}; a frame is as wide as the mean of both shares</span>
        </div></>}
    </section>
  );
}

function points(change: number): string {
  return `${change >= 0 ? "+" : "−"}${(100 * Math.abs(change)).toFixed(1)} points`;
}

function csv(rows: ReturnType<typeof changes>): string {
  // A cell that a spreadsheet would take for a formula is text.
  const cell = (value: string): string => `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  return ["function,file,binary,before,after", ...rows.map((row) => [cell(row.fn.label), cell(row.fn.file), cell(row.fn.binary), row.before, row.after].join(","))].join("\r\n");
}

function SideForm({ title, side, set }: { title: string; side: Side; set: (side: Side) => void }): preact.JSX.Element {
  const [wrong, setWrong] = useState("");
  const nodes = useAnswer<NodesAnswer>("nodes", { from: side.from, to: side.to });
  const processes = useAnswer<ProcessesAnswer>("processes", { node: side.node, from: side.from, to: side.to, limit: 100 });
  const jobs = [...new Set((processes.answer ?? []).map((one) => one.job ?? "").filter(Boolean)), side.job].filter((one, i, all) => one && all.indexOf(one) === i);
  const names = [...new Set([...(nodes.answer ?? []).map((one) => one.node), side.node].filter(Boolean))];
  const pids = (processes.answer ?? []).map((one): [string, string] => [String(one.pid), `${programOf(one)} (${one.pid})`]);
  if (side.pid && !pids.some(([pid]) => pid === side.pid)) pids.push([side.pid, side.pid]);
  const time = (value: string, name: "from" | "to"): void => {
    const seconds = timeOf(value);
    const isUsable = Number.isFinite(seconds) && (name === "from" ? seconds < side.to : seconds > side.from);
    setWrong(isUsable ? "" : `No such time${Number.isFinite(seconds) ? ": “To” has to be later than “From”" : ""}. Write it as 2026-11-23 08:35:30.5, in UTC.`);
    if (isUsable) set({ ...side, [name]: seconds });
  };
  return (
    <section class="panel pad side" aria-label={title}>
      <h2>{title}</h2>
      <div class="fields">
        <label>Node <select value={side.node} onChange={(event) => set({ ...side, node: event.currentTarget.value, pid: "" })}><option value="">all nodes</option>{names.map((name) => <option value={name}>{name}</option>)}</select></label>
        <label>Process <select value={side.pid} onChange={(event) => set({ ...side, pid: event.currentTarget.value })}><option value="">all processes</option>{pids.map(([pid, name]) => <option value={pid}>{name}</option>)}</select></label>
        <label>Job <select value={side.job} onChange={(event) => set({ ...side, job: event.currentTarget.value })}><option value="">all jobs</option>{jobs.map((name) => <option value={name}>{name}</option>)}</select></label>
        <label class="time">From, UTC <input value={written(side.from)} autocomplete="off" onChange={(event) => time(event.currentTarget.value, "from")} /></label>
        <label class="time">To, UTC <input value={written(side.to)} autocomplete="off" onChange={(event) => time(event.currentTarget.value, "to")} /></label>
      </div>
      {wrong && <p role="alert">{wrong}</p>}
    </section>
  );
}
