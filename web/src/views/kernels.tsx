// SPDX-License-Identifier: Apache-2.0
// Kernels and copies of a range: a row each, with its share of the GPU time. Its kind: kernel, replay (of a whole CUDA
// graph), copy or set (of memory).

import { useMemo } from "preact/hooks";
import type { KernelRow } from "../api";
import { save, text } from "../exports";
import { kernelsCsv, matching, shortKernel } from "../kernels";
import { duration, grouped, percent } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";
import { copyLink, SaveMenu } from "./save";

/** Rows that are asked for, those with the most GPU time. */
const MAX_ROWS = 300;

export function Kernels({ name }: { name: string }): preact.JSX.Element {
  const { place } = useApp();
  const asked = useAnswer<KernelRow[]>("kernels", { node: place.node, from: place.from, to: place.to, limit: MAX_ROWS });
  return (
    <Answer asked={asked} loading="Asking for the kernels…">
      {(rows) => rows.length ? <Rows rows={rows} name={name} />
        : <Empty title="No run on a GPU was timed here">Choose a longer time. Which recordings time them is in the help of <code>sonde record</code>.</Empty>}
    </Answer>
  );
}

function Rows({ rows, name }: { rows: KernelRow[]; name: string }): preact.JSX.Element {
  const { place, go } = useApp();
  const shown = useMemo(() => matching(rows, place.search), [rows, place.search]);
  const sum = (some: readonly KernelRow[], of: "ns" | "runs" | "timed"): number => some.reduce((all, row) => all + row[of], 0);
  const whole = sum(rows, "ns") || 1;
  const isCut = rows.length >= MAX_ROWS;
  return (
    <>
      <div class="tools second">
        <label class="search">Search <input type="search" value={place.search} placeholder="name or kind" onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
        {place.search.trim() && <output class="match">{duration(sum(shown, "ns"))}, {percent(sum(shown, "ns") / whole)} of all</output>}
        <SaveMenu label="Save the kernels" choices={[{ name: "CSV", about: "the rows that are shown, with whole names", run: () => save(`${name}-kernels.csv`, text(kernelsCsv(shown), "text/csv")) }, copyLink]} />
      </div>
      <div class="sheet tall" tabIndex={0} role="region" aria-label="Kernels">
        <table class="kernels">
          <thead><tr><th>Kernel</th><th class="number">GPU time</th><th class="number">Share</th><th class="number">Runs</th><th class="number">Mean</th><th class="number">Longest</th><th>Kind</th></tr></thead>
          <tbody>
            <tr class="sum"><th scope="row">All{isCut ? ` of the ${MAX_ROWS} with the most time` : ""}</th><td class="number">{duration(sum(rows, "ns"))}</td><td class="number">100 %</td><td class="number">{grouped(sum(rows, "runs"))}</td><td /><td /><td /></tr>
            {shown.map((row) => <tr><td class="code" title={row.name}>{row.name ? shortKernel(row.name) : row.kind}</td><td class="number">{duration(row.ns)}</td><td class="number">{percent(row.ns / whole)}</td>
              <td class="number">{grouped(row.runs)}</td><td class="number">{duration(row.mean_ns)}</td><td class="number">{duration(row.most_ns)}</td><td>{row.kind}</td></tr>)}
            {!shown.length && <tr><td colSpan={7} class="none">No row matches. Clear the search.</td></tr>}
          </tbody>
        </table>
      </div>
      <p class="quiet note">Shares are of the GPU time of {isCut ? `these ${MAX_ROWS}` : "all"} rows. Estimated from {grouped(sum(rows, "timed"))} timed runs.</p>
    </>
  );
}
