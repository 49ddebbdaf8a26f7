// SPDX-License-Identifier: Apache-2.0
// GPU hours as a bar of their parts, and what views of owners share.

import { gpuTimes, percent } from "../numbers";
import { PARTS, sharesOf, type Hours } from "../gpu_hours";
import { useApp } from "../state";
import { TimeMenu } from "./time";

/** Lengths of time that are offered, in seconds. */
export const RANGES: readonly [string, number][] = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["7 days", 604800]];
export const DAY_S = 86_400;

/** The time that views over all nodes show: chosen, or the last day. */
export function useRange(nowS: number): { from: number; to: number } {
  const { place } = useApp();
  const isChosen = place.from > 0 && place.to > place.from;
  return isChosen ? { from: place.from, to: place.to } : { from: nowS - DAY_S, to: nowS + 1 };
}

/** The time shown, written out, and buttons for times up to the present. `all`: in words, that no time is chosen. */
export function RangeButtons({ nowS, from, to, all = "" }: { nowS: number; from: number; to: number; all?: string }): preact.JSX.Element {
  const { place, go } = useApp();
  const isPressed = (seconds: number): boolean => !all && Math.abs(to - from - seconds) <= 1 && nowS - to < seconds / 10;
  return (
    <>
      <TimeMenu from={from} to={to} all={all} />
      <div class="segments" role="group" aria-label="Time up to the present">
        {RANGES.map(([name, seconds]) => (
          <button aria-pressed={isPressed(seconds)} title={`The last ${name}`} onClick={() => go({ from: nowS - seconds, to: nowS, live: place.live ? seconds : 0 })}>{name}</button>
        ))}
      </div>
    </>
  );
}

export function HoursBar({ hours }: { hours: Hours }): preact.JSX.Element {
  const shares = sharesOf(hours);
  const text = shares.map((one) => `${one.title} ${percent(one.share)}`).join(", ");
  return (
    <span class="parts-bar" role="img" aria-label={text || "nothing was held"} title={text}>
      {shares.map((one) => one.share > 0 && <i class={one.part} style={{ width: `${100 * one.share}%` }} />)}
    </span>
  );
}

export function HoursLegend(): preact.JSX.Element {
  return <div class="under">{PARTS.map(([part, title, about]) => <span title={about}><i class={part} />{title}: {about}</span>)}</div>;
}

export function HoursParts({ hours }: { hours: Hours }): preact.JSX.Element {
  const gpuTime = gpuTimes([hours.held_h]);
  return (
    <table class="plain-rows">
      <thead class="unseen"><tr><th>Part</th><th>GPU hours</th><th>Share of the hours held</th></tr></thead>
      <tbody>{sharesOf(hours).map((one) => (
        <tr title={one.about}><th scope="row"><i class={`swatch ${one.part}`} />{one.title} <small>{one.about}</small></th><td class="number">{gpuTime(one.hours)}</td><td class="number">{percent(one.share)}</td></tr>
      ))}</tbody>
    </table>
  );
}
