// SPDX-License-Identifier: Apache-2.0
// What the one-file report of `sonde report` draws with: built into src/sonde/export/built, where its
// own scripts (src/sonde/export/assets) find it as `Boxes`.

export { makeRow } from "./draw/boxes";
export { BoxCanvas } from "./draw/canvas";
export { abgr } from "./draw/colours";
