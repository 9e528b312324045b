"use strict";
// Draws the page from the JSON in #data. Text from the trace enters the document as text nodes
// and attribute values only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const KNOWN = new Set(data.states);
  const LINES = ["#2563eb", "#d97706", "#7c3aed", "#059669", "#db2777", "#64748b"];
  const points = data.lives.filter((life) => life.machine === "point");

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "rect", "line", "polyline", "circle", "text", "title"].includes(tag);
    const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const look = (state) => (KNOWN.has(state) ? state : "other");

  function duration(ms) {
    if (ms < 1000) return `${Math.round(ms)} ms`;
    const s = ms / 1000;
    if (s < 60) return `${s.toFixed(1)} s`;
    if (s < 3600) return `${Math.floor(s / 60)}m${String(Math.floor(s % 60)).padStart(2, "0")}s`;
    return `${Math.floor(s / 3600)}h${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  }

  const number = (value) => String(Number(value.toPrecision(4)));

  // -- choosing a point ------------------------------------------------------------------

  const marks = new Map(); // index of a life -> the elements that stand for it

  function choosable(element, index) {
    element.setAttribute("tabindex", "0");
    element.setAttribute("role", "button");
    element.addEventListener("click", () => choose(index));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(index);
    });
    if (!marks.has(index)) marks.set(index, []);
    marks.get(index).push(element);
    return element;
  }

  function choose(index) {
    for (const element of document.querySelectorAll(".chosen")) element.classList.remove("chosen");
    for (const element of marks.get(index) || []) element.classList.add("chosen");
    const life = data.lives[index];
    document.getElementById("why-title").textContent = `Why: ${life.machine} ${life.id}`;
    const items = life.chain.map((link) =>
      make("li", link.crosses ? { class: "crosses" } : {}, make("time", {}, `+${duration(link.ms)}`),
        link.crosses ? `because ${link.text}` : link.text));
    if (!items.length) items.push(make("li", {}, "Its causes are not in this page."));
    document.getElementById("chain").replaceChildren(...items);
  }

  // -- curve -----------------------------------------------------------------------------

  function step(life) {
    const value = Number(life.id.replace(/^hf:/, ""));
    return life.id !== "" && Number.isFinite(value) ? value : null;
  }

  function curve() {
    const sets = new Map();
    for (const life of points)
      for (const [name, score] of Object.entries(life.scores))
        if (step(life) !== null) {
          if (!sets.has(name)) sets.set(name, []);
          sets.get(name).push({ life, x: step(life), y: score });
        }
    if (!sets.size) {
      document.getElementById("curve-section").hidden = true;
      return;
    }
    const all = [...sets.values()].flat();
    const skipped = points.filter((life) => life.state === "skipped" && step(life) !== null);
    const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    let [x0, x1] = extent([...all.map((p) => p.x), ...skipped.map(step)]);
    let [y0, y1] = extent(all.map((p) => p.y));
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
    const [width, height, left, bottom, top] = [900, 260, 60, 30, 12];
    const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - 20);
    const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - bottom - top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, id: "curve-svg" },
      make("line", { class: "axis", x1: left, x2: width - 20, y1: height - bottom, y2: height - bottom }),
      make("line", { class: "axis", x1: left, x2: left, y1: top, y2: height - bottom }),
      make("text", { x: 4, y: py(y1) + 4 }, number(y1)), make("text", { x: 4, y: py(y0) + 4 }, number(y0)),
      make("text", { x: left, y: height - 10 }, `step ${number(x0)}`),
      make("text", { x: width - 20, y: height - 10, "text-anchor": "end" }, `step ${number(x1)}`));
    [...sets].forEach(([name, dots], i) => {
      const colour = LINES[i % LINES.length];
      dots.sort((a, b) => a.x - b.x);
      svg.append(make("polyline", { class: "score", stroke: colour, points: dots.map((d) => `${px(d.x)},${py(d.y)}`).join(" ") }));
      for (const dot of dots)
        svg.append(choosable(make("circle", { class: "dot", cx: px(dot.x), cy: py(dot.y), r: 4, fill: colour, "data-point": dot.life.id },
          make("title", {}, `${name} at ${dot.life.id}: ${number(dot.y)}`)), dot.life.index));
      svg.append(make("text", { x: left + 10, y: top + 14 * (i + 1), fill: colour }, `● ${name}`));
    });
    for (const life of skipped)
      svg.append(choosable(make("rect", { class: "dot skipped", x: px(step(life)) - 3, y: height - bottom - 3, width: 6, height: 6, "data-point": life.id },
        make("title", {}, `${life.id} skipped: ${life.reason}`)), life.index));
    document.getElementById("curve").append(svg);
  }

  // -- timeline --------------------------------------------------------------------------

  function timeline() {
    const [width, height, left] = [1000, 18, 150];
    const [start, end] = [data.start_ms, Math.max(data.end_ms, data.start_ms + 1)];
    const x = (ms) => left + ((Math.min(Math.max(ms, start), end) - start) / (end - start)) * (width - left - 10);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height * (data.lives.length + 1) + 4}`, id: "timeline-svg" });
    data.lives.forEach((life, row) => {
      const y = row * height + 2;
      const label = `${life.machine} ${life.id}`;
      const group = make("g", { class: "row", "data-life": label },
        make("rect", { class: "hit", x: 0, y, width, height }),
        make("text", { x: 4, y: y + 13 }, label.length > 22 ? `${label.slice(0, 21)}…` : label, make("title", {}, label)));
      for (const [state, from, to] of life.spans)
        group.append(make("rect", { class: look(state), x: x(from), y: y + 3, width: Math.max(x(to) - x(from), 1), height: height - 6 },
          make("title", {}, `${state}: ${duration(to - from)}, from +${duration(from)}`)));
      if (life.state === "done" || life.state === "skipped")
        group.append(make("text", { class: life.state, x: x(life.end_ms) + 3, y: y + 13 }, life.state === "done" ? "✓" : "✗"));
      svg.append(choosable(group, life.index));
    });
    const y = data.lives.length * height + 14;
    svg.append(make("text", { x: left, y }, `+${duration(start)}`), make("text", { x: width - 10, y, "text-anchor": "end" }, `+${duration(end)}`));
    document.getElementById("timeline").append(svg);
    const seen = new Set(data.lives.flatMap((life) => life.spans.map(([state]) => state)));
    for (const state of seen) document.getElementById("legend").append(make("span", { class: `swatch ${look(state)}` }), state);
  }

  // -- tables ----------------------------------------------------------------------------

  function table(id, heads, lives, cells) {
    const row = (life) => choosable(make("tr", { "data-point": life.id }, ...cells(life)), life.index);
    document.getElementById(id).append(
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head)))),
      make("tbody", {}, ...lives.map(row)));
  }

  const cell = (text) => make("td", {}, text);
  const spent = (life, state) => {
    const stays = life.spans.filter(([name]) => name === state);
    const text = stays.length ? duration(stays.reduce((sum, [, from, to]) => sum + to - from, 0)) : "";
    return make("td", { class: "number" }, text);
  };

  function tables() {
    const skipped = points.filter((life) => life.state === "skipped");
    document.getElementById("skip-section").hidden = !skipped.length;
    table("skips", ["point", "reason", "message", "at"], skipped,
      (life) => [cell(life.id), cell(life.reason), cell(life.message), cell(`+${duration(life.end_ms)}`)]);
    const states = ["queued", "exporting", "pinning", "running"];
    table("points", ["point", "state", ...states, "score", "weights"], points, (life) => [
      cell(life.id), cell(life.state), ...states.map((state) => spent(life, state)),
      cell(Object.entries(life.scores).map(([name, score]) => `${name} ${number(score)}`).join(", ")),
      cell(life.weights)]);
  }

  document.getElementById("title").textContent = data.title;
  document.getElementById("summary").textContent = data.summary;
  document.getElementById("notes").append(...data.notes.map((note) => make("li", {}, note)));
  data.lives.forEach((life, index) => { life.index = index; });
  curve();
  timeline();
  tables();
  document.body.dataset.ready = "yes";
})();
