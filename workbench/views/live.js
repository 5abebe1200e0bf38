// The page's side of the live view and of the curves panel. uPlot comes before this file in the same module, and SEQUENCE,
// the colours from the smallest to the largest lr.
//
// The kernel only tells what is new; everything that one does with the picture happens here, because the kernel is busy
// training. One store of curves a model, any number of views of it.

const METRICS = [
  { key: "loss", title: "training loss", noisy: true },
  { key: "grad_norm", title: "gradient norm", noisy: true },
  { key: "lr", title: "learning rate" },
];
const KEYS = METRICS.map(({ key }) => key);
const AXES = { steps: "steps", examples: "examples" };
const BRIEF = {
  max_grad_norm: "clip", batch_size: "batch", shared_seed: "seed", per_host_seed: "data seed", warmup_steps: "warmup",
  accumulate_steps: "accumulate", bn_stat_examples: "bn examples", total_steps: "steps", momentum: "momentum",
};
const brief = (note) => note.replace(/(\w+)=/g, (_, name) => `${BRIEF[name] || name} `);
const STATES = {
  waiting: ["·", "waiting"],
  running: ["▸", "running"],
  complete: ["✓", "complete"],
  diverged: ["✕", "diverged"],
  stopped: ["■", "stopped"],
  failed: ["!", "failed"],
};
const MOST_POINTS = 65536; // of one curve; what is more is thinned, lowest and highest kept
const NEAR = 28; // pixels from a line within which the pointer means it
const FAINT = 0.25; // of a raw curve below its smoothed one
const FEW = 4; // lines that may be thicker
const MANY = 32; // more lines are drawn from columns of two pixels, in half the time
const ROOM = 1e4; // logarithmic: a curve that leaves its start so far behind does not flatten the others
const FAR = 2; // linear: nor does one whose peak is so many times the median peak of the trials that did not diverge (rule of thumb)
const PARTS = 1000; // the weight of smoothing is that from one thousandth of the longest trial to the next, so that it means the same in any

const short = (value) => {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : value.toPrecision(3);
  return text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "").replace("e+", "e");
};
const count = (value) => Math.round(value).toLocaleString("en");

// ---------------------------------------------------------------------------------------------------- data

class Points {
  constructor(x, y) {
    this.x = x || new Int32Array(256);
    this.y = y || new Float32Array(256);
    this.n = x ? x.length : 0;
    this.version = 0;
  }

  append(x, y) {
    const n = this.n + x.length;
    if (n > this.x.length) {
      const size = Math.max(2 * this.x.length, n);
      const [oldX, oldY] = [this.x, this.y];
      this.x = new Int32Array(size);
      this.y = new Float32Array(size);
      this.x.set(oldX.subarray(0, this.n));
      this.y.set(oldY.subarray(0, this.n));
    }
    this.x.set(x, this.n);
    this.y.set(y, this.n);
    this.n = n;
  }

  // Keep the lowest and the highest of every four.
  thinned() {
    const x = [];
    const y = [];
    for (let i = 0; i < this.n; i += 4) {
      const end = Math.min(i + 4, this.n);
      let [low, high] = [i, i];
      for (let k = i; k < end; k++) {
        if (this.y[k] < this.y[low] || Number.isNaN(this.y[low])) low = k;
        if (this.y[k] > this.y[high] || Number.isNaN(this.y[high])) high = k;
      }
      for (const k of low === high ? [low] : [Math.min(low, high), Math.max(low, high)]) {
        x.push(this.x[k]);
        y.push(this.y[k]);
      }
    }
    return new Points(Int32Array.from(x), Float32Array.from(y));
  }

  // Index of the last point at or before `step`, -1 where there is none.
  at(step, n) {
    let [low, high] = [0, n];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.x[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

// Lowest and highest value in every pixel column of the window, kept up as points arrive; with a weight, of the smoothed curve:
// the mean of all earlier values, each weighing `weight` to the power of its distance in steps.
class Columns {
  constructor(points, width, key, { from, to, xOf }, weight) {
    Object.assign(this, { points, width, key, from, to, xOf, weight, done: 0, before: null, after: null });
    this.low = new Float32Array(width).fill(NaN);
    this.high = new Float32Array(width).fill(NaN);
    this.falls = new Uint8Array(width); // whether the highest came first
    this.min = Infinity;
    this.max = -Infinity;
    this.tiny = Infinity; // the smallest value above 0
    this.last = -1; // index of the last finite point
    Object.assign(this, { sum: 0, share: 0, step: 0 });
  }

  smoothed(step, value) {
    if (!this.weight) return value;
    const kept = this.weight ** (step - this.step);
    this.sum = kept * this.sum + value;
    this.share = kept * this.share + 1;
    this.step = step;
    return this.sum / this.share;
  }

  take(n) {
    const { x, y } = this.points;
    const scale = this.width / (this.to - this.from);
    for (let i = this.done; i < n; i++) {
      if (!Number.isFinite(y[i])) continue;
      this.last = i;
      const value = this.smoothed(x[i], y[i]);
      const at = (this.xOf(x[i]) - this.from) * scale;
      if (at < 0) {
        this.before = [at, value];
        continue;
      }
      if (at > this.width) {
        this.after = this.after || [at, value];
        continue;
      }
      const c = Math.min(this.width - 1, at | 0);
      if (!(value >= this.low[c])) {
        this.low[c] = value;
        this.falls[c] = 1;
      }
      if (!(value <= this.high[c])) {
        this.high[c] = value;
        this.falls[c] = 0;
      }
      if (value < this.min) this.min = value;
      if (value > this.max) this.max = value;
      if (value > 0 && value < this.tiny) this.tiny = value;
    }
    this.done = Math.max(this.done, n);
  }
}

class Store {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.clear();
    this.expected = null; // number of the next message, once there was one that told everything
    this.missed = 0;
    this.askedAt = -Infinity;
    model.on("msg:custom", (content, buffers) => this.receive(content, buffers || []));
    if (model.get("still")) this.ask(); // a live view is told everything in its first seconds without asking
  }

  clear() {
    this.head = { name: "", workload: "", still: false };
    this.status = { stage: "", steps: 0, rate: null, states: {} };
    this.trials = new Map();
    this.points = new Map();
  }

  // Ask for everything; the kernel answers while it trains where page and kernel have a second way to talk.
  ask() {
    if (performance.now() - this.askedAt < 2000) return;
    this.askedAt = performance.now();
    this.model.send({ kind: "all" });
  }

  receive(content, buffers) {
    if (content.kind === "all") {
      this.clear();
      this.head = { name: content.name, workload: content.workload, still: !!this.model.get("still") };
    } else if (content.number !== this.expected) {
      this.missed += 1;
      if (this.expected !== null || this.missed > 60) this.ask(); // something was lost: what follows would have a hole
      return;
    }
    this.expected = content.number + 1;
    this.missed = 0;
    this.status = content.status;
    for (const trial of content.trials) this.trials.set(trial.trial, trial);
    let next = 0;
    for (const part of content.parts) {
      const x = new Int32Array(bytes(buffers[next++]));
      for (const metric of part.metrics) {
        const y = new Float32Array(bytes(buffers[next++]));
        let from = 0;
        for (const [trial, rows] of part.rows) {
          this.pointsOf(trial)[metric].append(x.subarray(from, from + rows), y.subarray(from, from + rows));
          from += rows;
        }
      }
    }
    for (const view of this.views) view.schedule();
  }

  pointsOf(trial) {
    if (!this.points.has(trial)) {
      this.points.set(trial, Object.fromEntries(KEYS.map((key) => [key, new Points()])));
    }
    const points = this.points.get(trial);
    for (const key of KEYS) if (points[key].n > MOST_POINTS) points[key] = points[key].thinned();
    return points;
  }
}

const bytes = (view) =>
  view instanceof ArrayBuffer ? view : view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);

// ---------------------------------------------------------------------------------------------------- one chart

class Chart {
  constructor(view, metric, element) {
    Object.assign(this, { view, metric, element, plot: null, shape: "", columns: new Map(), smooth: new Map() });
    this.overlay = document.createElement("canvas");
    this.overlay.className = "wb-live-over";
  }

  destroy() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  draw(lanes, window) {
    const width = Math.max(160, this.element.clientWidth);
    const height = Math.max(110, this.element.clientHeight) - 20; // the title stands above
    const wide = Math.max(60, Math.floor((width - 76) / (lanes.length > MANY ? 2 : 1)));
    const weight = this.metric.noisy ? this.view.weight : 0;
    for (const lane of lanes) this.keep(this.columns, lane, wide, window, 0);
    if (weight) for (const lane of lanes) this.keep(this.smooth, lane, wide, window, weight);
    else this.smooth.clear();
    const range = this.range(lanes);
    const shape = [lanes.map((lane) => lane.trial).join(), width, height, range.log].join("|");
    this.window = window;
    this.wide = wide;
    this.limits = range;
    this.lanes = lanes;
    const data = this.data(lanes);
    if (shape !== this.shape) {
      this.destroy();
      this.shape = shape;
      this.build(lanes, width, height, range, data);
    } else {
      this.style(lanes);
      this.plot.setData(data, false);
      this.plot.batch(() => {
        this.plot.setScale("x", { min: window.from, max: window.to });
        this.plot.setScale("y", { min: range.min, max: range.max });
      });
    }
    const above = lanes.filter((lane) => lane.dim !== "hidden" && this.columns.get(lane.trial).max > range.max).length;
    this.plot.root.querySelector(".u-title").textContent = this.metric.title + (above ? ` · ${above} beyond the scale` : "");
  }

  // Keep a lane's columns up to date, begun anew where the window, the x axis or the smoothing is another.
  keep(all, lane, wide, { from, to, x }, weight) {
    const { points, n } = lane.points[this.metric.key];
    const key = [from, to, x, weight].join();
    let columns = all.get(lane.trial);
    if (!columns || columns.points !== points || columns.width !== wide || columns.key !== key || columns.done > n) {
      columns = new Columns(points, wide, key, { from, to, xOf: lane.xOf }, weight);
      all.set(lane.trial, columns);
    }
    columns.take(n);
  }

  // What stands for a trial: its smoothed curve where there is one.
  shown(trial) {
    return this.smooth.get(trial) || this.columns.get(trial);
  }

  // uPlot draws axes and keeps places; lines are drawn from the columns, which hold all that can be seen of them.
  data(lanes) {
    return [[this.window.from, this.window.to], ...lanes.map(() => [null, null])];
  }

  // A function from values to pixels of the canvas, or of the page.
  heights(top, height) {
    const { min, max, log, floor } = this.limits; // on a logarithmic axis 0 is drawn at its lower edge
    const place = log ? Math.log : (value) => value;
    const [low, scale] = [place(min), height / (place(max) - place(min))];
    const above = top - height; // what leaves the picture does so without overflowing the canvas
    return (value) => Math.max(above, top + height - (place(log && value <= 0 ? floor : value) - low) * scale);
  }

  // From column to column, through the lowest and the highest value of each; `pen` is a path or a canvas.
  trace(pen, columns, left, width, top, height) {
    const yOf = this.heights(top, height);
    const step = width / columns.width;
    const { low, high, falls } = columns;
    let [down, lastY, skipped] = [false, NaN, null];
    if (columns.before) {
      lastY = yOf(columns.before[1]);
      pen.moveTo(left + columns.before[0] * step, lastY);
      down = true;
    }
    for (let c = 0; c < columns.width; c++) {
      if (low[c] !== low[c]) continue;
      const x = left + (c + 0.5) * step;
      const first = yOf(falls[c] ? high[c] : low[c]);
      const second = low[c] === high[c] ? first : yOf(falls[c] ? low[c] : high[c]);
      if (!down) pen.moveTo(x, first);
      else if (Math.abs(first - lastY) < 0.05 && second === first) {
        skipped = x; // a level stretch is one line
        continue;
      } else {
        if (skipped !== null) pen.lineTo(skipped, lastY);
        pen.lineTo(x, first);
      }
      skipped = null;
      if (second !== first) pen.lineTo(x, second);
      down = true;
      lastY = second;
    }
    if (skipped !== null) pen.lineTo(skipped, lastY);
    if (columns.after && down) pen.lineTo(left + columns.after[0] * step, yOf(columns.after[1]));
  }

  paths(lane) {
    const path = new Path2D();
    const { left, width, top, height } = this.plot.bbox;
    this.trace(path, this.shown(lane.trial), left, width, top, height);
    return { stroke: path, fill: null, clip: null, band: null, gaps: null, flags: 1 };
  }

  range(lanes) {
    let [min, max, tiny, start] = [Infinity, -Infinity, Infinity, -Infinity];
    const [peaks, gone] = [[], []];
    for (const lane of lanes) {
      const found = this.columns.get(lane.trial);
      if (lane.dim === "hidden" || found.min === Infinity) continue;
      (lost(lane) ? gone : peaks).push(found.max);
      min = Math.min(min, found.min);
      max = Math.max(max, found.max);
      tiny = Math.min(tiny, found.tiny);
      const { points, n } = lane.points[this.metric.key];
      const first = n ? Math.abs(points.y[0]) : 0;
      if (Number.isFinite(first)) start = Math.max(start, first);
    }
    for (const clip of this.clips()) {
      max = Math.max(max, clip);
      tiny = Math.min(tiny, clip);
      min = Math.min(min, clip);
    }
    if (min === Infinity) return { log: true, min: 0.1, max: 1, floor: 0.1 };
    const log = this.view.log && min >= 0 && tiny < Infinity;
    const sorted = (peaks.length ? peaks : gone).sort((a, b) => a - b);
    const middle = sorted.length ? sorted[sorted.length >> 1] : 0;
    const ceiling = log ? ROOM * start : FAR * middle;
    if (this.metric.key !== "lr" && ceiling > 0) max = Math.min(max, ceiling);
    if (!log) {
      const room = 0.05 * (max - min || Math.abs(max) || 1);
      return { log, min: min - room, max: max + room, floor: min };
    }
    const low = Math.max(tiny, max * 1e-12);
    const room = Math.max(1.06, (max / low) ** 0.04);
    return { log, min: low / room, max: max * room, floor: low };
  }

  // Clip thresholds of what is shown.
  clips() {
    if (this.metric.key !== "grad_norm") return [];
    const shown = this.view.lanes.filter((lane) => lane.dim === "" && lane.info.clip !== null);
    return [...new Set(shown.map((lane) => lane.info.clip))].filter((clip) => clip > 0).slice(0, 3);
  }

  style(lanes) {
    const few = lanes.filter((lane) => lane.dim === "").length <= FEW;
    lanes.forEach((lane, i) => Object.assign(this.plot.series[i + 1], look(lane, few)));
  }

  build(lanes, width, height, range, data) {
    const ink = () => css("--jp-ui-font-color1", "#333");
    const grid = { stroke: () => css("--jp-border-color2", "#ddd"), width: 0.6 };
    const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "11px sans-serif", gap: 3 };
    const few = lanes.filter((lane) => lane.dim === "").length <= FEW;
    const series = lanes.map((lane) => ({
      scale: "y", points: { show: false }, paths: (plot) => ((this.plot = plot), this.paths(lane)), stroke: () => this.view.stroke(lane.trial), ...look(lane, few),
    }));
    this.element.replaceChildren();
    this.plot = new uPlot(
      {
        width,
        height,
        title: this.metric.title,
        padding: [4, 20, 0, 0],
        legend: { show: false },
        cursor: {
          points: { show: false }, y: false, drag: { x: true, y: false, setScale: false, dist: 4 },
          bind: { dblclick: () => () => this.view.zoom(null) },
        },
        scales: {
          x: { time: false, auto: false, range: () => [this.window.from, this.window.to] },
          y: { auto: false, distr: range.log ? 3 : 1, log: 10, range: () => [this.limits.min, this.limits.max] },
        },
        axes: [
          { ...axis, size: 26, space: 60, values: (_, ticks) => (this.xTicks = ticks).map((v) => (v === null ? "" : count(v))) },
          { ...axis, scale: "y", size: 56, space: 26, values: (_, ticks) => (this.yTicks = ticks).map((v) => (v === null ? "" : short(v))), ...(range.log ? { splits: () => this.ticks(), filter: (_, ticks) => ticks } : {}) },
        ],
        series: [{}, ...series],
        hooks: {
          setSelect: [(plot) => this.select(plot)],
          drawAxes: [() => this.faint()],
          draw: [() => this.marks(), () => this.highlight(this.view.hovered)],
        },
      },
      data,
      this.element,
    );
    this.plot.over.append(this.overlay);
    this.plot.over.addEventListener("pointermove", (event) => this.view.point(this, event));
    this.plot.over.addEventListener("pointerleave", () => this.view.leave());
    this.plot.over.addEventListener("click", (event) => this.view.click(this, event));
  }

  // Ticks of a logarithmic axis: powers of ten, with 2 and 5 between where there are few.
  ticks() {
    const [low, high] = [Math.log10(this.limits.min), Math.log10(this.limits.max)];
    const every = Math.max(1, Math.ceil((high - low) / 6));
    const between = high - low < 0.6 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : high - low < 2.2 ? [1, 2, 5] : [1];
    const found = [];
    for (let e = Math.floor(low); e <= high; e += 1) {
      if (e % every) continue;
      for (const m of between) {
        const value = Number(`${m}e${e}`);
        if (value >= this.limits.min && value <= this.limits.max) found.push(value);
      }
    }
    return found.length > 1 ? found : [this.limits.min, this.limits.max].map((v) => Number(v.toPrecision(2)));
  }

  // What was dragged over becomes the window of all three charts.
  select(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    const [from, to] = [left, left + width].map((at) => plot.posToVal(at, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.view.zoom([from, to]);
  }

  // The raw curves, below the smoothed ones.
  faint() {
    if (!this.smooth.size || !this.plot) return;
    const { ctx, bbox } = this.plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = devicePixelRatio || 1;
    for (const lane of this.lanes) {
      ctx.strokeStyle = this.view.stroke(lane.trial, lane.dim === "hidden" ? 0.04 : FAINT);
      ctx.beginPath();
      this.trace(ctx, this.columns.get(lane.trial), bbox.left, bbox.width, bbox.top, bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Clip lines, and a cross where a diverged trial ends.
  marks() {
    const { ctx, bbox } = this.plot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 6 * ratio, bbox.width + 8 * ratio, bbox.height + 8 * ratio);
    ctx.clip();
    for (const clip of this.clips()) {
      const y = this.plot.valToPos(clip, "y", true);
      ctx.strokeStyle = ctx.fillStyle = css("--jp-ui-font-color1", "#222");
      ctx.lineWidth = 1.2 * ratio;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.font = `${11 * ratio}px sans-serif`;
      ctx.textAlign = "right";
      ctx.textBaseline = y - bbox.top < 16 * ratio ? "top" : "bottom";
      const text = [`clipped above ${short(clip)}`, bbox.left + bbox.width - 4 * ratio, y + (y - bbox.top < 16 * ratio ? 3 : -2) * ratio];
      ctx.lineWidth = 4 * ratio;
      ctx.strokeStyle = css("--jp-layout-color0", "#fff");
      ctx.strokeText(...text);
      ctx.fillText(...text);
    }
    for (const lane of this.lanes) {
      const columns = this.columns.get(lane.trial);
      if (lane.info.state !== "diverged" || columns.last < 0 || lane.dim === "hidden") continue;
      const value = Math.min(this.limits.max, Math.max(columns.points.y[columns.last], this.limits.min));
      const [x, y] = [this.plot.valToPos(lane.xOf(columns.points.x[columns.last]), "x", true), this.plot.valToPos(value, "y", true)];
      ctx.strokeStyle = this.view.stroke(lane.trial, 1);
      ctx.lineWidth = 1.8 * ratio;
      ctx.beginPath();
      for (const side of [1, -1]) {
        ctx.moveTo(x - 4 * ratio, y - 4 * side * ratio);
        ctx.lineTo(x + 4 * ratio, y + 4 * side * ratio);
      }
      ctx.stroke();
    }
    ctx.restore();
  }

  // The lane whose line is nearest to the pointer, and the step under it.
  nearest(left, top) {
    const x = this.plot.posToVal(left, "x");
    const { from, to } = this.window;
    const at = Math.min(this.wide - 1, Math.max(0, Math.floor(((x - from) / (to - from)) * this.wide)));
    let best = { lane: null, away: NEAR, step: 0, smoothed: null };
    for (const lane of this.lanes) {
      if (lane.dim === "hidden") continue;
      const span = this.span(this.shown(lane.trial), at);
      if (!span) continue;
      const [low, high] = span.map((value) => this.plot.valToPos(Math.min(this.limits.max, Math.max(value, this.limits.min)), "y"));
      const away = top > low ? top - low : top < high ? high - top : 0;
      if (away < best.away - (lane.dim ? -8 : 0)) {
        best = { lane, away: away + (lane.dim ? 8 : 0), step: Math.round(lane.stepOf(x)), smoothed: this.smooth.size ? (span[0] + span[1]) / 2 : null };
      }
    }
    return best;
  }

  // Lowest and highest value of a lane in a column, between its neighbours where it has none there itself.
  span(columns, at) {
    let [before, after] = [at, at];
    while (before >= 0 && Number.isNaN(columns.low[before])) before--;
    while (after < columns.width && Number.isNaN(columns.low[after])) after++;
    if (before === after) return [columns.low[at], columns.high[at]];
    if (before < 0 || after >= columns.width) {
      const edge = before < 0 ? after : before; // a little beyond its end is still this line
      return Math.abs(edge - at) < NEAR / 2 && edge < columns.width && edge >= 0 ? [columns.low[edge], columns.high[edge]] : null;
    }
    const share = (at - before) / (after - before);
    const value = columns.high[before] + share * (columns.low[after] - columns.high[before]);
    return [value, value];
  }

  // Draw one line again, thick, above the others.
  highlight(trial) {
    if (!this.plot) return;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [this.plot.over.clientWidth, this.plot.over.clientHeight];
    const canvas = this.overlay;
    if (canvas.width !== width * ratio || canvas.height !== height * ratio) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
    }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    const alone = this.view.chosen && this.view.chosen.size === 1 && this.view.chosen.has(trial);
    const index = trial === null || alone ? -1 : this.lanes.findIndex((lane) => lane.trial === trial);
    if (index < 0) return;
    const columns = this.shown(trial);
    for (const [color, thick] of [[css("--jp-layout-color0", "#fff"), 5], [this.view.stroke(trial, 1), 2]]) {
      ctx.strokeStyle = color;
      ctx.lineWidth = thick;
      ctx.lineJoin = "round";
      ctx.beginPath();
      this.trace(ctx, columns, 0, width, 0, height);
      ctx.stroke();
    }
  }
}

const lost = (lane) => lane.info.state === "diverged" || lane.info.state === "failed";

// A line of one pixel is drawn eight times as fast as a thicker one.
function look(lane, few) {
  return { width: few && !lost(lane) && lane.dim === "" ? 1.5 : 1, dash: lost(lane) ? [4, 3] : undefined };
}

function css(name, fallback) {
  const value = getComputedStyle(document.body).getPropertyValue(name).trim();
  return value || fallback;
}

function dark() {
  const probe = document.createElement("span");
  probe.style.color = css("--jp-layout-color0", "#fff");
  document.body.append(probe);
  const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
}

function mix(stops, share) {
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const [low, rest] = [Math.min(stops.length - 2, Math.floor(at)), at - Math.min(stops.length - 2, Math.floor(at))];
  const part = (color, i) => parseInt(color.slice(1 + 2 * i, 3 + 2 * i), 16);
  return [0, 1, 2].map((i) => Math.round(part(stops[low], i) * (1 - rest) + part(stops[low + 1], i) * rest));
}

// ---------------------------------------------------------------------------------------------------- the view

const tag = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

class View {
  constructor(store, root) {
    Object.assign(this, { store, lanes: [], chosen: null, hovered: null, frozen: null, waiting: false, rows: new Map() });
    Object.assign(this, { smoothing: 0, weight: 0, log: true, x: "steps", window: null });
    this.stats = { redraws: 0, last_ms: 0, max_ms: 0, total_ms: 0 };
    root.classList.add("wb-live");
    root.setAttribute("data-lm-suppress-shortcuts", "true");
    root.wbLive = this;
    this.root = root;
    this.title = tag("strong");
    this.status = tag("span", { class: "wb-live-status", role: "status", "aria-live": "off" });
    this.freeze = tag("button", { type: "button", class: "wb-live-freeze", "aria-pressed": "false" }, "Freeze");
    this.all = tag("button", { type: "button", class: "wb-live-all" }, "Show all");
    const boxes = METRICS.map(({ key, title }) =>
      tag("div", { class: `wb-live-chart wb-live-${key}`, role: "img", "aria-label": `${title} of each trial against step` }));
    this.legend = tag("div", { class: "wb-live-legend", role: "group", "aria-label": "Trials: press one to isolate it" });
    this.tip = tag("div", { class: "wb-live-tip", hidden: "" });
    root.append(
      tag("div", { class: "wb-live-head" }, this.title, this.status, tag("span", { class: "wb-live-room" }), this.all, this.freeze),
      this.tools(),
      tag("div", { class: "wb-live-body" },
        tag("div", { class: "wb-live-charts" }, boxes[0], tag("div", { class: "wb-live-pair" }, boxes[1], boxes[2])),
        this.legend),
      this.tip,
    );
    this.charts = METRICS.map((metric, i) => new Chart(this, metric, boxes[i]));
    this.freeze.addEventListener("click", () => this.toggleFreeze());
    this.all.addEventListener("click", () => this.choose(null));
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
    this.slider = tag("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing" });
    this.told = tag("span", { class: "wb-live-told", "aria-hidden": "true" });
    this.slider.addEventListener("input", () => this.redraw({ smoothing: Number(this.slider.value) }));
    this.logs = button("Log y", { "aria-pressed": "true" }, () => this.redraw({ log: !this.log }));
    this.axis = tag("select", { "aria-label": "x axis" }, ...Object.entries(AXES).map(([value, text]) => tag("option", { value }, text)));
    this.axis.addEventListener("change", () => this.redraw({ x: this.axis.value, window: null }));
    this.reset = button("Reset zoom", { title: "also: double click" }, () => this.zoom(null));
    const save = (kind) => button(kind.toUpperCase(), { "aria-label": `Download as ${kind.toUpperCase()}` }, () => download(this, kind));
    return tag("div", { class: "wb-live-tools", role: "group", "aria-label": "How the curves are drawn" },
      tag("label", {}, "Smoothing", this.slider, this.told), this.logs, tag("label", {}, "x", this.axis), this.reset,
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
    const [xOf, stepOf] = [(step) => step * per, (x) => x / per];
    Object.assign(lane, { xOf, stepOf });
  }

  // State of the controls, and what of it needs the trials.
  settle(lanes) {
    const has = { steps: true, examples: lanes.every((lane) => lane.info.examples) };
    for (const option of this.axis.options) option.hidden = option.disabled = !has[option.value] || (option.value !== "steps" && !lanes.length);
    const longest = Math.max(PARTS / 10, ...lanes.map((lane) => lane.info.steps));
    this.weight = this.smoothing ** (PARTS / longest);
    const over = this.smoothing ? `${this.smoothing.toFixed(2)}: about ${count(1 / (1 - this.weight))} steps` : "off";
    this.told.textContent = over;
    this.slider.setAttribute("aria-valuetext", over);
    this.logs.setAttribute("aria-pressed", String(this.log));
    this.reset.hidden = !this.window;
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

  // Where the x axis ends: it grows by doubling up to the length of the trials, so that what was counted stays counted.
  reach(lanes) {
    const shown = lanes.filter((lane) => lane.dim !== "hidden");
    let [last, total] = [1, 1];
    for (const lane of shown.length ? shown : lanes) {
      const { points, n } = lane.points.loss;
      if (n) last = Math.max(last, lane.xOf(points.x[n - 1] + 1));
      if (lane.dim === "") total = Math.max(total, lane.xOf(lane.info.steps));
    }
    total = Math.max(total, last);
    if (Object.keys(this.store.status.states).every((state) => state !== "running" && state !== "waiting")) return last;
    while (total / 2 >= last) total /= 2;
    return Math.max(1, Math.ceil(total));
  }

  paint(lanes) {
    const stops = dark() ? SEQUENCE.dark : SEQUENCE.light;
    const lrs = lanes.map((lane) => Math.log(lane.info.lr));
    const [low, high] = [Math.min(...lrs), Math.max(...lrs)];
    const share = (i) => (high > low ? (lrs[i] - low) / (high - low) : lanes.length > 1 ? i / (lanes.length - 1) : 0.5);
    return new Map(lanes.map((lane, i) => [lane.trial, mix(stops, share(i))]));
  }

  stroke(trial, alpha) {
    const lane = this.lanes.find((each) => each.trial === trial);
    const pale = !lane || lane.dim === "hidden" ? 0.1 : lane.dim === "old" ? 0.35 : lost(lane) ? 0.6 : 1;
    return `rgba(${(this.colors.get(trial) || [128, 128, 128]).join()},${alpha || pale})`;
  }

  headline(head, status) {
    this.title.textContent = head.name ? `${head.name} · ${head.workload}` : "waiting for the first trial";
    const states = status.states;
    const total = Object.values(states).reduce((a, b) => a + b, 0);
    const said = [
      !head.still && status.stage ? status.stage : "",
      `${total} trial${total === 1 ? "" : "s"}: ` + Object.entries(STATES).filter(([key]) => states[key]).map(([key, [, word]]) => `${states[key]} ${word}`).join(", "),
      `${count(status.steps)} steps`,
      status.rate !== null && !head.still ? `${count(status.rate)} steps/s` : "",
    ];
    this.status.textContent = head.name ? said.filter(Boolean).join(" · ") : "";
    this.freeze.hidden = head.still;
    this.all.hidden = !this.chosen;
  }

  list(lanes) {
    const stages = new Map();
    for (const lane of lanes) stages.set(lane.info.stage, [...(stages.get(lane.info.stage) || []), lane]);
    const order = [...stages].sort((a, b) => Math.max(...b[1].map((l) => l.trial)) - Math.max(...a[1].map((l) => l.trial)));
    const key = order.map(([stage, group]) => `${stage}:${group.map((lane) => lane.trial).join()}`).join("|");
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.rows.clear();
      this.legend.replaceChildren();
      for (const [stage, group] of order) {
        const heading = tag("button", { type: "button", class: "wb-live-stage", "aria-pressed": "false" }, stage);
        const trials = group.map((lane) => lane.trial);
        heading.addEventListener("click", () => this.choose(trials));
        heading.wbTrials = trials;
        this.legend.append(heading, ...group.map((lane) => this.row(lane)));
      }
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
    this.tip.hidden = !lane;
    if (!lane) return;
    this.tip.replaceChildren(...this.facts(lane, step, chart.metric, smoothed).map(([name, value]) => tag("div", {}, tag("span", {}, name), tag("b", {}, value))));
    const root = this.root.getBoundingClientRect();
    const [x, y] = [event.clientX - root.left, event.clientY - root.top];
    const right = x + 16 + this.tip.offsetWidth < root.width;
    this.tip.style.left = `${Math.max(0, right ? x + 14 : x - 14 - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y + 10, root.height - this.tip.offsetHeight - 4))}px`;
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
      ["loss", short(at("loss")[1])],
      ["gradient norm", short(at("grad_norm")[1])],
      ["state", (STATES[info.state] || ["", info.state])[1]],
    ];
    if (smoothed !== null) facts.splice(5, 0, [`${metric.title}, smoothed`, short(smoothed)]);
    return info.note ? [facts[0], ["with", info.note], ...facts.slice(1)] : facts;
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

// ---------------------------------------------------------------------------------------------------- download

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// The charts as they are drawn, and the names of the lines.
function picture(view) {
  const [ink, paper] = [css("--jp-ui-font-color1", "#222"), css("--jp-layout-color0", "#fff")];
  const parts = [];
  let top = 0;
  let wide = 0;
  const say = (x, y, text, how = "") => parts.push(`<text x="${x}" y="${y}" fill="${ink}" ${how}>${escaped(text)}</text>`);
  view.charts.forEach((chart, i) => {
    const { plot, limits, window } = chart;
    const [left, y0, width, height] = [64, top + 24, plot.over.clientWidth, plot.over.clientHeight];
    wide = Math.max(wide, left + width + 16);
    say(left, top + 16, plot.root.querySelector(".u-title").textContent, 'font-weight="600"');
    for (const tick of chart.xTicks.filter((v) => v !== null && v >= window.from && v <= window.to)) {
      say(left + plot.valToPos(tick, "x"), y0 + height + 14, count(tick), 'text-anchor="middle"');
    }
    for (const tick of chart.yTicks.filter((v) => v !== null && v >= limits.min && v <= limits.max)) {
      const y = y0 + plot.valToPos(tick, "y");
      parts.push(`<path d="M${left} ${y}h${width}" stroke="${ink}" stroke-opacity="0.15"/>`);
      say(left - 6, y + 4, short(tick), 'text-anchor="end"');
    }
    parts.push(`<clipPath id="c${i}"><rect x="${left}" y="${y0}" width="${width}" height="${height}"/></clipPath>`);
    const lines = (all, opacity) => {
      for (const lane of chart.lanes.filter((each) => each.dim !== "hidden")) {
        let d = "";
        const pen = {
          moveTo: (x, y) => (d += `M${x.toFixed(1)} ${y.toFixed(1)}`), lineTo: (x, y) => (d += `L${x.toFixed(1)} ${y.toFixed(1)}`),
        };
        chart.trace(pen, all.get(lane.trial), left, width, y0, height);
        const dash = lost(lane) ? ' stroke-dasharray="4 3"' : "";
        const color = `rgb(${view.colors.get(lane.trial).join()})`;
        parts.push(`<path d="${d}" fill="none" stroke="${color}" stroke-opacity="${opacity}"${dash} clip-path="url(#c${i})"><title>trial ${lane.trial}</title></path>`);
      }
    };
    if (chart.smooth.size) lines(chart.columns, FAINT);
    lines(chart.smooth.size ? chart.smooth : chart.columns, 1);
    say(left + width, y0 + height + 30, AXES[window.x], 'text-anchor="end"');
    top = y0 + height + 38;
  });
  const named = view.lanes.filter((lane) => lane.dim !== "hidden");
  named.forEach((lane, i) => {
    const y = 20 + 16 * i;
    parts.push(`<path d="M${wide} ${y - 4}h18" stroke="rgb(${view.colors.get(lane.trial).join()})" stroke-width="3"/>`);
    say(wide + 24, y, `trial ${lane.trial} · lr ${short(lane.info.lr)}${lane.info.note ? ` · ${brief(lane.info.note)}` : ""}`);
  });
  const size = [wide + 260, Math.max(top, 28 + 16 * named.length)].map(Math.ceil);
  return { size, text: `<svg xmlns="http://www.w3.org/2000/svg" width="${size[0]}" height="${size[1]}" viewBox="0 0 ${size.join(" ")}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="${paper}"/>${parts.join("")}</svg>` };
}

// Every point that the page has of the trials that are shown.
function csv(view) {
  const rows = ["trial,stage,peak_lr,metric,step,value"];
  for (const lane of view.lanes.filter((each) => each.dim !== "hidden")) {
    for (const key of KEYS) {
      const { points, n } = lane.points[key];
      for (let i = 0; i < n; i++) rows.push([lane.trial, lane.info.stage, lane.info.lr, key, points.x[i], points.y[i]].join());
    }
  }
  return `${rows.join("\n")}\n`;
}

async function download(view, kind) {
  if (view.charts.some((chart) => !chart.plot)) return;
  const hand = (blob) => {
    const link = tag("a", { href: URL.createObjectURL(blob), download: `${view.store.head.name || "curves"}.${kind}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  if (kind === "csv") return hand(new Blob([csv(view)], { type: "text/csv" }));
  const { size, text } = picture(view);
  if (kind === "svg") return hand(new Blob([text], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = tag("canvas", { width: 2 * size[0], height: 2 * size[1] });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob(hand, "image/png");
}

const widget = () => {
  let store = null;
  return {
    initialize({ model }) {
      store = new Store(model);
    },
    render({ model, el }) {
      store = store || new Store(model);
      const view = new View(store, el.appendChild(document.createElement("div")));
      return () => view.destroy();
    },
  };
};

export default widget;
