// SPDX-License-Identifier: Apache-2.0
// Whether anything of the chosen process was recorded.

import type { ProcessesAnswer } from "../answers";
import { useAnswer } from "../state";

/** Rows of samples sum up a second and are selected by its start. */
const TICK_S = 1;

/** The notice that a time has nothing of a process; null where it has, where none is chosen, and until that is known. */
export function NothingOf({ node, pid, from, to }: { node: string; pid: string; from: number; to: number }): preact.JSX.Element | null {
  const question = pid && node && to > from ? "processes" : null;
  const of = { node, pid, from: from - TICK_S, to, limit: 1 };
  const asked = [
    useAnswer<ProcessesAnswer>(question, { ...of, kind: "cpu" }), useAnswer<ProcessesAnswer>(question, { ...of, kind: "blocked" }),
    useAnswer<ProcessesAnswer>(question, { ...of, kind: "runqueue" }), useAnswer<ProcessesAnswer>(question, { ...of, kind: "device" }),
  ];
  if (!question || !isNothing(asked.map((one) => (one.loading ? null : one.answer)))) return null;
  return (
    <p class="panel pad" role="status"><b>Nothing of process {pid} was recorded on {node} in this time.</b>{" "}
      What is shown of the node is of other processes. Its agent may not have run then, or did not record this process.</p>
  );
}

/** Whether all answers are there, and have no row. */
export function isNothing(answers: readonly (readonly unknown[] | null)[]): boolean {
  return answers.every((rows) => rows !== null && rows.length === 0);
}
