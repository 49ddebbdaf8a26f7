// SPDX-License-Identifier: Apache-2.0
// Functions of a tree of stacks, with their weights.

import { useMemo, useState } from "preact/hooks";
import { table, type matcher, type Tree } from "../flame";
import { percent } from "../numbers";
import { MoreRows, ROWS_AT_ONCE } from "../parts";
import { useApp } from "../state";

export function Functions({ tree, show, search, choose }: { tree: Tree; show: (value: number) => string; search: ReturnType<typeof matcher>; choose?: (label: string) => void }): preact.JSX.Element {
  const { go } = useApp();
  const [byTotal, setByTotal] = useState(false);
  const [shown, setShown] = useState(ROWS_AT_ONCE);
  const all = useMemo(() => {
    const found = table(tree).filter((row) => row.total > 0 && (!search || search(tree.functions[row.fn]!)));
    return byTotal ? found.sort((a, b) => b.total - a.total) : found;
  }, [tree, byTotal, search]);
  const rows = all.slice(0, shown);
  const whole = tree.total[0] || 1;
  return (
    <div class="sheet tall" tabIndex={0} role="region" aria-label="Functions">
      <table>
        <thead><tr><th class="number" aria-sort={byTotal ? "none" : "descending"}><button onClick={() => setByTotal(false)}>By itself</button></th>
          <th class="number" aria-sort={byTotal ? "descending" : "none"}><button onClick={() => setByTotal(true)}>With callees</button></th><th>Function</th><th>Binary</th></tr></thead>
        <tbody>{rows.map((row) => {
          const fn = tree.functions[row.fn]!;
          return <tr><td class="number">{show(row.own)} <small>{percent(row.own / whole)}</small></td><td class="number">{show(row.total)} <small>{percent(row.total / whole)}</small></td>
            <td class="code"><button class="link" title={fn.file} onClick={() => { if (choose) choose(fn.label); else go({ fn: fn.label, shape: "sandwich" }); }}>{fn.label}</button></td><td class="quiet">{fn.binary}</td></tr>;
        })}
          {!rows.length && <tr><td colSpan={4} class="none">No function matches. Clear the search.</td></tr>}</tbody>
      </table>
      <MoreRows all={all.length} shown={shown} show={setShown} />
    </div>
  );
}
