// SPDX-License-Identifier: Apache-2.0
// The time that a view shows, and how to move it.

import { clock, day, duration } from "../numbers";
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
      <span class="quiet">{day(from)} {clock(from)} – {clock(to)}, {duration((to - from) * 1e9)}</span>
      <div class="segments" role="group" aria-label="Time">
        <button onClick={() => move(-0.5)} aria-label="Earlier">← Earlier</button>
        <button onClick={() => wider(2)}>Wider</button>
        <button onClick={() => wider(0.5)}>Narrower</button>
        <button onClick={() => move(0.5)} aria-label="Later">Later →</button>
      </div>
    </>
  );
}
