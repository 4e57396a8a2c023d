// Puts the page together, and has it drawn.

function head() {
  return el("header", { class: "top" },
    el("div", {}, el("h1", {}, `${data.model}: where the memory goes`), el("p", { class: "muted small where" }, data.where.join(" · "))),
    themeButton());
}

function facts() {
  return el("div", { class: "facts" }, ...data.facts.map((fact) => el("div", { class: "fact" },
    el("span", { class: "name" }, fact.name), el("b", {}, fact.bytes === null ? time(fact.seconds) : size(fact.bytes)),
    el("span", { class: "small muted" }, fact.meaning))));
}

async function start() {
  applyTheme();
  const parts = [head(), facts(), timelineSection(), plansSection(), icicleSection(), tableSection()];
  const words = "All sizes are binary: 1 GiB is 1024 MiB. On the CPU and without data, scratch memory inside kernels is not counted.";
  document.getElementById("page").replaceChildren(...parts.filter(Boolean), el("footer", {}, `Made by memkit ${data.version}. ${words}`));
  try {
    await Promise.all(drawings.map((draw) => draw()));
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    document.documentElement.dataset.ready = "no";
    for (const chart of document.querySelectorAll(".chart")) {
      chart.replaceChildren(el("p", { class: "broken" }, `This browser could not draw the picture (${error.message}). The tables are all there.`));
    }
    throw error;
  }
}

start();
