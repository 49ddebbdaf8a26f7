// SPDX-License-Identifier: Apache-2.0
// What the one-file report of `sonde report` has in common with the server's page, built into src/sonde/export/built:
// its own scripts (src/sonde/export/assets) find what draws as `Boxes`.

import type { ComponentChild } from "preact";
import type { CauseShare, Explanation } from "./api";
import { nodes } from "./plain_jsx";
import { Article, Folded, kindOfCause } from "./verdict";
import "./verdict.css";

export { makeRow } from "./draw/boxes";
export { BoxCanvas } from "./draw/canvas";
export { abgr } from "./draw/colours";

/** `missing`: why there is no explanation, in words, and the command that gives one. */
export interface Explained { explanation: Explanation | null; missing: string; command: string }
/** Shows stacks of a kind, and what matches a place in the code among them. */
export type ShowStacks = (kind: string, where: string) => void;

/** Names of kinds of stacks in the report, by those of the server. */
const KINDS: Record<string, string> = { runqueue: "run-queue", kernel: "gpu-time", device: "gpu-calls", blocked: "off-cpu", cpu: "on-cpu" };
/** Verdicts that are shown. */
const MOST = 3;

/** Draws the verdict into an element; folded at first, so that the stacks are seen below it. */
export function showVerdict(root: HTMLElement, explained: Explained, showStacks: ShowStacks): void {
  const state = { isFolded: true, chosen: "", all: new Set<number>() };
  const draw = (): void => {
    const buttons = [...root.querySelectorAll("button")];
    const focused = buttons.indexOf(document.activeElement as HTMLButtonElement);
    const isFold = focused >= 0 && focused === buttons.length - 1;
    root.replaceChildren(...nodes(panel() as never));
    const made = root.querySelectorAll("button");
    if (focused >= 0) made[isFold ? made.length - 1 : Math.min(focused, made.length - 1)]?.focus();
  };
  const choose = (key: string, where: string): void => {
    const isChosen = state.chosen !== key;
    state.chosen = isChosen ? key : "";
    draw();
    if (isChosen) showStacks(KINDS[kindOfCause(key)] ?? "on-cpu", where);
    else showStacks("", "");
  };
  const panel = (): ComponentChild => {
    const { explanation, missing, command } = explained;
    if (!explanation?.verdicts.length) {
      const why = [missing, ...(explanation?.notes ?? [])].filter(Boolean).join("; ");
      return <section class="verdict panel" aria-label="Verdict"><p class="missing"><b>No verdict</b> {why}{command && <>. This gives one: <code>{command}</code></>}</p></section>;
    }
    return (
      <Folded isFolded={state.isFolded} toggle={() => { state.isFolded = !state.isFolded; draw(); }}>
        {explanation.verdicts.slice(0, state.isFolded ? 1 : MOST).map((verdict, number) => <Article
          verdict={verdict} notes={number ? [] : explanation.notes} isFolded={state.isFolded} chosen={state.chosen}
          about="Show the stacks of this kind, and this place among them" aboutBound="Show the GPU time by the code that launched the work"
          choose={(cause: CauseShare) => choose(cause.key, cause.locations[0]?.function ?? "")} chooseBound={(key) => choose(key, "")}
          reasons={(cause) => cause.facts.map((text) => ({ text }))}
          all={state.all.has(number)} setAll={(all) => { if (all) state.all.add(number); else state.all.delete(number); draw(); }}
        />)}
      </Folded>
    );
  };
  draw();
}
