// The modules: an icicle of their bytes, and the table of all of them.

const NAME = 0, KIND = 1, PARENT = 2, OWN = 5, CALLS = 6, PEAK = 7, FORWARD = 8, BACKWARD = 9, INPUTS = 10, OUTPUTS = 11, MARKS = 12;
const MOST_NODES = 1200;

const children = data.rows.map(() => []);
const roots = [];
data.rows.forEach((row, index) => (row[PARENT] === null ? roots : children[row[PARENT]]).push(index));

function lastPart(row) {
  return row[PARENT] === null ? row[NAME] : row[NAME].slice(row[NAME].lastIndexOf(".") + 1);
}

// The icicle

function icicleSection() {
  const kinds = [
    { key: ACTIVATION, name: "Activations", color: "--activation", low: "--low", what: "what each module keeps for the backward" },
    { key: PARAM, name: "Parameters", color: "--param", low: "--low-param", what: "the weights of each module" },
  ];
  let kind = kinds.find((one) => roots.some((root) => data.rows[root][one.key])) || kinds[0];
  const chart = el("div", { class: "chart", id: "icicle-chart" });
  const words = el("p", { class: "small muted", id: "icicle-words" });
  const buttons = kinds.map((one) => el("button", {
    type: "button", id: one.key === PARAM ? "by-params" : "by-activations",
    onclick: () => { kind = one; say(); if (window.Plotly) draw(); },
  }, one.name));

  function say() {
    kinds.forEach((one, index) => buttons[index].setAttribute("aria-pressed", String(one === kind)));
    words.textContent = `Each box is as large as ${kind.what}, including the modules inside it. Click a box to look inside, and the bar above to go back.`;
  }

  // The largest modules, and for the others one box in each module: a module comes before those inside of it.
  function nodes() {
    const value = (index) => data.rows[index][kind.key];
    const order = data.rows.map((_, index) => index).filter((index) => value(index) > 0);
    const kept = new Set(order.sort((one, other) => value(other) - value(one) || one - other).slice(0, MOST_NODES));
    const total = roots.reduce((sum, root) => sum + value(root), 0);
    const found = { ids: [], labels: [], parents: [], values: [], colors: [], texts: [], notes: [] };
    const add = (id, label, parent, bytes, note) => {
      found.ids.push(id);
      found.labels.push(plotText(label));
      found.parents.push(parent);
      found.values.push(bytes);
      found.colors.push(total ? bytes / total : 0);
      found.texts.push(`${size(bytes)}`);
      found.notes.push(`<b>${plotText(note)}</b><br>${size(bytes)}, ${percent(total ? bytes / total : 0)} of all`);
    };
    const walk = (indices, parent) => {
      const small = indices.filter((index) => !kept.has(index) && value(index) > 0);
      for (const index of indices.filter((one) => kept.has(one))) {
        const row = data.rows[index];
        add(String(index), lastPart(row), parent, value(index), `${row[NAME]} (${row[KIND] || "no module"})`);
        walk(children[index], String(index));
      }
      if (small.length) {
        const bytes = small.reduce((sum, index) => sum + value(index), 0);
        add(`${parent} smaller`, `${small.length} smaller`, parent, bytes, `${small.length} smaller modules`);
      }
    };
    const filled = roots.filter((root) => value(root) > 0);
    if (filled.length > 1) add("all", "the step", "", total, "the step"); // plotly wants one box around all
    walk(filled, filled.length > 1 ? "all" : "");
    return { ...found, total };
  }

  function draw() {
    const found = nodes();
    if (!found.total) {
      window.Plotly.purge(chart);
      chart.textContent = `There are no ${kind.name.toLowerCase()}.`;
      return null;
    }
    if (!chart.data) chart.textContent = "";
    const low = css(kind.low), high = css(kind.color), isDark = document.documentElement.dataset.theme === "dark";
    const colors = found.colors.map((share) => mixed(low, high, 0.12 + 0.88 * Math.sqrt(share)));
    const text = found.colors.map((share) => (isDark && share < 0.35 ? "#e5ebf3" : kind.key === PARAM && share > 0.2 ? "#ffffff" : "#1b2430"));
    return plot(chart, [{
      type: "icicle", ids: found.ids, labels: found.labels, parents: found.parents, values: found.values, text: found.texts,
      branchvalues: "total", texttemplate: "%{label}  %{text}", customdata: found.notes, hovertemplate: "%{customdata}<extra></extra>",
      marker: { colors, line: { color: css("--card"), width: 1.5 } }, tiling: { orientation: "h", pad: 1 }, sort: false,
      maxdepth: isNarrow() ? 4 : 5, pathbar: { visible: true, thickness: 26, textfont: { color: css("--text") } }, textfont: { color: text },
      insidetextfont: { color: text }, outsidetextfont: { color: text }, root: { color: "rgba(0,0,0,0)" },
    }], { uniformtext: { minsize: isNarrow() ? 9 : 11, mode: "hide" }, height: isNarrow() ? 440 : 520, margin: { l: 2, r: 2, t: 30, b: 4 } });
  }

  say();
  drawings.push(draw);
  return section("icicle", "Memory by module", el("div", { class: "tools", role: "group", "aria-label": "What the boxes show" }, ...buttons), words, chart);
}

// The table

function tableSection() {
  const has = (column) => data.rows.some((row) => row[column] !== null);
  const columns = [
    { name: "module", key: NAME, text: true },
    { name: "class", key: KIND, text: true },
    { name: "activations (MiB)", key: ACTIVATION, cell: mib, bar: "" },
    { name: "own activations (MiB)", key: OWN, cell: mib, about: "Kept by the module itself, without the modules inside it" },
    { name: "parameters (MiB)", key: PARAM, cell: mib, bar: "param" },
    { name: "peak of a call (MiB)", key: PEAK, cell: mib, about: "The most that a call takes beside what was there before it" },
    { name: "forward (ms)", key: FORWARD, cell: (s) => (s === null ? "–" : (1e3 * s).toFixed(2)) },
    { name: "backward (ms)", key: BACKWARD, cell: (s) => (s === null ? "–" : (1e3 * s).toFixed(2)) },
    { name: "calls", key: CALLS, cell: String },
    { name: "input", key: INPUTS, text: true },
    { name: "output", key: OUTPUTS, text: true },
  ].filter((column) => column.text || has(column.key));
  const total = { [ACTIVATION]: 0, [PARAM]: 0 };
  for (const root of roots) for (const key of [ACTIVATION, PARAM]) total[key] += data.rows[root][key];

  const open = new Set();
  const depth = data.rows.map(() => 0);
  data.rows.forEach((row, index) => { depth[index] = row[PARENT] === null ? 0 : depth[row[PARENT]] + 1; });
  const openTo = (most) => { open.clear(); data.rows.forEach((_, index) => { if (children[index].length && depth[index] < most) open.add(index); }); };
  openTo(depth.filter((at) => at <= 2).length <= 40 ? 2 : 1);

  let by = null, isUp = false, find = "";
  const body = el("tbody", {});
  const heads = columns.map((column) => el("th", { class: column.text ? null : "num", scope: "col", title: column.about },
    el("button", { type: "button", "data-key": column.key, onclick: () => sortBy(column) }, column.name)));

  // First the most, or from a to z; then the other way round; then the order of the model.
  function sortBy(column) {
    if (by !== column) { by = column; isUp = Boolean(column.text); }
    else if (isUp === Boolean(column.text)) isUp = !isUp;
    else by = null;
    fill();
  }

  function ordered(indices) {
    if (!by) return indices;
    const value = (index) => data.rows[index][by.key];
    const compare = by.text ? (one, other) => String(value(one)).localeCompare(String(value(other)), "en", { numeric: true })
      : (one, other) => (value(one) || 0) - (value(other) || 0);
    return [...indices].sort((one, other) => (isUp ? compare(one, other) : compare(other, one)) || one - other);
  }

  function nameCell(index, isFlat) {
    const row = data.rows[index], cell = el("td", { class: "name", title: row[NAME] });
    if (!isFlat) {
      cell.style.paddingLeft = `${10 + 16 * Math.min(depth[index], 12)}px`;
      if (children[index].length) {
        const isOpen = open.has(index);
        cell.append(el("button", {
          type: "button", class: "fold", "aria-expanded": String(isOpen), "aria-label": `${isOpen ? "Fold" : "Unfold"} ${row[NAME]}`,
          onclick: () => { if (!open.delete(index)) open.add(index); fill(index); },
        }, isOpen ? "▾" : "▸"));
      } else cell.append(el("span", { class: "leaf" }));
    }
    cell.append(isFlat ? row[NAME] : lastPart(row));
    for (const mark of row[MARKS] ? row[MARKS].split(", ") : []) cell.append(el("span", { class: "tag" }, mark));
    return cell;
  }

  function rowOf(index, isFlat) {
    const row = data.rows[index];
    return el("tr", { "data-name": row[NAME] }, ...columns.map((column) => {
      if (column.key === NAME) return nameCell(index, isFlat);
      if (column.text) return el("td", { class: column.key === KIND ? null : "muted" }, row[column.key] || "–");
      const cell = el("td", { class: `num${column.bar === undefined ? "" : ` bar ${column.bar}`}` }, column.cell(row[column.key]));
      if (column.bar !== undefined && total[column.key]) cell.style.setProperty("--share", `${(100 * row[column.key]) / total[column.key]}%`);
      return cell;
    }));
  }

  function fill(focused) {
    const rows = [];
    if (find) {
      const found = data.rows.map((_, index) => index).filter((index) => `${data.rows[index][NAME]} ${data.rows[index][KIND]}`.toLowerCase().includes(find));
      for (const index of ordered(found).slice(0, 2000)) rows.push(rowOf(index, true));
    } else {
      const pending = [...ordered(roots)].reverse();
      while (pending.length) {
        const index = pending.pop();
        rows.push(rowOf(index, false));
        if (open.has(index)) pending.push(...[...ordered(children[index])].reverse());
      }
    }
    body.replaceChildren(...rows);
    columns.forEach((column, place) => {
      heads[place].setAttribute("aria-sort", by !== column ? "none" : isUp ? "ascending" : "descending");
      heads[place].firstChild.textContent = column.name + (by !== column ? "" : isUp ? " ↑" : " ↓");
    });
    if (focused !== undefined) body.querySelectorAll("tr").forEach((row) => {
      if (row.dataset.name === data.rows[focused][NAME]) row.querySelector(".fold").focus();
    });
  }

  fill();
  const search = el("input", { type: "search", id: "find", placeholder: "Find a module or a class", "aria-label": "Find a module or a class" });
  search.addEventListener("input", () => { find = search.value.trim().toLowerCase(); fill(); });
  return section("table", "All modules",
    el("p", { class: "small muted" }, "Each row includes the modules inside it. Click a heading to sort, and an arrow to unfold."),
    el("div", { class: "tools" }, search,
      el("button", { type: "button", id: "unfold", onclick: () => { openTo(Infinity); fill(); } }, "Unfold all"),
      el("button", { type: "button", id: "fold", onclick: () => { openTo(1); fill(); } }, "Fold")),
    el("div", { class: "scroll tall" }, el("table", { id: "modules" }, el("thead", {}, el("tr", {}, ...heads)), body)));
}
