// SPDX-License-Identifier: Apache-2.0
// A function between its callers, which stand above it, and what it called, below it.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Flame } from "../api";
import { around, build, type Hide, type matcher, type Tree, type Weight } from "../flame";
import { percent } from "../numbers";
import { Empty } from "../parts";
import { useApp } from "../state";
import { Drawn, type Half } from "./drawn";
import { Functions } from "./functions";

/** Callers without the root and the function, which is the first row of its callees. */
const CALLERS: Half = { skip: 2, upwards: true };
const CALLEES: Half = { skip: 1, upwards: false };

/** One function between its callers and callees, as two trees from it outwards and inwards. */
export function Sandwich({ flame, tree, weight, hide, show, search }: {
  flame: Flame; tree: Tree; weight: Weight; hide: Hide; show: (value: number) => string; search: ReturnType<typeof matcher>;
}): preact.JSX.Element {
  const { place, go } = useApp();
  const cut = useMemo(() => (place.fn ? around(flame, place.fn) : null), [flame, place.fn]);
  const callers = useMemo(() => (cut ? build(cut.callers, weight, true, hide) : null), [cut, weight, hide]);
  const callees = useMemo(() => (cut ? build(cut.callees, weight, false, hide) : null), [cut, weight, hide]);
  const [outwards, setOutwards] = useState<readonly string[]>([]);
  const [inwards, setInwards] = useState<readonly string[]>([]);
  const scroller = useRef<HTMLDivElement>(null);
  const seam = useRef<HTMLHeadingElement>(null);
  useEffect(() => { setOutwards([]); setInwards([]); }, [cut]);
  // The function is in sight first, with those who called it above it.
  useEffect(() => {
    if (scroller.current && seam.current) scroller.current.scrollTop = seam.current.offsetTop - scroller.current.clientHeight / 2;
  }, [callers]);
  if (!cut) return <><p class="quiet note">Choose a function: its callers and its callees are shown.</p><Functions tree={tree} show={show} search={search} choose={(fn) => go({ fn })} /></>;
  if (!cut.callers.stacks.length) {
    return <Empty title="This function is in no stack here">{place.fn}: choose another kind above, or <button class="link open" onClick={() => go({ fn: "" })}>another function</button>.</Empty>;
  }
  const whole = tree.total[0] || 1;
  return (
    <>
      <div class="tools second"><strong class="code">{place.fn}</strong><span class="quiet">{show(cut.weight[weight])}, {percent(cut.weight[weight] / whole)}, with what it calls</span>
        <button onClick={() => go({ fn: "" })}>Another function</button></div>
      <div class="sandwich" ref={scroller} tabIndex={0} role="region" aria-label="Callers and callees">
        <section aria-label="Callers"><h3>Callers: from the outermost down to the one that called it</h3>
          <Drawn tree={callers!} lit={null} show={show} focus={outwards} zoom={setOutwards} name="Callers" half={CALLERS} /></section>
        <section aria-label="Callees"><h3 ref={seam} class="seam">Callees: the function, and below it what it called</h3>
          <Drawn tree={callees!} lit={null} show={show} focus={inwards} zoom={setInwards} name="Callees" half={CALLEES} /></section>
      </div>
    </>
  );
}
