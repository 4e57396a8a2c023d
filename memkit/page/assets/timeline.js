// The step's timeline: bytes by category over its operations, and what is there at a moment.

function timelineSection() {
  const line = data.timeline;
  if (!line) {
    return section("timeline", "Memory over the step", el("p", { class: "muted" }, data.no_timeline));
  }
  const totals = line.x.map((_, place) => line.series.reduce((sum, series) => sum + series.y[place], 0));
  const [unit, each] = unitOf(totals[line.peak]);
  const hidden = new Set();
  let at = line.peak;

  const chart = el("div", { class: "chart", id: "timeline-chart" });
  const range = el("input", {
    type: "range", id: "moment", min: 0, max: line.x.length - 1, value: at, "aria-label": "Moment of the step to look at",
  });
  const back = el("button", { type: "button", id: "to-peak" }, "Back to the peak");
  const title = el("h3", { id: "moment-title" });
  const where = el("p", { class: "small muted", id: "moment-where" });
  const bars = el("ul", { class: "bars", id: "moment-bars" });
  const alive = el("div", { class: "scroll", id: "alive" });

  const phaseAt = (moment) => line.phases.find((phase) => phase.begin <= moment && moment < phase.end);
  const placeText = (place) => {
    const op = line.texts[line.ops[place]], module = line.texts[line.modules[place]];
    return module ? `${op} runs in ${module}` : `${op} runs`;
  };
  const inWords = (place) => `in the ${phaseAt(line.x[place]).name}, while ${placeText(place)}`;

  function select(place) {
    at = Math.max(0, Math.min(line.x.length - 1, Number(place)));
    range.value = at;
    back.disabled = at === line.peak;
    tell();
    if (window.Plotly && chart.data) window.Plotly.relayout(chart, { shapes: shapes(), annotations: notes() });
  }

  function tell() {
    title.textContent = at === line.peak ? `At the peak: ${size(totals[at])}` : `At this moment: ${size(totals[at])}`;
    where.textContent = `Operation ${line.x[at]} of ${line.num_moments}, ${inWords(at)}.`;
    const most = Math.max(...line.series.map((series) => series.y[at]), 1);
    bars.replaceChildren(...line.series.map((series) => {
      const known = data.categories.find((category) => category.key === series.key);
      const bytes = series.y[at];
      return el("li", {}, el("button", {
        type: "button", color: colorName(series.key), "aria-pressed": String(!hidden.has(series.key)), "data-key": series.key,
        title: `${known ? `${known.meaning}. ` : ""}Click to show or hide it in the picture.`, onclick: () => toggle(series.key),
      },
      el("span", { class: "swatch" }), el("span", { class: "name" }, labelOf(series.key)),
      el("span", { class: "rail" }, el("i", { style: `width:${(100 * bytes) / most}%` })),
      el("span", { class: "size" }, `${size(bytes)}, ${percent(totals[at] ? bytes / totals[at] : 0)}`)));
    }));
    tellAlive(alive, line, line.x[at], totals[at]);
  }

  function toggle(key) {
    if (!hidden.delete(key)) hidden.add(key);
    tell();
    bars.querySelector(`[data-key="${key}"]`).focus();
    if (window.Plotly) draw();
  }

  function shapes() {
    const shaded = line.phases.filter((phase) => phase.name === "backward").map((phase) => ({
      type: "rect", xref: "x", yref: "paper", x0: phase.begin, x1: phase.end, y0: 0, y1: 1, line: { width: 0 },
      fillcolor: css("--shade"), layer: "below",
    }));
    return [...shaded, {
      type: "line", xref: "x", yref: "paper", x0: line.x[at], x1: line.x[at], y0: 0, y1: 1,
      line: { color: css("--text"), width: 1.5, dash: "dot" },
    }];
  }

  function shownTotal(place) {
    return line.series.reduce((sum, series) => sum + (hidden.has(series.key) ? 0 : series.y[place]), 0);
  }

  function notes() {
    const wide = line.phases.filter((phase) => (phase.end - phase.begin) > line.num_moments * 0.06);
    const names = wide.map((phase) => ({
      xref: "x", yref: "paper", x: (phase.begin + phase.end) / 2, y: 1, yanchor: "bottom", text: phase.name, showarrow: false,
      font: { color: css("--muted") },
    }));
    const isRight = line.x[line.peak] > line.num_moments * 0.6;
    return [...names, {
      x: line.x[line.peak], y: shownTotal(line.peak) / each, text: `peak ${size(totals[line.peak])}`, showarrow: true, arrowhead: 2,
      arrowsize: 0.9, ax: isRight ? -54 : 54, ay: -4, xanchor: isRight ? "right" : "left", arrowcolor: css("--mark"),
      font: { color: css("--mark"), size: 13 }, bgcolor: css("--card"), borderpad: 2,
    }];
  }

  function draw() {
    const shown = line.series.filter((series) => !hidden.has(series.key));
    const areas = shown.map((series) => ({
      type: "scatter", mode: "lines", x: line.x, y: series.y.map((bytes) => bytes / each), stackgroup: "bytes", name: labelOf(series.key),
      line: { width: 0.6, color: colorOf(series.key), shape: "hv" }, fillcolor: colorOf(series.key),
      customdata: series.y.map(size), hovertemplate: "%{customdata}",
    }));
    const all = {
      type: "scatter", mode: "lines", x: line.x, y: line.x.map((_, place) => shownTotal(place) / each), name: "in all",
      line: { width: 1.4, color: css("--text"), shape: "hv" },
      customdata: line.x.map((_, place) => `${size(totals[place])}, ${plotText(placeText(place))}`), hovertemplate: "%{customdata}",
    };
    return plot(chart, [...areas, all], {
      height: isNarrow() ? 320 : 400, hovermode: "x unified", shapes: shapes(), annotations: notes(),
      xaxis: axis({ title: { text: "operations of the step, in order" }, range: [0, line.num_moments], showgrid: false, unifiedhovertitle: { text: "operation %{x}" } }),
      yaxis: axis({ title: { text: `on the device (${unit})` }, rangemode: "tozero", range: [0, (1.08 * totals[line.peak]) / each] }),
    });
  }

  range.addEventListener("input", () => select(range.value));
  back.addEventListener("click", () => select(line.peak));
  back.disabled = true;
  tell();
  drawings.push(async () => {
    const isNew = !chart.data;
    await draw();
    if (isNew) chart.on("plotly_click", (event) => select(nearest(line.x, event.points[0].x)));
  });

  const top = line.series.map((series) => [series.y[line.peak], labelOf(series.key)]).sort((one, other) => other[0] - one[0]);
  const most = top.filter((pair) => pair[0]).slice(0, 2).map((pair) => `${size(pair[0])} of ${pair[1]}`).join(" and ");
  // What an allocator counted beside all storages, where one was asked.
  const unseen = data.unseen_bytes > 0.005 * totals[line.peak] ? el("p", { class: "small muted", id: "unseen" },
    `The allocator counted ${size(data.unseen_bytes)} more at its peak: scratch memory inside kernels, which no tensor holds.`) : null;
  return section("timeline", "Memory over the step",
    el("p", { id: "in-words" }, `At its peak, the step holds ${size(totals[line.peak])}: ${inWords(line.peak)}. Most of that is ${most}.`),
    el("p", { class: "small muted" },
      "Each color is what bytes are for. Click in the picture, or drag the slider, to see what is on the device at another moment."),
    unseen,
    chart, range, el("div", { class: "range-ends" }, el("span", {}, "start of the step"), el("span", {}, "end of the step")),
    el("div", { class: "columns" },
      el("div", {}, title, where, bars, el("div", { class: "tools", style: "margin-top:10px" }, back)),
      el("div", {}, el("h3", {}, "What is on the device, largest first"), alive)));
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// Names of modules differ at their ends: parts in front go first, but for the last two.
function shortened(name) {
  const most = isNarrow() ? 22 : 34, parts = name.split(".");
  while (parts.length > 2 && parts.join(".").length > most) parts.shift();
  const left = parts.join(".");
  return left.length < name.length ? `…${left}` : name || "(model)";
}

// One row for each category in each module: parameters of hundreds of layers would hide all else.
function tellAlive(box, line, moment, total) {
  const groups = new Map();
  let known = 0;
  for (const [category, module, what, bytes, begin, end] of line.storages) {
    if (moment < begin || moment >= end) continue;
    const key = `${category} ${module}`;
    const group = groups.get(key) || { category, module, what, bytes: 0, count: 0 };
    group.bytes += bytes;
    group.count += 1;
    known += bytes;
    groups.set(key, group);
  }
  const rows = [...groups.values()].sort((one, other) => other.bytes - one.bytes);
  const shown = Number(box.dataset.shown || 12);
  const body = rows.slice(0, shown).map((row) => {
    const category = line.series[row.category].key, more = row.count > 1 ? ` and ${row.count - 1} more` : "";
    return el("tr", {},
      el("td", { class: "num" }, size(row.bytes)),
      el("td", { class: "owner", title: line.texts[row.module] },
        el("i", { class: "dot", color: colorName(category), title: labelOf(category) }), shortened(line.texts[row.module])),
      el("td", { class: "what muted" }, `${line.texts[row.what]}${more}`));
  });
  const rest = total - rows.slice(0, shown).reduce((sum, row) => sum + row.bytes, 0);
  const left = rows.length - shown;
  const more = left > 0 ? el("button", {
    type: "button", id: "alive-more", onclick: () => { box.dataset.shown = shown + 50; tellAlive(box, line, moment, total); },
  }, `Show more (${left} left, ${size(rest)})`) : null;
  const head = el("tr", {}, el("th", { class: "num" }, "size"), el("th", {}, "module"), el("th", {}, "what"));
  const end = left <= 0 && total > known ? el("p", { class: "small muted" }, `and ${size(total - known)} in smaller pieces`) : null;
  box.replaceChildren(...[el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)), more, end].filter(Boolean));
}
