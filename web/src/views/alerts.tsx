// SPDX-License-Identifier: Apache-2.0
// Rules of alerts, and what fired.

import { useEffect, useState } from "preact/hooks";
import type { AlertsAnswer } from "../answers";
import { ask } from "../api";
import { unitOf } from "../charts";
import { save, text } from "../exports";
import { ago, count, duration, percent, scaled, written } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";
import { OWNER_KINDS, START, type Place } from "../url";
import { copyLink, SaveMenu } from "./save";

type Alert = AlertsAnswer["alerts"][number];
type Rule = AlertsAnswer["rules"][number];
const TONES: Record<Alert["status"], string> = { firing: "bad", pending: "warn", resolved: "fine" };
/** An alert opens the time from BEFORE_S before it fired to its end, at least MIN_AFTER_S after. */
const BEFORE_S = 300;
const MIN_AFTER_S = 60;

export function AlertsView(): preact.JSX.Element {
  const { place, go } = useApp();
  const asked = useAnswer<AlertsAnswer>("alerts", {});
  return (
    <>
      <div class="tools">
        <h1>Alerts</h1>
        <label class="search">Filter <input type="search" value={place.search} placeholder="rule, label, or firing, pending, resolved"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
        {asked.answer && <SaveMenu label="Save the alerts" choices={[
          { name: "JSON", about: "the server's answer", run: () => save("alerts.json", text(JSON.stringify(asked.answer, null, 1), "application/json")) }, copyLink]} />}
      </div>
      <Answer asked={asked} loading="Asking for the alerts…">{(answer) => <All answer={answer} />}</Answer>
    </>
  );
}

function All({ answer }: { answer: AlertsAnswer }): preact.JSX.Element {
  const { place, go } = useApp();
  if (!answer.rules.length && !answer.alerts.length) {
    return <Empty title="No rule is set">Write a rule to a file, see whether it holds with <code>sonde alerts check rules.toml</code>, and start the server with <code>--alerts rules.toml</code>. A rule is a question of this server and a threshold.</Empty>;
  }
  const words = place.search.toLowerCase();
  const shown = answer.alerts.filter((one) => !words || textOf(one).includes(words));
  const number = (status: Alert["status"]): number => answer.alerts.filter((one) => one.status === status).length;
  const rules = new Map(answer.rules.map((rule) => [rule.name, rule]));
  return (
    <div class="stack">
      <dl class="figures">
        <div><dt>Firing</dt><dd class={number("firing") ? "is-bad" : ""}>{number("firing")}</dd></div>
        <div><dt>Pending</dt><dd>{number("pending")}</dd></div>
        <div><dt>Resolved</dt><dd>{number("resolved")}</dd></div>
        <div><dt>Rules</dt><dd>{answer.rules.length} <small>{broken(answer.rules)}</small></dd></div>
      </dl>
      <section class="panel" aria-label="Alerts">
        <div class="tools"><h2>Alerts</h2><span class="quiet">as they are now: firing first, then pending, which have not lasted long enough; a resolved alert stays listed for 20 minutes</span></div>
        {answer.alerts.length ? <div class="sheet" tabIndex={0} role="region" aria-label="Table of alerts"><table>
          <thead><tr><th>State</th><th>Rule</th><th>What about</th><th class="number">Value</th><th>Since, UTC</th><th>Fired, UTC</th><th>Resolved, UTC</th><th>Details</th></tr></thead>
          <tbody>{shown.map((one) => <Line one={one} rule={rules.get(one.labels["alertname"] ?? "")} />)}
            {!shown.length && <tr><td colSpan={8} class="none">No alert matches “{place.search}”. <button class="link" onClick={() => go({ search: "" })}>Show all</button></td></tr>}</tbody>
        </table></div> : <Empty title="No rule has found anything">{count(answer.rules.length, "rule")} below {answer.rules.length === 1 ? "is" : "are"} asked about every few seconds.</Empty>}
        {answer.not_shown > 0 && <p class="quiet note">{count(answer.not_shown, "more alert")} not shown.</p>}
      </section>
      <section class="panel" aria-label="Rules">
        <div class="tools"><h2>Rules</h2><span class="quiet">from the file of <code>sonde serve --alerts</code></span></div>
        <div class="sheet" tabIndex={0} role="region" aria-label="Rules of alerts"><table>
          <thead><tr><th>Rule</th><th>Fires where</th><th class="number">For at least</th><th>Question</th><th>State</th></tr></thead>
          <tbody>{answer.rules.map((rule) => (
            <tr><td class="name"><button class="link" onClick={() => go({ search: rule.name })}>{rule.name}</button></td><td class="wide">{rule.measured} {thresholdOf(rule)}</td><td class="number">{rule.for_s ? duration(rule.for_s * 1e9) : "at once"}</td><td class="code">{rule.question}</td>
              <td class="wide">{rule.error ? <span class="tag bad">{rule.error}</span> : <RuleState rule={rule} alerts={answer.alerts} />}{rule.left_out > 0 && <small>{count(rule.left_out, "alert")} beyond what a rule may have</small>}</td></tr>))}
          {!answer.rules.length && <tr><td colSpan={5} class="none">These rules are not in the file any more.</td></tr>}</tbody>
        </table></div>
      </section>
    </div>
  );
}

const ruleUnit = ({ unit, series }: Pick<Rule, "unit" | "series">): string => unit || unitOf(series);

/** A value in a unit; 1: a share. */
export function valueText(value: number, unit: string): string {
  if (unit === "1") return value < 0 ? `−${percent(-value)}` : percent(value);
  if (unit === "ns" || unit === "s" || unit === "h") return duration(value * { ns: 1, s: 1e9, h: 3.6e12 }[unit]);
  const rounded = Math.abs(value) >= 1000 ? scaled(value, "").trim() : String(Number(value.toPrecision(3)));
  const name = unit === "By" ? "B" : unit;
  if (name === "B" || name === "B/s" || name === "Hz") return scaled(value, name);
  return `${rounded} ${name}`.trim();
}

export function thresholdOf(rule: Pick<Rule, "comparison" | "threshold" | "unit" | "series">): string {
  return `${rule.comparison === "above" ? ">" : "<"} ${valueText(rule.threshold, ruleUnit(rule))}`;
}

function RuleState({ rule, alerts }: { rule: Rule; alerts: readonly Alert[] }): preact.JSX.Element {
  const of = (status: Alert["status"]): number => alerts.filter((one) => one.labels["alertname"] === rule.name && one.status === status).length;
  const [firing, pending] = [of("firing"), of("pending")];
  if (!firing && !pending) return <span class="tag fine">nothing found</span>;
  return <>{firing > 0 && <span class="tag bad">{firing} firing</span>}{pending > 0 && <span class="tag warn">{pending} pending</span>}</>;
}

/** How often the number of firing alerts is asked for. */
const BADGE_MS = 60_000;

/** How many alerts fire, beside the name of this view in the frame of the page. */
export function FiringBadge(): preact.JSX.Element | null {
  const { attempt, place } = useApp();
  const [firing, setFiring] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    // Who may not ask sees no badge; the view itself shows why.
    const update = (): void => { ask<AlertsAnswer>("alerts", {}, stop.signal).then((answer) => setFiring(answer.alerts.filter((one) => one.status === "firing").length), () => undefined); };
    update();
    const timer = setInterval(() => { if (!document.hidden) update(); }, BADGE_MS);
    return () => { clearInterval(timer); stop.abort(); };
  }, [attempt, place.view]);
  return firing ? <span class="badge"><span class="unseen">, </span>{firing}<span class="unseen"> firing</span></span> : null;
}

function broken(rules: readonly Rule[]): string {
  const failing = rules.filter((rule) => rule.error).length;
  return failing ? `${failing} cannot be evaluated` : "";
}

function textOf(one: Alert): string {
  return [one.status, ...Object.entries(one.labels).flat(), ...Object.values(one.annotations)].join(" ").toLowerCase();
}

/** Where to look: the node's range around it, the job, or the overview of that time. */
export function placeOf(one: Alert): Partial<Place> {
  const began = Date.parse(one.fired ?? one.since) / 1000;
  const from = Math.floor(began) - BEFORE_S;
  const to = Math.ceil(Math.max(began + MIN_AFTER_S, one.resolved ? Date.parse(one.resolved) / 1000 : 0));
  const times = Number.isFinite(began) ? { from, to } : {};
  const { node } = one.labels;
  if (node) return { view: "node", node, ...times };
  const by = OWNER_KINDS.find((kind) => one.labels[kind]);
  if (by) return { view: "job", by, id: one.labels[by]!, ...times };
  return { view: "overview", ...times };
}

function Line({ one, rule }: { one: Alert; rule: Rule | undefined }): preact.JSX.Element {
  const { go } = useApp();
  const { alertname, tenant: _, ...labels } = one.labels;
  const { summary, ...others } = one.annotations;
  const target = placeOf(one);
  const time = (iso: string | null): string => {
    const seconds = iso ? Date.parse(iso) / 1000 : NaN;
    return Number.isFinite(seconds) ? written(Math.floor(seconds)) : "–";
  };
  // A label whose value the summary already has is not written again.
  const rest = Object.entries(labels).filter(([, value]) => !summary?.includes(value));
  return (
    <tr>
      <td><span class={`tag ${TONES[one.status]}`}>{one.status}</span></td>
      <td class="name">{alertname}</td>
      <td class="wide">{summary && <div>{summary}</div>}{Object.entries(others).map(([name, value]) => <div><small>{name}: {value}</small></div>)}
        <small>{rest.map(([name, value]) => `${name} ${value}`).join(" · ")}</small></td>
      <td class="number nowrap">{rule ? <span title={rule.measured}>{valueText(one.value, ruleUnit(rule))} <small>({thresholdOf(rule)})</small></span> : Number(one.value.toPrecision(3))}</td>
      <td class="nowrap" title={ago(Date.now() / 1000 - Date.parse(one.since) / 1000)}>{time(one.since)}</td><td class="nowrap">{time(one.fired)}</td><td class="nowrap">{time(one.resolved)}</td>
      <td><button class="link open" onClick={() => go({ ...START, ...target })}>{target.view === "node" ? "The node" : target.view === "job" ? "The owner" : "That time"}</button></td>
    </tr>
  );
}
