// One chart: axes by uPlot, lines from the lowest and highest value of each column.

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
    const range = this.range(lanes);
    if (weight) for (const lane of lanes) this.keep(this.smooth, lane, wide, window, weight, range.log);
    else this.smooth.clear();
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
    const title = this.plot.root.querySelector(".u-title");
    title.textContent = title.title = this.metric.title + (above ? ` · ${above} off scale` : "");
  }

  // Keep a lane's columns up to date, begun anew where the window, the x axis or the smoothing is another.
  keep(all, lane, wide, { from, to, x }, weight, log = false) {
    const { points, n } = lane.points[this.metric.key];
    const key = [from, to, x, weight, log].join();
    let columns = all.get(lane.trial);
    if (!columns || columns.points !== points || columns.width !== wide || columns.key !== key || columns.done > n) {
      columns = new Columns(points, wide, key, { from, to, xOf: lane.xOf }, weight, log);
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
    if (min === Infinity) return { log: true, min: 0.1, max: 1, floor: 0.1, empty: true };
    for (const clip of this.clips()) {
      max = Math.max(max, clip);
      tiny = Math.min(tiny, clip);
      min = Math.min(min, clip);
    }
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
        padding: [8, 20, 0, 0],
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
          { ...axis, size: 26, space: 60, values: (_, ticks) => (this.xTicks = ticks).map((v) => (v === null || this.limits.empty ? "" : tick(this.window.x, v))) },
          { ...axis, scale: "y", size: 56, space: 26, values: (_, ticks) => (this.yTicks = ticks).map((v) => (v === null || this.limits.empty ? "" : short(v))), ...(range.log ? { splits: () => this.ticks(), filter: (_, ticks) => ticks } : {}) },
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
    return found.length > 1 ? found : [this.limits.min, Math.sqrt(this.limits.min * this.limits.max), this.limits.max].map((v) => Number(v.toPrecision(2)));
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

  // Of each lane that is drawn the value under the pointer, from the highest down.
  values(left) {
    const { from, to } = this.window;
    const at = Math.min(this.wide - 1, Math.max(0, Math.floor(((this.plot.posToVal(left, "x") - from) / (to - from)) * this.wide)));
    const found = this.lanes.filter((lane) => lane.dim !== "hidden").map((lane) => [lane, this.span(this.shown(lane.trial), at)]);
    return found.filter(([, span]) => span).map(([lane, [low, high]]) => [lane, (low + high) / 2]).sort(([, a], [, b]) => b - a);
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
