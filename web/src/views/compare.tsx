// SPDX-License-Identifier: Apache-2.0
// What changed between the time before and this one.

import type { DiffRow } from "../api";
import { clock, percent } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";

export function CompareView(): preact.JSX.Element {
  const { place, go } = useApp();
  const ready = place.from > 0 && place.to > place.from;
  const asked = useAnswer<DiffRow[]>(ready ? "diff" : null, { node: place.node, from: place.from, to: place.to, kind: place.kind, limit: 200 });
  if (!ready) return <Empty title="No time is chosen">Choose a node, then drag over one of its charts.</Empty>;
  const before = place.from - (place.to - place.from);
  return (
    <>
      <div class="tools"><h1>What changed</h1><span class="quiet">{clock(before, 0.1)} – {clock(place.from, 0.1)} before, {clock(place.from, 0.1)} – {clock(place.to, 0.1)} after: shares of own time</span>
        <button onClick={() => go({ view: "range" })}>Back to the range</button></div>
      <Answer asked={asked} loading="Comparing…">
        {(rows) => rows.length ? <div class="sheet panel"><table>
          <thead><tr><th>Function</th><th>Binary</th><th class="number">Before</th><th class="number">After</th><th class="number">Change</th></tr></thead>
          <tbody>{rows.map((row) => <tr><td class="code">{row.function || "[no name]"}</td><td class="quiet">{row.binary}</td><td class="number">{percent(row.before)}</td><td class="number">{percent(row.after)}</td>
            <td class="number">{row.after >= row.before ? "+" : "−"}{(100 * Math.abs(row.after - row.before)).toFixed(1)} points</td></tr>)}</tbody>
        </table></div> : <Empty title="Nothing to compare">Neither time has samples of this kind.</Empty>}
      </Answer>
    </>
  );
}
