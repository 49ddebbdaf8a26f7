// SPDX-License-Identifier: Apache-2.0
// What limits the work in a time: its causes with their shares, what to do next, and the evidence.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { CauseShare, TimelineAnswer, Verdict } from "../api";
import { useApp } from "../state";
import { reasonOf } from "../timeline";
import { Article, Folded, kindOfCause } from "../verdict";

/** The key of the verdict among the parts that are folded. */
const KEY = "verdict";

/** The panel of verdicts, which can be folded. */
export function VerdictPanel({ children }: { children: ComponentChildren }): preact.JSX.Element {
  const { place, go } = useApp();
  const isFolded = place.toggled.includes(KEY);
  return <Folded isFolded={isFolded} toggle={() => go({ toggled: isFolded ? place.toggled.filter((one) => one !== KEY) : [...place.toggled, KEY] }, true)}>{children}</Folded>;
}

export function Verdicts({ answer }: { answer: TimelineAnswer }): preact.JSX.Element {
  const { place } = useApp();
  const { notes } = answer.explanation;
  const verdicts = chosenFirst(answer.explanation.verdicts, place.pid);
  if (!verdicts.length) return <p class="quiet">No verdict: {notes.join("; ") || "nothing was observed in this time"}. Choose a longer time.</p>;
  return <>{verdicts.slice(0, 3).map((verdict, number) => <One answer={answer} verdict={verdict} notes={number ? [] : notes} />)}</>;
}

/** Those on the chosen process before the others. */
export function chosenFirst<T extends Pick<Verdict, "device_name">>(verdicts: readonly T[], pid: string): T[] {
  const isIts = (one: T): boolean => pid !== "" && one.device_name.endsWith(`(${pid})`);
  return [...verdicts.filter(isIts), ...verdicts.filter((one) => !isIts(one))];
}

function One({ answer, verdict, notes }: { answer: TimelineAnswer; verdict: Verdict; notes: string[] }): preact.JSX.Element {
  const { place, go } = useApp();
  const [all, setAll] = useState(false);
  const hasThreads = place.view === "range";
  const shape = place.shape === "kernels" ? "graph" : place.shape;
  /** Shows stacks of one thread, or of all where it is not known, and what matches a place in the code among them. */
  const stacksOf = (cause: string, kind: string, thread: string, where: string): void => {
    const isThread = hasThreads && thread !== "";
    go({ cause, kind, shape, search: where, group: isThread ? "thread" : "", focus: isThread ? [thread] : [] });
  };
  const clear = (): void => go({ cause: "", search: "", focus: [], group: "" });
  const reasons = (cause: CauseShare): { text: string; open?: () => void }[] => {
    const reason = reasonOf(answer, cause);
    if (!reason) return [];
    if (!reason.where) return [{ text: reason.text }];
    return [{
      text: reason.text,
      open: () => {
        stacksOf(cause.key, "cpu", reason.thread, reason.where);
        document.getElementById("stacks")?.scrollIntoView(); // they lie below the timeline
      },
    }];
  };
  return <Article
    verdict={verdict} notes={notes} isFolded={place.toggled.includes(KEY)} chosen={place.cause} all={all} setAll={setAll} reasons={reasons}
    about="Show where: in the timeline and in the stacks" aboutBound="Show where: in the timeline, and in the GPU time by the code that launched the work"
    choose={(cause) => (place.cause === cause.key ? clear() : stacksOf(cause.key, kindOfCause(cause.key), cause.thread, cause.locations[0]?.function ?? ""))}
    chooseBound={(key) => (place.cause === key ? clear() : stacksOf(key, "kernel", "", ""))}
  />;
}
