"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const narrow = () => window.innerWidth < 600;
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function themed(figure) {
    const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line") };
    const layout = {
      ...figure.layout,
      height: figure.height,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text"), size: narrow() ? 10 : 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") }, align: "left" },
      margin: narrow() ? { l: 40, r: 6, t: 34, b: 40 } : { l: 62, r: 12, t: 34, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--text") },
      dragmode: narrow() ? false : "zoom",
    };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) layout[name] = { ...axis, automargin: true, ...layout[name] };
    }
    return layout;
  }

  const options = () => ({ displayModeBar: narrow() ? false : "hover", responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });

  function drawFigures() {
    for (const [id, figure] of Object.entries(charts.figures)) {
      Plotly.react(id, figure.data, themed(figure), options());
    }
  }

  const shortened = (text, length) => (text.length <= length ? text : "…" + text.slice(1 - length));
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function drawHeat() {
    const choice = document.getElementById("heat-choice");
    if (!choice) return;
    const figure = charts.maps[Number(choice.value)];
    const layout = themed(figure);
    layout.yaxis.ticktext = figure.labels.map((name) => escaped(shortened(name, narrow() ? 12 : 34)));
    const [trace] = figure.data;
    const data = [{ ...trace, showscale: !narrow() }];
    Plotly.react("chart-heat", data, layout, options());
    document.getElementById("heat-note").textContent =
      (figure.unit === "bits" ? "Bits before an overflow; few are dangerous." : "Share of values; 0 is best.") +
      (figure.left_out ? ` The worst ${figure.labels.length} of ${figure.labels.length + figure.left_out} layers.` : "");
  }

  function draw() {
    drawFigures();
    drawHeat();
  }

  function filterTable(input) {
    const table = document.getElementById(input.dataset.table);
    const parts = input.value.trim().toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !parts.every((part) => text.includes(part));
      shown += row.hidden ? 0 : 1;
    }
    const total = table.tBodies[0].rows.length;
    document.querySelector(`[data-count="${table.id}"]`).textContent =
      shown === total ? `${total} rows` : `${shown} of ${total} rows`;
  }

  function sortTable(header) {
    const table = header.closest("table");
    const index = header.cellIndex;
    const ascending = header.getAttribute("aria-sort") === "descending";
    const key = (row) => row.cells[index].dataset.order;
    const compare = (one, other) => {
      const [a, b] = [key(one), key(other)];
      const numbers = a !== "" && b !== "" && !isNaN(a) && !isNaN(b);
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
      const order = numbers ? a - b : a.localeCompare(b);
      return ascending ? order : -order;
    };
    for (const one of header.parentNode.cells) one.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }

  for (const input of document.querySelectorAll(".filter")) {
    input.addEventListener("input", () => filterTable(input));
  }
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sortTable(button.parentNode));
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const current = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = current === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  document.getElementById("heat-choice")?.addEventListener("change", drawHeat);
  let wasNarrow = narrow();
  window.addEventListener("resize", () => {
    if (narrow() !== wasNarrow) {
      wasNarrow = narrow();
      draw();
    }
  });
  draw();
})();
