// SPDX-License-Identifier: Apache-2.0
// Joins the parts: what the user chooses above the graph decides what is drawn and listed.

const find = (id) => document.getElementById(id);

class Page {
  constructor(capture) {
    this.capture = capture;
    this.colours = new Colours(capture);
    this.kinds = Object.keys(KINDS).filter((kind) => kind in capture.tree.kinds);
    this.choice = {
      kind: this.kinds.find((kind) => this.totals(kind)[KINDS[kind].metrics[0]] > 0) ?? this.kinds[0],
      metric: "ns", group: "name", process: null, hideBystanders: true,
    };
    this.tab = "functions";
    this.query = "";
    this.flame = new FlameView(find("flame"), find("scroller"), this.colours, (node) => this.label(node), {
      zoom: (node) => this.onZoom(node),
      hover: (node, x, y) => this.showTooltip(node, x, y),
      select: (node) => this.announce(node),
    });
    this.tables = {
      functions: new DataTable(functionColumns(this), {
        caption: "Functions", onPick: (row) => this.search(row.name),
      }),
      waits: new DataTable(waitColumns(capture), { caption: "Waits" }),
      calls: new DataTable(callColumns(capture), { caption: "GPU API calls" }),
      runs: new DataTable(runColumns(capture), { caption: "Runs on devices" }),
      processes: new DataTable(processColumns(capture), {
        caption: "Processes", onPick: (row) => this.pickProcess(`pid:${row.process}`),
      }),
    };
    this.setTheme(this.storedTheme());
    this.fillHeader();
    this.fillProcesses();
    this.listen();
    this.refresh();
    if (capture.verdict) {
      find("verdict").hidden = false;
      Boxes.showVerdict(find("verdict"), capture.verdict, (kind, place) => this.showStacks(kind, place));
    }
    document.body.dataset.ready = "true";
  }

  get metric() {
    return METRICS[this.choice.metric];
  }

  totals(kind, hideBystanders = false) {
    const rows = this.capture.tree.kinds[kind];
    const sums = { ns: 0, count: 0, bytes: 0, hidden: new Set() };
    for (let row = 0; row < rows.node.length; row++) {
      const thread = rows.thread[row];
      if (this.choice?.process && !this.choice.process.has(this.capture.threads.process[thread])) continue;
      if (hideBystanders && isBystander(this.capture, thread)) {
        sums.hidden.add(thread);
        continue;
      }
      sums.ns += rows.ns[row];
      sums.count += rows.count[row];
      sums.bytes += rows.bytes[row];
    }
    return sums;
  }

  // ---- what is written once ----

  fillHeader() {
    const about = this.capture.capture;
    const host = about.host;
    find("title").textContent = about.path.split("/").pop();
    const facts = [
      new Date(about.wall_start_ns / 1e6).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
      duration(about.duration_ns),
      host.cpus ? `${host.cpus} CPUs` : "", host.kernel ? `Linux ${host.kernel}` : "",
      host.hz ? `${host.hz} Hz` : "", this.capture.filtered ? "a part of the capture" : "",
      this.capture.hide && `stacks: ${this.capture.hide}`,
    ];
    find("subtitle").textContent = facts.filter(Boolean).join(" · ");
    const lost = lossLines(this.capture).length;
    const chip = find("losses");
    chip.textContent = lost ? `${lost} ${lost === 1 ? "loss" : "losses"}` : "Nothing lost";
    chip.classList.add(lost ? "warn" : "fine");
    chip.addEventListener("click", () => this.openTab("capture", true));
  }

  fillProcesses() {
    const { processes, tables } = this.capture;
    const select = find("process");
    const byName = new Map();
    for (const row of tables.processes) {
      const name = processes.name[row.process];
      byName.set(name, [...(byName.get(name) ?? []), row.process]);
    }
    this.processesNamed = byName;
    select.append(element("option", { value: "" }, `all (${grouped(tables.processesInAll)})`));
    for (const [name, members] of byName) {
      if (members.length > 1) {
        select.append(element("option", { value: `name:${name}` }, `${name} (${members.length} processes)`));
      }
      for (const process of members) {
        const label = `${members.length > 1 ? "\u2003" : ""}${processLabel(this.capture, process)}`;
        select.append(element("option", { value: `pid:${process}` }, label));
      }
    }
  }

  listen() {
    find("search").addEventListener("input", (event) => this.setQuery(event.target.value));
    find("search").addEventListener("keydown", (event) => this.searchKey(event));
    find("process").addEventListener("change", (event) => this.pickProcess(event.target.value));
    find("group").addEventListener("change", (event) => this.choose({ group: event.target.value }));
    find("metric").addEventListener("change", (event) => this.choose({ metric: event.target.value }));
    find("bystanders").addEventListener("change", (event) => this.choose({ hideBystanders: event.target.checked }));
    find("reset").addEventListener("click", () => this.resetZoom());
    find("orientation").addEventListener("click", (event) => {
      this.flame.setRootAtTop(!this.flame.rootAtTop);
      event.currentTarget.setAttribute("aria-pressed", String(!this.flame.rootAtTop));
    });
    find("theme").addEventListener("click", () => this.setTheme(this.colours.dark ? "light" : "dark", true));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.setTheme(this.storedTheme()));
    document.addEventListener("keydown", (event) => this.key(event));
    for (const moved of ["scroll", "resize"]) addEventListener(moved, () => this.showTooltip(-1), { passive: true });
  }

  // ---- choices ----

  choose(change) {
    Object.assign(this.choice, change);
    this.refresh();
  }

  // A kind of stacks, and what matches a place ("function file:line") among them; '' for all, as they were.
  showStacks(kind, place) {
    find("search").value = place.match(/^(.+) \S+:\d+$/)?.[1] ?? place;
    this.query = find("search").value;
    this.choose(this.kinds.includes(kind) ? { kind } : {});
  }

  pickProcess(value) {
    const [by, ...rest] = value.split(":");
    const process = by === "name" ? new Set(this.processesNamed.get(rest.join(":")))
      : by === "pid" ? new Set([Number(rest[0])]) : null;
    find("process").value = value;
    this.choose({ process });
  }

  refresh() {
    const { choice } = this;
    const { metrics } = KINDS[choice.kind];
    if (!metrics.includes(choice.metric)) choice.metric = metrics[0];
    this.tree = buildTree(this.capture, {
      ...choice, hideBystanders: choice.hideBystanders && choice.kind === "off-cpu",
    });
    find("metric").replaceChildren(...metrics.map((metric) =>
      element("option", { value: metric, selected: metric === choice.metric },
        metric === "count" ? KINDS[choice.kind].events : METRICS[metric].title)));
    find("bystanders-label").hidden = choice.kind !== "off-cpu";
    this.findMatches();
    this.flame.show(this.tree, this.found);
    this.fillKinds();
    this.onZoom(0);
    this.fillLegend();
    this.fillTable();
    const empty = find("empty");
    empty.hidden = this.tree.total[0] > 0;
    empty.textContent = `No ${KINDS[choice.kind].events} here${choice.process ? " for this process" : ""}.`;
    find("flame").hidden = !empty.hidden;
    find("flame").setAttribute("aria-label",
      `${KINDS[choice.kind].title} by ${this.metric.title}: ${this.metric.show(this.tree.total[0])}`);
  }

  fillKinds() {
    const { cpus, duration_ns: length } = this.capture.capture;
    find("kinds").replaceChildren(...this.kinds.map((kind) => {
      const hide = kind === "off-cpu" && this.choice.hideBystanders;
      const sums = this.totals(kind, hide);
      const { title, events, hint } = KINDS[kind];
      const capacity = (this.capture.capture.host.cpus ?? 0) * length;
      const detail = kind === "on-cpu" && capacity ? `${percent(sums.ns, capacity)} of ${this.capture.capture.host.cpus} CPUs`
        : kind === "gpu-calls" && sums.bytes ? `${grouped(sums.count)} calls, ${byteSize(sums.bytes)}`
          : `${grouped(sums.count)} ${events}${sums.hidden.size ? `, ${grouped(sums.hidden.size)} ${sums.hidden.size === 1 ? "thread" : "threads"} hidden` : ""}`;
      const chosen = kind === this.choice.kind;
      return element("button", {
        type: "button", role: "tab", id: `kind-${kind}`, class: "kind", title: hint, "aria-selected": String(chosen),
        "aria-controls": "graph-panel", tabindex: chosen ? "0" : "-1",
        onclick: () => this.choose({ kind }), onkeydown: (event) => this.tabKey(event, "kinds"),
      }, element("span", { class: "kind-title" }, title),
      element("strong", {}, KINDS[kind].metrics.includes("ns") ? duration(sums.ns) : byteSize(sums.bytes)), element("small", {}, detail));
    }));
  }

  fillLegend() {
    const { tree } = this;
    const calls = this.capture.tree;
    const weights = new Map();
    for (let node = 1; node < tree.size; node++) {
      if (!tree.self[node] || tree.fn[node] < 0) continue;
      const binary = calls.binary[this.ownCode(node)];
      weights.set(binary, (weights.get(binary) ?? 0) + tree.self[node]);
    }
    const heaviest = [...weights].filter(([binary, weight]) => binary && weight >= tree.total[0] / 1000)
      .sort((a, b) => b[1] - a[1]).slice(0, 12);
    find("legend").replaceChildren(...heaviest.map(([binary, weight]) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = this.colours.ofBinary(binary);
      return element("button", { type: "button", onclick: () => this.search(binary), title: `Search for ${binary}` },
        swatch, binary, element("small", {}, percent(weight, tree.total[0])));
    }));
  }

  // The function that a node's own weight counts for in the legend. Every wait ends in the scheduler,
  // so off the CPU it is the innermost function outside the kernel.
  ownCode(node) {
    const { fn, parent } = this.tree;
    const { kind } = this.capture.tree;
    const offCpu = this.choice.kind === "off-cpu" || this.choice.kind === "run-queue";
    const passed = offCpu ? ["wait", "call", "kernel"] : ["wait", "call"];
    let at = node;
    while (passed.includes(kind[fn[at]]) && fn[parent[at]] >= 0) at = parent[at];
    return fn[at];
  }

  // ---- search ----

  search(text) {
    find("search").value = this.query === text ? "" : text;
    this.setQuery(find("search").value);
  }

  setQuery(text) {
    this.query = text;
    this.findMatches();
    this.flame.highlight(this.found);
    this.fillTable();
  }

  findMatches() {
    const input = find("search");
    const output = find("match");
    this.test = null;
    this.found = null;
    let problem = "";
    try {
      this.test = matcher(this.query);
    } catch {
      problem = "no such pattern yet";
    }
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    if (!this.test) {
      output.textContent = problem;
      return;
    }
    this.found = searchTree(this.tree, this.capture.tree, this.test);
    output.textContent = `${percent(this.found.weight, this.tree.total[0])} matched`;
    output.title = `${this.metric.show(this.found.weight)} in ${grouped(this.found.nodes)} frames`;
  }

  searchKey(event) {
    if (event.key === "Enter" && this.found && this.found.heaviest >= 0) {
      find("flame").focus();
      this.flame.select(this.found.heaviest);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      event.target.value = "";
      this.setQuery("");
      find("flame").focus();
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && !event.target.matches("input, select")) {
      event.preventDefault();
      find("search").focus();
      find("search").select();
    } else if (event.key === "Escape") {
      this.resetZoom();
    }
  }

  tabKey(event, list) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const tabs = [...find(list).children];
    const to = (tabs.indexOf(event.currentTarget) + step + tabs.length) % tabs.length;
    tabs[to].click();
    find(list).children[to].focus();
  }

  // ---- the graph ----

  label(node) {
    const fn = this.tree.fn[node];
    return fn >= 0 ? this.capture.tree.name[fn] : fn === -1 ? "all" : this.tree.groups[-2 - fn].label;
  }

  resetZoom() {
    if (this.flame.zoomed !== 0) this.flame.zoom(0);
  }

  onZoom(node) {
    const path = [];
    for (let at = node; at >= 0; at = this.tree.parent[at]) path.unshift(at);
    find("crumbs").replaceChildren(...path.map((at) => element("button", {
      type: "button", onclick: () => this.flame.zoom(at), "aria-current": at === node ? "true" : undefined,
    }, this.label(at))));
    find("crumbs").scrollLeft = find("crumbs").scrollWidth;
    find("reset").disabled = node === 0;
  }

  describe(node) {
    const { tree, metric } = this;
    const weights = [["Total", tree.total[node]], ["Self", tree.self[node]]].map(([name, weight]) => {
      const shares = [`${percent(weight, tree.total[0])} of all`];
      if (this.flame.zoomed) shares.push(`${percent(weight, tree.total[this.flame.zoomed])} of the zoomed`);
      return [name, `${metric.show(weight)} · ${shares.join(" · ")}`];
    });
    const fn = tree.fn[node];
    if (fn < 0) {
      const group = fn === -1 ? null : tree.groups[-2 - fn];
      const where = group ? `${grouped(group.processes.size)} ${group.processes.size === 1 ? "process" : "processes"}` : "";
      return { name: this.label(node), where, source: "", weights };
    }
    const calls = this.capture.tree;
    const kind = { wait: "what the thread waited for", call: "device call", run: "on the device" }[calls.kind[fn]];
    return { name: this.label(node), where: calls.binary[fn] || kind || "", source: sourceOf(calls, fn), weights };
  }

  announce(node) {
    if (node < 0) return;
    const { name, where, weights } = this.describe(node);
    find("announce").textContent = [name, where, ...weights.map((pair) => pair.join(" "))].filter(Boolean).join(", ");
    const { x, y } = this.flame.place;
    this.showTooltip(node, x, y);
  }

  showTooltip(node, x, y) {
    const tooltip = find("tooltip");
    tooltip.hidden = node < 0;
    if (node < 0) return;
    const { name, where, source, weights } = this.describe(node);
    const fn = this.tree.fn[node];
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = fn < 0 ? this.colours.group : this.colours.ofFunction(fn);
    const list = element("dl");
    for (const [title, text] of weights) list.append(element("dt", {}, title), element("dd", {}, text));
    tooltip.replaceChildren(element("strong", {}, name),
      ...(where || source ? [element("p", {}, swatch, [where, source].filter(Boolean).join(" · "))] : []), list);
    const box = tooltip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
    const top = y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18;
    tooltip.style.transform = `translate(${left}px, ${top}px)`;
  }

  // ---- tables ----

  get tabTitles() {
    const { tables } = this.capture;
    return {
      functions: "Functions",
      waits: `Waits ${grouped(tables.waitsInAll)}`,
      calls: `Device calls ${grouped(tables.callsInAll)}`,
      ...(tables.runsInAll ? { runs: `GPU time ${grouped(tables.runsInAll)}` } : {}),
      processes: `Processes ${grouped(tables.processesInAll)}`,
      capture: "Capture",
    };
  }

  openTab(tab, scroll = false) {
    this.tab = tab;
    this.fillTable();
    if (scroll) find("tabs").scrollIntoView({ behavior: "smooth" });
  }

  fillTable() {
    find("tabs").replaceChildren(...Object.entries(this.tabTitles).map(([tab, title]) => element("button", {
      type: "button", role: "tab", id: `tab-${tab}`, "aria-selected": String(tab === this.tab),
      "aria-controls": "table", tabindex: tab === this.tab ? "0" : "-1",
      onclick: () => this.openTab(tab), onkeydown: (event) => this.tabKey(event, "tabs"),
    }, title)));
    find("table").setAttribute("aria-labelledby", `tab-${this.tab}`);
    if (this.tab === "capture") {
      find("table").replaceChildren(aboutCapture(this.capture));
      return;
    }
    const table = this.tables[this.tab];
    if (find("table").firstChild !== table.root) find("table").replaceChildren(table.root);
    table.show(this.tableRows());
    table.note(this.tab === "waits" ? this.bystanderNote() : "", () => {
      find("bystanders").checked = !this.choice.hideBystanders;
      this.choose({ hideBystanders: !this.choice.hideBystanders });
    });
  }

  bystanderNote() {
    const hidden = new Set(this.capture.tables.waits.map((row) => row.thread)
      .filter((thread) => isBystander(this.capture, thread))).size;
    return !hidden ? "" : this.choice.hideBystanders
      ? `Show ${grouped(hidden)} threads that slept all the time or are the kernel’s`
      : "Hide threads that slept all the time or are the kernel’s";
  }

  tableRows() {
    const { capture, choice } = this;
    const { tables, threads } = capture;
    const test = this.test ?? (() => true);
    const wanted = (process) => !choice.process || choice.process.has(process);
    if (this.tab === "functions") return this.functionRows(test);
    if (this.tab === "waits") {
      return tables.waits.filter((row) => wanted(threads.process[row.thread])
        && !(choice.hideBystanders && isBystander(capture, row.thread))
        && test(threadLabel(capture, row.thread), row.reason, row.waker, row.hint, row.binary));
    }
    if (this.tab === "calls") {
      return tables.calls.filter((row) => wanted(row.process) && test(row.function, row.api, row.op));
    }
    if (this.tab === "runs") {
      return tables.runs.filter((row) => wanted(row.process) && test(row.name, row.kind));
    }
    return tables.processes.filter((row) => wanted(row.process) && test(processLabel(capture, row.process)));
  }

  functionRows(test) {
    const calls = this.capture.tree;
    const { self, total } = functionWeights(this.tree, calls.name.length);
    const rows = [];
    total.forEach((weight, fn) => {
      if (!weight || !test(calls.name[fn], calls.binary[fn], calls.file[fn])) return;
      rows.push({
        fn, name: calls.name[fn], binary: calls.binary[fn], source: sourceOf(calls, fn), self: self[fn], total: weight,
      });
    });
    return rows;
  }

  // ---- light and dark ----

  storedTheme() {
    try {
      const stored = localStorage.getItem("sonde-theme");
      if (stored) return stored;
    } catch {
      // A page from a file may be refused storage.
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  setTheme(theme, keep = false) {
    document.documentElement.dataset.theme = theme;
    this.colours.setDark(theme === "dark");
    try {
      if (keep) localStorage.setItem("sonde-theme", theme);
    } catch {
      // Then the choice lasts for this visit only.
    }
    if (!this.tree) return;
    this.flame.draw();
    this.fillLegend();
    this.fillTable();
  }
}

loadCapture(find("data")).then((capture) => new Page(capture)).catch((error) => {
  find("failure").hidden = false;
  find("failure").textContent = `This report cannot be shown: ${error.message}`;
});
