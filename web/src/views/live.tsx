// SPDX-License-Identifier: Apache-2.0
// Live mode: the time shown ends at the present, and goes on with it.

import { useEffect } from "preact/hooks";
import { duration } from "../numbers";
import { useApp } from "../state";
import type { View } from "../url";

/** The length of the time shown when live mode begins. */
export const LIVE_S = 900;
/** Agents send every few seconds, and the server puts what came into its files every second. */
const EVERY_MS = 5000;
/** Views that can follow the present. */
const FOLLOWS: ReadonlySet<View> = new Set<View>(["overview", "node", "owners", "jobs", "job"]);

export function LiveButton(): preact.JSX.Element {
  const { place, go } = useApp();
  const follows = FOLLOWS.has(place.view);
  const isLive = follows && place.live > 0;
  useEffect(() => {
    if (!isLive) return undefined;
    const advance = (): void => {
      if (document.hidden) return;
      const to = Math.ceil(Date.now() / 1000);
      go({ from: to - place.live, to }, true);
    };
    const timer = setInterval(advance, EVERY_MS);
    document.addEventListener("visibilitychange", advance);
    advance();
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", advance);
    };
  }, [isLive, place.live, place.view, place.node]);
  return (
    <button class="plain live" aria-pressed={isLive} disabled={!follows} title={follows ? "Show the last 15 minutes, and go on with them" : "This view does not follow the present"}
      onClick={() => { if (isLive) go({ live: 0 }); else go({ live: LIVE_S }); }}>
      <span aria-hidden="true" class="dot" />{isLive ? `Live: last ${duration(place.live * 1e9)}` : "Live"}
    </button>
  );
}
