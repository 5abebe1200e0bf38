// Charts, legend and controls of one view.

const tag = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

class View {
  constructor(store, root) {
    Object.assign(this, { store, lanes: [], chosen: null, hovered: null, frozen: null, waiting: false, rows: new Map() });
    Object.assign(this, { smoothing: 0.9, weight: 0, log: true, x: "steps", window: null });
    this.stats = { redraws: 0, last_ms: 0, max_ms: 0, total_ms: 0 };
    root.classList.add("wb-live");
    root.setAttribute("data-lm-suppress-shortcuts", "true");
    root.wbLive = this;
    this.root = root;
    this.title = tag("strong");
    this.status = tag("span", { class: "wb-live-status", role: "status", "aria-live": "off" });
    this.freeze = tag("button", { type: "button", class: "wb-live-freeze", "aria-pressed": "false" }, "Freeze");
    this.all = tag("button", { type: "button", class: "wb-live-all" }, "Show all");
    this.reset = tag("button", { type: "button", title: "also: double click" }, "Reset zoom");
    const boxes = METRICS.map(({ key, title }) =>
      tag("div", { class: `wb-live-chart wb-live-${key}`, role: "img", "aria-label": `${title} of each trial against step` }));
    this.legend = tag("div", { class: "wb-live-legend", role: "group", "aria-label": "Trials: press one to isolate it" });
    this.tip = tag("div", { class: "wb-live-tip", hidden: "" });
    root.append(
      tag("div", { class: "wb-live-head" }, this.title, this.status, tag("span", { class: "wb-live-room" }), this.reset, this.all, this.freeze),
      this.tools(),
      tag("div", { class: "wb-live-body" },
        tag("div", { class: "wb-live-charts" }, boxes[0], tag("div", { class: "wb-live-pair" }, boxes[1], boxes[2])),
        this.legend),
      this.tip,
    );
    this.charts = METRICS.map((metric, i) => new Chart(this, metric, boxes[i]));
    this.freeze.addEventListener("click", () => this.toggleFreeze());
    this.all.addEventListener("click", () => this.choose(null));
    this.reset.addEventListener("click", () => this.zoom(null));
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.choose(null);
      event.stopPropagation(); // the notebook has keys of its own
    });
    this.sizes = new ResizeObserver(() => this.schedule());
    this.sizes.observe(root);
    this.themes = new MutationObserver(() => {
      for (const chart of this.charts) chart.shape = "";
      this.schedule();
    });
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
    store.views.add(this);
    this.schedule();
  }

  // Smoothing, scale, x axis, zoom and download.
  tools() {
    const button = (text, attributes, does) => {
      const made = tag("button", { type: "button", ...attributes }, text);
      made.addEventListener("click", does);
      return made;
    };
    this.slider = tag("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0.9", "aria-label": "Smoothing" });
    this.told = tag("span", { class: "wb-live-told", "aria-hidden": "true" });
    this.slider.addEventListener("input", () => this.redraw({ smoothing: Number(this.slider.value) }));
    this.logs = button("Log y", { "aria-pressed": "true" }, () => this.redraw({ log: !this.log }));
    this.axis = tag("select", { "aria-label": "x axis" }, ...Object.entries(AXES).map(([value, text]) => tag("option", { value }, text)));
    this.axis.addEventListener("change", () => this.redraw({ x: this.axis.value, window: null }));
    const save = (kind) => button(kind.toUpperCase(), { "aria-label": `Download as ${kind.toUpperCase()}` }, () => download(this, kind));
    return tag("div", { class: "wb-live-tools", role: "group", "aria-label": "How the curves are drawn" },
      tag("label", {}, "Smoothing", this.slider, this.told), this.logs, tag("label", {}, "x", this.axis),
      tag("span", { class: "wb-live-room" }), tag("span", { class: "wb-live-save" }, "Download", ...["svg", "png", "csv"].map(save)));
  }

  redraw(changed) {
    Object.assign(this, changed);
    this.schedule();
  }

  // Show a part of the x axis, in its unit; null shows all of it.
  zoom(window) {
    this.redraw({ window });
  }

  // How a lane's steps lie on the x axis, and back.
  place(lane) {
    const per = (this.x === "examples" && lane.info.examples) || 1;
    const { points, n } = lane.points.seconds;
    const timed = { xOf: (step) => height(points.x, points.y, n, step), stepOf: (x) => height(points.y, points.x, n, x) };
    Object.assign(lane, this.x === "time" ? timed : { xOf: (step) => step * per, stepOf: (x) => x / per });
  }

  // State of the controls, and what of it needs the trials.
  settle(lanes) {
    const timed = ({ points: { seconds } }) => seconds.n && Number.isFinite(seconds.points.y[seconds.n - 1]);
    const has = { steps: true, examples: lanes.length && lanes.every((lane) => lane.info.examples), time: lanes.length && lanes.every(timed) };
    for (const option of this.axis.options) option.hidden = option.disabled = !has[option.value];
    if (!has[this.x]) Object.assign(this, { x: "steps", window: null });
    this.axis.value = this.x;
    const longest = Math.max(PARTS, ...lanes.map((lane) => lane.info.steps));
    this.weight = this.smoothing ** (PARTS / longest);
    const over = this.smoothing ? `${this.smoothing.toFixed(2)}: about ${count(1 / (1 - this.weight))} steps` : "off";
    this.told.textContent = over;
    this.slider.setAttribute("aria-valuetext", over);
    this.logs.setAttribute("aria-pressed", String(this.log));
    this.reset.disabled = !this.window;
  }

  destroy() {
    this.store.views.delete(this);
    this.sizes.disconnect();
    this.themes.disconnect();
    for (const chart of this.charts) chart.destroy();
    this.gone = true;
  }

  schedule() {
    if (this.waiting || this.gone) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.gone || !this.root.isConnected || !this.root.clientWidth) return;
      const begun = performance.now();
      this.draw();
      const ms = performance.now() - begun;
      const { stats } = this;
      Object.assign(stats, {
        redraws: stats.redraws + 1, last_ms: ms, max_ms: Math.max(stats.max_ms, ms), total_ms: stats.total_ms + ms,
      });
    });
  }

  // What is drawn: the store's data, or as much of it as there was when the picture was frozen.
  snapshot() {
    const { store } = this;
    const lanes = [...store.trials.values()].map((info) => ({
      trial: info.trial,
      info,
      points: Object.fromEntries(KEYS.map((key) => {
        const points = store.pointsOf(info.trial)[key];
        return [key, { points, n: points.n }];
      })),
    }));
    return { lanes, head: store.head, status: store.status };
  }

  draw() {
    const { lanes, head, status } = this.frozen || this.snapshot();
    lanes.sort((a, b) => a.info.lr - b.info.lr || a.trial - b.trial);
    if (this.chosen && !lanes.some((lane) => this.chosen.has(lane.trial))) this.chosen = null;
    for (const lane of lanes) {
      const old = lane.info.stage !== status.stage && !head.still;
      lane.dim = this.chosen ? (this.chosen.has(lane.trial) ? "" : "hidden") : old ? "old" : "";
    }
    this.lanes = lanes;
    this.colors = this.paint(lanes);
    const drawn = lanes.filter((lane) => METRICS.some(({ key }) => lane.points[key].n));
    drawn.sort((a, b) => (b.dim === "hidden") - (a.dim === "hidden") || (b.dim === "old") - (a.dim === "old"));
    this.settle(drawn);
    for (const lane of lanes) this.place(lane);
    const [from, to] = this.window || [0, this.reach(drawn)];
    const window = { from, to, x: this.x };
    this.headline(head, status);
    this.list(lanes);
    for (const chart of this.charts) chart.draw(drawn, window);
  }

  // Where the x axis ends: with the length of the trials, while one of them trains; of time, whose end is not known, it grows by doubling.
  reach(lanes) {
    const shown = lanes.filter((lane) => lane.dim !== "hidden");
    const timed = this.x === "time";
    let [last, total] = timed ? [0, 0] : [1, 1];
    for (const lane of shown.length ? shown : lanes) {
      const { points, n } = lane.points.loss;
      if (n) last = Math.max(last, lane.xOf(points.x[n - 1] + 1));
      if (lane.dim === "") total = Math.max(total, lane.xOf(lane.info.steps));
    }
    total = Math.max(total, last);
    if (Object.keys(this.store.status.states).every((state) => state !== "running" && state !== "waiting")) return last || 1;
    return timed ? 2 ** Math.ceil(Math.log2(last || 1)) : Math.ceil(total);
  }

  paint(lanes) {
    const stops = dark() ? SEQUENCE.dark : SEQUENCE.light;
    // By rank: one lr far off leaves the others their colours; the lr of a whole run counts as much as those of all short runs.
    const longest = Math.max(...lanes.map((lane) => lane.info.steps));
    const whole = new Set(lanes.filter((lane) => 2 * lane.info.steps >= longest).map((lane) => lane.info.lr));
    const lrs = [...new Set(lanes.map((lane) => lane.info.lr))];
    const places = new Map();
    let at = 0;
    for (const lr of lrs) {
      const half = whole.has(lr) ? Math.max(1, lrs.length - whole.size) / 2 : 0.5;
      places.set(lr, at + half);
      at += 2 * half;
    }
    const [first, last] = [places.get(lrs[0]), places.get(lrs.at(-1))];
    const share = (lane, i) => (lrs.length > 1 ? (places.get(lane.info.lr) - first) / (last - first) : lanes.length > 1 ? i / (lanes.length - 1) : 0.5);
    return new Map(lanes.map((lane, i) => [lane.trial, mix(stops, share(lane, i))]));
  }

  stroke(trial, alpha) {
    const lane = this.lanes.find((each) => each.trial === trial);
    const pale = !lane || lane.dim === "hidden" ? 0.1 : lane.dim === "old" ? 0.35 : lost(lane) ? 0.6 : 1;
    return `rgba(${(this.colors.get(trial) || [128, 128, 128]).join()},${alpha || pale})`;
  }

  headline(head, status) {
    this.title.textContent = head.name ? `${head.name} · ${head.workload}` : "Preparing";
    const states = status.states;
    const total = Object.values(states).reduce((a, b) => a + b, 0);
    const said = [
      head.still ? "" : status.plan + (status.steps < status.planned ? ` · ${Math.round((100 * status.steps) / status.planned)}%` : ""),
      `${total} trial${total === 1 ? "" : "s"}: ` + Object.entries(STATES).filter(([key]) => states[key]).map(([key, [sign, word]]) => `${sign} ${states[key]} ${word}`).join(", "),
      `${count(status.steps)} steps`,
      status.rate !== null && !head.still ? `${count(status.rate)} steps/s${this.left(status)}` : "",
    ];
    if (!status.steps) said.splice(1, 3, "the first trials are being prepared; curves begin with their first recorded step");
    this.status.textContent = head.name ? said.filter(Boolean).join(" · ") : "data and model are being loaded; curves begin with the first trial";
    this.freeze.hidden = head.still;
    this.all.disabled = !this.chosen;
  }

  // Time until what is planned, or the trials that are known and not at their end, have run, at the rate of now.
  left({ rate, steps: done, planned }) {
    const going = this.lanes.filter((lane) => ["running", "waiting"].includes(lane.info.state));
    const known = going.reduce((all, lane) => all + Math.max(0, lane.info.steps - lane.points.loss.n), 0);
    const steps = Math.max(known, planned - done || 0);
    if (!(rate > 0) || !steps) return "";
    return steps / rate < 90 ? ` · ${Math.ceil(steps / rate)} s left` : ` · ${Math.round(steps / rate / 60)} min left`;
  }

  list(lanes) {
    const stages = new Map();
    for (const lane of lanes) stages.set(lane.info.stage, [...(stages.get(lane.info.stage) || []), lane]);
    const longest = (group) => Math.max(...group.map((lane) => lane.info.steps)), first = (group) => Math.min(...group.map((lane) => lane.trial));
    const order = [...stages].sort(([, a], [, b]) => longest(b) - longest(a) || first(a) - first(b)); // whole runs before short ones
    const key = order.map(([stage, group]) => `${stage}:${group.map((lane) => lane.trial).join()}`).join("|");
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.rows.clear();
      this.legend.replaceChildren(...(order.length ? [tag("div", { class: "wb-live-what" }, "last loss")] : []));
      for (const [stage, group] of order) {
        const heading = tag("button", { type: "button", class: "wb-live-stage", "aria-pressed": "false" }, stage);
        const trials = group.map((lane) => lane.trial);
        heading.addEventListener("click", () => this.choose(trials));
        heading.wbTrials = trials;
        this.legend.append(heading, ...group.map((lane) => this.row(lane)));
      }
      const now = lanes.find((lane) => lane.info.state === "running");
      if (now) this.legend.scrollTop = this.rows.get(now.trial).row.offsetTop - this.legend.offsetTop - this.legend.clientHeight / 2;
    }
    for (const heading of this.legend.querySelectorAll(".wb-live-stage")) {
      heading.setAttribute("aria-pressed", String(this.isChosen(heading.wbTrials)));
    }
    for (const lane of lanes) this.fill(lane);
  }

  row(lane) {
    const row = tag("button", { type: "button", class: "wb-live-row", "data-trial": lane.trial });
    const part = (name) => row.appendChild(tag("span", { class: name }));
    const parts = { swatch: part("wb-live-swatch"), name: part("wb-live-name"), loss: part("wb-live-value"), state: part("wb-live-state") };
    row.addEventListener("click", () => this.choose([lane.trial]));
    for (const on of ["pointerenter", "focus"]) row.addEventListener(on, () => this.hover(lane.trial));
    for (const off of ["pointerleave", "blur"]) row.addEventListener(off, () => this.hover(null));
    this.rows.set(lane.trial, { row, parts });
    return row;
  }

  fill(lane) {
    const { row, parts } = this.rows.get(lane.trial);
    const { info } = lane;
    const { points, n } = lane.points.loss;
    const [sign, word] = STATES[info.state] || ["?", info.state];
    const set = (element, text) => element.textContent !== text && (element.textContent = text);
    set(parts.name, `lr ${short(info.lr)}${info.note ? ` · ${brief(info.note)}` : ""}`);
    set(parts.loss, n ? short(points.y[n - 1]) : "");
    set(parts.state, sign);
    const about = `trial ${info.trial}, ${info.stage}, lr ${short(info.lr)}${info.note ? `, ${info.note}` : ""}, ${word}` + (n ? `, loss ${short(points.y[n - 1])} at step ${count(points.x[n - 1])}` : "");
    row.title = about;
    row.setAttribute("aria-label", about);
    row.setAttribute("aria-pressed", String(this.isChosen([lane.trial])));
    row.classList.toggle("wb-live-hidden", lane.dim === "hidden");
    parts.swatch.style.borderTopColor = this.stroke(lane.trial, 1);
    parts.swatch.style.borderTopStyle = lost(lane) ? "dashed" : "solid";
  }

  isChosen(trials) {
    return !!this.chosen && this.chosen.size === trials.length && trials.every((trial) => this.chosen.has(trial));
  }

  // Show these trials alone; the same ones again, or null, give the others back.
  choose(trials) {
    this.chosen = trials === null || this.isChosen(trials) ? null : new Set(trials);
    this.schedule();
  }

  toggleFreeze() {
    this.frozen = this.frozen ? null : this.snapshot();
    this.freeze.textContent = this.frozen ? "Frozen: go on" : "Freeze";
    this.freeze.setAttribute("aria-pressed", String(!!this.frozen));
    this.root.classList.toggle("wb-live-frozen", !!this.frozen);
    this.schedule();
  }

  hover(trial) {
    if (trial === this.hovered) return;
    this.hovered = trial;
    for (const chart of this.charts) if (chart.plot) chart.highlight(trial);
    for (const [number, { row }] of this.rows) row.classList.toggle("wb-live-hover", number === trial);
  }

  point(chart, event) {
    const box = chart.plot.over.getBoundingClientRect();
    const { lane, step, smoothed } = chart.nearest(event.clientX - box.left, event.clientY - box.top);
    this.hover(lane ? lane.trial : null);
    const facts = lane ? this.facts(lane, step, chart.metric, smoothed) : this.column(chart, event.clientX - box.left);
    this.tip.hidden = !facts.length;
    if (!facts.length) return;
    this.tip.replaceChildren(...facts.map(([name, value]) => tag("div", {}, tag("span", {}, name), tag("b", {}, value))));
    const root = this.root.getBoundingClientRect();
    const [x, y] = [event.clientX - root.left, event.clientY - root.top];
    const right = x + 16 + this.tip.offsetWidth < root.width;
    this.tip.style.left = `${Math.max(0, right ? x + 14 : x - 14 - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y + 10, root.height - this.tip.offsetHeight - 4))}px`;
  }

  // Away from every line: what each has there.
  column(chart, left) {
    const all = chart.values(left);
    const rows = all.slice(0, MOST_TOLD).map(([lane, value]) => [`lr ${short(lane.info.lr)} · trial ${lane.trial}`, short(value)]);
    return all.length > MOST_TOLD ? [...rows, [`and ${all.length - MOST_TOLD} below`, "…"]] : rows;
  }

  facts(lane, step, metric, smoothed) {
    const at = (key) => {
      const { points, n } = lane.points[key];
      const index = Math.max(0, points.at(step, n));
      return n ? [points.x[index], points.y[index]] : [null, null];
    };
    const { info } = lane;
    const facts = [
      ["trial", `${info.trial} · ${info.stage}`],
      ["lr", short(info.lr) + (short(at("lr")[1]) === short(info.lr) ? "" : `, here ${short(at("lr")[1])}`)],
      ["step", `${count(at("loss")[0])} of ${count(info.steps)}`],
      ["training time", this.x === "time" && `${short(at("seconds")[1])} s`],
      ["loss", short(at("loss")[1])],
      ["gradient norm", short(at("grad_norm")[1])],
      ["state", (STATES[info.state] || ["", info.state])[1]],
    ];
    facts.splice(1, 0, ["with", info.note]);
    facts.splice(-1, 0, [`${metric.title}, smoothed`, smoothed !== null && short(smoothed)]);
    return facts.filter(([, value]) => value);
  }

  leave() {
    this.tip.hidden = true;
    this.hover(null);
  }

  click(chart, event) {
    const box = chart.plot.over.getBoundingClientRect();
    const { lane } = chart.nearest(event.clientX - box.left, event.clientY - box.top);
    this.choose(lane ? [lane.trial] : null);
  }
}
