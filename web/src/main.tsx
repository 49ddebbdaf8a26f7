// SPDX-License-Identifier: Apache-2.0
import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { AppContext, useAppState } from "./state";
import { Overview } from "./views/overview";
import { NodeView } from "./views/node";
import { RangeView } from "./views/range";
import { CompareView } from "./views/compare";
import { clock, day } from "./numbers";
import { START } from "./url";

function Page(): preact.JSX.Element {
  const app = useAppState();
  const { place, go, palette } = app;
  const times = place.from && place.to ? `${day(place.from)} ${clock(place.from)} – ${clock(place.to)}` : "";
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
            {(place.view === "range" || place.view === "compare") && <li><span aria-current="page">{place.view === "range" ? times : `Compare · ${times}`}</span></li>}
          </ol>
        </nav>
        {place.view === "range" && <button class="plain" onClick={() => go({ view: "compare" })}>Compare with the time before</button>}
        <button class="plain" onClick={() => app.setTheme(!palette.dark)} aria-label={palette.dark ? "Use the light theme" : "Use the dark theme"}>
          {palette.dark ? "☀ Light" : "☾ Dark"}
        </button>
      </header>
      <main id="main" class={place.view}>
        {place.view === "overview" && <Overview />}
        {place.view === "node" && <NodeView />}
        {place.view === "range" && <RangeView />}
        {place.view === "compare" && <CompareView />}
      </main>
    </AppContext.Provider>
  );
}

render(<Page />, document.getElementById("app")!);
