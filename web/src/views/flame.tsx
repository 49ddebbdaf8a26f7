// SPDX-License-Identifier: Apache-2.0
// Stacks of a range: a flame graph, a table, or the kernels.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { send, type Flame, type KernelRow } from "../api";
import type { BoxCanvas } from "../draw/canvas";
import { folded, save, speedscope, svg, text } from "../exports";
import { around, build, byBinary, coloursOf, found, matcher, nodeOf, pathOf, rowsOf, ROW_HEIGHT, table, type Hide, type Tree, type Weight } from "../flame";
import { css } from "../draw/colours";
import { Live, useLive } from "../live";
import { duration, grouped, percent, scaled } from "../numbers";
import { Answer, Empty, Tooltip } from "../parts";
import { useAnswer, useApp } from "../state";
import type { Group } from "../url";
import { Boxes } from "./canvas";
import { copyLink, SaveMenu, type Choice } from "./save";

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
        <h2>Stacks</h2>
        {place.pid && !flames && <button onClick={() => go({ pid: "", focus: [] })} aria-label={`Stacks of process ${place.pid}; show all`}>Process {place.pid} ✕</button>}
        <div class="segments" role="group" aria-label="Shape">
          <button aria-pressed={place.shape === "graph"} onClick={() => go({ shape: "graph" })}>Graph</button>
          <button aria-pressed={place.shape === "table"} onClick={() => go({ shape: "table" })}>Table</button>
          <button aria-pressed={place.shape === "sandwich"} title="one function between its callers and callees" onClick={() => go({ shape: "sandwich", fn: place.fn || place.focus[place.focus.length - 1] || "" })}>Sandwich</button>
        </div>
        <div class="segments" role="group" aria-label="What is counted">
          {kinds.map(([kind, name, , about]) => (
            <button aria-pressed={!isKernels && chosen === kind} title={about}
              onClick={() => go({ kind, focus: [], shape: isKernels ? "graph" : place.shape })}>{name}</button>
          ))}
          {!flames && !memory && <button aria-pressed={isKernels} onClick={() => go({ shape: "kernels" })}>Kernels</button>}
        </div>
      </div>
      {isKernels && !flames ? <Kernels /> : <Answer asked={flames ? { answer: flames[chosen] ?? NO_FLAME, error: null, loading: false } : asked} loading={`Asking for the stacks: ${title}…`}>
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
  const hits = useMemo(() => (search ? found(tree, search) : null), [tree, search]);
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
        {hits && <output class="match">{percent(hits.weight / (tree.total[0] || 1))}</output>}
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
        <span><i style={{ background: css(palette.frame("kernel", "", "")) }} />kernel</span>
        <span><i style={{ background: css(palette.frame("user", "libtorch", "")) }} />libraries, a colour each</span>
        <span class="quiet">{show(tree.total[0] ?? 0)} in all: {hint}{!isFile && place.to - place.from < SHORT_S ? "; of whole seconds around this time" : ""}</span>
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

/** Colours of nodes in place of those of their functions, and more lines of their tooltips. */
export interface Shade { colours: Uint32Array; levelOf(node: number): number; lines(node: number): readonly [string, string][] }

export function Drawn({ tree, lit, show, use, focus, zoom, name, shade }: {
  tree: Tree; lit: Uint8Array | null; show: (value: number) => string; use?: (canvas: BoxCanvas | null) => void;
  focus: readonly string[]; zoom: (focus: string[]) => void; name: string; shade?: Shade;
}): preact.JSX.Element {
  const { palette } = useApp();
  const rows = useMemo(() => {
    const made = rowsOf(tree, palette.background, lit);
    for (const row of shade ? made : []) row.id.forEach((node, i) => { row.colourIndex[i] = shade!.levelOf(node); });
    return made;
  }, [tree, palette, lit, shade]);
  const colours = useMemo(() => shade?.colours ?? coloursOf(tree, palette), [tree, palette, shade]);
  const scroller = useRef<HTMLDivElement>(null);
  const focused = useMemo(() => nodeOf(tree, focus), [tree, focus]);
  const [hover] = useState(() => new Live<{ id: number; x: number; y: number } | null>(null));
  const labelOf = (node: number): string => tree.functions[tree.fn[node]!]!.label;
  const shown = useMemo(() => ({
    rows, colours, height: tree.levels * ROW_HEIGHT, left: tree.x[focused]!, right: tree.x[focused]! + (tree.total[focused]! || 1),
    first: 0, last: tree.total[0] || 1, palette, labelOf, isFaded: (node: number) => lit !== null && !lit[node],
  }), [rows, focused, palette, lit]);
  useEffect(() => {
    if (scroller.current) scroller.current.scrollTop = Math.max(0, (tree.depth[focused]! - 2) * ROW_HEIGHT);
  }, [focused, tree]);
  useEffect(() => () => use?.(null), []);
  return (
    <>
      <div class="scroller flames" ref={scroller}>
        <div class="spacer" style={{ height: `${tree.levels * ROW_HEIGHT}px` }}>
          <div class="canvas">
            <Boxes shown={shown} scroller={scroller} {...(use ? { use } : {})} pans={false} label={`${name} of ${tree.fn.length} nodes. Arrow keys select a frame, Enter zooms to it. The table shows the same as text.`}
              events={{
                hover: (id, x, y) => hover.set(id < 0 ? null : { id, x, y }),
                click: (id) => zoom(id === focused ? pathOf(tree, tree.parent[id]!) : pathOf(tree, id)),
              }} />
          </div>
        </div>
      </div>
      <Hovered hover={hover} tree={tree} show={show} {...(shade ? { shade } : {})} />
    </>
  );
}

/** One function between its callers and callees, as two trees from it outwards and inwards. */
function Sandwich({ flame, tree, weight, hide, show, search }: {
  flame: Flame; tree: Tree; weight: Weight; hide: Hide; show: (value: number) => string; search: ReturnType<typeof matcher>;
}): preact.JSX.Element {
  const { place, go } = useApp();
  const cut = useMemo(() => (place.fn ? around(flame, place.fn) : null), [flame, place.fn]);
  const callers = useMemo(() => (cut ? build(cut.callers, weight, true, hide) : null), [cut, weight, hide]);
  const callees = useMemo(() => (cut ? build(cut.callees, weight, false, hide) : null), [cut, weight, hide]);
  const [outwards, setOutwards] = useState<readonly string[]>([]);
  const [inwards, setInwards] = useState<readonly string[]>([]);
  useEffect(() => { setOutwards([]); setInwards([]); }, [cut]);
  if (!cut) return <><p class="quiet note">Choose a function: its callers and its callees are shown.</p><Functions tree={tree} show={show} search={search} choose={(fn) => go({ fn })} /></>;
  if (!cut.callers.stacks.length) {
    return <Empty title="This function is in no stack here">{place.fn}: choose another kind above, or <button class="link open" onClick={() => go({ fn: "" })}>another function</button>.</Empty>;
  }
  const whole = tree.total[0] || 1;
  return (
    <>
      <div class="tools second"><strong class="code">{place.fn}</strong><span class="quiet">{show(cut.weight[weight])}, {percent(cut.weight[weight] / whole)}, with what it calls</span>
        <button onClick={() => go({ fn: "" })}>Another function</button></div>
      <div class="sandwich">
        <section aria-label="Callers"><h3>Callers: the first row is the function, below it who called it</h3>
          <Drawn tree={callers!} lit={null} show={show} focus={outwards} zoom={setOutwards} name="Callers" /></section>
        <section aria-label="Callees"><h3>Callees: the first row is the function, below it what it called</h3>
          <Drawn tree={callees!} lit={null} show={show} focus={inwards} zoom={setInwards} name="Callees" /></section>
      </div>
    </>
  );
}

function Hovered({ hover, tree, show, shade }: { hover: Live<{ id: number; x: number; y: number } | null>; tree: Tree; show: (value: number) => string; shade?: Shade }): preact.JSX.Element | null {
  const at = useLive(hover);
  if (!at || at.id >= tree.fn.length) return null;
  const node = at.id;
  const fn = tree.functions[tree.fn[node]!]!;
  return (
    <Tooltip x={at.x} y={at.y}>
      <strong>{fn.name}</strong>
      {fn.file && <p>{fn.file}{fn.line ? `:${fn.line}` : ""}</p>}
      {fn.binary && <p>{fn.binary}</p>}
      {shade ? <dl>{shade.lines(node).map(([title, value]) => <><dt>{title}</dt><dd>{value}</dd></>)}</dl> : <dl>
        <dt>With callees</dt><dd>{show(tree.total[node]!)}, {percent(tree.total[node]! / (tree.total[0] || 1))}</dd>
        <dt>By itself</dt><dd>{show(tree.own[node]!)}, {percent(tree.own[node]! / (tree.total[0] || 1))}</dd>
        <dt>Events</dt><dd>about {grouped(tree.count[node]!)}</dd>
      </dl>}
    </Tooltip>
  );
}

function Functions({ tree, show, search, choose }: { tree: Tree; show: (value: number) => string; search: ReturnType<typeof matcher>; choose?: (label: string) => void }): preact.JSX.Element {
  const { go } = useApp();
  const [byTotal, setByTotal] = useState(false);
  const rows = useMemo(() => {
    const all = table(tree).filter((row) => row.total > 0 && (!search || search(tree.functions[row.fn]!)));
    return (byTotal ? all.sort((a, b) => b.total - a.total) : all).slice(0, 300);
  }, [tree, byTotal, search]);
  const whole = tree.total[0] || 1;
  return (
    <div class="sheet tall" tabIndex={0} role="region" aria-label="Functions">
      <table>
        <thead><tr><th class="number" aria-sort={byTotal ? "none" : "descending"}><button onClick={() => setByTotal(false)}>By itself</button></th>
          <th class="number" aria-sort={byTotal ? "descending" : "none"}><button onClick={() => setByTotal(true)}>With callees</button></th><th>Function</th><th>Binary</th></tr></thead>
        <tbody>{rows.map((row) => {
          const fn = tree.functions[row.fn]!;
          return <tr><td class="number">{show(row.own)} <small>{percent(row.own / whole)}</small></td><td class="number">{show(row.total)} <small>{percent(row.total / whole)}</small></td>
            <td class="code"><button class="link" title={fn.file} onClick={() => { if (choose) choose(fn.label); else go({ fn: fn.label, shape: "sandwich" }); }}>{fn.label}</button></td><td class="quiet">{fn.binary}</td></tr>;
        })}
          {!rows.length && <tr><td colSpan={4} class="none">No function matches. Clear the search.</td></tr>}</tbody>
      </table>
    </div>
  );
}

function Kernels(): preact.JSX.Element {
  const { place } = useApp();
  const asked = useAnswer<KernelRow[]>("kernels", { node: place.node, from: place.from, to: place.to, limit: 300 });
  return (
    <Answer asked={asked} loading="Asking for the kernels…">
      {(rows) => rows.length ? (
        <div class="sheet tall" tabIndex={0} role="region" aria-label="Kernels">
          <table>
            <thead><tr><th class="number">GPU time</th><th class="number">Runs</th><th class="number">Mean</th><th class="number">Longest</th><th>Kind</th><th>Kernel</th></tr></thead>
            <tbody>{rows.map((row) => <tr><td class="number">{duration(row.ns)}</td><td class="number">{grouped(row.runs)}</td><td class="number">{duration(row.mean_ns)}</td>
              <td class="number">{duration(row.most_ns)}</td><td>{row.kind}</td><td class="code" title={row.name}>{row.name || row.kind}</td></tr>)}</tbody>
          </table>
          <p class="quiet note">Estimated from {grouped(rows.reduce((sum, row) => sum + row.timed, 0))} timed runs.</p>
        </div>
      ) : <Empty title="No run on a device was timed here">Choose a longer time. Which recordings time them is in the help of <code>sonde record</code>.</Empty>}
    </Answer>
  );
}
