// SPDX-License-Identifier: Apache-2.0
// Whether anything of the chosen process was recorded.

import type { ProcessesAnswer } from "../answers";
import { useAnswer } from "../state";

/** Rows of samples (the store's table `sample`) sum up a second and are selected by its start. */
const TICK_S = 1;
/** Kinds of samples. Nearly every process has some of the first, so the others are asked for only where it has none. */
export const FIRST_KIND = "cpu";
export const OTHER_KINDS = ["blocked", "runqueue", "device", "kernel", "mapped", "unmapped", "faulted"] as const;

/** The notice that a time has nothing of a process; null where it has, where none is chosen, and until that is known. */
export function NothingOf({ node, pid, from, to }: { node: string; pid: string; from: number; to: number }): preact.JSX.Element | null {
  const question = pid && node && to > from ? "processes" : null;
  const of = { node, pid, from: from - TICK_S, to, limit: 1 };
  const first = useAnswer<ProcessesAnswer>(question, { ...of, kind: FIRST_KIND });
  const hasNone = isNothing([first.loading ? null : first.answer]);
  const others = OTHER_KINDS.map((kind) => useAnswer<ProcessesAnswer>(hasNone ? question : null, { ...of, kind }));
  if (!question || !isNothing([first, ...others].map((one) => (one.loading ? null : one.answer)))) return null;
  return (
    <p class="panel pad" role="status"><b>Nothing of process {pid} was recorded on {node} in this time.</b>{" "}
      What is shown of the node is of other processes. Its agent may not have run then, or did not record this process.</p>
  );
}

/** Whether all answers are there, and have no row. */
export function isNothing(answers: readonly (readonly unknown[] | null)[]): boolean {
  return answers.every((rows) => rows !== null && rows.length === 0);
}
