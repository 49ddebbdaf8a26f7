// SPDX-License-Identifier: Apache-2.0
// Stacks of a range: a flame graph, a table, or the kernels.

import { useMemo, useRef } from "preact/hooks";
import { send, type Flame } from "../api";
import type { BoxCanvas } from "../draw/canvas";
import { folded, save, speedscope, svg, text } from "../exports";
import { build, byBinary, coloursOf, found, matcher, nodeOf, pathOf, type Hide, type Tree, type Weight } from "../flame";
import { css } from "../draw/colours";
import { clock, duration, percent, scaled } from "../numbers";
import { Answer, Empty } from "../parts";
import { useAnswer, useApp } from "../state";
import type { Group } from "../url";
import { Drawn } from "./drawn";
import { Functions } from "./functions";
import { Kernels } from "./kernels";
import { Sandwich } from "./sandwich";
import { copyLink, SaveMenu, type Choice } from "./save";

export { Drawn, type Shade } from "./drawn";

/** Kinds of stacks: key, title, weight, what they count. */
export const KINDS: readonly [string, string, Weight, string][] = [
  ["cpu", "On CPU", "ns", "code that ran on CPUs"],
  ["blocked", "Blocked", "ns", "threads that waited: locks, I/O, sleep"],
  ["runqueue", "Run queue", "ns", "threads that could run and had no CPU"],
  ["device", "GPU calls", "ns", "time inside calls of a GPU API"],
  ["kernel", "GPU time", "ns", "time on the GPU, under the code that launched the work"],
  ["mapped", "Memory", "bytes", "bytes that were mapped"],
];

const MEMORY_KINDS: typeof KINDS = [
  ["mapped", "Mapped", "bytes", "bytes that were mapped"],
  ["faulted", "Touched", "bytes", "bytes that were touched for the first time"],
  ["unmapped", "Given back", "bytes", "bytes that were unmapped"],
];

const HIDES: readonly [Hide, string][] = [["", "all frames"], ["kernel", "without the kernel"], ["runtime", "without kernel and runtime"], ["python", "Python only"]];

const GROUPS: readonly [Group, string][] = [["", "all together"], ["binary", "by binary"], ["process", "by process"], ["thread", "by thread"]];

/** Rows of samples sum up a second and are selected by its start: asked for this much earlier, the second in which a
 * time begins is in the answer, too. */
const TICK_S = 1;
const NO_FLAME: Flame = { total: { rows: 0, n: 0, ns: 0, bytes: 0 }, frames: [], stacks: [] };
/** Below it the view states that stacks are of whole seconds. */
const SHORT_S = 20;

/** What the server has to keep stacks apart by; by binary the page does it, as each frame of an answer has its binary. */
const serverGroup = (group: Group): string => (group === "binary" ? "" : group);

/** The stacks of the place, or `flames` of a file, by kind. `memory`: only the kinds of host memory. */
export function FlamePanel({ name, flames, memory = false }: { name: string; flames?: Record<string, Flame>; memory?: boolean }): preact.JSX.Element {
  const { place, go } = useApp();
  const kinds = memory ? MEMORY_KINDS : KINDS;
  const [chosen, title, weight, hint] = kinds.find(([kind]) => kind === place.kind) ?? kinds[0]!;
  const isKernels = place.shape === "kernels" && !memory;
  const asked = useAnswer<Flame>(isKernels || flames ? null : "flamegraph", { node: place.node, from: place.from - TICK_S, to: place.to, kind: chosen, pid: place.pid, group: serverGroup(place.group) });
  return (
    <>
      <div class="tools">
        <h2 id="stacks">Stacks</h2>
        {place.pid && !flames && <button onClick={() => go({ pid: "", focus: [] })} aria-label={`Stacks of process ${place.pid}; show all`}>Process {place.pid} ✕</button>}
        <div class="segments" role="group" aria-label="Shape">
          <button aria-pressed={place.shape === "graph"} onClick={() => go({ shape: "graph" })}>Graph</button>
          <button aria-pressed={place.shape === "table"} onClick={() => go({ shape: "table" })}>Table</button>
          <button aria-pressed={place.shape === "sandwich"} title="one function between its callers and callees" onClick={() => go({ shape: "sandwich", fn: place.fn || place.focus[place.focus.length - 1] || "" })}>Sandwich</button>
          {!flames && !memory && <button aria-pressed={isKernels} title="a row for each kernel and copy" onClick={() => go({ shape: "kernels" })}>Kernels</button>}
        </div>
        <div class="segments" role="group" aria-label="What is counted">
          {kinds.map(([kind, name, , about]) => (
            <button aria-pressed={isKernels ? kind === "kernel" : chosen === kind} title={about}
              onClick={() => go({ kind, focus: [], shape: isKernels ? "graph" : place.shape })}>{name}</button>
          ))}
        </div>
        {!flames && place.to - place.from < SHORT_S && <span class="quiet">{isKernels ? `${clock(place.from, 0.001)} to ${clock(place.to, 0.001)}` : `sums of whole seconds: up to ${TICK_S} s beyond ${clock(place.from)} to ${clock(place.to)}`}</span>}
      </div>
      {isKernels && !flames ? <Kernels name={name} /> : <Answer asked={flames ? { answer: flames[chosen] ?? NO_FLAME, error: null, loading: false } : asked} loading={`Asking for the stacks: ${title}…`}>
        {(flame) => flame.stacks.length ? <Graph kind={chosen} flame={flame} weight={weight} hint={hint} name={name} isFile={flames !== undefined} /> : (
          <Empty title={`Nothing here for “${title}”`}>It counts {hint}; none was recorded {flames ? "in this file. Choose another kind above." : "in this time. Choose another kind above, or a longer time."}</Empty>
        )}
      </Answer>}
    </>
  );
}

function Graph({ kind, flame, weight, hint, name, isFile }: { kind: string; flame: Flame; weight: Weight; hint: string; name: string; isFile: boolean }): preact.JSX.Element {
  const { place, go, palette } = useApp();
  const canvasOf = useRef<BoxCanvas | null>(null);
  const hide = HIDES.find(([one]) => one === place.hide)?.[0] ?? "";
  const grouped = useMemo(() => (place.group === "binary" ? byBinary(flame, hide) : flame), [flame, place.group, hide]);
  const tree = useMemo(() => build(grouped, weight, place.invert, hide), [grouped, weight, place.invert, hide]);
  const search = useMemo(() => matcher(place.search), [place.search]);
  const focused = useMemo(() => (place.shape === "graph" ? nodeOf(tree, place.focus) : 0), [tree, place.focus, place.shape]);
  const hits = useMemo(() => (search ? found(tree, search, focused) : null), [tree, search, focused]);
  const show = (value: number): string => (weight === "bytes" ? scaled(value, "B") : duration(value));
  const top = (): number => nodeOf(tree, place.focus);
  const file = `${name}-${kind}`;
  const choices: Choice[] = [
    ...(isFile ? [] : [{
      name: "pprof", about: "the whole selection, for go tool pprof and others",
      run: async () => {
        const given = { node: place.node, from: String(place.from - TICK_S), to: String(place.to), kind, ...(place.pid ? { pid: place.pid } : {}) };
        save(`${file}.pb.gz`, await (await send(`/v1/pprof?${new URLSearchParams(given)}`, {})).blob());
      },
    }]),
    ...(isFile ? [] : [{
      name: "Arrow", about: "stacks with their weights, as an Arrow stream",
      run: async () => {
        const given = { node: place.node, from: String(place.from - TICK_S), to: String(place.to), kind, format: "arrow", ...(place.pid ? { pid: place.pid } : {}), ...(serverGroup(place.group) ? { group: place.group } : {}) };
        save(`${file}.arrows`, await (await send(`/v1/flamegraph?${new URLSearchParams(given)}`, {})).blob());
      },
    }]),
    { name: "speedscope", about: "what is shown, for speedscope.app", run: () => save(`${file}.speedscope.json`, text(speedscope(tree, top(), file, weight === "bytes" ? "bytes" : "nanoseconds"), "application/json")) },
    { name: "Folded stacks", about: "what is shown, a line a stack", run: () => save(`${file}.folded`, text(folded(tree, top()))) },
    { name: "SVG", about: "the flame graph as shown", run: () => save(`${file}.svg`, text(svg(tree, top(), coloursOf(tree, palette), palette.ink, css(palette.background)), "image/svg+xml")) },
    { name: "PNG", about: "the part of the flame graph in sight", run: async () => { const found = canvasOf.current; if (!found) throw new Error("show the graph first"); save(`${file}.png`, await found.picture()); } },
    ...(isFile ? [] : [copyLink]),
  ];
  const wrong = place.search.trim() !== "" && !search;
  return (
    <>
      <div class="tools second">
        <label class="search">Search <input type="search" value={place.search} aria-invalid={wrong} placeholder="function, file, binary or /regex/"
          onInput={(event) => go({ search: event.currentTarget.value }, true)} /></label>
        {hits && <output class="match" title="How much the search matches, and its share of what is shown">{show(hits.weight)}, {percent(hits.weight / (tree.total[focused] || 1))} of {focused ? "the part shown" : "all"}</output>}
        <select aria-label="Frames that are shown" value={hide} onChange={(event) => go({ hide: event.currentTarget.value, focus: [] })}>{HIDES.map(([value, name]) => <option value={value}>{name}</option>)}</select>
        <select aria-label="What stacks are kept apart by" value={place.group} onChange={(event) => go({ group: event.currentTarget.value as Group, focus: [] })}>
          {GROUPS.filter(([value]) => !isFile || value === "" || value === "binary").map(([value, name]) => <option value={value}>{name}</option>)}</select>
        <label class="check"><input type="checkbox" checked={place.invert} onChange={(event) => go({ invert: event.currentTarget.checked, focus: [] })} /> Invert</label>
        <SaveMenu label="Save the stacks" choices={choices} />
      </div>
      {place.shape === "table" ? <Functions tree={tree} show={show} search={search} />
        : place.shape === "sandwich" ? <Sandwich flame={grouped} tree={tree} weight={weight} hide={hide} show={show} search={search} />
        : <Chart tree={tree} lit={hits?.lit ?? null} show={show} use={(one) => { canvasOf.current = one; }} />}
      <div class="under">
        <span><i style={{ background: css(palette.frame("python", "", "")) }} />Python</span>
        <span><i style={{ background: css(palette.frame("kernel", "", "")) }} />Linux kernel</span>
        <span><i style={{ background: css(palette.frame("user", "libtorch", "")) }} />libraries, a colour each</span>
        <span class="quiet">{show(tree.total[0] ?? 0)} in all: {hint}</span>
      </div>
    </>
  );
}

function Chart({ tree, lit, show, use }: { tree: Tree; lit: Uint8Array | null; show: (value: number) => string; use: (canvas: BoxCanvas | null) => void }): preact.JSX.Element {
  const { place, go } = useApp();
  const path = pathOf(tree, useMemo(() => nodeOf(tree, place.focus), [tree, place.focus]));
  return (
    <>
      <nav class="crumbs" aria-label="Zoomed to">
        <button aria-current={path.length === 0} onClick={() => go({ focus: [] })}>all</button>
        {path.slice(-5).map((label, i) => <button aria-current={i === Math.min(5, path.length) - 1} title={label}
          onClick={() => go({ focus: path.slice(0, Math.max(0, path.length - 5) + i + 1) })}>{label}</button>)}
      </nav>
      <Drawn tree={tree} lit={lit} show={show} use={use} focus={place.focus} zoom={(focus) => go({ focus })} name="Flame graph" />
    </>
  );
}
