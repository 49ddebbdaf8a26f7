// SPDX-License-Identifier: Apache-2.0
// The tree that is drawn: the capture's call tree, repeated under each group of threads, with the
// weights of one metric.
//
// Everything is columns of typed arrays. Nodes are numbered breadth first, children of a node stand
// side by side from the heaviest on, and so a node's place on the x axis (`x`, in units of weight)
// grows with its number among its siblings.

// choice: {kind, metric, group: none|name|process|thread, process: Set or null, hideBystanders}
function buildTree(capture, choice) {
  const rows = capture.tree.kinds[choice.kind];
  const groups = groupRows(capture, choice, rows);
  const grown = growTree(capture.tree, rows[choice.metric], rows.node, groups);
  return arrangeTree(grown, groups);
}

// The rows by group: [{label, rows, processes}]; one group without a label if nothing is grouped.
function groupRows(capture, choice, rows) {
  const { process, tid } = capture.threads;
  const name = capture.processes.name;
  const byKey = new Map();
  for (let row = 0; row < rows.node.length; row++) {
    const thread = rows.thread[row];
    if (choice.process && !choice.process.has(process[thread])) continue;
    if (choice.hideBystanders && isBystander(capture, thread)) continue;
    const key = choice.group === "none" ? 0 : choice.group === "name" ? name[process[thread]]
      : choice.group === "process" ? process[thread] : thread;
    let group = byKey.get(key);
    if (!group) {
      const label = choice.group === "none" ? "" : choice.group === "name" ? key
        : choice.group === "process" ? processLabel(capture, key)
          : `${name[process[thread]]} / ${capture.threads.name[thread]} (${tid[thread]})`;
      byKey.set(key, (group = { label, rows: [], processes: new Set() }));
    }
    group.rows.push(row);
    group.processes.add(process[thread]);
  }
  return [...byKey.values()];
}

// Copies what is needed of the call tree under each group. Parents come before their children.
function growTree(calls, weights, nodeOf, groups) {
  const parent = [-1];
  const fn = [-1]; // function; -1 for the root, -2 - group for a group
  const self = [0];
  const grownFor = new Int32Array(calls.parent.length).fill(-1);
  const place = new Int32Array(calls.parent.length);
  const path = [];
  groups.forEach((group, number) => {
    let base = 0;
    if (group.label) {
      base = parent.length;
      parent.push(0);
      fn.push(-2 - number);
      self.push(0);
    }
    grownFor[0] = number;
    place[0] = base;
    for (const row of group.rows) {
      const weight = weights[row];
      if (!weight) continue;
      let node = nodeOf[row];
      for (; grownFor[node] !== number; node = calls.parent[node]) path.push(node);
      let at = place[node];
      while (path.length) {
        node = path.pop();
        parent.push(at);
        at = parent.length - 1;
        fn.push(calls.function[node]);
        self.push(0);
        grownFor[node] = number;
        place[node] = at;
      }
      self[at] += weight;
    }
  });
  return { parent, fn, self };
}

// The grown tree with totals, numbered breadth first, and without nodes of no weight.
function arrangeTree(grown, groups) {
  const size = grown.parent.length;
  const total = Float64Array.from(grown.self);
  for (let i = size - 1; i > 0; i--) total[grown.parent[i]] += total[i];
  const childrenOf = new Array(size);
  for (let i = 1; i < size; i++) {
    if (total[i]) (childrenOf[grown.parent[i]] ??= []).push(i);
  }
  const tree = {
    groups,
    size: 0,
    depth: 0,
    parent: new Int32Array(size),
    fn: new Int32Array(size),
    level: new Int32Array(size),
    self: new Float64Array(size),
    total: new Float64Array(size),
    x: new Float64Array(size),
    begin: new Int32Array(size), // children: begin <= child < end
    end: new Int32Array(size),
  };
  const old = new Int32Array(size);
  tree.parent[0] = -1;
  tree.size = 1;
  for (let node = 0; node < tree.size; node++) {
    const from = old[node];
    tree.fn[node] = grown.fn[from];
    tree.self[node] = grown.self[from];
    tree.total[node] = total[from];
    tree.depth = Math.max(tree.depth, tree.level[node] + 1);
    tree.begin[node] = tree.size;
    let x = tree.x[node];
    const children = childrenOf[from];
    if (children) {
      children.sort((a, b) => total[b] - total[a] || grown.fn[a] - grown.fn[b]);
      for (const child of children) {
        const at = tree.size++;
        old[at] = child;
        tree.parent[at] = node;
        tree.level[at] = tree.level[node] + 1;
        tree.x[at] = x;
        x += total[child];
      }
    }
    tree.end[node] = tree.size;
  }
  return tree;
}

// A function's own weight, and that of its outermost calls: recursion counts once.
function functionWeights(tree, functions) {
  const self = new Float64Array(functions);
  const total = new Float64Array(functions);
  const open = new Int32Array(functions);
  const stack = tree.size > 1 || tree.fn[0] >= 0 ? [0] : [];
  const entered = new Uint8Array(tree.size);
  while (stack.length) {
    const node = stack[stack.length - 1];
    const fn = tree.fn[node];
    if (entered[node]) {
      stack.pop();
      if (fn >= 0) open[fn]--;
      continue;
    }
    entered[node] = 1;
    if (fn >= 0) {
      self[fn] += tree.self[node];
      if (open[fn]++ === 0) total[fn] += tree.total[node];
    }
    for (let child = tree.begin[node]; child < tree.end[node]; child++) stack.push(child);
  }
  return { self, total };
}

// A test for names, from what was typed: words anywhere, or /regex/. null: nothing was typed.
function matcher(text) {
  const typed = text.trim();
  if (!typed) return null;
  const regex = /^\/(.+)\/$/.exec(typed);
  if (regex) {
    const pattern = new RegExp(regex[1], "i"); // may throw: half a regex is no regex
    return (...names) => names.some((name) => pattern.test(name));
  }
  const wanted = typed.toLowerCase();
  return (...names) => names.some((name) => name.toLowerCase().includes(wanted));
}

// Which nodes match, and how much of the whole they and what they called make up.
function searchTree(tree, calls, test) {
  const matched = new Uint8Array(tree.size);
  if (!test) return { matched, weight: 0, nodes: 0, heaviest: -1 };
  const known = new Map();
  const matches = (fn) => {
    if (fn === -1) return false;
    if (!known.has(fn)) {
      known.set(fn, fn < -1 ? test(tree.groups[-2 - fn].label)
        : test(calls.name[fn], calls.binary[fn], calls.file[fn]));
    }
    return known.get(fn);
  };
  const inside = new Uint8Array(tree.size);
  let weight = 0;
  let nodes = 0;
  let heaviest = -1;
  for (let node = 1; node < tree.size; node++) {
    inside[node] = inside[tree.parent[node]];
    if (!matches(tree.fn[node])) continue;
    matched[node] = 1;
    nodes++;
    if (!inside[node]) weight += tree.total[node];
    inside[node] = 1;
    if (heaviest < 0 || tree.total[node] > tree.total[heaviest]) heaviest = node;
  }
  return { matched, weight, nodes, heaviest };
}
