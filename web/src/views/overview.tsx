// SPDX-License-Identifier: Apache-2.0
// All nodes, what is wrong first.

import { useEffect, useMemo, useState } from "preact/hooks";
import { ask, type Columns, type Explanation, type LossRow, type NodeRow } from "../api";
import { states, type NodeState } from "../devices";
import { ago, duration, scaled } from "../numbers";
import { Answer, Empty, Meter } from "../parts";
import { useAnswer, useApp } from "../state";

const RANGES: readonly [string, number][] = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["7 days", 604800]];
const AT_ONCE = 100;
const VERDICTS = 12;
const VERDICT_S = 60;

export function Overview(): preact.JSX.Element {
  const { place, go, attempt } = useApp();
  const now = useMemo(() => Math.ceil(Date.now() / 1000), [attempt, place.from, place.to]);
  const length = place.from && place.to ? place.to - place.from : 86400;
  const from = place.from || now - length;
  const to = place.to || now + 1;
  const nodes = useAnswer<NodeRow[]>("nodes", { from, to });
  const devices = useAnswer<Columns>(nodes.answer?.length ? "devices" : null, { from, to, format: "columns" });
  const losses = useAnswer<LossRow[]>(nodes.answer?.length ? "losses" : null, { from, to });
  const list = useMemo(
    () => states(nodes.answer ?? [], devices.answer, losses.answer ?? [], Math.min(now, to)),
    [nodes.answer, devices.answer, losses.answer],
  );
  return (
    <>
      <div class="tools">
        <h1>Nodes</h1>
        <div class="segments" role="group" aria-label="Time">
          {RANGES.map(([name, seconds]) => (
            <button aria-pressed={length === seconds} onClick={() => go({ from: now - seconds, to: now, live: place.live ? seconds : 0 })}>{name}</button>
          ))}
        </div>
        <label class="search">Filter <input type="search" value={place.search} placeholder="name of a node, or what is wrong"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
      </div>
      <Answer asked={nodes} loading="Asking for the nodes…">
        {(rows) => rows.length ? <Table list={list} /> : <Nothing />}
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

function Table({ list }: { list: NodeState[] }): preact.JSX.Element {
  const { place, go } = useApp();
  const [most, setMost] = useState(AT_ONCE);
  const words = place.search.toLowerCase();
  const shown = words ? list.filter((one) => `${one.node} ${one.troubles.map((trouble) => trouble.text).join(" ")}`.toLowerCase().includes(words)) : list;
  const verdicts = useVerdicts(shown.slice(0, VERDICTS));
  const gpus = list.reduce((sum, one) => sum + one.devices.length, 0);
  const idle = list.reduce((sum, one) => sum + one.idleGpuS, 0);
  const troubled = list.filter((one) => one.troubles.length).length;
  return (
    <>
      <dl class="figures">
        <div><dt>Nodes</dt><dd>{list.length}</dd></div>
        <div><dt>GPUs</dt><dd>{gpus}</dd></div>
        <div><dt>Nodes with something wrong</dt><dd>{troubled}</dd></div>
        <div><dt>GPU time not used</dt><dd>{duration(idle * 1e9)}</dd></div>
      </dl>
      <div class="sheet" tabIndex={0} role="region" aria-label="Nodes">
        <table>
          <thead><tr><th>Node</th><th>What is wrong</th><th>Verdict on its last minute</th><th>GPU busy</th><th>SM active</th><th>Memory</th><th class="number">Power</th><th class="number">Last sent</th></tr></thead>
          <tbody>
            {shown.slice(0, most).map((one) => <NodeLine key={one.node} one={one} verdict={verdicts[one.node]} />)}
            {!shown.length && <tr><td colSpan={8} class="none">No node matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></td></tr>}
          </tbody>
        </table>
        {shown.length > most && <button class="more" onClick={() => setMost(most + 500)}>Show 500 more of {shown.length - most}</button>}
      </div>
    </>
  );
}

function NodeLine({ one, verdict }: { one: NodeState; verdict: string | undefined }): preact.JSX.Element {
  const { go } = useApp();
  const open = (event: Event): void => {
    event.preventDefault();
    const end = Math.ceil(one.lastS) + 1;
    go({ view: "node", node: one.node, from: Math.max(Math.floor(one.firstS) - 1, end - 3600), to: end, search: "" });
  };
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
      <td class="wide">{one.troubles.length ? one.troubles.slice(0, 2).map((trouble) => <span class={`tag ${trouble.tone}`}>{trouble.text}</span>) : <span class="tag fine">nothing found</span>}
        {one.troubles.length > 2 && <small title={one.troubles.slice(2).map((trouble) => trouble.text).join("\n")}>and {one.troubles.length - 2} more</small>}</td>
      <td class="wide">{verdict ?? <span class="quiet">–</span>}</td>
      <td>{busy === null ? "–" : <Meter share={busy} text={`${Math.round(100 * busy)} %`} />}</td>
      <td>{sm === null ? "–" : <Meter share={sm} text={`${Math.round(100 * sm)} %`} />}</td>
      <td>{limit ? <Meter share={memory / limit} text={scaled(memory, "B")} /> : "–"}</td>
      <td class="number">{power ? `${Math.round(power)} W` : "–"}</td>
      <td class="number nowrap">{ago(Date.now() / 1000 - one.lastS)}</td>
    </tr>
  );
}

/** Verdicts of the first nodes, one after another: each reads a minute of rows. */
function useVerdicts(list: NodeState[]): Record<string, string> {
  const [found, setFound] = useState<Record<string, string>>({});
  // In live mode a node's last time moves on every few seconds: its verdict is asked for once a minute.
  const key = list.map((one) => `${one.node} ${Math.floor(one.lastS / VERDICT_S)}`).join("|");
  useEffect(() => {
    const stop = new AbortController();
    const all = async (): Promise<void> => {
      for (const one of list) {
        if (stop.signal.aborted) return;
        let text = "not known";
        try {
          const answer = await ask<Explanation>("verdict", { node: one.node, from: one.lastS - VERDICT_S, to: Math.ceil(one.lastS) + 1 }, stop.signal);
          const verdict = answer.verdicts[0];
          if (verdict) {
            const bound = verdict.bounds[0]?.key ?? text;
            const cause = verdict.causes.find((one) => one.bound === bound);
            text = cause ? cause.title : bound;
          } else text = "nothing to explain";
        } catch {
          if (stop.signal.aborted) return;
        }
        setFound((before) => ({ ...before, [one.node]: text }));
      }
    };
    void all();
    return () => stop.abort();
  }, [key]);
  return found;
}
