// SPDX-License-Identifier: Apache-2.0
// A file that somebody dropped on the page, as a range.

import { Empty, Failure } from "../parts";
import { Live, useLive } from "../live";
import { clock, day, duration } from "../numbers";
import { open, opening } from "../opened";
import { useApp } from "../state";
import { START } from "../url";
import { Sides } from "./range";
import { VerdictPanel, Verdicts } from "./verdict";

/** 2001-09-09: times of files before it count from the start of a machine or a program. */
const FIRST_S = 1e9;

export const ACCEPTED = ".sonde,.json,.gz,.sqlite,.txt,.pb";

export function FileButton(): preact.JSX.Element {
  const { go } = useApp();
  const chosen = (event: Event & { currentTarget: HTMLInputElement }): void => {
    const file = event.currentTarget.files?.[0];
    event.currentTarget.value = "";
    if (file) show(file, go);
  };
  return <label class="plain pick">Open a file<input type="file" accept={ACCEPTED} onChange={chosen} /></label>;
}

export function show(file: File, go: ReturnType<typeof useApp>["go"]): void {
  void open(file);
  go({ view: "file", node: "", from: 0, to: 0, left: 0, right: 0, cause: "", focus: [], search: "", shape: "graph", kind: "cpu", group: "", toggled: [] });
}

/** Whether a file is held over the page. */
export const held = new Live(false);

export function DropHint(): preact.JSX.Element | null {
  return useLive(held) ? <div class="drop" role="status">Drop a recording (.sonde) or a trace of torch.profiler to open it. It goes to this server alone, which keeps nothing.</div> : null;
}

export function FileView(): preact.JSX.Element {
  const { go, hrefOf } = useApp();
  const now = useLive(opening);
  if (now.state === "none") {
    return <Empty title="No file is open">A file is held by the tab alone: drop it on the page again, or choose “Open a file” above. Recordings (.sonde), traces of torch.profiler, Nsight Systems’ SQLite exports, output of <code>perf script</code> and OTLP profiles are read.</Empty>;
  }
  if (now.state === "reads") return <div class="state quiet" aria-busy="true">Reading {now.name}…</div>;
  if (now.state === "failed") return <Failure error={now.error} />;
  const { timeline, flames, name } = now.opened;
  const { verdicts, notes } = timeline.explanation;
  const begin = (timeline.origin_ns + timeline.begin_ns) / 1e9;
  return (
    <>
      <div class="tools">
        <a href={hrefOf(START)} onClick={(event) => { event.preventDefault(); go(START); }}>Overview</a><span class="quiet" aria-hidden="true">›</span>
        <h1>{name}</h1>
        <span class="quiet">{begin > FIRST_S ? `${day(begin)} ${clock(begin)} UTC,` : "no date is known;"} {duration(timeline.end_ns - timeline.begin_ns)} long; held in this tab alone, the server keeps nothing of it</span>
      </div>
      <VerdictPanel>
        {verdicts.length || notes.length ? <Verdicts answer={timeline} /> : <p class="quiet">No verdict: nothing in it shows what work waited for.</p>}
      </VerdictPanel>
      <Sides timeline={{ answer: timeline, error: null, loading: false }} flames={flames} name={name} />
    </>
  );
}
