// SPDX-License-Identifier: Apache-2.0
// All nodes, what is wrong first.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { HoldersAnswer } from "../answers";
import { ask, type Columns, type Explanation, type LossRow, type NodeRow } from "../api";
import { devicesOf, measured, ranked, shortId, type Device, type DeviceState, type NodeState } from "../devices";
import { ago, clock, count, day, duration, gpuTimes, grouped, percent, scaled, written } from "../numbers";
import { inWords, keyOf, lastMinute } from "../last_minute";
import { Answer, Empty, Loading, Meter, MoreRows } from "../parts";
import { useAnswer, useApp, type Asked } from "../state";
import { START } from "../url";
import { RangeButtons, useRange } from "./hours";
import type { Incidents } from "./incidents";
import { NewestButton, newestOf } from "./opening";
import { inOrder, SortHead, type Keys } from "./sorting";

/** Rows of holders that are asked for. */
const MAX_HOLDERS = 100_000;
/** Rows that are shown at first. */
const FIRST_ROWS = 100;
/** Nodes whose verdict is asked for. */
const VERDICTS = 12;
/** A node that sent nothing for this long is silent. */
const SILENT_S = 120;

/** What the overview has asked for beside the nodes: values of what has not come are shown as loading, not as none. */
interface Come { devices: Asked<Columns>; losses: Asked<LossRow[]>; holders: Asked<HoldersAnswer>; incidents: Asked<Incidents> }
const isPending = (asked: Asked<unknown>): boolean => asked.answer === null && asked.error === null;
/** The time shown, and the present, in seconds since 1970. */
interface When { from: number; to: number; now: number }
const isPast = ({ to, now }: When): boolean => to < now - SILENT_S;

export function Overview(): preact.JSX.Element {
  const { place, go, attempt } = useApp();
  const now = useMemo(() => Math.ceil(Date.now() / 1000), [attempt, place.from, place.to]);
  const { from, to } = useRange(now);
  const when = useMemo(() => ({ from, to, now }), [from, to, now]);
  const nodes = useAnswer<NodeRow[]>("nodes", { from, to });
  const devices = useAnswer<Columns>(nodes.answer?.length ? "devices" : null, { from, to, format: "columns" });
  const losses = useAnswer<LossRow[]>(nodes.answer?.length ? "losses" : null, { from, to });
  // The table does not wait for these two: what has come is shown, the rest as loading.
  const holders = useAnswer<HoldersAnswer>(nodes.answer?.length ? "holders" : null, { from, to, limit: MAX_HOLDERS });
  const incidents = useAnswer<Incidents>(nodes.answer?.length ? "incidents" : null, {});
  const come = useMemo(() => ({ devices, losses, holders, incidents }), [devices, losses, holders, incidents]);
  const found = useMemo(() => measured(nodes.answer ?? [], devices.answer, losses.answer ?? [], Math.min(now, to), isPast(when)), [nodes.answer, devices.answer, losses.answer]);
  const list = useMemo(() => {
    const during = (incidents.answer?.incidents ?? []).filter((one) => one.began_ns >= from * 1e9 && one.began_ns < to * 1e9);
    return ranked(found, { holders: holders.answer?.holders ?? [], incidents: during });
  }, [found, holders.answer, incidents.answer]);
  return (
    <>
      <div class="tools">
        <h1>Overview</h1>
        <div class="segments" role="group" aria-label="What is listed">
          <button aria-pressed={place.list === "nodes"} onClick={() => go({ list: "nodes", sort: "" })}>Nodes</button>
          <button aria-pressed={place.list === "gpus"} onClick={() => go({ list: "gpus", sort: "" })}>GPUs</button>
        </div>
        <RangeButtons nowS={now} from={from} to={to} />
        <label class="search">Filter <input type="search" value={place.search} placeholder="node, owner, or what is wrong"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
      </div>
      <Answer asked={nodes} loading="Asking for the nodes…">
        {(rows) => rows.length ? <Listed list={list} when={when} come={come} /> : <Nothing />}
      </Answer>
    </>
  );
}

function Nothing(): preact.JSX.Element {
  const all = useAnswer<NodeRow[]>("nodes", { from: 1 });
  return (
    <Answer asked={all} loading="Nothing was sent in this time. Asking for the newest data…">{(rows) => rows.length
      ? <Empty title="Nothing was sent in this time">The newest data is {ago(Date.now() / 1000 - newestOf(rows))}. <NewestButton /></Empty>
      : <Empty title="No node has sent anything yet">
        Send a recording: <code>sonde record -d 10 -o run.sonde</code>, then <code>sonde upload run.sonde --server {location.origin}</code>
      </Empty>}
    </Answer>
  );
}

const textOf = (one: NodeState): string => `${one.node} ${one.holders.map((holder) => holder.owner).join(" ")} ${one.troubles.map((trouble) => trouble.text).join(" ")}`.toLowerCase();

function Figures({ list, when, come }: { list: NodeState[]; when: When; come: Come }): preact.JSX.Element {
  const { go, hrefOf, place } = useApp();
  const { devices, holders, incidents } = come;
  const of = (asked: Asked<unknown>, value: () => preact.ComponentChildren): preact.ComponentChildren =>
    isPending(asked) ? <Loading /> : asked.error ? <small title={asked.error.message}>not known: the server gave no answer</small> : value();
  const sum = (value: (one: NodeState) => number): number => list.reduce((all, one) => all + value(one), 0);
  const troubled = list.filter((one) => one.troubles.length).length;
  const held = list.flatMap((one) => one.holders).reduce((all, one) => all + one.heldH, 0);
  const gpuTime = gpuTimes([held]);
  const target = { ...START, view: "incidents" as const, from: when.from, to: when.to, live: place.live };
  return (
    <dl class="figures">
      <div><dt>Nodes</dt><dd>{grouped(list.length)}</dd></div>
      <div><dt>GPUs</dt><dd>{of(devices, () => grouped(sum((one) => one.devices.length)))}</dd></div>
      <div><dt>Something wrong on</dt><dd>{isPending(devices) || isPending(incidents) ? <Loading /> : <>{grouped(troubled)} <small>of {count(list.length, "node")}</small></>}</dd></div>
      <div><dt>GPU time wasted</dt><dd>{of(holders, () => held > 0 ? <>{gpuTime(sum((one) => one.wastedH ?? 0))} <small class="nowrap" title={`${percent(sum((one) => one.wastedH ?? 0) / held)} of the time for which processes had memory on GPUs`}>of {gpuTime(held)}</small></>
        : <>– <small>no owner known; not used: {of(devices, () => duration(sum((one) => one.idleGpuS) * 1e9))}</small></>)}</dd></div>
      <div><dt>Incidents</dt><dd>{of(incidents, () => <a href={hrefOf(target)} title="Show the incidents of this time" onClick={(event) => { event.preventDefault(); go(target); }}>{sum((one) => one.incidents)}</a>)}</dd></div>
    </dl>
  );
}

function Listed({ list, when, come }: { list: NodeState[]; when: When; come: Come }): preact.JSX.Element {
  const { place } = useApp();
  const words = place.search.toLowerCase();
  const shown = words ? list.filter((one) => textOf(one).includes(words)) : list;
  return (
    <>
      <Figures list={list} when={when} come={come} />
      {place.list === "gpus"
        ? <Answer asked={come.devices} loading="Asking for the GPUs…">{() => <Gpus list={shown} when={when} come={come} />}</Answer>
        : <Table list={list} shown={shown} when={when} come={come} />}
    </>
  );
}

const mean = (values: (number | null)[]): number | null => {
  const known = values.filter((value): value is number => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};
const busyOf = (one: NodeState): number | null => mean(one.devices.map((device) => device.utilization));
const smOf = (one: NodeState): number | null => mean(one.devices.map((device) => device.smActive));
const powerOf = (one: NodeState): number => one.devices.reduce((sum, device) => sum + (device.power ?? 0), 0);
function memoryOf(devices: readonly Device[]): { used: number; share: number | null } {
  const used = devices.reduce((sum, device) => sum + (device.memory ?? 0), 0);
  const limit = devices.reduce((sum, device) => sum + (device.memoryLimit ?? 0), 0);
  return { used, share: limit ? used / limit : null };
}

const NODE_KEYS: Keys<NodeState> = {
  node: (one) => one.node, wasted: (one) => one.wastedH, busy: busyOf, sm: smOf, memory: (one) => memoryOf(one.devices).share,
  power: (one) => powerOf(one) || null, sent: (one) => one.lastS,
};

function Table({ list, shown, when, come }: { list: NodeState[]; shown: NodeState[]; when: When; come: Come }): preact.JSX.Element {
  const { place } = useApp();
  const [most, setMost] = useState(FIRST_ROWS);
  const ordered = useMemo(() => inOrder(shown, place.sort, NODE_KEYS), [shown, place.sort]);
  const gpuTime = useMemo(() => gpuTimes(list.map((one) => one.wastedH ?? 0)), [list]);
  const verdicts = useVerdicts(ordered.slice(0, VERDICTS));
  return (
    <div class="sheet" tabIndex={0} role="region" aria-label="Nodes">
      <table>
        <thead><tr>
          <SortHead name="node" title="Node" isName /><th>Owner</th><SortHead name="" title="What is wrong" about="The worst first, then the most GPU time wasted" /><th title={`Of the first ${VERDICTS} nodes, on the minute before they last sent`}>Verdict on its last minute</th>
          <SortHead name="wasted" title="Wasted" isNumber /><SortHead name="busy" title="GPU busy" /><SortHead name="sm" title="SM active" /><SortHead name="memory" title="Memory" /><SortHead name="power" title="Power" isNumber /><SortHead name="sent" title={isPast(when) ? "Last sent, UTC" : "Last sent"} isNumber />
        </tr></thead>
        <tbody>
          {ordered.slice(0, most).map((one, row) => <NodeLine key={one.node} one={one} verdict={verdicts[one.node] ?? (row < VERDICTS ? null : "")} gpuTime={gpuTime} when={when} come={come} />)}
          {!shown.length && list.length > 0 && <NoMatch columns={10} />}
        </tbody>
      </table>
      <MoreRows all={shown.length} shown={most} show={setMost} />
    </div>
  );
}

function NoMatch({ columns }: { columns: number }): preact.JSX.Element {
  const { place, go } = useApp();
  return <tr><td colSpan={columns} class="none">Nothing matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></td></tr>;
}

/** Opens a node with what it sent in the time shown. */
function useOpenNode({ from, to }: When): (one: NodeState) => (event: Event) => void {
  const { go } = useApp();
  return (one) => (event) => {
    event.preventDefault();
    go({ view: "node", node: one.node, from: Math.max(Math.floor(one.firstS) - 1, from), to: Math.min(Math.ceil(one.lastS) + 1, to), search: "" });
  };
}

function Troubles({ node, troubles, when, come }: { node: NodeState; troubles: NodeState["troubles"]; when: When; come: Come }): preact.JSX.Element {
  return (
    <>
      {troubles.length ? troubles.slice(0, 2).map((trouble) => <span class={`tag ${trouble.tone}`}>{trouble.text}</span>) : <NoTrouble node={node} when={when} come={come} />}
      {troubles.length > 2 && <small title={troubles.slice(2).map((trouble) => trouble.text).join("\n")}>and {troubles.length - 2} more</small>}
    </>
  );
}

/** That nothing is wrong: once all was asked, and of a node that still sends. */
function NoTrouble({ node, when, come }: { node: NodeState; when: When; come: Come }): preact.JSX.Element {
  const asked = [come.devices, come.losses, come.incidents];
  if (asked.some(isPending)) return <Loading />;
  const failed = asked.find((one) => one.error);
  if (failed) return <span class="tag plain" title={failed.error?.message}>not known</span>;
  if (when.now - node.lastS > SILENT_S) return <span class="tag plain" title={`Nothing was found up to ${written(Math.floor(node.lastS))} UTC, when it last sent`}>nothing found; silent now</span>;
  return <span class="tag fine">nothing found</span>;
}

const share = (value: number | null): preact.JSX.Element | string => (value === null ? "–" : <Meter share={value} text={`${Math.round(100 * value)} %`} />);

const GPU_KEYS: Keys<DeviceState> = {
  gpu: ({ node, device }) => `${node.node} ${device.id}`, busy: ({ device }) => device.utilization, sm: ({ device }) => device.smActive, tensor: ({ device }) => device.tensor,
  memory: ({ device }) => memoryOf([device]).share, power: ({ device }) => device.power, hottest: ({ device }) => device.temperature,
};

function Gpus({ list, when, come }: { list: NodeState[]; when: When; come: Come }): preact.JSX.Element {
  const { place, hrefOf } = useApp();
  const [most, setMost] = useState(FIRST_ROWS);
  const open = useOpenNode(when);
  const all = useMemo(() => inOrder(devicesOf(list), place.sort, GPU_KEYS), [list, place.sort]);
  if (!all.length && list.length) return <Empty title="No GPU was polled in this time">Choose a longer time, or see the nodes. GPUs are polled where <code>sonde doctor</code> finds NVML, AMD SMI or DRM.</Empty>;
  return (
    <div class="sheet" tabIndex={0} role="region" aria-label="GPUs">
      <table>
        <thead><tr><SortHead name="gpu" title="GPU" isName /><SortHead name="" title="What is wrong" about="The worst first" /><SortHead name="busy" title="Busy" /><SortHead name="sm" title="SM active" /><SortHead name="tensor" title="Tensor cores" /><SortHead name="memory" title="Memory" /><SortHead name="power" title="Power" isNumber /><SortHead name="hottest" title="Hottest" isNumber /></tr></thead>
        <tbody>
          {all.slice(0, most).map(({ node, device, troubles }: DeviceState) => (
            <tr key={`${node.node} ${device.id}`}>
              <td class="name" title={device.id}><a href={hrefOf({ view: "node", node: node.node })} onClick={open(node)}>{node.node} · {shortId(device.id)}</a></td>
              <td class="wide"><Troubles node={node} troubles={troubles} when={when} come={come} /></td>
              <td>{share(device.utilization)}</td><td>{share(device.smActive)}</td><td>{share(device.tensor)}</td>
              <td>{device.memoryLimit ? <Meter share={(device.memory ?? 0) / device.memoryLimit} text={scaled(device.memory ?? 0, "B")} /> : "–"}</td>
              <td class="number">{device.power === null ? "–" : `${Math.round(device.power)} W`}</td><td class="number">{device.temperature === null ? "–" : `${Math.round(device.temperature)} °C`}</td>
            </tr>))}
          {!all.length && <NoMatch columns={8} />}
        </tbody>
      </table>
      <MoreRows all={all.length} shown={most} show={setMost} />
    </div>
  );
}

function Owners({ one, from, to }: { one: NodeState } & When): preact.JSX.Element {
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

/** `verdict`: null while it is asked for, '' where it is not. */
function NodeLine({ one, verdict, gpuTime, when, come }: { one: NodeState; verdict: string | null; gpuTime: (hours: number) => string; when: When; come: Come }): preact.JSX.Element {
  const { place, hrefOf } = useApp();
  const open = useOpenNode(when)(one);
  // A hundred lines are drawn for each verdict and each answer that comes: those that it does not change are kept.
  return useMemo(() => nodeLine(one, verdict, gpuTime, when, come, hrefOf({ view: "node", node: one.node, search: "" }), open), [one, verdict, gpuTime, when, come, place]);
}

function nodeLine(
  one: NodeState, verdict: string | null, gpuTime: (hours: number) => string, when: When, come: Come, href: string, open: (event: Event) => void,
): preact.JSX.Element {
  const memory = memoryOf(one.devices);
  const power = powerOf(one);
  const ofDevices = (cell: preact.ComponentChildren): preact.ComponentChildren => (isPending(come.devices) ? <Loading /> : cell);
  const isSum = one.devices.length > 1;
  return (
    <tr>
      <td class="name"><a href={href} onClick={open}>{one.node}</a><small>{ofDevices(count(one.devices.length, "GPU"))}</small></td>
      <td class="owner">{isPending(come.holders) ? <Loading /> : <Owners one={one} {...when} />}</td>
      <td class="wide"><Troubles node={one} troubles={one.troubles} when={when} come={come} /></td>
      <td class="wide">{verdict === null ? <Loading /> : verdict || <span class="quiet" title={`Asked for the first ${VERDICTS} nodes`}>not asked</span>}</td>
      <td class="number">{isPending(come.holders) ? <Loading /> : one.wastedH === null ? "–" : gpuTime(one.wastedH)}</td>
      <td>{ofDevices(share(busyOf(one)))}</td>
      <td>{ofDevices(share(smOf(one)))}</td>
      <td>{ofDevices(memory.share === null ? "–" : <Meter share={memory.share} text={scaled(memory.used, "B")} />)}</td>
      <td class="number" title={isSum ? "All its GPUs together" : undefined}>{ofDevices(power ? `${Math.round(power)} W` : "–")}</td>
      <td class="number nowrap sent" title={isPast(when) ? ago(when.now - one.lastS) : `${written(Math.floor(one.lastS))} UTC`}>{isPast(when) ? <>{clock(one.lastS)}<small>{day(one.lastS)}</small></> : ago(when.now - one.lastS)}</td>
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
