// SPDX-License-Identifier: Apache-2.0
// What is drawn over boxes while the pointer or a selection is on one of them: its outline and its arrows. Each reports
// the part of the canvas that it covers, so that this alone is restored when it goes.

/** Part of a canvas, in CSS pixels. */
export interface Part { left: number; top: number; right: number; bottom: number }

/** From one place to another on the canvas, in CSS pixels. */
interface Line { x0: number; y0: number; x1: number; y1: number }

export function drawOutline(context: CanvasRenderingContext2D, { left, top, right, bottom }: Part, thickness: number, ink: string): Part {
  const width = Math.max(1, right - left - thickness);
  context.strokeStyle = ink;
  context.lineWidth = thickness;
  context.strokeRect(left + thickness / 2, top + thickness / 2, width, bottom - top - thickness);
  return { left, top, right: left + width + thickness, bottom };
}

/** Of an arrow: half the width of its halo and of its head, and some room. */
const ARROW_PX = 8;

export function drawArrow(context: CanvasRenderingContext2D, { x0, y0, x1, y1 }: Line, ink: string, background: string): Part {
  const bend = Math.max(24, Math.abs(x1 - x0) / 2);
  // Twice: a halo of the background keeps it apart from what it crosses.
  for (const [width, colour] of [[5, background], [1.8, ink]] as const) {
    context.lineWidth = width;
    context.strokeStyle = context.fillStyle = colour;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
    context.beginPath();
    context.arc(x0, y0, width + 0.8, 0, 2 * Math.PI);
    context.fill();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 9, y1 - 4.5);
    context.lineTo(x1 - 9, y1 + 4.5);
    context.closePath();
    context.fill();
  }
  // A curve lies within its four points.
  return {
    left: Math.min(x0, x1 - bend) - ARROW_PX, right: Math.max(x1, x0 + bend) + ARROW_PX,
    top: Math.min(y0, y1) - ARROW_PX, bottom: Math.max(y0, y1) + ARROW_PX,
  };
}
