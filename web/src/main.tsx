// SPDX-License-Identifier: Apache-2.0
import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import "./verdict.css";
import { AppContext, useApp, useAppState } from "./state";
import { Overview } from "./views/overview";
import { NodeView } from "./views/node";
import { RangeView } from "./views/range";
import { CompareView } from "./views/compare";
import { DropHint, FileButton, FileView, held, show } from "./views/file";
import { AlertsView, FiringBadge } from "./views/alerts";
import { IncidentsView } from "./views/incidents";
import { JobView } from "./views/job";
import { OwnersView } from "./views/owners";
import { TenantMenu } from "./views/tenant";
import { FleetView } from "./views/fleet";
import { LiveButton } from "./views/live";
import { MemoryView } from "./views/memory";
import { Opened } from "./views/opening";
import { RanksView } from "./views/ranks";
import { period } from "./numbers";
import { crumbsOf } from "./trail";
import { format, isOwnerKind, START, type Place, type View } from "./url";

/** Views over all nodes, in the order in which they are offered. */
const VIEWS: readonly [View, string][] = [
  ["overview", "Overview"], ["owners", "Owners"], ["jobs", "Jobs"], ["ranks", "Ranks"], ["incidents", "Incidents"], ["alerts", "Alerts"], ["fleet", "Fleet"],
];
/** Which of them is marked as the current one while another view is shown. */
const SHOWN_UNDER: Partial<Record<View, View>> = { node: "overview", range: "overview", memory: "overview", compare: "overview", job: "jobs" };
const shownUnder = (place: Place): View => (place.view === "job" && isOwnerKind(place.by) ? "owners" : SHOWN_UNDER[place.view] ?? place.view);

/** Where a view of one node or one job stands, and the way back. */
function Trail({ times, link }: { times: string; link: (event: Event, change: Partial<Place>) => void }): preact.JSX.Element | null {
  const { place, go, hrefOf } = useApp();
  const crumbs = crumbsOf(place, times);
  if (!crumbs.length) return null;
  return (
    <div class="trail">
      <nav aria-label="Place"><ol>{crumbs.map(([name, target]) => (
        <li>{target ? <a href={hrefOf({ ...START, ...target })} onClick={(event) => link(event, target)}>{name}</a> : <span aria-current="page">{name}</span>}</li>))}</ol></nav>
      {place.view === "range" && <button onClick={() => go({ view: "compare" })}>Compare with the time before</button>}
    </div>
  );
}

function Page(): preact.JSX.Element {
  const app = useAppState();
  const { place, go, palette } = app;
  const times = place.from && place.to ? period(place.from, place.to) : "";
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
        <nav class="views" aria-label="Views">
          <ul>{VIEWS.map(([view, name]) => {
            // The chosen time goes along, also through views that show all times; ranks open in a job's own time.
            const target = view === "ranks" ? { view } : { view, from: place.from, to: place.to, live: place.live };
            return <li><a href={format({ ...START, ...target }) || "/"} aria-current={shownUnder(place) === view ? "page" : undefined} onClick={(event) => link(event, target)}><span class="tab" data-name={name}>{name}</span>{view === "alerts" && <FiringBadge />}</a></li>;
          })}</ul>
        </nav>
        <LiveButton />
        <FileButton />
        <TenantMenu />
        <button class="plain" onClick={() => app.setTheme(!palette.dark)} aria-label={palette.dark ? "Use the light theme" : "Use the dark theme"}>
          {palette.dark ? "☀ Light" : "☾ Dark"}
        </button>
      </header>
      <Trail times={times} link={link} />
      <main id="main" class={place.view}>
        {place.view === "overview" && <Opened><Overview /></Opened>}
        {place.view === "node" && <NodeView />}
        {place.view === "range" && <RangeView />}
        {place.view === "compare" && <CompareView />}
        {place.view === "ranks" && <RanksView />}
        {place.view === "memory" && <MemoryView />}
        {place.view === "fleet" && <FleetView />}
        {place.view === "incidents" && <IncidentsView />}
        {place.view === "alerts" && <AlertsView />}
        {(place.view === "owners" || place.view === "jobs") && <Opened key={place.view}><OwnersView /></Opened>}
        {place.view === "job" && <Opened><JobView /></Opened>}
        {place.view === "file" && <FileView />}
      </main>
      <DropHint />
    </AppContext.Provider>
  );
}

render(<Page />, document.getElementById("app")!);
