// SPDX-License-Identifier: Apache-2.0
// Where a view of one node or one job stands: the links back. They keep the chosen time, and `live`.

import { isOwnerKind, type Place } from "./url";

/** What a link changes of START; null: the view that is shown. */
export type Crumb = readonly [name: string, target: Partial<Place> | null];

/** The way to a place; none for views over all nodes. `times`: the chosen time as text. */
export function crumbsOf(place: Place, times: string): Crumb[] {
  const { view, node, from, to, live } = place;
  const when = { from, to, live };
  if (view === "job") {
    const parent: Crumb = isOwnerKind(place.by) ? ["Owners", { view: "owners", by: place.by, ...when }] : ["Jobs", { view: "jobs", by: place.by, ...when }];
    return [parent, [`${place.by || "job"} ${place.id}`, null]];
  }
  if (view === "jobs" && place.owner) {
    return [["Owners", { view: "owners", by: place.ownerBy, ...when }], [`jobs of ${place.owner}`, null]];
  }
  if (!node) return [];
  const trail: Crumb[] = [["Overview", when], [node, view === "node" ? null : { view: "node", node, ...when }]];
  if (view === "node") return trail;
  if (view === "memory") return [...trail, ["Memory", null]];
  if (view === "range") return [...trail, [times, null]];
  if (view === "compare") return [...trail, [times, { view: "range", node, from, to, pid: place.pid }], ["Compare", null]];
  return [];
}
