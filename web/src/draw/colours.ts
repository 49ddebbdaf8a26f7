// SPDX-License-Identifier: Apache-2.0
// Colours that people with colour-blindness distinguish (after Okabe and Ito, 2008), for both themes.

/** A colour as one number, 0xAABBGGRR (draw/boxes.ts), of a hue in degrees and two percentages. */
export function abgr(hue: number, saturation: number, lightness: number): number {
  const s = saturation / 100;
  const l = lightness / 100;
  const part = (n: number): number => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (l - s * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return (0xff000000 | (part(4) << 16) | (part(8) << 8) | part(0)) >>> 0;
}

export function css(colour: number): string {
  return `rgb(${colour & 255} ${(colour >>> 8) & 255} ${(colour >>> 16) & 255})`;
}

/** FNV-1a: what has the same name gets the same colour. */
export function hashOf(text: string): number {
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  return hash >>> 0;
}

/** Colours of a theme: `ink` of text; `faded` of boxes that a search or a cause is not about; of frames and of spans. */
export interface Palette {
  dark: boolean;
  background: number;
  lane: number;
  /** Of lines over a lane in which nothing was measured. */
  hatch: number;
  ink: string;
  faded: number;
  fadedInk: string;
  frame(kind: string, binary: string, name: string): number;
  span(kind: string): number;
}

const KIND_HUES: Record<string, number> = { python: 208, kernel: 28, jit: 320, call: 265, unknown: 0, process: 176, thread: 176, binary: 60 };
const NATIVE_HUES = [164, 186, 140, 236, 300, 50];

/** Hue, saturation, lightness in the light theme and in the dark one. */
const SPANS: Record<string, readonly [number, number, number, number]> = {
  kernel: [265, 52, 62, 60], collective: [320, 55, 62, 58], copy: [45, 85, 52, 52], set: [48, 40, 62, 45],
  replay: [245, 55, 62, 62], launch: [200, 70, 58, 52], graph_launch: [215, 65, 58, 56], sync: [12, 75, 60, 56],
  alloc: [330, 55, 62, 56], free: [330, 30, 72, 44], pin: [345, 45, 66, 50], event: [190, 30, 70, 44],
  build: [20, 40, 52, 48], other: [210, 14, 70, 46], blocked: [215, 12, 80, 34], runqueue: [35, 95, 55, 54],
  step: [222, 30, 80, 36], "odd step": [28, 80, 66, 48], operator: [208, 55, 74, 40], python: [178, 40, 74, 36], range: [285, 40, 76, 42],
  running: [160, 45, 52, 42], stall: [340, 75, 48, 62],
};

export function paletteOf(dark: boolean): Palette {
  return {
    dark,
    background: dark ? abgr(222, 22, 13) : abgr(0, 0, 100),
    lane: dark ? abgr(222, 20, 16) : abgr(220, 24, 97),
    hatch: dark ? abgr(222, 14, 34) : abgr(222, 16, 76),
    ink: dark ? "rgb(240 243 250)" : "rgb(18 24 38)",
    faded: dark ? abgr(222, 12, 22) : abgr(222, 18, 92),
    fadedInk: dark ? "rgb(130 138 155)" : "rgb(120 128 145)",
    frame(kind, binary, name) {
      const shift = (hashOf(name) % 7) - 3;
      if (kind === "root") return dark ? abgr(222, 14, 28) : abgr(222, 22, 89);
      if (kind === "unknown" || kind === "light") return dark ? abgr(222, 8, 32) : abgr(222, 10, 86);
      const hue = KIND_HUES[kind] ?? NATIVE_HUES[hashOf(binary) % NATIVE_HUES.length]!;
      return dark ? abgr(hue, 36, 34 + shift) : abgr(hue, 62, 77 + shift);
    },
    span(kind) {
      const counter = /^counter (\d)$/.exec(kind);
      if (counter) return dark ? abgr(200, 34, 22 + 5 * Number(counter[1])) : abgr(200, 50, 93 - 6 * Number(counter[1]));
      const [hue, saturation, light, darkLight] = SPANS[kind] ?? SPANS["other"]!;
      return abgr(hue, dark ? saturation * 0.75 : saturation, dark ? darkLight : light);
    },
  };
}
