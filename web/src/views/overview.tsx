// SPDX-License-Identifier: Apache-2.0
// All nodes, what is wrong first.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { HoldersAnswer } from "../answers";
import { ask, type Columns, type Explanation, type LossRow, type NodeRow } from "../api";
import { devicesOf, shortId, states, type DeviceState, type NodeState } from "../devices";
import { ago, duration, gpuHours, grouped, scaled } from "../numbers";
import { inWords, keyOf, lastMinute } from "../last_minute";
import { Answer, Empty, Meter } from "../parts";
import { useAnswer, useApp } from "../state";
import { START } from "../url";
import { RangeButtons, useRange } from "./hours";
import type { Incidents } from "./incidents";

/** Rows of holders that are asked for. */
const MAX_HOLDERS = 100_000;
/** Rows that are shown at first. */
const FIRST_ROWS = 100;
/** Nodes whose verdict is asked for. */
const VERDICTS = 12;

export function Overview(): preact.JSX.Element {
  const { place, go, attempt } = useApp();
  const now = useMemo(() => Math.ceil(Date.now() / 1000), [attempt, place.from, place.to]);
  const { from, to, length } = useRange(now);
  const nodes = useAnswer<NodeRow[]>("nodes", { from, to });
  const devices = useAnswer<Columns>(nodes.answer?.length ? "devices" : null, { from, to, format: "columns" });
  const losses = useAnswer<LossRow[]>(nodes.answer?.length ? "losses" : null, { from, to });
  // Of these two the table shows what has come: it does not wait for them.
  const holders = useAnswer<HoldersAnswer>(nodes.answer?.length ? "holders" : null, { from, to, limit: MAX_HOLDERS });
  const incidents = useAnswer<Incidents>(nodes.answer?.length ? "incidents" : null, {});
  const list = useMemo(() => {
    const during = (incidents.answer?.incidents ?? []).filter((one) => one.began_ns >= from * 1e9 && one.began_ns < to * 1e9);
    return states(nodes.answer ?? [], devices.answer, losses.answer ?? [], Math.min(now, to), { holders: holders.answer?.holders ?? [], incidents: during });
  }, [nodes.answer, devices.answer, losses.answer, holders.answer, incidents.answer]);
  return (
    <>
      <div class="tools">
        <h1>Overview</h1>
        <div class="segments" role="group" aria-label="What is listed">
          <button aria-pressed={place.list === "nodes"} onClick={() => go({ list: "nodes" })}>Nodes</button>
          <button aria-pressed={place.list === "gpus"} onClick={() => go({ list: "gpus" })}>GPUs</button>
        </div>
        <RangeButtons nowS={now} length={length} />
        <label class="search">Filter <input type="search" value={place.search} placeholder="node, owner, or what is wrong"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
      </div>
      <Answer asked={nodes} loading="Asking for the nodes…">
        {(rows) => rows.length ? <Listed list={list} from={from} to={to} /> : <Nothing />}
      </Answer>
    </>
  );
}

function Nothing(): preact.JSX.Element {
  const { go } = useApp();
  const all = useAnswer<NodeRow[]>("nodes", { from: 1 });
  const last = Math.max(0, ...(all.answer ?? []).map((row) => row.last_ns / 1e9));
  if (!last) {
    return (
      <Empty title="No node has sent anything yet">
        Send a recording: <code>sonde record -d 10 -o run.sonde</code>, then <code>sonde upload run.sonde --server {location.origin}</code>
      </Empty>
    );
  }
  return (
    <Empty title="Nothing was sent in this time">
      The newest data is {ago(Date.now() / 1000 - last)}.{" "}
      <button class="primary" onClick={() => go({ from: Math.floor(last) - 3600, to: Math.ceil(last) + 1 })}>Show the hour before it</button>
    </Empty>
  );
}

const textOf = (one: NodeState): string => `${one.node} ${one.holders.map((holder) => holder.owner).join(" ")} ${one.troubles.map((trouble) => trouble.text).join(" ")}`.toLowerCase();

function Listed({ list, from, to }: { list: NodeState[]; from: number; to: number }): preact.JSX.Element {
  const { place } = useApp();
  const words = place.search.toLowerCase();
  const shown = words ? list.filter((one) => textOf(one).includes(words)) : list;
  const gpus = list.reduce((sum, one) => sum + one.devices.length, 0);
  const idle = list.reduce((sum, one) => sum + one.idleGpuS, 0);
  const isHeld = list.some((one) => one.wastedH !== null);
  const wasted = list.reduce((sum, one) => sum + (one.wastedH ?? 0), 0);
  const troubled = list.filter((one) => one.troubles.length).length;
  const incidents = list.reduce((sum, one) => sum + one.incidents, 0);
  return (
    <>
      <dl class="figures">
        <div><dt>Nodes</dt><dd>{grouped(list.length)}</dd></div>
        <div><dt>GPUs</dt><dd>{grouped(gpus)}</dd></div>
        <div><dt>Something wrong on</dt><dd>{grouped(troubled)} <small>node{troubled === 1 ? "" : "s"}</small></dd></div>
        {isHeld ? <div><dt>GPU time wasted</dt><dd>{gpuHours(wasted)}</dd></div> : <div><dt>GPU time not used</dt><dd>{duration(idle * 1e9)}</dd></div>}
        <div><dt>Incidents</dt><dd>{incidents}</dd></div>
      </dl>
      {place.list === "gpus" ? <Gpus list={shown} /> : <Table list={list} shown={shown} from={from} to={to} />}
    </>
  );
}

function Table({ list, shown, from, to }: { list: NodeState[]; shown: NodeState[]; from: number; to: number }): preact.JSX.Element {
  const [most, setMost] = useState(FIRST_ROWS);
  const verdicts = useVerdicts(shown.slice(0, VERDICTS));
  return (
    <div class="sheet" tabIndex={0} role="region" aria-label="Nodes">
      <table>
        <thead><tr><th>Node</th><th>Owner</th><th>What is wrong</th><th>Verdict on its last minute</th><th class="number">Wasted</th><th>GPU busy</th><th>SM active</th><th>Memory</th><th class="number">Power</th><th class="number">Last sent</th></tr></thead>
        <tbody>
          {shown.slice(0, most).map((one) => <NodeLine key={one.node} one={one} verdict={verdicts[one.node]} from={from} to={to} />)}
          {!shown.length && list.length > 0 && <NoMatch columns={10} />}
        </tbody>
      </table>
      {shown.length > most && <button class="more" onClick={() => setMost(most + 500)}>Show 500 more of {grouped(shown.length - most)}</button>}
    </div>
  );
}

function NoMatch({ columns }: { columns: number }): preact.JSX.Element {
  const { place, go } = useApp();
  return <tr><td colSpan={columns} class="none">Nothing matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></td></tr>;
}

function useOpenNode(): (one: NodeState) => (event: Event) => void {
  const { go } = useApp();
  return (one) => (event) => {
    event.preventDefault();
    const end = Math.ceil(one.lastS) + 1;
    go({ view: "node", node: one.node, from: Math.max(Math.floor(one.firstS) - 1, end - 3600), to: end, search: "" });
  };
}

function Troubles({ troubles }: { troubles: NodeState["troubles"] }): preact.JSX.Element {
  return (
    <>
      {troubles.length ? troubles.slice(0, 2).map((trouble) => <span class={`tag ${trouble.tone}`}>{trouble.text}</span>) : <span class="tag fine">nothing found</span>}
      {troubles.length > 2 && <small title={troubles.slice(2).map((trouble) => trouble.text).join("\n")}>and {troubles.length - 2} more</small>}
    </>
  );
}

const share = (value: number | null): preact.JSX.Element | string => (value === null ? "–" : <Meter share={value} text={`${Math.round(100 * value)} %`} />);

function Gpus({ list }: { list: NodeState[] }): preact.JSX.Element {
  const { hrefOf } = useApp();
  const [most, setMost] = useState(FIRST_ROWS);
  const open = useOpenNode();
  const all = useMemo(() => devicesOf(list), [list]);
  if (!all.length && list.length) return <Empty title="No GPU was polled in this time">Choose a longer time, or see the nodes. GPUs are polled where <code>sonde doctor</code> finds NVML, AMD SMI or DRM.</Empty>;
  return (
    <div class="sheet" tabIndex={0} role="region" aria-label="GPUs">
      <table>
        <thead><tr><th>GPU</th><th>Node</th><th>What is wrong</th><th>Busy</th><th>SM active</th><th>Tensor cores</th><th>Memory</th><th class="number">Power</th><th class="number">Hottest</th></tr></thead>
        <tbody>
          {all.slice(0, most).map(({ node, device, troubles }: DeviceState) => (
            <tr key={`${node.node} ${device.id}`}>
              <td class="code" title={device.id}>{shortId(device.id)}</td>
              <td class="name"><a href={hrefOf({ view: "node", node: node.node })} onClick={open(node)}>{node.node}</a></td>
              <td class="wide"><Troubles troubles={troubles} /></td>
              <td>{share(device.utilization)}</td><td>{share(device.smActive)}</td><td>{share(device.tensor)}</td>
              <td>{device.memoryLimit ? <Meter share={(device.memory ?? 0) / device.memoryLimit} text={scaled(device.memory ?? 0, "B")} /> : "–"}</td>
              <td class="number">{device.power === null ? "–" : `${Math.round(device.power)} W`}</td><td class="number">{device.temperature === null ? "–" : `${Math.round(device.temperature)} °C`}</td>
            </tr>))}
          {!all.length && <NoMatch columns={9} />}
        </tbody>
      </table>
      {all.length > most && <button class="more" onClick={() => setMost(most + 500)}>Show 500 more of {grouped(all.length - most)}</button>}
    </div>
  );
}

function Owners({ one, from, to }: { one: NodeState; from: number; to: number }): preact.JSX.Element {
  const { place, go, hrefOf } = useApp();
  const named = one.holders.filter((holder) => holder.owner);
  if (!named.length) return <span class="quiet">–</span>;
  const target = (owner: string) => ({ ...START, view: "jobs" as const, owner, ownerBy: "user" as const, from, to, live: place.live });
  return (
    <>
      {named.slice(0, 2).map(({ owner }, number) => <>{number > 0 && ", "}<a href={hrefOf(target(owner))} title={`Jobs of ${owner}`} onClick={(event) => { event.preventDefault(); go(target(owner)); }}>{owner}</a></>)}
      {named.length > 2 && <small title={named.slice(2).map((holder) => holder.owner).join("\n")}> and {named.length - 2} more</small>}
    </>
  );
}

function NodeLine({ one, verdict, from, to }: { one: NodeState; verdict: string | undefined; from: number; to: number }): preact.JSX.Element {
  const open = useOpenNode()(one);
  const mean = (values: (number | null)[]): number | null => {
    const known = values.filter((value): value is number => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  const busy = mean(one.devices.map((device) => device.utilization));
  const sm = mean(one.devices.map((device) => device.smActive));
  const memory = one.devices.reduce((sum, device) => sum + (device.memory ?? 0), 0);
  const limit = one.devices.reduce((sum, device) => sum + (device.memoryLimit ?? 0), 0);
  const power = one.devices.reduce((sum, device) => sum + (device.power ?? 0), 0);
  return (
    <tr>
      <td class="name"><a href={`?view=node&node=${encodeURIComponent(one.node)}`} onClick={open}>{one.node}</a><small>{one.devices.length} GPU{one.devices.length === 1 ? "" : "s"}</small></td>
      <td class="owner"><Owners one={one} from={from} to={to} /></td>
      <td class="wide"><Troubles troubles={one.troubles} /></td>
      <td class="wide">{verdict ?? <span class="quiet">–</span>}</td>
      <td class="number">{one.wastedH === null ? "–" : gpuHours(one.wastedH)}</td>
      <td>{share(busy)}</td>
      <td>{share(sm)}</td>
      <td>{limit ? <Meter share={memory / limit} text={scaled(memory, "B")} /> : "–"}</td>
      <td class="number">{power ? `${Math.round(power)} W` : "–"}</td>
      <td class="number nowrap">{ago(Date.now() / 1000 - one.lastS)}</td>
    </tr>
  );
}

/** Verdicts of the first nodes, one after another: each reads a minute of rows. What is known stays when the order changes. */
function useVerdicts(list: NodeState[]): Record<string, string> {
  const { place } = useApp();
  const [found, setFound] = useState<Record<string, string>>({});
  const known = useRef(found);
  const keys = list.map((one) => keyOf(one.node, one.lastS, place.to));
  useEffect(() => {
    const stop = new AbortController();
    const all = async (): Promise<void> => {
      for (const [number, one] of list.entries()) {
        if (stop.signal.aborted) return;
        const key = keys[number]!;
        if (key in known.current) continue;
        let text = "not known";
        try {
          text = inWords(await ask<Explanation>("verdict", { node: one.node, ...lastMinute(one.lastS, place.to) }, stop.signal));
        } catch {
          if (stop.signal.aborted) return;
        }
        known.current = { ...known.current, [key]: text };
        setFound(known.current);
      }
    };
    void all();
    return () => stop.abort();
  }, [keys.join("|")]);
  return Object.fromEntries(list.flatMap((one, number) => (keys[number]! in found ? [[one.node, found[keys[number]!]!]] : [])));
}
