// SPDX-License-Identifier: Apache-2.0
// Tables that are sorted by a column, which the address names.

import { useApp } from "../state";

/** What rows are sorted by, by the name of a column: numbers from large to small, names from A to Z. */
export type Keys<T> = Readonly<Record<string, (row: T) => number | string | null>>;
const NAMES = new Intl.Collator("en", { numeric: true });
const UP = ".up";

/** Rows by a column, or as they are where none of this name is known. Those without a value are last in both directions. */
export function inOrder<T>(rows: readonly T[], sort: string, keys: Keys<T>): readonly T[] {
  const isReversed = sort.endsWith(UP);
  const name = isReversed ? sort.slice(0, -UP.length) : sort;
  const key = Object.hasOwn(keys, name) ? keys[name] : undefined;
  if (!key) return rows;
  return rows.map((row) => ({ row, value: key(row) })).sort((a, b) => {
    if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
    const order = typeof a.value === "string" ? NAMES.compare(a.value, String(b.value)) : Number(b.value) - a.value;
    return isReversed ? -order : order;
  }).map(({ row }) => row);
}

/** The head of a column. `isName`: its values are names. The column without a `name` is the order at first. */
export function SortHead({ name, title, about, isName, isNumber }: { name: string; title: string; about?: string; isName?: boolean; isNumber?: boolean }): preact.JSX.Element {
  const { place, go } = useApp();
  const isUp = place.sort === name + UP;
  const isOn = place.sort === name || (isUp && name !== "");
  const isAscending = isUp !== Boolean(isName);
  return (
    <th class={isNumber ? "number" : ""} aria-sort={isOn ? (isAscending ? "ascending" : "descending") : undefined}>
      <button title={about ?? `Sort by ${title.toLowerCase()}`} onClick={() => go({ sort: isOn && !isUp && name ? name + UP : name })}>{title}</button>
    </th>
  );
}
