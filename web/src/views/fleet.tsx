// SPDX-License-Identifier: Apache-2.0
// Releases of the fleet: shares of classes of applications and kernels, with intervals and their cost in privacy.

import type { FleetAnswer } from "../answers";
import { duration, grouped, percent } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";

type Release = FleetAnswer["releases"][number];
type Classes = Release["applications"];

export function FleetView(): preact.JSX.Element {
  const asked = useAnswer<FleetAnswer>("fleet", {});
  return (
    <>
      <div class="tools"><h1>Fleet</h1><span class="quiet">totals over nodes of many tenants, with noise that hides each of them</span></div>
      <Answer asked={asked} loading="Asking for the releases…">{(answer) => <Releases answer={answer} />}</Answer>
    </>
  );
}

function utc(seconds: number): string {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "at no known time" : `${date.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

function Releases({ answer }: { answer: FleetAnswer }): preact.JSX.Element {
  const { place, go } = useApp();
  if (!answer.shown) {
    return <Empty title="This server shows no fleet releases">Collect one with <code>sonde fleet collect --state COLLECTOR -o fleet.d/NAME.json</code> (each one when it is due: <code>--follow --format json -o fleet.d</code>), and start the server with <code>--fleet fleet.d</code>. A trial fleet: <code>sonde fleet aggregate --new trial</code>.</Empty>;
  }
  const unread = answer.unreadable > 0 ? `${answer.unreadable} file${answer.unreadable === 1 ? "" : "s"} could not be read as a release.` : "";
  const chosen = answer.releases.find((one) => one.id === place.release) ?? answer.releases[0];
  if (!chosen) return <Empty title="Nothing was released yet">A release is due when its period and the time for late reports are over: <code>sonde fleet collect --schedule --state COLLECTOR</code>. {unread}</Empty>;
  return (
    <div class="stack">
      <div class="tools">
        <label>Release <select class="broad" value={chosen.id} onChange={(event) => go({ release: event.currentTarget.value })}>
          {answer.releases.map((one) => <option value={one.id}>{one.task}, {utc(one.start_s)}</option>)}</select></label>
        <span class="quiet">{chosen.task}: {duration(chosen.duration_s * 1e9)} from {utc(chosen.start_s)}, {grouped(chosen.samples)} samples in {grouped(chosen.buckets)} buckets</span>
      </div>
      <Spent one={chosen} />
      <div class="sides">
        <Shares title="Applications" classes={chosen.applications} />
        <Shares title="Kernels" classes={chosen.kernels} />
      </div>
      <p class="quiet">{answer.older > 0 && `${answer.older} older releases are not shown. `}{unread}</p>
    </div>
  );
}

/** A text of a value, or of the next larger one with as many digits: a privacy loss is never understated. */
function roundedUp(value: number, write: (value: number) => string, unit: number): string {
  const text = write(value);
  return Number(text) >= value ? text : write(Number(text) + unit);
}

/** A privacy loss with two decimals, below 0.1 with two digits. */
export function epsilon(value: number | null): string {
  if (value === null) return "not bounded";
  if (value >= 0.1 || value <= 0) return roundedUp(value, (one) => one.toFixed(2), 0.01);
  return roundedUp(value, (one) => one.toPrecision(2), 10 ** (Math.floor(Math.log10(value)) - 1));
}

/** 1e-6 as 1 × 10⁻⁶, rounded up to one digit. */
export function power(value: number): string {
  const unit = 10 ** Number(value.toExponential().split("e")[1]);
  const [digits, exponent] = roundedUp(value, (one) => one.toExponential(0), unit).split("e");
  return `${digits} × 10${[...String(Number(exponent))].map((one) => (one === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(one)])).join("")}`;
}

function Spent({ one }: { one: Release }): preact.JSX.Element {
  const own = one.spent.find((spent) => spent.unit === one.unit);
  const worst = own?.worst_year;
  return (
    <>
      <dl class="figures">
        <div><dt>ε of this release, per {one.unit}</dt><dd>{own ? epsilon(own.one_release) : "–"}</dd></div>
        <div><dt>ε spent in the costliest year</dt><dd>{worst === undefined || worst === null ? "–" : epsilon(worst)} <small>{" "}{one.collected ? `${one.collected} release${one.collected === 1 ? "" : "s"} collected` : "unknown"}</small></dd></div>
        <div><dt>Budget of a year</dt><dd>{epsilon(one.budget)}{worst ? <small> {percent(worst / (one.budget || 1))} spent</small> : null}</dd></div>
        <div><dt>δ</dt><dd>{power(one.delta)}</dd></div>
      </dl>
      <p class="quiet">{one.privacy}. Counts are estimates: the whisker is the 95 % interval of the added noise; sampling adds an error of about 1/√count.</p>
    </>
  );
}

function Shares({ title, classes }: { title: string; classes: Classes }): preact.JSX.Element {
  const widest = Math.max(1e-9, ...classes.rows.map((row) => row.share + row.share_error));
  return (
    <section class="panel" aria-label={title}>
      <div class="tools"><h2>{title}</h2><span class="quiet">{classes.in_noise} more are within the noise{classes.left_out > 0 && `, ${classes.left_out} smaller ones are left out`}</span></div>
      {classes.rows.length ? (
        <div class="sheet" tabIndex={0} role="region" aria-label={`${title} by share`}>
          <table>
            <thead><tr><th>Class</th><th class="number">Share</th><th class="number">± 95 %</th><th class="number">Samples</th><th>Interval</th></tr></thead>
            <tbody>{classes.rows.map((row) => (
              <tr>
                <td title={row.name}>{row.name || "without a name"}</td><td class="number">{percent(row.share)}</td><td class="number">{percent(row.share_error)}</td><td class="number">{grouped(row.count)}</td>
                <td class="interval"><Whisker share={row.share / widest} error={row.share_error / widest} /></td>
              </tr>))}</tbody>
          </table>
        </div>
      ) : <Empty title="No class stands out of the noise">With more nodes or longer periods counts grow; the noise does not.</Empty>}
    </section>
  );
}

function Whisker({ share, error }: { share: number; error: number }): preact.JSX.Element {
  const at = (value: number): string => `${100 * Math.max(0, Math.min(1, value))}%`;
  return (
    <span class="whisker" aria-hidden="true">
      <i style={{ width: at(share) }} /><b style={{ left: at(share - error), width: `calc(${at(share + error)} - ${at(share - error)})` }} />
    </span>
  );
}
