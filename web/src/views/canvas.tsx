// SPDX-License-Identifier: Apache-2.0
// The canvas of boxes as a component. Which of `events` there are, `pans` and `use` count only when it is made.

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { BoxCanvas, type Events, type Shown } from "../draw/canvas";

export function Boxes(props: {
  shown: Shown; events: Events; pans: boolean; label: string; scroller: preact.RefObject<HTMLElement>;
  use?: (canvas: BoxCanvas) => void;
}): preact.JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<BoxCanvas | null>(null);
  const events = useRef(props.events);
  events.current = props.events;
  useLayoutEffect(() => {
    const one = new BoxCanvas(canvas.current!, props.scroller.current!, {
      hover: (id, x, y) => events.current.hover(id, x, y),
      click: (id) => events.current.click(id),
      ...(props.events.selected ? { selected: (id) => events.current.selected?.(id) } : {}),
      ...(props.events.moved ? { moved: (left, right, done) => events.current.moved?.(left, right, done) } : {}),
    }, props.pans);
    box.current = one;
    props.use?.(one);
    return () => one.close();
  }, []);
  useEffect(() => box.current!.show(props.shown), [props.shown]);
  return <canvas ref={canvas} tabIndex={0} role="img" aria-label={props.label} />;
}
