// SPDX-License-Identifier: Apache-2.0
// The flame graph: draws a tree on a canvas, and turns pointer and keys into what happens to it.

const ROW = 20; // px
const MIN_WIDTH = 0.6; // px: narrower frames are not drawn
const MIN_TEXT = 28; // px
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const ZOOM_MS = 180;
const ANIMATED_FRAMES = 15000;

class FlameView {
  // events: {zoom(node), hover(node, x, y), select(node)}; a node of -1 is none
  constructor(canvas, scroller, colours, labelOf, events) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.context = canvas.getContext("2d", { alpha: false });
    this.colours = colours;
    this.labelOf = labelOf;
    this.events = events;
    this.rootAtTop = true;
    this.tree = null;
    this.zoomed = 0;
    this.selected = -1;
    this.hovered = -1;
    this.found = null;
    this.left = 0; // of what is in view, in units of weight
    this.span = 1;
    this.drawn = 0;
    this.widths = new Map();
    new ResizeObserver(() => this.draw()).observe(scroller);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.hover(-1));
    canvas.addEventListener("click", (event) => this.click(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.select(-1));
    canvas.addEventListener("focus", () => {
      if (this.selected < 0 && canvas.matches(":focus-visible")) this.select(this.zoomed);
    });
  }

  show(tree, found) {
    this.tree = tree;
    this.found = found;
    this.zoomed = 0;
    this.selected = this.hovered = -1;
    this.left = 0;
    this.span = tree.total[0] || 1;
    this.draw();
    this.scroller.scrollTop = this.rootAtTop ? 0 : this.scroller.scrollHeight;
  }

  highlight(found) {
    this.found = found;
    this.draw();
  }

  setRootAtTop(rootAtTop) {
    this.rootAtTop = rootAtTop;
    this.draw();
    this.scroller.scrollTop = rootAtTop ? 0 : this.scroller.scrollHeight;
  }

  zoom(node) {
    const { tree } = this;
    this.zoomed = node;
    this.events.zoom(node);
    const to = { left: tree.x[node], span: tree.total[node] || 1 };
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    cancelAnimationFrame(this.animation);
    if (still || this.drawn > ANIMATED_FRAMES) {
      this.left = to.left;
      this.span = to.span;
      this.draw();
      return;
    }
    const from = { left: this.left, span: this.span };
    const began = performance.now();
    const step = (now) => {
      const t = Math.min(1, Math.max(0, (now - began) / ZOOM_MS));
      const eased = 1 - (1 - t) ** 3;
      this.left = from.left + (to.left - from.left) * eased;
      this.span = from.span + (to.span - from.span) * eased;
      this.draw();
      if (t < 1) this.animation = requestAnimationFrame(step);
    };
    this.animation = requestAnimationFrame(step);
  }

  select(node) {
    this.selected = node;
    this.events.select(node);
    if (node >= 0) this.reveal(node);
    this.draw();
  }

  hover(node, x = 0, y = 0) {
    const changed = node !== this.hovered;
    this.hovered = node;
    this.events.hover(node, x, y);
    if (changed) this.draw();
  }

  // ---- geometry ----

  get width() {
    return this.canvas.clientWidth;
  }

  rowTop(level) {
    return (this.rootAtTop ? level : this.tree.depth - 1 - level) * ROW;
  }

  // Left and right edge in px, cut at the view: what the zoomed node stands on fills it.
  box(node) {
    const { tree, width } = this;
    const scale = width / this.span;
    const x0 = (tree.x[node] - this.left) * scale;
    return [Math.max(0, x0), Math.min(width, x0 + tree.total[node] * scale)];
  }

  nodeAt(x, y) {
    const { tree } = this;
    if (!tree || tree.total[0] === 0) return -1;
    const row = Math.floor(y / ROW);
    const level = this.rootAtTop ? row : tree.depth - 1 - row;
    const at = this.left + (x / this.width) * this.span;
    let node = 0;
    while (node >= 0 && tree.level[node] < level) node = this.childAt(node, at);
    return node >= 0 && tree.level[node] === level ? node : -1;
  }

  childAt(node, at) {
    const { tree } = this;
    let low = tree.begin[node];
    let high = tree.end[node] - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (at < tree.x[middle]) high = middle - 1;
      else if (at >= tree.x[middle] + tree.total[middle]) low = middle + 1;
      else return middle;
    }
    return -1;
  }

  reveal(node) {
    const top = this.rowTop(this.tree.level[node]);
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.scroller.scrollTop = top + ROW - clientHeight;
  }

  // ---- drawing ----

  draw() {
    const { canvas, context, tree } = this;
    if (!tree) return;
    const width = this.scroller.clientWidth;
    const height = tree.depth * ROW;
    const ratio = globalThis.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = getComputedStyle(this.scroller).backgroundColor;
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.drawn = 0;
    const stack = [0];
    while (stack.length) {
      const node = stack.pop();
      const [x0, x1] = this.box(node);
      this.drawFrame(node, x0, x1);
      this.drawn++;
      let narrow = 0; // width of the children that are too narrow to draw, which stand last
      let from = x1;
      for (let child = tree.begin[node]; child < tree.end[node]; child++) {
        const [left, right] = this.box(child);
        if (right - left >= MIN_WIDTH) stack.push(child);
        else if (right > left) {
          narrow += right - left;
          from = Math.min(from, left);
        }
      }
      if (narrow >= MIN_WIDTH) {
        context.fillStyle = this.colours.narrow;
        context.fillRect(from, this.rowTop(tree.level[node] + 1), narrow, ROW - 1);
      }
    }
    if (this.hovered >= 0) this.outline(this.hovered, 1.5);
    if (this.selected >= 0) this.outline(this.selected, 2.5);
  }

  drawFrame(node, x0, x1) {
    const { context, tree, colours, found } = this;
    const fn = tree.fn[node];
    const faded = found && !found.matched[node];
    const top = this.rowTop(tree.level[node]);
    const gap = x1 - x0 > 3 ? 1 : 0;
    context.globalAlpha = tree.level[node] < tree.level[this.zoomed] ? 0.55 : 1;
    context.fillStyle = faded ? colours.faded : fn < 0 ? colours.group : colours.ofFunction(fn);
    context.fillRect(x0, top, x1 - x0 - gap, ROW - 1);
    if (x1 - x0 >= MIN_TEXT) {
      context.fillStyle = faded ? colours.fadedInk : colours.ink;
      const text = this.fitted(this.labelOf(node), x1 - x0 - 9);
      if (text) context.fillText(text, x0 + 4, top + ROW / 2);
    }
    context.globalAlpha = 1;
  }

  outline(node, thickness) {
    const [x0, x1] = this.box(node);
    const { context } = this;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = thickness;
    const inset = thickness / 2;
    const top = this.rowTop(this.tree.level[node]);
    context.strokeRect(x0 + inset, top + inset, Math.max(1, x1 - x0 - 1 - thickness), ROW - 1 - thickness);
  }

  textWidth(text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 50000) this.widths.clear();
      this.widths.set(text, (width = this.context.measureText(text).width));
    }
    return width;
  }

  fitted(text, room) {
    if (text.length * 14 < room || this.textWidth(text) <= room) return text;
    let length = Math.floor((text.length * room) / this.textWidth(text));
    while (length > 1 && this.context.measureText(`${text.slice(0, length)}…`).width > room) length--;
    return length > 1 ? `${text.slice(0, length)}…` : "";
  }

  // ---- pointer and keys ----

  point(event) {
    this.hover(this.nodeAt(event.offsetX, event.offsetY), event.clientX, event.clientY);
  }

  click(event) {
    const node = this.nodeAt(event.offsetX, event.offsetY);
    if (node >= 0) this.zoom(node);
  }

  key(event) {
    const { tree } = this;
    if (!tree || event.ctrlKey || event.metaKey || event.altKey) return;
    const node = this.selected < 0 ? this.zoomed : this.selected;
    const inward = this.rootAtTop ? "ArrowDown" : "ArrowUp";
    const outward = this.rootAtTop ? "ArrowUp" : "ArrowDown";
    let to = null;
    if (event.key === inward) to = tree.begin[node] < tree.end[node] ? tree.begin[node] : node;
    else if (event.key === outward) to = Math.max(0, tree.parent[node]);
    else if (event.key === "ArrowLeft") to = this.neighbour(node, -1);
    else if (event.key === "ArrowRight") to = this.neighbour(node, 1);
    else if (event.key === "Home") to = 0;
    else if (event.key === "Enter" || event.key === " ") this.zoom(node);
    else return;
    event.preventDefault();
    if (to !== null) this.select(to);
  }

  // The frame beside this one on its level, under whichever parent.
  neighbour(node, step) {
    const { tree } = this;
    const beside = node + step;
    return beside > 0 && beside < tree.size && tree.level[beside] === tree.level[node] ? beside : node;
  }
}
