// What all parts of the page share: its data, its units, its elements, its theme, and plotly.js.

const data = JSON.parse(document.getElementById("memkit-data").textContent);
const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
const PARAM = 3, ACTIVATION = 4;

// Texts of the user's go into elements as text nodes, and never as HTML.
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") made.className = value;
    else if (name === "color") continue;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  if (props.color) made.style.setProperty("--color", props.color); // behind `style`, which would take it off
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Plotly reads a few HTML tags and entities in its labels.
function plotText(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function unitOf(bytes) {
  if (bytes >= GIB) return ["GiB", GIB];
  return bytes >= MIB ? ["MiB", MIB] : ["KiB", KIB];
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  if (Math.abs(bytes) < KIB) return `${bytes} B`;
  const [unit, each] = unitOf(Math.abs(bytes));
  return `${(bytes / each).toFixed(2)} ${unit}`;
}

function mib(bytes) {
  return bytes === null ? "–" : (bytes / MIB).toFixed(2);
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1e3).toFixed(seconds >= 0.1 ? 1 : 2)} ms`;
}

function percent(share) {
  const shown = 100 * share;
  return `${shown >= 10 || shown === 0 ? shown.toFixed(0) : shown.toFixed(1)} %`;
}

function section(id, title, ...children) {
  return el("section", { class: "card", id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children.filter(Boolean));
}

// Colors

const COLORS = {
  param: "--param", "optimizer state": "--optimizer", buffer: "--buffer", input: "--input", "param cast": "--cast",
  grad: "--grad", activation: "--activation", temp: "--temp",
};

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colorOf(category) {
  return css(COLORS[category] || "--temp");
}

function colorName(category) {
  return `var(${COLORS[category] || "--temp"})`;
}

function mixed(from, to, share) {
  const parts = [from, to].map((color) => [1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16)));
  return `rgb(${parts[0].map((low, index) => Math.round(low + (parts[1][index] - low) * share)).join(",")})`;
}

function labelOf(category) {
  const found = data.categories.find((known) => known.key === category);
  return found ? found.name : category;
}

// Theme

const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
const drawings = []; // functions that draw with the colors as they are

function applyTheme() {
  const isDark = theme === "dark" || (theme === "auto" && wantsDark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

function themeButton() {
  const button = el("button", { id: "theme", type: "button", title: "Switch between dark and light" });
  const say = () => { button.textContent = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    applyTheme();
    say();
    redraw();
  });
  wantsDark.addEventListener("change", () => { applyTheme(); say(); redraw(); });
  say();
  return button;
}

function redraw() {
  for (const draw of drawings) draw();
}

// Plotly

function isNarrow() {
  return window.innerWidth < 760;
}

function axis(more) {
  return {
    gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, fixedrange: isNarrow(),
    ...more,
  };
}

function plot(box, traces, layout) {
  return window.Plotly.react(
    box, traces,
    {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: isNarrow() ? 12 : 13, color: css("--text") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") }, align: "left", namelength: -1 },
      margin: { l: 8, r: 12, t: 30, b: 8 },
      ...layout,
    },
    { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", scrollZoom: false },
  );
}
