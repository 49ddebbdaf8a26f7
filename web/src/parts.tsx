// SPDX-License-Identifier: Apache-2.0
// Parts that several views use.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { lackOf, token, type AskError } from "./api";
import { moreText } from "./numbers";
import { useApp, type Asked } from "./state";

export function TokenPrompt(): preact.JSX.Element {
  const { again } = useApp();
  const [text, setText] = useState("");
  return (
    <form class="state" onSubmit={(event) => { event.preventDefault(); token.set(text); again(); }}>
      <h2>This server asks for a token</h2>
      <p>Paste one that may read. The server's operator makes it with <code>sonde token make --scope read</code>.</p>
      <label>Token <input type="password" autocomplete="off" value={text} autofocus
        onInput={(event) => setText(event.currentTarget.value)} /></label>
      <button class="primary" type="submit" disabled={!text.trim()}>Use it</button>
      <p class="quiet">It is kept in this tab only, until you close it.</p>
    </form>
  );
}

export function Failure({ error }: { error: AskError }): preact.JSX.Element {
  const { again } = useApp();
  if (error.status === 401) return <TokenPrompt />;
  return (
    <div class="state" role="alert">
      <h2>{error.message}</h2>
      {error.remedy && <p>What to do: {error.remedy}.</p>}
      <button class="primary" onClick={again}>Try again</button>
    </div>
  );
}

/** An answer, or what stands in its place. */
export function Answer<T>(props: {
  asked: Asked<T>; loading: string; children: (answer: T) => ComponentChildren;
}): preact.JSX.Element {
  const { asked } = props;
  if (asked.error) return <Failure error={asked.error} />;
  if (asked.answer === null) return <div class="state quiet" aria-busy="true">{props.loading}</div>;
  return <div class={asked.loading ? "stale" : "fresh"} aria-busy={asked.loading}>{lackOf(asked.answer) && <p class="quiet" role="note">{lackOf(asked.answer)}</p>}{props.children(asked.answer)}</div>;
}

/** Rows of a table that are shown at first, and more with each press of the button below it. */
export const ROWS_AT_ONCE = 500;

/** Below a table of which `shown` rows are shown: shows more of them. */
export function MoreRows({ all, shown, show }: { all: number; shown: number; show: (rows: number) => void }): preact.JSX.Element | null {
  if (all <= shown) return null;
  return <button class="more" onClick={() => show(shown + ROWS_AT_ONCE)}>{moreText(all - shown, ROWS_AT_ONCE)}</button>;
}

export function Empty(props: { title: string; children: ComponentChildren }): preact.JSX.Element {
  return <div class="state"><h2>{props.title}</h2><p>{props.children}</p></div>;
}

/** In place of a value that is asked for: not to be taken for none. */
export function Loading(): preact.JSX.Element {
  return <span class="loading" role="img" aria-label="loading" aria-busy="true" />;
}

export function Meter({ share, text, tone }: { share: number; text: string; tone?: string }): preact.JSX.Element {
  return (
    <span class={`meter ${tone ?? ""}`}>
      <span class="bar-of" aria-hidden="true"><i style={{ width: `${100 * Math.max(0, Math.min(1, share))}%` }} /></span><span>{text}</span>
    </span>
  );
}

export function Tooltip(props: { x: number; y: number; children: ComponentChildren }): preact.JSX.Element {
  const right = props.x > innerWidth - 440;
  const below = props.y < innerHeight - 220;
  const style = {
    left: right ? "auto" : `${props.x + 14}px`, right: right ? `${innerWidth - props.x + 14}px` : "auto",
    top: below ? `${props.y + 16}px` : "auto", bottom: below ? "auto" : `${innerHeight - props.y + 12}px`,
  };
  return <div class="tooltip" role="tooltip" style={style}>{props.children}</div>;
}
