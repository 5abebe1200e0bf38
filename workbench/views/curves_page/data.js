// The page's side of the live view and of the curves panel. Joined into one module: uPlot, SEQUENCE (the colours
// from the smallest to the largest lr), this file, chart.js, view.js and page.js.
//
// The kernel only tells what is new; everything that one does with the picture happens here, because the kernel is busy
// training. One store of curves a model, any number of views of it.

const METRICS = [
  { key: "loss", title: "training loss", noisy: true },
  { key: "grad_norm", title: "gradient norm", noisy: true },
  { key: "lr", title: "learning rate" },
];
const KEYS = [...METRICS.map(({ key }) => key), "seconds"]; // of training, evaluation left out; of all trials that train together
const AXES = { steps: "steps", examples: "examples", time: "time (s)" };
const BRIEF = {
  max_grad_norm: "clip", batch_size: "batch", shared_seed: "seed", per_host_seed: "data seed", warmup_steps: "warmup",
  accumulate_steps: "accumulate", bn_stat_examples: "bn examples", total_steps: "steps", momentum: "momentum",
};
const brief = (note) => note.replace(/(\w+)=/g, (_, name) => `${BRIEF[name] || name} `);
const STATES = {
  waiting: ["·", "waiting"],
  running: ["▸", "running"],
  complete: ["•", "complete"],
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
const PARTS = 1000; // the weight of smoothing is that from step to step, in longer trials from one thousandth of the longest to the next
const MOST_TOLD = 12; // trials in one box

const short = (value) => {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : value.toPrecision(3);
  return text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "").replace("e+", "e");
};
const count = (value) => Math.round(value).toLocaleString("en");
const tick = (x, value) => (x === "time" && value < 100 ? short(value) : count(value));

// The height at `x` of a rising curve of n points; beyond its end it goes on at its mean rate.
const height = (xs, ys, n, x) => {
  let [low, high] = [0, n - 1];
  if (n < 1 || x <= xs[0]) return n ? ys[0] : x;
  if (x >= xs[high]) return xs[high] ? (ys[high] * x) / xs[high] : ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return ys[low] + ((x - xs[low]) / (xs[high] - xs[low])) * (ys[high] - ys[low]);
};

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
// the mean of all earlier values, or of their logarithms, each weighing `weight` to the power of its distance in steps.
class Columns {
  constructor(points, width, key, { from, to, xOf }, weight, log) {
    Object.assign(this, { points, width, key, from, to, xOf, weight, log, done: 0, before: null, after: null });
    this.low = new Float32Array(width).fill(NaN);
    this.high = new Float32Array(width).fill(NaN);
    this.falls = new Uint8Array(width); // whether the highest came first
    this.min = Infinity;
    this.max = -Infinity;
    this.tiny = Infinity; // the smallest value above 0
    this.last = -1; // index of the last finite point
    Object.assign(this, { sum: 0, share: 0, step: 0, least: Infinity });
  }

  smoothed(step, value) {
    if (value > 0) this.least = Math.min(this.least, value); // stands for 0, which has no logarithm
    if (!this.weight || (this.log && this.least === Infinity)) return value;
    const kept = this.weight ** (step - this.step);
    this.sum = kept * this.sum + (this.log ? Math.log(value > 0 ? value : this.least) : value);
    this.share = kept * this.share + 1;
    this.step = step;
    const mean = this.sum / this.share;
    return this.log ? Math.exp(mean) : mean;
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
      this.head = { name: content.name, workload: content.workload, still: content.still ?? !!this.model.get("still") };
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
