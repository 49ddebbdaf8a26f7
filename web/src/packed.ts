// SPDX-License-Identifier: Apache-2.0
// Answers with columns of numbers: JSON, and behind it the numbers as the machine has them, so that a
// million spans need no parsing. The counterpart of src/sonde/export/packed.py, where the layout is.

export const MEDIA_TYPE = "application/vnd.sonde.columns";

const ARRAYS = {
  f64: Float64Array, i32: Int32Array, u8: Uint8Array,
} as const;

/** What stands in the JSON for an array: its type, where it begins (bytes), and its number of elements. */
type Place = [kind: keyof typeof ARRAYS, offset: number, length: number];

/** What a packed answer holds. Throws RangeError or SyntaxError for one that is cut off. */
export function unpacked(bytes: ArrayBuffer): unknown {
  const head = new DataView(bytes).getUint32(0, true);
  const text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes, 8, head));
  const base = 8 + Math.ceil(head / 8) * 8;
  const placed = (value: unknown): unknown => {
    if (typeof value !== "object" || value === null) return value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(placed) : value;
    const place = (value as { $?: Place }).$;
    if (place) return new ARRAYS[place[0]](bytes, base + place[1], place[2]);
    const record = value as Record<string, unknown>;
    for (const name of Object.keys(record)) record[name] = placed(record[name]);
    return record;
  };
  return placed(JSON.parse(text));
}

/** A table in columns; `text` columns are indices into their values. */
export interface Columns {
  rows: number;
  numbers: Record<string, ArrayLike<number>>;
  texts: Record<string, { values: string[]; index: ArrayLike<number> }>;
}
