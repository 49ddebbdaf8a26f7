// SPDX-License-Identifier: Apache-2.0
// The time that a view shows, and how to move or to choose it.

import { useRef, useState } from "preact/hooks";
import { duration, period, timeOf, written } from "../numbers";
import { useApp } from "../state";

export function TimeTools({ from, to }: { from: number; to: number }): preact.JSX.Element {
  const { go } = useApp();
  const show = (left: number, right: number): void => go({ live: 0, from: left, to: right, left: 0, right: 0 });
  const wider = (factor: number): void => {
    const middle = (from + to) / 2;
    const half = ((to - from) / 2) * factor;
    show(middle - half, middle + half);
  };
  const move = (share: number): void => show(from + share * (to - from), to + share * (to - from));
  return (
    <>
      <TimeMenu from={from} to={to} />
      <div class="segments" role="group" aria-label="Time">
        <button onClick={() => move(-0.5)} aria-label="Earlier">← Earlier</button>
        <button onClick={() => wider(2)}>Wider</button>
        <button onClick={() => wider(0.5)}>Narrower</button>
        <button onClick={() => move(0.5)} aria-label="Later">Later →</button>
      </div>
    </>
  );
}

/** A time in this browser's zone, with the zone's name, for who looks at a clock on the wall. */
function localText(from: number, to: number): string {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const text = (seconds: number): string => new Date(seconds * 1000).toLocaleString("sv-SE");
  return `${text(from)} – ${text(to)} in ${zone || "the zone of this browser"}`;
}

/** The time that is shown, written out; opened, it takes another. `all`: no time is chosen, and all of it is shown. */
export function TimeMenu({ from, to, all = "" }: { from: number; to: number; all?: string }): preact.JSX.Element {
  const { go } = useApp();
  const menu = useRef<HTMLDetailsElement>(null);
  const [wrong, setWrong] = useState("");
  const take = (event: Event): void => {
    event.preventDefault();
    const form = new FormData(event.currentTarget as HTMLFormElement);
    const [left, right] = [timeOf(String(form.get("from"))), timeOf(String(form.get("to")))];
    if (!Number.isFinite(left) || !Number.isFinite(right)) return setWrong("Write both as 2026-11-23 08:35:30, in UTC.");
    if (!(right > left)) return setWrong("“To” has to be later than “From”.");
    setWrong("");
    if (menu.current) menu.current.open = false;
    go({ live: 0, from: left, to: right, left: 0, right: 0 });
  };
  return (
    <details class="menu when" ref={menu}>
      <summary title={all ? "Choose a time" : localText(from, to)}>{all || <>{period(from, to)} <small>{duration((to - from) * 1e9)}</small></>}</summary>
      <form key={`${from} ${to}`} onSubmit={take}>
        <label>From <input name="from" value={from ? written(from) : ""} placeholder="2026-11-23 08:35:30" autocomplete="off" /> UTC</label>
        <label>To <input name="to" value={to ? written(to) : ""} placeholder="2026-11-23 08:36:30" autocomplete="off" /> UTC</label>
        {wrong && <p role="alert">{wrong}</p>}
        {!all && <p class="quiet">{localText(from, to)}</p>}
        <button class="primary" type="submit">Show this time</button>
      </form>
    </details>
  );
}
