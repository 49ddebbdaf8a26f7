// SPDX-License-Identifier: Apache-2.0
// A tree of stacks as boxes, with a tooltip.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { BoxCanvas } from "../draw/canvas";
import { coloursOf, nodeOf, pathOf, rowsOf, ROW_HEIGHT, type Tree } from "../flame";
import { Live, useLive } from "../live";
import { grouped, percent } from "../numbers";
import { Tooltip } from "../parts";
import { useApp } from "../state";
import { Boxes } from "./canvas";

/** Colours of nodes in place of those of their functions, and more lines of their tooltips. */
export interface Shade { colours: Uint32Array; levelOf(node: number): number; lines(node: number): readonly [string, string][] }

/** Half of a sandwich: rows without the first `skip` levels, all of them in sight, upwards or downwards. */
export interface Half { skip: number; upwards: boolean }

/** The most pixels that a half is high: deeper ones scroll by themselves. */
const MOST_PX = 6000;

export function Drawn({ tree, lit, show, use, focus, zoom, name, shade, half }: {
  tree: Tree; lit: Uint8Array | null; show: (value: number) => string; use?: (canvas: BoxCanvas | null) => void;
  focus: readonly string[]; zoom: (focus: string[]) => void; name: string; shade?: Shade; half?: Half;
}): preact.JSX.Element {
  const { palette } = useApp();
  const rows = useMemo(() => {
    const made = rowsOf(tree, palette.background, lit, half?.skip, half?.upwards);
    for (const row of shade ? made : []) row.id.forEach((node, i) => { row.colourIndex[i] = shade!.levelOf(node); });
    return made;
  }, [tree, palette, lit, shade, half?.skip, half?.upwards]);
  const colours = useMemo(() => shade?.colours ?? coloursOf(tree, palette), [tree, palette, shade]);
  const scroller = useRef<HTMLDivElement>(null);
  const height = Math.max(0, tree.levels - (half?.skip ?? 0)) * ROW_HEIGHT;
  const focused = useMemo(() => nodeOf(tree, focus), [tree, focus]);
  const [hover] = useState(() => new Live<{ id: number; x: number; y: number } | null>(null));
  const labelOf = (node: number): string => tree.functions[tree.fn[node]!]!.label;
  const shown = useMemo(() => ({
    rows, colours, height, left: tree.x[focused]!, right: tree.x[focused]! + (tree.total[focused]! || 1),
    first: 0, last: tree.total[0] || 1, palette, labelOf, isFaded: (node: number) => lit !== null && !lit[node],
  }), [rows, focused, palette, lit]);
  useEffect(() => {
    if (scroller.current && !half) scroller.current.scrollTop = Math.max(0, (tree.depth[focused]! - 2) * ROW_HEIGHT);
  }, [focused, tree]);
  useEffect(() => () => use?.(null), []);
  return (
    <>
      <div class="scroller flames" ref={scroller} style={half ? { height: `${Math.min(MOST_PX, height)}px` } : {}}>
        <div class="spacer" style={{ height: `${height}px` }}>
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
