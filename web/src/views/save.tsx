// SPDX-License-Identifier: Apache-2.0
// A menu of what can be done with what is shown: saved in a format, copied.

import type { ComponentChildren } from "preact";
import { useRef, useState } from "preact/hooks";

export interface Choice { name: string; about: string; run(): void | Promise<void> }

export function SaveMenu({ label, choices }: { label: string; choices: readonly Choice[] }): preact.JSX.Element {
  const menu = useRef<HTMLDetailsElement>(null);
  const [problem, setProblem] = useState<ComponentChildren>(null);
  const choose = (choice: Choice): void => {
    menu.current!.open = false;
    menu.current!.querySelector("summary")?.focus();
    (async () => choice.run())().then(() => setProblem(null), (error: unknown) => setProblem(error instanceof Error ? error.message : String(error)));
  };
  return (
    <details class="menu" ref={menu} onKeyDown={(event) => { if (event.key === "Escape") menu.current!.open = false; }}>
      <summary aria-label={label}>Save</summary>
      <div role="group" aria-label={label}>
        {choices.map((choice) => <button onClick={() => choose(choice)} title={choice.about}>{choice.name}</button>)}
      </div>
      {problem && <p role="alert">{problem}</p>}
    </details>
  );
}

/** The address of what is shown, to be pasted elsewhere. */
export const copyLink: Choice = {
  name: "Copy the link", about: "the address of what is shown",
  run: () => navigator.clipboard.writeText(location.href),
};
