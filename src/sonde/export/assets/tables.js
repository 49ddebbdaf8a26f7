// SPDX-License-Identifier: Apache-2.0
// Tables that sort by any column and filter by what is searched for.

const SHOWN_ROWS = 200;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// columns: {title, value(row), show(row), numeric, bar(row) in 0..1, code, swatch(row): a colour,
// pick: a click on the cell calls onPick(row), first: sort by it at first}
class DataTable {
  constructor(columns, { caption, onPick, rowLabel } = {}) {
    this.columns = columns;
    this.caption = caption;
    this.onPick = onPick;
    this.rowLabel = rowLabel;
    this.sorted = columns.findIndex((column) => column.first);
    this.descending = true;
    this.rows = [];
    this.limit = SHOWN_ROWS;
    this.body = element("tbody");
    this.more = element("button", { type: "button", class: "more", onclick: () => this.showMore() });
    this.footnote = element("button", { type: "button", class: "more", hidden: true });
    this.heads = columns.map((column, number) => this.head(column, number));
    this.root = element("div", { class: "sheet" },
      element("table", {}, element("caption", { class: "hidden" }, caption),
        element("thead", {}, element("tr", {}, ...this.heads)), this.body),
      this.more, this.footnote);
  }

  head(column, number) {
    const button = element("button", { type: "button", onclick: () => this.sortBy(number) }, column.title);
    return element("th", { scope: "col", class: column.numeric ? "number" : "" }, button);
  }

  sortBy(number) {
    this.descending = this.sorted === number ? !this.descending : Boolean(this.columns[number].numeric);
    this.sorted = number;
    this.render();
  }

  show(rows) {
    this.rows = rows;
    this.limit = SHOWN_ROWS;
    this.render();
  }

  showMore() {
    this.limit *= 5;
    this.render();
  }

  // A button below the table; '' for none.
  note(text, onPress) {
    this.footnote.hidden = !text;
    this.footnote.textContent = text;
    this.footnote.onclick = onPress;
  }

  render() {
    const column = this.columns[this.sorted];
    if (column) {
      const sign = this.descending ? -1 : 1;
      this.rows.sort((a, b) => {
        const [x, y] = [column.value(a), column.value(b)];
        return sign * (x < y ? -1 : x > y ? 1 : 0);
      });
    }
    this.heads.forEach((head, number) => {
      const order = number !== this.sorted ? "none" : this.descending ? "descending" : "ascending";
      head.setAttribute("aria-sort", order);
    });
    this.body.replaceChildren(...this.rows.slice(0, this.limit).map((row) => this.row(row)));
    if (!this.rows.length) {
      const cell = element("td", { colspan: this.columns.length, class: "none" }, "Nothing here.");
      this.body.append(element("tr", {}, cell));
    }
    const left = this.rows.length - this.limit;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show more (${grouped(Math.max(0, left))} left)`;
  }

  row(row) {
    const cells = this.columns.map((column) => {
      const text = column.show ? column.show(row) : String(column.value(row));
      const cell = element("td", {
        class: `${column.numeric ? "number" : ""} ${column.code ? "code" : ""}`.trim(),
        title: column.numeric ? undefined : text,
      });
      if (column.bar) {
        const bar = element("span", { class: "meter", "aria-hidden": "true" });
        bar.style.setProperty("--share", Math.min(1, column.bar(row) || 0));
        cell.append(bar);
      }
      if (column.swatch) {
        const swatch = element("i", { class: "swatch", "aria-hidden": "true" });
        swatch.style.background = column.swatch(row);
        cell.append(swatch);
      }
      if (column.pick && this.onPick) {
        const pick = () => this.onPick(row);
        cell.append(element("button", { type: "button", class: "link", onclick: pick }, text));
      } else {
        cell.append(text);
      }
      return cell;
    });
    return element("tr", {}, ...cells);
  }
}

const number = (title, value, show = grouped, more = {}) =>
  ({ title, value, show: (row) => show(value(row)), numeric: true, ...more });
const words = (title, value, more = {}) => ({ title, value, ...more });

function functionColumns(page) {
  return [
    words("Function", (row) => row.name, { code: true, pick: true, swatch: (row) => page.colours.ofFunction(row.fn) }),
    words("Binary", (row) => row.binary),
    words("Source", (row) => row.source),
    number("Self", (row) => row.self, (value) => page.metric.show(value), { first: true }),
    number("Self %", (row) => row.self, (value) => percent(value, page.tree.total[0]),
      { bar: (row) => row.self / page.tree.total[0] }),
    number("Total", (row) => row.total, (value) => page.metric.show(value)),
    number("Total %", (row) => row.total, (value) => percent(value, page.tree.total[0]),
      { bar: (row) => row.total / page.tree.total[0] }),
  ];
}

function waitColumns(capture) {
  const titles = { "off-cpu": "blocked", "run-queue": "for a CPU" };
  return [
    words("Thread", (row) => threadLabel(capture, row.thread)),
    words("Process", (row) => processLabel(capture, capture.threads.process[row.thread])),
    words("Waited", (row) => titles[row.kind]),
    words("Reason", (row) => (row.call && row.call !== row.reason ? `${row.reason} · ${row.call}` : row.reason)),
    number("Total", (row) => row.ns, duration, { first: true }),
    number("Of the recording", (row) => row.ns, (ns) => percent(ns, capture.capture.duration_ns),
      { bar: (row) => row.ns / capture.capture.duration_ns }),
    number("Waits", (row) => row.count, (count) => (count ? grouped(count) : "goes on")),
    number("Longest", (row) => row.max, duration),
    words("Woken by", (row) => row.waker || "–"),
    words("In", (row) => (row.hint ? `${row.hint} · ${row.binary}` : "–"), { code: true }),
  ];
}

function callColumns(capture) {
  return [
    words("Function", (row) => row.function, { code: true }),
    words("Process", (row) => processLabel(capture, row.process)),
    words("API", (row) => row.api),
    words("Does", (row) => row.op),
    number("Calls", (row) => row.count),
    number("Bytes", (row) => row.bytes, byteSize),
    words("Direction", (row) => row.directions || "–"),
    number("Time", (row) => row.ns, duration, { first: true }),
    number("Mean", (row) => row.ns / (row.count || 1), duration),
    number("Longest", (row) => row.max, duration),
    number("Errors", (row) => row.errors),
  ];
}

function runColumns(capture) {
  const whole = capture.tables.runs.reduce((sum, row) => sum + row.ns, 0);
  return [
    words("Name", (row) => row.name, { code: true }),
    words("Process", (row) => processLabel(capture, row.process)),
    words("Does", (row) => row.kind),
    number("Runs", (row) => row.count),
    number("Time", (row) => row.ns, duration, { first: true }),
    number("± (95 %)", (row) => row.error, duration),
    number("Share", (row) => row.ns, (ns) => percent(ns, whole), { bar: (row) => row.ns / whole }),
    number("Mean", (row) => row.ns / (row.count || 1), duration),
    number("p50", (row) => row.p50, duration),
    number("p99", (row) => row.p99, duration),
    number("Bytes", (row) => row.bytes, byteSize),
    number("Timed", (row) => row.timed),
    words("By", (row) => row.sources),
  ];
}

function processColumns(capture) {
  const whole = capture.tables.processes.reduce((sum, row) => sum + row.cpu, 0);
  return [
    words("Process", (row) => processLabel(capture, row.process), { pick: true }),
    number("Threads", (row) => row.threads),
    number("On CPU", (row) => row.cpu, duration, { first: true }),
    number("Share", (row) => row.cpu, (ns) => percent(ns, whole), { bar: (row) => row.cpu / whole }),
    number("Samples", (row) => row.samples),
    number("Blocked", (row) => row.blocked, duration),
    number("For a CPU", (row) => row.runqueue, duration),
    number("GPU API calls", (row) => row.calls),
    number("In device calls", (row) => row.device, duration),
  ];
}

// The tab on the capture itself: facts, metrics, losses and notices.
function aboutCapture(capture) {
  const about = capture.capture;
  const { tables, tree } = capture;
  const facts = [
    ["File", about.path],
    ["Recorded", `${new Date(about.wall_start_ns / 1e6).toLocaleString()} for ${duration(about.duration_ns)}`],
    ...Object.entries(about.host).map(([name, value]) => [`Host: ${name.replaceAll("_", " ")}`, String(value)]),
    ["Recorder", `Sonde ${about.version}${about.clean_end ? "" : ", killed before it could end the file"}`],
    ["Chunks", `${grouped(about.chunks)}, ${byteSize(about.size_bytes)}`],
    ...(tree.folded ? [["Picture", `${grouped(tree.folded)} of the lightest frames are drawn as “(lighter stacks)”`]] : []),
    ...tables.metrics.map((row) => [`${row.series} ${row.labels}`.trim(),
      row.series.endsWith("_bytes") ? byteSize(row.last) : String(Number(row.last.toPrecision(6)))]),
  ];
  const list = element("dl", { class: "facts" });
  for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
  const section = (title, rows, empty) => element("section", {}, element("h2", {}, title),
    rows.length ? element("ul", {}, ...rows.map((row) => element("li", {}, row))) : element("p", {}, empty));
  return element("div", { class: "about-capture" }, list, chartList(tables.charts),
    section("Lost", lossLines(capture), "Nothing was lost."),
    section("Notices", tables.notices.map((row) => `${grouped(row.count)} × ${row.name}${row.process ? ` in ${row.process}` : ""}: ${row.text}`),
      "No notices."));
}

function chartList(charts) {
  if (!charts.length) return element("section", {});
  const head = ["Metric", "Of", "", "Min", "Mean", "Max"].map((name) => element("th", {}, name));
  const rows = charts.map((one) => element("tr", {},
    element("td", {}, one.name), element("td", {}, one.of), element("td", { class: "bars" }, one.bars),
    ...one.values.map((text) => element("td", { class: "number" }, text))));
  return element("section", { class: "charts" }, element("h2", {}, "Metrics over time"),
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

function lossLines(capture) {
  const lines = capture.tables.losses.map((row) => `${grouped(row.amount)} × ${row.name}${row.text ? `: ${row.text}` : ""}`);
  if (!capture.capture.clean_end) lines.push("The recorder was killed: what it saw last never reached the file.");
  return lines;
}
