// SPDX-License-Identifier: Apache-2.0
// A colour for each binary: the heaviest get hues that are easy to distinguish, the rest share them
// by the hash of their name. The same binary has the same colour in every view.

const HUES = [211, 150, 268, 42, 178, 328, 92, 238, 60, 300, 195, 122];
const KERNEL_HUE = 14;

// FNV-1a, 32 bits.
function hashOf(text) {
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  return hash >>> 0;
}

// The function that a stack ends in, below the reason of its wait or the name of its call.
function codeOf(calls, node) {
  const fn = calls.function[node];
  const above = calls.parent[node];
  return above > 0 && isTip(calls, fn) ? calls.function[above] : fn;
}

// Whether a function is none, but the label on top of a stack: the reason of a wait, or a call.
function isTip(calls, fn) {
  return calls.kind[fn] === "wait" || calls.kind[fn] === "call";
}

function binaryHues(capture) {
  const { tree } = capture;
  const weight = new Map();
  for (const rows of Object.values(tree.kinds)) {
    const whole = rows.ns.reduce((sum, ns) => sum + ns, 0) || 1;
    for (let row = 0; row < rows.node.length; row++) {
      const binary = tree.binary[codeOf(tree, rows.node[row])];
      weight.set(binary, (weight.get(binary) ?? 0) + rows.ns[row] / whole);
    }
  }
  const hues = new Map();
  const named = [...weight].filter(([binary]) => binary && binary !== "[kernel]");
  named.sort((a, b) => b[1] - a[1]).forEach(([binary], rank) => {
    hues.set(binary, rank < HUES.length ? HUES[rank] : HUES[hashOf(binary) % HUES.length]);
  });
  return hues;
}

class Colours {
  constructor(capture) {
    this.calls = capture.tree;
    this.hues = binaryHues(capture);
    this.known = new Map();
    this.dark = false;
  }

  setDark(dark) {
    this.dark = dark;
    this.known.clear();
  }

  ofBinary(binary, name = "") {
    const shift = name ? (hashOf(name) % 7) - 3 : 0;
    if (binary === "" || binary === "[unknown]" || binary === "[no stack]") {
      return this.dark ? "hsl(220 8% 34%)" : "hsl(220 12% 86%)";
    }
    const hue = binary === "[kernel]" ? KERNEL_HUE
      : this.hues.get(binary) ?? HUES[hashOf(binary) % HUES.length];
    return this.dark ? `hsl(${hue} 38% ${35 + shift * 1.1}%)` : `hsl(${hue} 66% ${80 + shift * 1.1}%)`;
  }

  ofFunction(fn) {
    let colour = this.known.get(fn);
    if (colour === undefined) {
      colour = isTip(this.calls, fn) ? (this.dark ? "hsl(220 12% 46%)" : "hsl(220 20% 74%)")
        : this.ofBinary(this.calls.binary[fn], this.calls.name[fn]);
      this.known.set(fn, colour);
    }
    return colour;
  }

  get group() {
    return this.dark ? "hsl(222 14% 27%)" : "hsl(222 24% 91%)";
  }

  get faded() {
    return this.dark ? "hsl(222 10% 22%)" : "hsl(222 16% 93%)";
  }

  get narrow() {
    return this.dark ? "hsl(222 9% 26%)" : "hsl(222 14% 89%)";
  }

  get ink() {
    return this.dark ? "hsl(220 20% 95%)" : "hsl(222 35% 14%)";
  }

  get fadedInk() {
    return this.dark ? "hsl(220 8% 52%)" : "hsl(222 10% 60%)";
  }
}
