// The study browser: two tables that filter, sort and scroll without the kernel; opening, comparing and notes ask it.

const ROW = 28; // height of a row in pixels, as in studies.css
const SPARE = 8; // rows drawn above and below what is seen
const STATES = {
  finished: "•", complete: "•", running: "▶", unfinished: "‖", stopped: "‖", diverged: "↗", failed: "✕",
};
const WIDTHS = {
  study: "minmax(15em, 2fr)", workload: "8.5em", state: "6.5em", stage: "13em", trials: "4.5em", diverged: "5.5em", failed: "5em",
  trial: "5.5em", best_value: "8em", mean_value: "11em", select: "9.5em", best_lr: "5.5em", lr_best: "5.5em", lr_unstable: "7.5em", verdict: "7.5em",
  note: "minmax(10em, 3fr)", seed: "5.5em", best_step: "8em", steps_run: "8em", seconds: "7em",
};
const INTEGER = new Intl.NumberFormat("en-US");
const WORDS = {
  best_value: "best value", mean_value: "value", select: "metric", best_lr: "at lr", lr_best: "lr.best", lr_unstable: "lr.unstable", best_step: "best step",
  steps_run: "steps run",
};
const MOST = 6; // compared at once, as in studies_data.py

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function shown(value, name) {
  if (value === null || value === undefined) return "–";
  if (name === "state") return `${STATES[value] || ""} ${value}`.trim();
  if (name === "note") return String(value).replace(/^(diagnosis|watched training) of /, "").replaceAll("`", "");
  if (name === "select") return String(value).split(" ")[0];
  if (name === "study") return String(value).replace(/-\d{4}(\d\d)(\d\d)-(\d\d)(\d\d)\d\d(?=$|-\d+$)/, " $1-$2 $3:$4");
  if (typeof value === "number") {
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return INTEGER.format(value);
    return String(Number(value.toPrecision(4))).replace("e+", "e");
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// null and NaN last, whichever way it is sorted; infinities arrive as words
function number(value) {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return typeof value === "number" ? value : null;
}

function ordered(rows, name, down) {
  const sign = down ? -1 : 1;
  const numeric = rows.some((row) => typeof row[name] === "number");
  const key = (row) => (numeric ? number(row[name]) : row[name] === null || row[name] === undefined ? null : shown(row[name], name));
  return rows
    .map((row, place) => [key(row), place, row])
    .sort(([a, i], [b, j]) => {
      if (a === null || b === null) return (a === null) - (b === null) || i - j;
      const difference = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      return sign * difference || i - j;
    })
    .map(([, , row]) => row);
}

let grids = 0;

// A table that draws only the rows in sight. `id` names a row; `onOpen` gets the row.
function grid({ label, height, id, onOpen, onMarked }) {
  const prefix = `wb-grid-${(grids += 1)}`;
  let fields = [], columns = [], rows = [], seen = [], sort = null, words = [], active = 0, marked = [], figures = new Set(), texts = new Map();
  const head = make("div", { role: "row", className: "wb-row wb-head" });
  const body = make("div", { role: "rowgroup", className: "wb-body" });
  const box = make("div", { role: "grid", className: "wb-grid", tabIndex: 0, "aria-label": label, "aria-multiselectable": "true" }, head, body);
  box.style.maxHeight = `${height}px`;
  box.setAttribute("aria-description", "arrow keys move, Enter opens, space selects for comparing");

  const numeric = (name) => figures.has(name);

  function drawHead() {
    const template = ["2.4em", ...columns.map((name) => WIDTHS[name] || "8em")].join(" ");
    box.style.setProperty("--wb-columns", template);
    box.style.setProperty("--wb-wide", `${template.match(/[\d.]+(?=em)/g).reduce((all, em) => all + Number(em), 0)}em`);
    head.style.gridTemplateColumns = template;
    head.replaceChildren(
      make("div", { role: "columnheader", "aria-label": "selected for comparing", title: "selected for comparing" }),
      ...columns.map((name) => {
        const word = WORDS[name] || name;
        const way = sort && sort.name === name ? (sort.down ? " ▼" : " ▲") : "";
        const button = make("button", { type: "button", textContent: word + way, title: `sort by ${word}` });
        button.dataset.column = name;
        button.addEventListener("click", () => {
          sort = { name, down: sort && sort.name === name ? !sort.down : false };
          arrange();
          drawHead();
          head.querySelector(`[data-column="${name}"]`).focus();
        });
        const state = way ? (sort.down ? "descending" : "ascending") : "none";
        return make("div", { role: "columnheader", className: numeric(name) ? "wb-number" : "", "aria-sort": state }, button);
      }),
    );
  }

  function arrange() {
    const kept = seen[active] && id(seen[active]);
    seen = words.length
      ? rows.filter((row) => {
          let text = texts.get(row); // put together once: a thousand rows at every key would be felt
          if (text === undefined) texts.set(row, (text = fields.map((name) => shown(row[name], name)).join(" ").toLowerCase()));
          return words.every((word) => text.includes(word));
        })
      : rows.slice();
    if (sort) seen = ordered(seen, sort.name, sort.down);
    active = Math.max(0, seen.findIndex((row) => id(row) === kept));
    box.setAttribute("aria-rowcount", seen.length + 1);
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
    const last = Math.min(seen.length, Math.ceil((box.scrollTop + height) / ROW) + SPARE);
    const drawn = [];
    for (let place = first; place < last; place += 1) drawn.push(drawRow(seen[place], place));
    body.style.paddingTop = `${first * ROW}px`;
    body.style.paddingBottom = `${(seen.length - last) * ROW}px`;
    if (!seen.length) drawn.push(make("div", { className: "wb-row wb-soft", textContent: words.length ? "nothing matches" : "nothing yet" }));
    body.replaceChildren(...drawn);
    if (seen.length) box.setAttribute("aria-activedescendant", `${prefix}-${active}`);
    else box.removeAttribute("aria-activedescendant");
  }

  function drawRow(row, place) {
    const isMarked = marked.includes(id(row));
    const mark = make("div", { role: "gridcell", className: "wb-mark", textContent: isMarked ? "☑" : "☐", title: "select for comparing" });
    mark.addEventListener("click", (event) => {
      event.stopPropagation();
      active = place;
      toggle(row);
    });
    const cells = columns.map((name) => {
      const text = shown(row[name], name) + (name === "mean_value" && row.seeds > 1 ? ` (mean of ${row.seeds})` : "");
      const long = typeof row[name] === "string" ? row[name] : text;
      return make("div", { role: "gridcell", className: numeric(name) ? "wb-number" : "", textContent: text, title: long });
    });
    const line = make(
      "div",
      {
        role: "row", id: `${prefix}-${place}`, className: `wb-row${place === active ? " wb-active" : ""}`,
        "aria-rowindex": place + 2, "aria-selected": String(isMarked),
      },
      mark, ...cells,
    );
    line.style.gridTemplateColumns = "var(--wb-columns)";
    line.addEventListener("click", () => {
      active = place;
      draw();
      box.focus({ preventScroll: true });
      onOpen(row);
    });
    return line;
  }

  function toggle(row) {
    const key = id(row);
    marked = marked.includes(key) ? marked.filter((other) => other !== key) : [...marked, key].slice(-MOST);
    draw();
    onMarked(marked.map((other) => rows.find((one) => id(one) === other)).filter(Boolean));
  }

  function show(place) {
    active = Math.min(Math.max(place, 0), seen.length - 1);
    const top = active * ROW, room = box.clientHeight - ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + ROW > box.scrollTop + room) box.scrollTop = top + ROW - room;
    draw();
  }

  box.addEventListener("keydown", (event) => {
    if (event.target !== box || !seen.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(height / ROW) - 2);
    const moves = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: seen.length - 1 };
    if (event.key in moves) show(moves[event.key]);
    else if (event.key === "Enter" && !event.shiftKey) onOpen(seen[active]);
    else if (event.key === " ") toggle(seen[active]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  let waiting = false;
  box.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  });

  return {
    node: box,
    set(names, values) {
      rows = values;
      const told = { state: (row) => row.state !== "finished", workload: () => false, diverged: (row) => row.diverged, failed: (row) => row.failed };
      fields = names;
      const filled = (name) => rows.some((row) => row[name] !== null && row[name] !== undefined && row[name] !== "");
      columns = names.filter((name) => (name in told ? rows.some(told[name]) : !rows.length || filled(name))); // no zeros, nothing empty; what is left out is found by the filter
      texts = new Map();
      figures = new Set(columns.filter((name) => rows.some((row) => typeof row[name] === "number")));
      if (sort && !columns.includes(sort.name)) sort = null;
      marked = marked.filter((key) => rows.some((row) => id(row) === key));
      drawHead();
      arrange();
    },
    filter(text) {
      words = text.toLowerCase().split(/\s+/).filter(Boolean);
      box.scrollTop = 0;
      arrange();
      return seen.length;
    },
    clear() {
      sort = null;
      marked = [];
      words = [];
      active = 0;
      box.scrollTop = 0;
    },
  };
}

async function copy(text, pre) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const range = document.createRange();
    range.selectNodeContents(pre);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    return document.execCommand("copy");
  }
}

function picture(html, alt) {
  const place = make("div");
  place.innerHTML = html; // drawn by the kernel; every text in it is escaped there
  const svg = place.querySelector("svg");
  for (const [name, value] of [["role", "img"], ["aria-label", alt]]) svg.setAttribute(name, value);
  svg.removeAttribute("aria-hidden");
  return place;
}

function render({ model, el }) {
  const root = make("div", { className: "wb-studies", role: "region", "aria-label": "studies" });
  root.setAttribute("data-lm-suppress-shortcuts", "true"); // JupyterLab's keys (arrows, Enter) are ours in here
  const say = make("p", { className: "wb-said", role: "status", "aria-live": "polite" });
  const ask = (message, text) => {
    say.className = "wb-said wb-soft";
    say.textContent = text;
    model.send(message);
  };

  const search = make("input", { type: "search", placeholder: "name, note, workload, state ...", "aria-label": "filter studies" });
  const count = make("span", { className: "wb-soft" });
  const compareStudies = make("button", { type: "button", textContent: "Compare selected", disabled: true });
  const again = make("button", { type: "button", textContent: "Refresh", title: "read the folders as they are now" });
  const problems = make("div", { className: "wb-problems" });
  let chosen = [];
  const studies = grid({
    label: "studies", height: 10 * ROW, id: (row) => row.path || row.study,
    onOpen: (row) => ask({ do: "open", path: row.path }, `Opening ${row.study} …`),
    onMarked: (rows) => {
      chosen = rows;
      compareStudies.disabled = rows.length < 2;
    },
  });
  const countRows = () => {
    const all = model.get("studies").length;
    const kept = studies.filter(search.value);
    count.textContent = kept === all ? `${all} ${all === 1 ? "study" : "studies"} in ${model.get("folder")}` : `${kept} of ${all} studies`;
  };
  search.addEventListener("input", countRows);
  again.addEventListener("click", () => ask({ do: "read" }, "Reading …"));
  compareStudies.addEventListener("click", () => {
    ask({ do: "compare", sides: chosen.map((row) => [row.path, null]) }, `Comparing ${chosen.map((row) => row.study).join(", ")} …`);
  });

  const detail = make("section", { className: "wb-detail", hidden: true, "aria-label": "open study" });
  const title = make("h3"), facts = make("div", { className: "wb-soft" });
  const note = make("textarea", { "aria-label": "note of the study", rows: 2 });
  const save = make("button", { type: "button", textContent: "Save note" });
  const unsaved = make("span", { className: "wb-soft" });
  const command = make("pre", { tabIndex: 0, "aria-label": "command that reproduces the study" });
  const copyButton = make("button", { type: "button", textContent: "Copy command" });
  const figure = make("div");
  const trialFilter = make("input", { type: "search", placeholder: "state, stage, value ...", "aria-label": "filter trials" });
  const trialCount = make("span", { className: "wb-soft" });
  const compareTrials = make("button", { type: "button", textContent: "Compare selected trials", disabled: true });
  let pair = [];
  const trials = grid({
    label: "trials", height: 9 * ROW, id: (row) => row.trial, onOpen: () => {},
    onMarked: (rows) => {
      pair = rows;
      compareTrials.disabled = rows.length < 2;
    },
  });
  const countTrials = () => {
    const all = (model.get("opened").trials || []).length;
    const kept = trials.filter(trialFilter.value);
    trialCount.textContent = (kept === all ? `${all} trial` : `${kept} of ${all} trial`) + (all === 1 ? "" : "s");
  };
  trialFilter.addEventListener("input", countTrials);
  compareTrials.addEventListener("click", () => {
    const path = model.get("opened").row.path;
    ask({ do: "compare", sides: pair.map((row) => [path, row.trial]) }, `Comparing trials ${pair.map((row) => row.trial).join(", ")} …`);
  });
  // A note that is not written yet survives another study, "Refresh", and (in the kernel) a reload of the page.
  const keep = () => {
    const drafts = { ...model.get("drafts") };
    if (note.value === model.get("opened").row.note) delete drafts[open];
    else drafts[open] = note.value;
    unsaved.textContent = open in drafts ? "not written yet" : "";
    if (JSON.stringify(drafts) === JSON.stringify(model.get("drafts"))) return;
    model.set("drafts", drafts);
    model.save_changes();
  };
  note.addEventListener("input", keep);
  const saveNote = () => ask({ do: "note", path: model.get("opened").row.path, note: note.value }, "Writing the note …");
  save.addEventListener("click", saveNote);
  note.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      saveNote();
    }
  });
  copyButton.addEventListener("click", async () => {
    const done = await copy(command.textContent, command);
    say.className = done ? "wb-said" : "wb-said wb-bad";
    say.textContent = done ? "The command is in the clipboard." : "The browser does not let the page copy: the command is selected, press Ctrl+C.";
  });
  detail.append(
    title, facts,
    make(
      "div", { className: "wb-fields" },
      make("div", {}, make("label", { className: "wb-soft", textContent: "Note (Ctrl+Enter saves)" }), note, save, " ", unsaved),
      make("details", {}, make("summary", { textContent: "Reproduce this study" }), command, copyButton),
    ),
    figure,
    make("div", { className: "wb-bar" }, trialFilter, compareTrials, trialCount),
    trials.node,
  );
  const comparison = make("section", { className: "wb-detail", hidden: true, "aria-label": "comparison" });

  let open = null;
  function drawOpened() {
    const opened = model.get("opened");
    detail.hidden = !opened.row;
    if (!opened.row) return;
    const another = open !== opened.row.path;
    open = opened.row.path;
    if (another) {
      problems.after(detail); // what was asked for last stands first
      trials.clear();
      trialFilter.value = "";
      pair = [];
      compareTrials.disabled = true;
      figure.replaceChildren();
    }
    const row = opened.row;
    title.textContent = row.study;
    facts.textContent = `${row.workload} · ${(row.kind || "study").replaceAll("_", " ")} · ${shown(row.state, "state")} · ${opened.said}`;
    const draft = model.get("drafts")[open];
    const text = draft === undefined ? row.note : draft;
    if (note.value !== text) note.value = text;
    unsaved.textContent = draft === undefined ? "" : "not written yet";
    command.textContent = row.reproduce;
    trials.set(opened.columns, opened.trials);
    countTrials();
  }
  function drawFigure() {
    const data = model.get("figure");
    const said = model.get("opened").said || "";
    if (data) figure.replaceChildren(picture(data, said));
    else figure.replaceChildren(make("p", { className: "wb-soft", textContent: "No picture: no trial has a recorded step." }));
  }
  function drawCompared() {
    const { names, rows, said } = model.get("compared");
    comparison.hidden = !names;
    if (!names) return;
    problems.after(comparison);
    const cell = (value) => make("td", { textContent: shown(value) });
    const head = ["", ...names].map((name) => make("th", { scope: "col", textContent: name }));
    const lines = rows.map(([what, ...values]) => make("tr", {}, make("th", { scope: "row", textContent: what }), ...values.map(cell)));
    const close = make("button", { type: "button", textContent: "Close comparison" });
    close.addEventListener("click", () => {
      comparison.hidden = true;
    });
    comparison.replaceChildren(
      make("h4", { textContent: names.join(" vs ") }), make("p", { textContent: said }),
      make("div", { className: "wb-beside" },
        make("div", { className: "wb-wide", tabIndex: 0 }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines))),
        make("div", { className: "wb-picture" })),
      close,
    );
    drawCurves();
  }
  function drawCurves() {
    const place = comparison.querySelector(".wb-picture"), data = model.get("comparison");
    if (place && data) place.replaceChildren(picture(data, `training loss of ${model.get("compared").names.join(", ")}`));
  }
  function drawStudies() {
    studies.set(model.get("columns"), model.get("studies"));
    countRows();
    const said = model.get("problems");
    problems.replaceChildren();
    if (said.length) {
      const list = make("ul", {}, ...said.map((line) => make("li", { textContent: line })));
      problems.append(make("details", { open: said.length < 3 }, make("summary", { textContent: said.length === 1 ? "A folder could not be read" : `${said.length} folders could not be read` }), list));
    }
    const nothing = model.get("nothing");
    if (nothing) say.textContent = nothing;
  }
  function drawSaid() {
    const { text, bad } = model.get("said");
    if (text === undefined) return;
    say.className = bad ? "wb-said wb-bad" : "wb-said";
    say.textContent = bad ? `✕ ${text}` : text;
  }

  root.append(make("div", { className: "wb-bar" }, search, compareStudies, again, count), studies.node, say, problems, comparison, detail);
  el.append(root);
  const handlers = {
    "change:studies": drawStudies, "change:problems": drawStudies, "change:opened": drawOpened, "change:figure": drawFigure,
    "change:compared": drawCompared, "change:comparison": drawCurves, "change:said": drawSaid,
  };
  for (const [name, handler] of Object.entries(handlers)) model.on(name, handler);
  drawStudies();
  drawOpened();
  if (model.get("opened").row) drawFigure();
  drawCompared();
  drawSaid();
  return () => {
    for (const [name, handler] of Object.entries(handlers)) model.off(name, handler);
  };
}

export default { render };
