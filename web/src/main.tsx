// SPDX-License-Identifier: Apache-2.0
import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { AppContext, useAppState } from "./state";
import { Overview } from "./views/overview";
import { NodeView } from "./views/node";
import { RangeView } from "./views/range";
import { CompareView } from "./views/compare";
import { DropHint, FileButton, FileView, held, show } from "./views/file";
import { IncidentsView } from "./views/incidents";
import { FleetView } from "./views/fleet";
import { LiveButton } from "./views/live";
import { MemoryView } from "./views/memory";
import { RanksView } from "./views/ranks";
import { clock, day } from "./numbers";
import { START } from "./url";

function Page(): preact.JSX.Element {
  const app = useAppState();
  const { place, go, palette } = app;
  const times = place.from && place.to ? `${day(place.from)} ${clock(place.from)} – ${clock(place.to)}` : "";
  useEffect(() => {
    const isFile = (event: DragEvent): boolean => event.dataTransfer?.types.includes("Files") ?? false;
    const over = (event: DragEvent): void => { if (isFile(event)) { event.preventDefault(); held.set(true); } };
    const leave = (event: DragEvent): void => { if (!event.relatedTarget) held.set(false); };
    const drop = (event: DragEvent): void => {
      if (!isFile(event)) return;
      event.preventDefault();
      held.set(false);
      const file = event.dataTransfer!.files[0];
      if (file) show(file, app.go);
    };
    const listeners = { dragover: over, dragleave: leave, drop } as const;
    for (const [name, listener] of Object.entries(listeners)) addEventListener(name as "drop", listener);
    return () => { for (const [name, listener] of Object.entries(listeners)) removeEventListener(name as "drop", listener); };
  }, []);
  const link = (event: Event, change: Partial<typeof place>): void => {
    event.preventDefault();
    go({ ...START, ...change });
  };
  return (
    <AppContext.Provider value={app}>
      <a class="skip" href="#main">Skip to the content</a>
      <header class="bar">
        <a class="brand" href="/" onClick={(event) => link(event, {})}>
          <svg width="20" height="20" viewBox="0 0 20 20" aria-hidden="true">
            <rect x="1" y="2" width="18" height="4" rx="1" /><rect x="1" y="8" width="11" height="4" rx="1" /><rect x="1" y="14" width="6" height="4" rx="1" />
          </svg>
          Sonde
        </a>
        <nav aria-label="Place">
          <ol>
            <li><a href="/" aria-current={place.view === "overview" ? "page" : undefined} onClick={(event) => link(event, {})}>Overview</a></li>
            {place.node && <li><a href="/" aria-current={place.view === "node" ? "page" : undefined}
              onClick={(event) => link(event, { view: "node", node: place.node })}>{place.node}</a></li>}
            {place.view === "memory" && place.node && <li><span aria-current="page">Memory</span></li>}
            {place.view === "ranks" && <li><span aria-current="page">Ranks</span></li>}
            {place.view === "file" && <li><span aria-current="page">File</span></li>}
            {(place.view === "range" || place.view === "compare") && <li><span aria-current="page">{place.view === "range" ? times : `Compare · ${times}`}</span></li>}
          </ol>
        </nav>
        {(place.view === "overview" || place.view === "node") && <LiveButton />}
        {place.view === "range" && <button class="plain" onClick={() => go({ view: "compare" })}>Compare with the time before</button>}
        <a class="plain" href="?view=ranks" aria-current={place.view === "ranks" ? "page" : undefined} onClick={(event) => link(event, { view: "ranks" })}>Ranks</a>
        <a class="plain" href="?view=fleet" aria-current={place.view === "fleet" ? "page" : undefined} onClick={(event) => link(event, { view: "fleet" })}>Fleet</a>
        <a class="plain" href="?view=incidents" aria-current={place.view === "incidents" ? "page" : undefined} onClick={(event) => link(event, { view: "incidents" })}>Incidents</a>
        <FileButton />
        <button class="plain" onClick={() => app.setTheme(!palette.dark)} aria-label={palette.dark ? "Use the light theme" : "Use the dark theme"}>
          {palette.dark ? "☀ Light" : "☾ Dark"}
        </button>
      </header>
      <main id="main" class={place.view}>
        {place.view === "overview" && <Overview />}
        {place.view === "node" && <NodeView />}
        {place.view === "range" && <RangeView />}
        {place.view === "compare" && <CompareView />}
        {place.view === "ranks" && <RanksView />}
        {place.view === "memory" && <MemoryView />}
        {place.view === "fleet" && <FleetView />}
        {place.view === "incidents" && <IncidentsView />}
        {place.view === "file" && <FileView />}
      </main>
      <DropHint />
    </AppContext.Provider>
  );
}

render(<Page />, document.getElementById("app")!);
