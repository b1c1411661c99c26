"use strict";
// Draws the page's data with Plotly. Axes of differences are linear in log10, with ticks that say so: bars have a width there.
const data = JSON.parse(document.getElementById("data").textContent);
const EMPTY = 0, UNSCORED = 255, LEVELS = 253;
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const floored = (value) => (value === null || Number.isNaN(value) ? null : Math.log10(Math.max(value, data.floor)));
const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
let selected = -1;

function format(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  return value < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function span(first, block, end) {
  const last = Math.min(first + block, end) - 1;
  return last > first ? first + "–" + last : String(first);
}

function decadeTicks(from, to) {
  const every = to - from > 6 ? 2 : 1;
  const values = [];
  if (to - from < 1.5) { // a decade may not lie inside
    for (let e = Math.floor(from); e <= to; e++) for (const digit of [1, 2, 5]) values.push(e + Math.log10(digit));
    const inside = values.filter((v) => v >= from && v <= to);
    return { tickvals: inside, ticktext: inside.map((v) => format(10 ** v, 1)) };
  }
  for (let exponent = Math.ceil(from); exponent <= to; exponent++) if (exponent % every === 0) values.push(exponent);
  return { tickvals: values, ticktext: values.map((e) => (e === 0 ? "1" : "10<sup>" + e + "</sup>")) };
}

function axis(title, more) {
  return { title: { text: title, standoff: 8 }, gridcolor: color("line"), linecolor: color("line"), zeroline: false, ...more };
}

function layout(height, more) {
  return {
    height, margin: { l: 64, r: 24, t: 12, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("ink") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("max"), activecolor: color("ink") },
    hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("ink") } }, ...more,
  };
}

function whole(count) { // ticks of an axis of `count` whole numbers
  return count <= 12 ? { tick0: 0, dtick: 1 } : { nticks: 12, tickformat: "d" };
}

function thresholds() {
  return [["warn", data.warn], ["stop", data.stop]].filter(([, value]) => value !== null);
}

function drawTrend() {
  const steps = data.steps.map((s) => s.step);
  const mode = steps.length > 60 ? "lines" : "lines+markers";
  const trace = (key, name, width) => ({
    type: "scatter", mode, name, x: steps, y: data.steps.map((s) => floored(s[key])), customdata: data.steps.map((s) => format(s[key])),
    hovertemplate: "%{customdata}", line: { color: color(key), width }, marker: { size: 6 },
  });
  const values = data.steps.flatMap((s) => [s.mean, s.max]).filter((v) => v !== null).map(floored);
  const limits = thresholds();
  const range = [Math.min(...values, Math.log10(data.warn)) - 0.3, Math.max(...values, ...limits.map(([, v]) => Math.log10(v))) + 0.5];
  const here = steps[selected];
  const x = steps.length > 12 ? whole(steps.length) : { tickvals: steps, ...(steps.length === 1 && { range: [here - 1, here + 1] }) };
  Plotly.react("trend", [trace("max", "max", 1), trace("p99", "p99", 1.5), trace("mean", "mean", 2.5)], layout(340, {
    xaxis: axis("step", x),
    yaxis: axis("probability difference", { range, ...decadeTicks(...range) }),
    legend: { orientation: "h", x: 0, y: 1.12, traceorder: "reversed" }, margin: { l: 64, r: 88, t: 32, b: 44 }, hovermode: "x unified",
    shapes: [
      ...limits.map(([name, v]) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: Math.log10(v), y1: Math.log10(v),
        line: { color: color(name), width: 1.5, dash: "dash" },
      })),
      { type: "line", yref: "paper", x0: here, x1: here, y0: 0, y1: 1, line: { color: color("soft"), width: 1, dash: "dot" } },
    ],
    annotations: limits.map(([name, v]) => ({
      xref: "paper", x: 1.005, y: Math.log10(v), text: name + " " + v, showarrow: false, xanchor: "left",
      yanchor: data.stop === null ? "middle" : name === "stop" ? "bottom" : "top", // the two may be close
      font: { color: color(name) },
    })),
  }), config);
}

function drawPicture(step) {
  const [rows, columns] = step.size, [blockRows, blockColumns] = step.block, cells = bytes(step.cells);
  const z = [], missing = [], text = [];
  for (let r = 0; r < rows; r++) {
    const codes = Array.from(cells.subarray(r * columns, (r + 1) * columns));
    const exponents = codes.map((c) => (c === EMPTY || c === UNSCORED ? null : ((c - 1) / LEVELS - 1) * data.decades));
    const sample = span(r * blockRows, blockRows, step.shape[0]);
    z.push(exponents);
    missing.push(codes.map((c) => (c === UNSCORED ? 1 : null)));
    text.push(exponents.map((e, c) => "sample " + sample + ", position " + span(c * blockColumns, blockColumns, step.shape[1]) + ": "
      + (e === null ? "unscored" : (blockRows * blockColumns > 1 ? "max " : "") + "≈ " + format(10 ** e))));
  }
  const place = { x0: (blockColumns - 1) / 2, dx: blockColumns, y0: (blockRows - 1) / 2, dy: blockRows, hoverinfo: "text", text };
  const means = new Float32Array(bytes(step.position_mean).buffer);
  const positions = Array.from(means, (_, c) => c * blockColumns + (blockColumns - 1) / 2);
  const shown = Array.from(means, floored).filter((v) => v !== null);
  const range = shown.length ? [Math.min(...shown) - 0.3, Math.max(...shown) + 0.3] : [-data.decades, 0];
  Plotly.react("picture", [
    {
      type: "heatmap", z, ...place, zmin: -8, zmax: 0, colorscale: "Viridis",
      colorbar: { ...decadeTicks(-8, 0), thickness: 12, outlinewidth: 0, len: 0.7, y: 1, yanchor: "top" },
    },
    { type: "heatmap", z: missing, ...place, colorscale: [[0, color("unscored")], [1, color("unscored")]], showscale: false },
    {
      type: "scatter", mode: positions.length > 60 ? "lines" : "lines+markers", x: positions, y: Array.from(means, floored), yaxis: "y2",
      line: { color: color("mean"), width: 1.5, shape: "hvh" }, marker: { size: 5 }, showlegend: false,
      text: Array.from(means, (v, c) => "position " + span(c * blockColumns, blockColumns, step.shape[1]) + ": mean " + format(v)),
      hoverinfo: "text",
    },
  ], layout(560, {
    margin: { l: 64, r: 24, t: 28, b: 44 },
    shapes: [{
      type: "rect", layer: "below", xref: "x domain", yref: "y domain", x0: 0, x1: 1, y0: 0, y1: 1,
      fillcolor: color("empty"), line: { width: 0 },
    }],
    xaxis: axis("position in the completion", { range: [-0.5, Math.max(step.shape[1], 1) - 0.5], showgrid: false, anchor: "y2", ...whole(step.shape[1]) }),
    yaxis: axis("sample", { range: [Math.max(step.shape[0], 1) - 0.5, -0.5], showgrid: false, domain: [0.36, 1], ...whole(step.shape[0]) }),
    yaxis2: axis("mean", { domain: [0, 0.28], range, ...decadeTicks(...range) }),
  }), config);
  byId("picture-note").textContent = rows * columns === 0 || step.tokens + step.unscored === 0
    ? "No token of this step is under the mask."
    : (blockRows * blockColumns > 1 ? "A cell is the largest of " + blockRows + " samples × " + blockColumns + " positions. " : "")
      + "Masked tokens are grey" + (step.unscored ? ", unscored ones pink" : "") + ". Below: the mean by position.";
}

function drawHistogram(step) {
  const width = 1 / data.bins_per_decade;
  const left = step.histogram.map((_, bin) => -data.decades + (bin - 1) * width - (bin === 0 ? width : 0)); // a gap after the first
  const text = step.histogram.map((count, bin) => (bin === 0 ? "below " + format(data.floor) + ", or 0"
    : format(10 ** left[bin]) + " to " + format(10 ** (left[bin] + width))) + ": " + count.toLocaleString("en") + " tokens");
  const ticks = decadeTicks(-data.decades, 0);
  const most = Math.max(...step.histogram, 1);
  Plotly.react("histogram", [{
    type: "bar", x: left.map((v) => v + width / 2), y: step.histogram, width, text, hoverinfo: "text", textposition: "none",
    marker: { color: left.map((v) => color(v + width / 2 > Math.log10(data.warn) ? "warn" : "mean")) },
  }], layout(280, {
    margin: { l: 64, r: 24, t: 28, b: 44 },
    bargap: 0.08,
    xaxis: axis("probability difference", {
      range: [-data.decades - 3 * width, 0], showgrid: false,
      tickvals: [left[0] + width / 2, ...ticks.tickvals.slice(1)], ticktext: ["0", ...ticks.ticktext.slice(1)],
    }),
    yaxis: axis("tokens", { type: "log", range: [Math.log10(0.7), Math.log10(most) + 0.3], dtick: most < 20 ? "D2" : 1 }),
  }), config);
}

function cell(row, content, kind, tag) {
  const element = row.appendChild(document.createElement(tag || "td"));
  element.className = kind || "";
  if (content instanceof Node) element.append(content);
  else element.textContent = content ?? "–";
}

// Token text goes through textContent alone: it can hold anything.
function drawTable(table, tokens, withStep, otherwise) {
  table.replaceChildren();
  if (!tokens.length) {
    cell(table.insertRow(), otherwise, "text");
    return;
  }
  const known = (key) => tokens.some((token) => token[key] !== undefined && token[key] !== null);
  const columns = [
    ["step", "step", withStep], ["sample", "sample", true], ["position", "position", true], ["text", "token", known("text")],
    ["token_id", "id", known("token_id")], ["rollout", "p engine", known("rollout")], ["actor", "p actor", known("actor")],
    ["diff", "difference", true], ["policy_version", "version", known("policy_version")], ["prompt", "prompt", known("prompt")],
  ].filter(([, , show]) => show);
  const head = table.createTHead().insertRow(), body = table.createTBody();
  const isText = (key) => key === "text" || key === "prompt";
  for (const [key, title] of columns) cell(head, title, isText(key) ? "text" : "", "th");
  for (const token of tokens) {
    const row = body.insertRow();
    for (const [key] of columns) {
      const value = token[key];
      if (key === "text" && value !== null && value !== undefined) {
        const code = document.createElement("code");
        code.textContent = value;
        cell(row, code, "text");
      } else if (key === "step") {
        const link = document.createElement("a");
        link.href = "#step=" + value;
        link.textContent = value;
        cell(row, link);
      } else if (key === "diff") cell(row, format(value), value > data.warn ? "above" : "");
      else cell(row, key === "rollout" || key === "actor" ? format(value, 4) : value, isText(key) ? "text" : "");
    }
  }
}

function select(index) {
  selected = Math.min(Math.max(index, 0), data.steps.length - 1);
  const step = data.steps[selected];
  byId("step").value = byId("slider").value = selected;
  byId("previous").disabled = selected === 0;
  byId("next").disabled = selected === data.steps.length - 1;
  byId("step-facts").textContent = step.shape.join(" × ") + " (samples × positions), " + step.tokens.toLocaleString("en")
    + " tokens: mean " + format(step.mean) + ", p99 " + format(step.p99) + ", max " + format(step.max)
    + (step.unscored ? ", " + step.unscored.toLocaleString("en") + " unscored" : "");
  byId("worst-step").textContent = step.step;
  byId("text-note").textContent = step.has_text ? ""
    : "Token text and both probabilities are in prob_tokens_step_" + step.step + ".parquet (prob_diff_save_tokens=True), which is not there or not readable.";
  drawTrend();
  drawPicture(step);
  drawHistogram(step);
  drawTable(byId("step-worst"), step.worst, false, step.tokens ? "No token differs." : "No token was scored.");
}

function fromAddress() {
  const match = /^#step=(\d+)$/.exec(location.hash);
  return match ? data.steps.findIndex((s) => s.step === Number(match[1])) : -1;
}

let waiting = null;
function selectSoon(index) { // a slider moves faster than a chart is drawn
  if (waiting === null) requestAnimationFrame(() => { const to = waiting; waiting = null; select(to); });
  waiting = index;
}

data.steps.forEach((step, index) => byId("step").add(new Option(step.step, index)));
byId("step").addEventListener("change", (event) => select(Number(event.target.value)));
byId("slider").addEventListener("input", (event) => selectSoon(Number(event.target.value)));
byId("previous").addEventListener("click", () => select(selected - 1));
byId("next").addEventListener("click", () => select(selected + 1));
window.addEventListener("hashchange", () => { if (fromAddress() >= 0) select(fromAddress()); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => select(selected));
drawTable(byId("run-worst"), data.worst, true, "No token differs.");
select(fromAddress() >= 0 ? fromAddress() : data.first);
byId("trend").on("plotly_click", (event) => select(event.points[0].pointIndex));
