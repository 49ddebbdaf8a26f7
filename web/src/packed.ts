// SPDX-License-Identifier: Apache-2.0
// Answers with columns of numbers: JSON, and behind it the numbers as the machine has them, so that a
// million spans need no parsing. The counterpart of src/sonde/server/packed.py, where the layout is.

export const MEDIA_TYPE = "application/vnd.sonde.columns";

const ARRAYS = {
  f64: Float64Array, i32: Int32Array, u8: Uint8Array,
} as const;

type Place = [kind: keyof typeof ARRAYS, offset: number, length: number];

/** What a packed answer holds. Throws RangeError or SyntaxError for one that is cut off. */
export function unpacked(bytes: ArrayBuffer): unknown {
  const head = new DataView(bytes).getUint32(0, true);
  const text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes, 8, head));
  const base = 8 + Math.ceil(head / 8) * 8;
  return JSON.parse(text, (_, value: unknown) => {
    const place = (value as { $?: Place } | null)?.$;
    if (!place) return value;
    const [kind, offset, length] = place;
    return new ARRAYS[kind](bytes, base + offset, length);
  });
}

/** A table in columns; `text` columns are indices into their values. */
export interface Columns {
  rows: number;
  numbers: Record<string, ArrayLike<number>>;
  texts: Record<string, { values: string[]; index: ArrayLike<number> }>;
}
