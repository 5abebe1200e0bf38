// Downloads; and the view in a widget, or in a page without a kernel.

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
    for (const at of chart.xTicks.filter((v) => v !== null && v >= window.from && v <= window.to)) {
      say(left + plot.valToPos(at, "x"), y0 + height + 14, tick(window.x, at), 'text-anchor="middle"');
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

// A view without a kernel; what it returns takes what a kernel would say, with its buffers in base64.
const stand = (el, still) => {
  const told = [];
  const model = { get: (name) => ({ still })[name], on: (_, listener) => told.push(listener), send: () => {} };
  new View(new Store(model), el);
  return (content, buffers) => {
    const parts = buffers.map((part) => Uint8Array.from(atob(part), (c) => c.charCodeAt(0)));
    for (const listener of told) listener(content, parts);
  };
};

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
