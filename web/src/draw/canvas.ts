// SPDX-License-Identifier: Apache-2.0
// A canvas in a scroller that shows rows of boxes: drawing, pointer and keys.

import { boxAt, firstEndingAfter, Painter, type Row, type Viewport } from "./boxes";
import { css, inkOn, type Palette } from "./colours";
import { drawArrow, drawOutline, type Part } from "./marks";

const FONT = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
/** A box gets its text from this width on, in CSS pixels. */
const TEXT_PX = 34;
/** A text may be this much higher than its box, above and below. */
const TEXT_OVER_PX = 4;

/** A box, by the indices of its row and within it. */
export interface At { row: number; box: number }

/** From one place to another, in the unit of the rows and in CSS pixels from the top of all rows. */
export interface Arrow { fromX: number; fromY: number; toX: number; toY: number }

/** What a canvas shows. `left`, `right`: the viewport; `height`: of all rows, in CSS pixels. */
export interface Shown {
  rows: readonly Row[];
  /** Of boxes, by their `colourIndex`, as pixels of a canvas have them (ABGR). */
  colours: Uint32Array;
  height: number;
  left: number;
  right: number;
  /** The ends of the widest viewport. */
  first: number;
  last: number;
  palette: Pick<Palette, "background" | "ink" | "fadedInk">;
  labelOf(id: number): string;
  isFaded(id: number): boolean;
  /** The arrows of a box: drawn while it is hovered or selected. */
  linksOf?(id: number): readonly Arrow[];
}

/** What a canvas reports; `id` is a box's. */
export interface Events {
  /** The pointer, or a selection by keys, is on a box (-1: on none), at x, y of the window. */
  hover(id: number, x: number, y: number): void;
  click(id: number): void;
  /** The viewport changed by pointer or keys; `done`: and then did not for a quarter of a second. */
  moved?(left: number, right: number, done: boolean): void;
  /** A box was reached by keys; -1: none. */
  selected?(id: number): void;
  /** The box that a key leads to from a box, in place of what the canvas would do; undefined: the canvas's own. */
  key?(key: string, id: number): number | undefined;
}

export class BoxCanvas {
  private shown: Shown | null = null;
  private viewport: Viewport = { left: 0, right: 1, scroll: 0 };
  private hovered: At | null = null;
  private selected: At | null = null;
  private readonly painter = new Painter();
  private image: ImageData | null = null;
  private pixels = new Uint32Array(0);
  private widths = new Map<string, number>();
  /** The animation frame that is asked for; 0: none. */
  private frame = 0;
  /** Whether that frame paints all; else only what marks the hovered and the selected box has changed. */
  private isStale = false;
  /** The parts of the picture that such marks cover, and the pixels of the screen a CSS pixel has in it. */
  private marked: Part[] = [];
  private ratio = 1;
  /** Pictures and arrows drawn, for tests. */
  private frames = 0;
  private arrows = 0;
  /** The timer until `done`. */
  private resting = 0;
  private drag: { x: number; left: number; right: number; moved: boolean } | null = null;
  private readonly context: CanvasRenderingContext2D;
  private readonly observer: ResizeObserver;
  /** Milliseconds that the last drawing took, for measurements. */
  spentMs = 0;

  constructor(
    private readonly canvas: HTMLCanvasElement, private readonly scroller: HTMLElement,
    private readonly events: Events, private readonly pans: boolean,
  ) {
    // Every picture is written as pixels by the CPU, so the canvas is kept in its memory, not in the GPU's.
    this.context = canvas.getContext("2d", { alpha: false, willReadFrequently: true })!;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(scroller);
    this.observer.observe(canvas.parentElement!);
    scroller.addEventListener("scroll", this.onScroll);
    canvas.addEventListener("pointermove", this.onMove);
    canvas.addEventListener("pointerleave", this.onLeave);
    canvas.addEventListener("pointerdown", this.onDown);
    canvas.addEventListener("pointerup", this.onUp);
    canvas.addEventListener("keydown", this.onKey);
    canvas.addEventListener("wheel", this.onWheel, { passive: false });
  }

  close(): void {
    this.observer.disconnect();
    this.scroller.removeEventListener("scroll", this.onScroll);
    cancelAnimationFrame(this.frame);
    clearTimeout(this.resting);
  }

  show(shown: Shown): void {
    if (this.shown?.rows !== shown.rows) this.hovered = this.selected = null;
    this.shown = shown;
    this.viewport.left = shown.left;
    this.viewport.right = shown.right;
    this.draw();
  }

  draw(): void {
    this.isStale = true;
    this.mark();
  }

  /** Draws again what marks the hovered and the selected box: the pixels of all boxes are kept. */
  private mark(): void {
    if (!this.frame) this.frame = requestAnimationFrame(() => { if (this.isStale || !this.image) this.drawNow(); else this.redraw(() => this.restore()); });
  }

  drawNow(): void {
    this.redraw(() => this.paint());
  }

  /** `base` gives the picture without marks. */
  private redraw(base: () => void): void {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { shown, canvas } = this;
    if (!shown) return;
    const began = performance.now();
    base();
    this.marked.length = 0;
    if (this.hovered) this.outline(this.hovered, 1);
    const isFocused = document.activeElement === canvas;
    if (this.selected && isFocused) this.outline(this.selected, 2);
    this.arrows = 0;
    if (this.hovered) this.drawArrows(this.hovered);
    if (this.selected && isFocused && this.idOf(this.selected) !== this.idOf(this.hovered)) this.drawArrows(this.selected);
    canvas.dataset["arrows"] = String(this.arrows);
    this.spentMs = performance.now() - began;
    canvas.dataset["ms"] = this.spentMs.toFixed(1);
    canvas.dataset["frames"] = String(++this.frames);
  }

  private paint(): void {
    const { canvas, scroller, context } = this;
    const shown = this.shown!;
    this.isStale = false;
    const ratio = this.ratio = globalThis.devicePixelRatio || 1;
    const holder = canvas.parentElement!;
    const width = Math.max(1, Math.round(holder.clientWidth * ratio));
    const height = Math.max(1, Math.round(Math.min(scroller.clientHeight, Math.max(shown.height, 60)) * ratio));
    if (canvas.width !== width || canvas.height !== height || !this.image) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
      this.image = context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.viewport.scroll = scroller.scrollTop;
    this.painter.paint(this.pixels, width, height, ratio, shown.rows, shown.colours, this.viewport, shown.palette.background, TEXT_PX * ratio);
    context.putImageData(this.image!, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (context.font !== FONT) context.font = FONT;
    context.textBaseline = "middle";
    this.drawLabels({ left: 0, top: 0, right: width / ratio, bottom: height / ratio });
  }

  /** Gives the parts that were marked their boxes and texts back. */
  private restore(): void {
    const { context, canvas, ratio } = this;
    for (const part of this.marked) {
      // Whole pixels of the screen, with one around them for what rounding made of edges.
      const left = Math.max(0, Math.floor(part.left * ratio) - 1);
      const top = Math.max(0, Math.floor(part.top * ratio) - 1);
      const width = Math.min(canvas.width, Math.ceil(part.right * ratio) + 1) - left;
      const height = Math.min(canvas.height, Math.ceil(part.bottom * ratio) + 1) - top;
      if (width <= 0 || height <= 0) continue;
      context.putImageData(this.image!, 0, 0, left, top, width, height);
      context.save();
      context.beginPath();
      context.rect(left / ratio, top / ratio, width / ratio, height / ratio);
      context.clip();
      this.drawLabels({ left: left / ratio, top: top / ratio, right: (left + width) / ratio, bottom: (top + height) / ratio });
      context.restore();
    }
  }

  /** Draws the texts of boxes that reach into a part of the canvas. */
  private drawLabels(part: Part): void {
    const { context, ratio, painter: { labels } } = this;
    const shown = this.shown!;
    for (let i = 0; i < labels.count; i++) {
      const one = shown.rows[labels.row[i]!]!;
      const top = one.top - this.viewport.scroll;
      // A text may be a little higher than its box.
      if (one.height < 13 || top - TEXT_OVER_PX > part.bottom || top + one.height + TEXT_OVER_PX < part.top) continue;
      if (labels.x[i]! / ratio > part.right || (labels.x[i]! + labels.width[i]!) / ratio < part.left) continue;
      const id = one.id[labels.box[i]!]!;
      const text = this.fitted(shown.labelOf(id), labels.width[i]! / ratio - 8);
      if (!text) continue;
      const box = labels.box[i]!;
      context.fillStyle = shown.isFaded(id) ? shown.palette.fadedInk : inkOn(shown.colours[one.colourIndex[box]! + (one.offset ?? 0)]!);
      context.fillText(text, labels.x[i]! / ratio + 4, top + one.height / 2 + 0.5);
    }
  }

  /** What is drawn now, as a PNG. */
  picture(): Promise<Blob> {
    this.drawNow();
    return new Promise((given, refused) => this.canvas.toBlob((blob) => blob ? given(blob) : refused(new Error("the picture is too large"))));
  }

  private outline(at: At, thickness: number): void {
    const row = this.shown!.rows[at.row];
    if (!row) return;
    const width = this.cssWidth;
    const scale = width / (this.viewport.right - this.viewport.left);
    const x0 = Math.max(0, (row.start[at.box]! - this.viewport.left) * scale);
    const x1 = Math.min(width, (row.end[at.box]! - this.viewport.left) * scale);
    if (x1 < 0 || x0 > width) return;
    const top = row.top - this.viewport.scroll;
    this.marked.push(drawOutline(this.context, { left: x0, top, right: x1, bottom: top + row.height }, thickness, this.shown!.palette.ink));
  }

  /** Moves the viewport, where it can be moved, to a box that was selected beyond its edges. */
  private revealSideways(at: At): void {
    const row = this.shown!.rows[at.row]!;
    const { left, right } = this.viewport;
    const [start, end] = [row.start[at.box]!, row.end[at.box]!];
    if (!this.events.moved || (start < right && end > left)) return;
    const middle = (Math.max(start, Math.min(end, left)) + Math.min(end, Math.max(start, right))) / 2;
    this.move(middle - (right - left) / 2, middle + (right - left) / 2);
  }

  private drawArrows(at: At): void {
    const { context, viewport } = this;
    const { palette } = this.shown!;
    const scale = this.cssWidth / (viewport.right - viewport.left);
    const x = (value: number): number => Math.max(-1e5, Math.min(1e5, (value - viewport.left) * scale));
    for (const one of this.shown!.linksOf?.(this.idOf(at)) ?? []) {
      const line = { x0: x(one.fromX), y0: one.fromY - viewport.scroll, x1: x(one.toX), y1: one.toY - viewport.scroll };
      this.marked.push(drawArrow(context, line, palette.ink, css(palette.background)));
      this.arrows++;
    }
  }

  private get cssWidth(): number {
    return this.canvas.clientWidth || 1;
  }

  /** A text, cut where there is no room for it; '' where there is hardly any. */
  private fitted(text: string, room: number): string {
    const width = this.widthOf(text);
    if (width <= room) return text;
    let length = Math.floor((text.length * (room - 9)) / width);
    while (length > 1 && this.widthOf(`${text.slice(0, length)}…`) > room) length--;
    return length > 1 ? `${text.slice(0, length)}…` : "";
  }

  private widthOf(text: string): number {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 50_000) this.widths.clear();
      this.widths.set(text, (width = this.context.measureText(text).width));
    }
    return width;
  }

  private hit(x: number, y: number): At | null {
    const { shown, viewport } = this;
    if (!shown) return null;
    const down = y + viewport.scroll;
    let row = shown.rows.length - 1;
    while (row >= 0 && !(down >= shown.rows[row]!.top && down < shown.rows[row]!.top + shown.rows[row]!.height + 1)) row--;
    if (row < 0) return null;
    const unit = (viewport.right - viewport.left) / this.cssWidth;
    const box = boxAt(shown.rows[row]!, viewport.left + x * unit, unit * 1.5);
    return box < 0 ? null : { row, box };
  }

  private idOf(at: At | null): number {
    return at ? this.shown!.rows[at.row]!.id[at.box]! : -1;
  }

  private readonly onScroll = (): void => this.draw();

  private readonly onMove = (event: PointerEvent): void => {
    if (this.drag && this.pans) {
      const moved = event.offsetX - this.drag.x;
      if (Math.abs(moved) > 3) this.drag.moved = true;
      if (this.drag.moved) {
        const unit = (this.drag.right - this.drag.left) / this.cssWidth;
        this.move(this.drag.left - moved * unit, this.drag.right - moved * unit);
        return;
      }
    }
    const at = this.hit(event.offsetX, event.offsetY);
    const changed = at?.row !== this.hovered?.row || at?.box !== this.hovered?.box;
    this.hovered = at;
    this.events.hover(this.idOf(at), event.clientX, event.clientY);
    if (changed) this.mark();
  };

  private readonly onLeave = (): void => {
    this.hovered = null;
    this.events.hover(-1, 0, 0);
    this.mark();
  };

  private readonly onDown = (event: PointerEvent): void => {
    if (event.button !== 0) return;
    this.drag = { x: event.offsetX, left: this.viewport.left, right: this.viewport.right, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  };

  private readonly onUp = (event: PointerEvent): void => {
    const moved = this.drag?.moved;
    this.drag = null;
    if (moved) return;
    const at = this.hit(event.offsetX, event.offsetY);
    this.selected = at;
    if (at) this.events.click(this.idOf(at));
    else this.mark();
  };

  private readonly onWheel = (event: WheelEvent): void => {
    if (!this.events.moved) return;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const span = this.viewport.right - this.viewport.left;
    if (sideways) {
      const shift = (event.deltaX / this.cssWidth) * span;
      this.move(this.viewport.left + shift, this.viewport.right + shift);
    } else this.zoom(Math.exp(event.deltaY / 300), event.offsetX / this.cssWidth);
  };

  /** Makes the viewport `factor` times as wide; `at`: the share of its width that stays where it is. */
  zoom(factor: number, at = 0.5): void {
    const span = this.viewport.right - this.viewport.left;
    const fixed = this.viewport.left + span * at;
    this.move(fixed - span * factor * at, fixed + span * factor * (1 - at));
  }

  private move(left: number, right: number): void {
    const { first, last } = this.shown!;
    const span = Math.min(last - first, Math.max((last - first) * 1e-7, right - left));
    const from = Math.min(Math.max(first, left), last - span);
    this.viewport.left = from;
    this.viewport.right = from + span;
    this.draw();
    this.events.moved?.(from, from + span, false);
    clearTimeout(this.resting);
    this.resting = window.setTimeout(() => this.events.moved?.(this.viewport.left, this.viewport.right, true), 250);
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    const { shown } = this;
    if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.viewport.right - this.viewport.left;
    if (this.events.moved) {
      if (event.key === "+" || event.key === "=") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (event.key === "a" || event.key === "d") {
        const shift = event.key === "a" ? -span / 4 : span / 4;
        this.move(this.viewport.left + shift, this.viewport.right + shift);
      }
    }
    const at = this.selected ?? this.firstInSight();
    if (!at) return;
    const target = this.events.key?.(event.key, this.idOf(at));
    if (target !== undefined) {
      event.preventDefault();
      this.select(target);
      return;
    }
    let to: At | null = at;
    if (event.key === "ArrowRight") to = { row: at.row, box: Math.min(shown.rows[at.row]!.start.length - 1, at.box + 1) };
    else if (event.key === "ArrowLeft") to = { row: at.row, box: Math.max(0, at.box - 1) };
    else if (event.key === "ArrowDown") to = this.beside(at, 1);
    else if (event.key === "ArrowUp") to = this.beside(at, -1);
    else if (event.key === "Enter" || event.key === " ") this.events.click(this.idOf(at));
    else return;
    event.preventDefault();
    this.selectAt(to ?? at);
  };

  /** Select the box of an id; -1: none. */
  select(id: number): void {
    const rows = this.shown?.rows ?? [];
    for (let row = 0; row < rows.length; row++) {
      const box = id < 0 ? -1 : rows[row]!.id.indexOf(id);
      if (box >= 0) return this.selectAt({ row, box });
    }
    this.selected = null;
    this.mark();
    return undefined;
  }

  private selectAt(at: At): void {
    this.selected = at;
    this.reveal(at);
    if (this.events.selected) this.events.selected(this.idOf(at));
    else {
      const box = this.canvas.getBoundingClientRect();
      this.events.hover(this.idOf(at), box.left + 40, box.top + 60);
    }
    this.mark();
  }

  /** Left edge and bottom of a selected box on the screen, in CSS pixels. */
  get place(): { x: number; y: number } {
    const canvas = this.canvas.getBoundingClientRect();
    const row = this.selected && this.shown?.rows[this.selected.row];
    if (!row || !this.selected) return { x: canvas.left, y: canvas.top };
    const scale = this.cssWidth / (this.viewport.right - this.viewport.left);
    const left = Math.max(0, (row.start[this.selected.box]! - this.viewport.left) * scale);
    return { x: canvas.left + left, y: canvas.top + row.top - this.viewport.scroll + row.height };
  }

  private firstInSight(): At | null {
    const { left, right } = this.viewport;
    const { rows } = this.shown!;
    for (let row = 0; row < rows.length; row++) {
      const box = firstEndingAfter(rows[row]!, left);
      if (box < rows[row]!.start.length && rows[row]!.start[box]! < right) return { row, box };
    }
    const row = rows.findIndex((one) => one.start.length > 0);
    return row < 0 ? null : { row, box: 0 };
  }

  private beside(at: At, step: number): At | null {
    const rows = this.shown!.rows;
    const here = rows[at.row]!;
    const middle = (here.start[at.box]! + here.end[at.box]!) / 2;
    const span = this.viewport.right - this.viewport.left;
    for (let row = at.row + step; row >= 0 && row < rows.length; row += step) {
      const x = step > 0 ? here.start[at.box]! + (here.end[at.box]! - here.start[at.box]!) * 1e-6 : middle;
      const box = boxAt(rows[row]!, x, span);
      if (box >= 0) return { row, box };
    }
    return null;
  }

  private reveal(at: At): void {
    const { top, height } = this.shown!.rows[at.row]!;
    const { scrollTop, clientHeight } = this.scroller;
    this.revealSideways(at);
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (top + height > scrollTop + clientHeight) this.scroller.scrollTop = top + height - clientHeight;
  }
}
