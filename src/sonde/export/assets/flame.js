// SPDX-License-Identifier: Apache-2.0
// The flame graph: the report's tree as rows for the renderer of the web page (`Boxes`, web/src/report.ts).

const ROW = 20; // px

// "hsl(211 38% 35%)" or "rgb(1, 2, 3)" as a pixel of a canvas.
function pixelOf(colour) {
  const [a, b, c] = colour.match(/[\d.]+/g).map(Number);
  return colour.startsWith("hsl") ? Boxes.abgr(a, b, c) : (0xff000000 | (c << 16) | (b << 8) | a) >>> 0;
}

class FlameView {
  // events: {zoom(node), hover(node, x, y), select(node)}; a node of -1 is none
  constructor(canvas, scroller, colours, labelOf, events) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.colours = colours;
    this.labelOf = labelOf;
    this.events = events;
    this.rootAtTop = true;
    this.tree = null;
    this.zoomed = 0;
    this.selected = -1;
    this.found = null;
    this.boxes = new Boxes.BoxCanvas(canvas, scroller, {
      hover: (node, x, y) => events.hover(node, x, y),
      click: (node) => { if (node >= 0) this.zoom(node); },
      selected: (node) => {
        this.selected = node;
        events.select(node);
      },
      key: (key) => this.key(key),
    }, false);
    canvas.addEventListener("blur", () => this.select(-1));
    canvas.addEventListener("focus", () => {
      if (this.selected < 0 && canvas.matches(":focus-visible")) this.select(this.zoomed);
    });
  }

  // tree: of buildTree; found: of searchTree, null without a search
  show(tree, found) {
    this.tree = tree;
    this.found = found;
    this.zoomed = 0;
    this.selected = -1;
    this.layOut();
    this.scroller.scrollTop = this.rootAtTop ? 0 : this.scroller.scrollHeight;
  }

  highlight(found) {
    this.found = found;
    this.layOut();
  }

  setRootAtTop(rootAtTop) {
    this.rootAtTop = rootAtTop;
    this.layOut();
    this.scroller.scrollTop = rootAtTop ? 0 : this.scroller.scrollHeight;
  }

  zoom(node) {
    this.zoomed = node;
    this.events.zoom(node);
    this.draw();
  }

  select(node) {
    this.selected = node;
    this.boxes.select(node);
  }

  get place() {
    return this.boxes.place;
  }

  // A row for each level. Colour indices: functions, one behind them for groups; then all of them
  // again, for frames that do not match the search, which are drawn faded.
  layOut() {
    const { tree, found } = this;
    const functions = this.colours.calls.name.length;
    this.canvas.parentElement.style.height = `${tree.depth * ROW}px`;
    this.rows = [];
    for (let first = 0; first < tree.size;) {
      const level = tree.level[first];
      let end = first + 1;
      while (end < tree.size && tree.level[end] === level) end++;
      const ids = Int32Array.from({ length: end - first }, (_, i) => first + i);
      const top = (this.rootAtTop ? level : tree.depth - 1 - level) * ROW;
      this.rows.push(Boxes.makeRow(
        tree.x.slice(first, end),
        Float64Array.from(ids, (node) => tree.x[node] + tree.total[node]),
        Uint32Array.from(ids, (node) => {
          const colour = tree.fn[node] < 0 ? functions : tree.fn[node];
          return found && !found.matched[node] ? colour + functions + 1 : colour;
        }),
        ids, top, ROW - 1, 0));
      first = end;
    }
    this.draw();
  }

  draw() {
    const { tree, colours } = this;
    if (!tree) return;
    const functions = colours.calls.name.length;
    const pixels = new Uint32Array(2 * functions + 2).fill(pixelOf(colours.faded));
    for (let fn = 0; fn < functions; fn++) pixels[fn] = pixelOf(colours.ofFunction(fn));
    pixels[functions] = pixelOf(colours.group);
    const background = pixelOf(getComputedStyle(this.scroller).backgroundColor);
    for (const row of this.rows) row.background = background;
    this.boxes.show({
      rows: this.rows, colours: pixels, height: tree.depth * ROW, first: 0, last: tree.total[0] || 1,
      left: tree.x[this.zoomed], right: tree.x[this.zoomed] + (tree.total[this.zoomed] || 1),
      palette: { background, ink: colours.ink, fadedInk: colours.fadedInk }, labelOf: this.labelOf,
      isFaded: (node) => Boolean(this.found) && !this.found.matched[node],
    });
    this.boxes.drawNow();
  }

  // ---- keys: returns the frame that a key moves to, undefined for any other key ----

  key(key) {
    const { tree } = this;
    const node = this.selected < 0 ? this.zoomed : this.selected;
    const inward = this.rootAtTop ? "ArrowDown" : "ArrowUp";
    const outward = this.rootAtTop ? "ArrowUp" : "ArrowDown";
    if (key === inward) return tree.begin[node] < tree.end[node] ? tree.begin[node] : node;
    if (key === outward) return Math.max(0, tree.parent[node]);
    if (key === "ArrowLeft") return this.neighbour(node, -1);
    if (key === "ArrowRight") return this.neighbour(node, 1);
    if (key === "Home") return 0;
    if (key !== "Enter" && key !== " ") return undefined;
    this.zoom(node);
    return node;
  }

  // The frame beside this one on its level, under whichever parent.
  neighbour(node, step) {
    const { tree } = this;
    const beside = node + step;
    return beside > 0 && beside < tree.size && tree.level[beside] === tree.level[node] ? beside : node;
  }
}
