// Plans: the step under smaller budgets, before and after, and what each budget costs.

function plansSection() {
  const all = data.plans;
  if (!all) return null;
  const rows = all.rows;
  const [unit, each] = unitOf(all.plain_peak_bytes);
  let at = rows.findIndex((row) => row.peak_bytes < all.plain_peak_bytes);
  at = at < 0 ? 0 : at;

  const range = el("input", { type: "range", id: "budget", min: 0, max: rows.length - 1, step: 1, value: at });
  const label = el("label", { for: "budget", id: "budget-label" });
  const answer = el("div", { class: "answer", id: "plan-answer", "aria-live": "polite" });
  const split = el("div", { class: "split", role: "img" });
  const keys = el("ul", { class: "keys", id: "plan-keys" });
  const line = el("div", { class: "chart", id: "plan-chart" });
  const front = el("div", { class: "chart", id: "front-chart" });
  const table = el("div", { class: "scroll", id: "plan-modules" });

  const share = (part, whole) => (whole ? part / whole - 1 : 0);
  const signed = (change) => `${change > 0.0005 ? "+" : change < -0.0005 ? "−" : "±"}${percent(Math.abs(change))}`;

  function stat(name, value, more) {
    return el("div", {}, el("span", { class: "small muted" }, name), el("b", {}, value), el("span", { class: "small" }, more));
  }

  function tell() {
    const row = rows[at];
    label.textContent = `Budget: ${size(row.budget_bytes)}`;
    range.setAttribute("aria-valuetext", size(row.budget_bytes));
    answer.replaceChildren(
      stat("predicted peak", size(row.peak_bytes), `${signed(share(row.peak_bytes, all.plain_peak_bytes))} against ${size(all.plain_peak_bytes)} without memkit`),
      stat("predicted time of a step", time(row.seconds), `${signed(share(row.seconds, all.plain_s))} against ${time(all.plain_s)} without memkit`),
      stat("of that, recomputing", time(row.replayed_s), `waiting for copies: ${time(row.stall_s)}`));
    const parts = [
      ["stay on the device", row.kept_bytes, "--activation"], ["go to host memory and back", row.moved_bytes, "--input"],
      ["are recomputed in the backward", row.again_bytes, "--grad"],
    ];
    const whole = parts.reduce((sum, part) => sum + part[1], 0) || 1;
    split.replaceChildren(...parts.map(([, bytes, color]) => el("i", { color: `var(${color})`, style: `width:${(100 * bytes) / whole}%` })));
    split.setAttribute("aria-label", parts.map(([name, bytes]) => `${size(bytes)} ${name}`).join(", "));
    keys.replaceChildren(...parts.map(([name, bytes, color]) => el("li", {}, el("i", { color: `var(${color})` }), `${size(bytes)} ${name}`)));
    tellModules(row);
  }

  function tellModules(row) {
    if (!row.modules.length) {
      table.replaceChildren(el("p", { class: "small muted" }, "Under this budget everything stays on the device."));
      return;
    }
    const shown = Number(table.dataset.shown || 8), left = row.modules.length - shown;
    const cell = (bytes) => el("td", { class: "num" }, bytes ? size(bytes) : "–");
    const head = ["module", "stays", "moves", "recomputed"].map((name, index) => el("th", { class: index ? "num" : null }, name));
    const body = row.modules.slice(0, shown).map(([module, kept, moved, again]) =>
      el("tr", {}, el("td", { class: "owner", title: module }, shortened(module)), cell(kept), cell(moved), cell(again)));
    const more = left > 0 ? el("button", { type: "button", onclick: () => { table.dataset.shown = shown + 50; tellModules(row); } }, `Show more (${left} left)`) : null;
    table.replaceChildren(...[el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)), more].filter(Boolean));
  }

  function drawLine() {
    const row = rows[at], scaled = (list) => list.map((bytes) => bytes / each);
    const isRight = row.budget_bytes / all.plain_peak_bytes > 0.9;
    return plot(line, [
      { type: "scatter", mode: "lines", x: row.x, y: scaled(row.held), name: "with the plan", fill: "tozeroy", fillcolor: css("--activation"),
        line: { width: 0.6, color: css("--activation"), shape: "hv" }, customdata: row.held.map(size), hovertemplate: "%{customdata}" },
      { type: "scatter", mode: "lines", x: row.x, y: scaled(row.held.map((bytes, place) => bytes + row.again[place])), name: "with what is recomputed",
        fill: "tonexty", fillcolor: css("--grad"), line: { width: 0, color: css("--grad"), shape: "hv" },
        customdata: row.held.map((bytes, place) => size(bytes + row.again[place])), hovertemplate: "%{customdata}" },
      { type: "scatter", mode: "lines", x: all.before.x, y: scaled(all.before.y), name: "without memkit",
        line: { width: 1.8, color: css("--text"), shape: "hv" }, customdata: all.before.y.map(size), hovertemplate: "%{customdata}" },
    ], {
      height: isNarrow() ? 300 : 340, hovermode: "x unified",
      xaxis: axis({ title: { text: "operations of the step, in order" }, range: [0, all.num_moments], showgrid: false, unifiedhovertitle: { text: "operation %{x}" } }),
      yaxis: axis({ title: { text: `on the device (${unit})` }, rangemode: "tozero", range: [0, (1.1 * all.plain_peak_bytes) / each] }),
      shapes: [
        { type: "rect", xref: "x", yref: "paper", x0: all.turn, x1: all.num_moments, y0: 0, y1: 1, line: { width: 0 }, fillcolor: css("--shade"), layer: "below" },
        { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: row.budget_bytes / each, y1: row.budget_bytes / each, line: { color: css("--mark"), width: 1.6, dash: "dash" } },
      ],
      annotations: [
        { xref: "x", yref: "paper", x: all.turn / 2, y: 1, yanchor: "bottom", text: "forward", showarrow: false, font: { color: css("--muted") } },
        { xref: "x", yref: "paper", x: (all.turn + all.num_moments) / 2, y: 1, yanchor: "bottom", text: "backward", showarrow: false, font: { color: css("--muted") } },
        { xref: "paper", yref: "y", x: 0.995, xanchor: "right", y: row.budget_bytes / each, yanchor: isRight ? "top" : "bottom", text: `budget ${size(row.budget_bytes)}`,
          showarrow: false, font: { color: css("--mark") }, bgcolor: css("--card"), borderpad: 1 },
      ],
    });
  }

  // Where one plan takes several times as long as the others, they would lie on one line: then by ratios.
  function timeAxis() {
    const slowest = Math.max(...rows.map((row) => row.seconds)), fastest = Math.min(all.plain_s, ...rows.map((row) => row.seconds));
    if (slowest < 2 * fastest || !all.plain_s) return axis({ title: { text: "time of a step (ms)" }, rangemode: "normal" });
    const ratios = [1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64].filter((ratio) => ratio * all.plain_s < 1.2 * slowest);
    return axis({
      title: { text: "time of a step" }, type: "log", range: [Math.log10(0.93e3 * fastest), Math.log10(1.1e3 * slowest)],
      tickvals: ratios.map((ratio) => 1e3 * ratio * all.plain_s), ticktext: ratios.map((ratio) => time(ratio * all.plain_s)),
    });
  }

  function drawFront() {
    const point = (row) => `${size(row.peak_bytes)}, ${time(row.seconds)}`;
    const bounds = rows.filter((row) => row.bound_s);
    return plot(front, [
      { type: "scatter", mode: "lines", x: bounds.map((row) => row.budget_bytes / each), y: bounds.map((row) => 1e3 * row.bound_s), name: "no plan is faster",
        line: { color: css("--muted"), width: 1.2, dash: "dot" }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines+markers", x: rows.map((row) => row.peak_bytes / each), y: rows.map((row) => 1e3 * row.seconds), name: "plans",
        line: { color: css("--accent"), width: 2 }, marker: { size: 9, color: css("--accent") }, customdata: rows.map(point), hovertemplate: "%{customdata}<extra>click to choose</extra>" },
      { type: "scatter", mode: "markers", x: [all.plain_peak_bytes / each], y: [1e3 * all.plain_s], name: "without memkit",
        marker: { size: 12, symbol: "diamond", color: css("--text") }, customdata: [`${size(all.plain_peak_bytes)}, ${time(all.plain_s)}`], hovertemplate: "%{customdata}<extra>without memkit</extra>" },
      { type: "scatter", mode: "markers", x: [rows[at].peak_bytes / each], y: [1e3 * rows[at].seconds], name: "chosen", hoverinfo: "skip",
        marker: { size: 18, symbol: "circle-open", line: { width: 3 }, color: css("--mark") } },
    ], {
      height: isNarrow() ? 280 : 340, hovermode: "closest",
      xaxis: axis({ title: { text: `peak (${unit})` } }), yaxis: timeAxis(),
      annotations: [{ x: all.plain_peak_bytes / each, y: timeAxis().type === "log" ? Math.log10(1e3 * all.plain_s) : 1e3 * all.plain_s, text: "without memkit", showarrow: false, yshift: 16, xanchor: "right", font: { color: css("--text") } }],
    });
  }

  function choose(place) {
    at = Math.max(0, Math.min(rows.length - 1, Number(place)));
    range.value = at;
    tell();
    if (window.Plotly) { drawLine(); drawFront(); }
  }

  range.addEventListener("input", () => choose(range.value));
  tell();
  drawings.push(async () => {
    const isNew = !front.data;
    await Promise.all([drawLine(), drawFront()]);
    if (isNew) front.on("plotly_click", (event) => { if (event.points[0].data.name === "plans") choose(event.points[0].pointNumber); });
  });
  const unsure = all.is_measured ? "" : " Predictions for this GPU have not been checked against real steps.";
  const least = `The smallest budget that a plan was found for is ${size(all.least_bytes)}.`;
  return section("plans", "The same step in less memory",
    el("p", {}, `Under a MemoryBudget, memkit keeps what fits, and moves or recomputes the rest. Here is what it predicts for ${/^(A|[FHLMNRSX][A-Z0-9 ])/.test(all.gpu) ? "an" : "a"} ${all.gpu}.${unsure}`),
    label, range,
    el("div", { class: "range-ends" }, el("span", {}, `largest: ${size(rows[0].budget_bytes)}`), el("span", {}, `smallest: ${size(rows[rows.length - 1].budget_bytes)}`)),
    answer, el("h3", {}, "What happens to the activations"), split, keys,
    el("h3", {}, "Before and after"), el("p", { class: "small muted" }, "The line is the step without memkit. The filled area is the step under the chosen budget."), line,
    el("div", { class: "columns" },
      el("div", {}, el("h3", {}, "What each budget costs"), el("p", { class: "small muted" }, "Each point is a plan: click one to choose it. Lower is faster, further left takes less memory."), front),
      el("div", {}, el("h3", {}, "Where the plan acts"), el("p", { class: "small muted" }, "The modules with the most to move or to recompute."), table)),
    ...all.notes.map((note) => el("p", { class: "small muted" }, `Note: ${note}.`)), el("p", { class: "small muted" }, least));
}
