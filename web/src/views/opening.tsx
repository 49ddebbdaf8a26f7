// SPDX-License-Identifier: Apache-2.0
// The time that views over all nodes open with while the address has none: the shortest one up to the present that has data.

import type { ComponentChildren } from "preact";
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { ask, AskError, type NodeRow } from "../api";
import { period } from "../numbers";
import { Failure } from "../parts";
import { AppContext, useApp } from "../state";
import { DAY_S, RANGES } from "./hours";

/** Times in seconds since 1970. `isPast`: none of the offered times up to the present has data. */
export interface Opening { from: number; to: number; isPast: boolean }

/** The shortest of the offered times up to `nowS` in which a node sent something; where there is none, the day that ends
 * with the newest data; null: no node has ever sent anything. `nodesSince`: the nodes that sent something from a time on. */
export async function openingAt(nowS: number, nodesSince: (from: number) => Promise<readonly { last_ns: number }[]>): Promise<Opening | null> {
  for (const [, seconds] of RANGES) {
    if ((await nodesSince(nowS - seconds)).length) return { from: nowS - seconds, to: nowS, isPast: false };
  }
  const last = newestOf(await nodesSince(1));
  return last ? { from: Math.ceil(last) + 1 - DAY_S, to: Math.ceil(last) + 1, isPast: true } : null;
}

/** When the newest data of nodes ends, in seconds since 1970; 0: there is none. */
export function newestOf(rows: readonly { last_ns: number }[]): number {
  return rows.reduce((last, row) => Math.max(last, row.last_ns / 1e9), 0);
}

/** Whether the time shown was chosen here, not by the address. */
const IsOpening = createContext(false);

/** What shows a time that the address may lack: with the time to open with in its place. */
export function Opened({ children }: { children: ComponentChildren }): preact.JSX.Element {
  const app = useApp();
  const { place, attempt } = app;
  const isChosen = place.from > 0 && place.to > place.from;
  const [opening, setOpening] = useState<Opening | AskError | "asked" | null>("asked");
  useEffect(() => {
    if (isChosen) return undefined;
    const stop = new AbortController();
    const now = Math.ceil(Date.now() / 1000);
    // To a second after the present: what was just sent counts.
    openingAt(now, (from) => ask<NodeRow[]>("nodes", { from, to: now + 1 }, stop.signal)).then(setOpening, (error: unknown) => {
      if (!stop.signal.aborted) setOpening(error instanceof AskError ? error : new AskError(0, String(error), "load the page again"));
    });
    return () => {
      stop.abort();
      setOpening("asked");
    };
  }, [isChosen, attempt]);
  if (isChosen) return <>{children}</>;
  if (opening === "asked") return <div class="state quiet" aria-busy="true">Asking for the newest data…</div>;
  if (opening instanceof AskError) return <Failure error={opening} />;
  if (!opening) return <>{children}</>;
  const { from, to, isPast } = opening;
  return (
    <AppContext.Provider value={{ ...app, place: { ...place, from, to } }}>
      <IsOpening.Provider value={true}>
        {isPast && <p class="quiet" role="status">Nothing was sent in the last 7 days. Showing {period(from, to)}, the newest data.</p>}
        {children}
      </IsOpening.Provider>
    </AppContext.Provider>
  );
}

/** Leads from a chosen time to the one that a view opens with. */
export function NewestButton(): preact.JSX.Element | null {
  const { go } = useApp();
  if (useContext(IsOpening)) return null;
  return <button class="primary" onClick={() => go({ from: 0, to: 0, live: 0 })}>Show the newest data</button>;
}
