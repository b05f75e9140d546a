"use strict";
// Values under the pointer. Everything is there without this script; it only adds.
const SVG = "http://www.w3.org/2000/svg";

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
}

function start() {
  const charts = JSON.parse(document.getElementById("curves").textContent);
  for (const card of document.querySelectorAll("[data-chart]")) {
    const chart = charts[card.dataset.chart], svg = card.querySelector("svg"), hover = svg.querySelector(".hover");
    const tip = document.createElement("div");
    tip.className = "tip"; tip.hidden = true; card.appendChild(tip);
    const { left, right, top, bottom } = chart.area, [x0, x1] = chart.x;
    const place = step => left + (step - x0) / (x1 - x0) * (right - left);

    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const step = x0 + ((event.clientX - box.left) * scale - left) / (right - left) * (x1 - x0);
      const near = chart.curves.filter(c => c.steps.length).map(c => ({ curve: c, i: nearest(c.steps, step) }));
      if (!near.length) return;
      const at = near.map(s => s.curve.steps[s.i]).reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
      // a run that had ended by then, or had not begun, has no value there
      const shown = near.filter(s => at >= s.curve.steps[0] && at <= s.curve.steps[s.curve.steps.length - 1]);
      hover.replaceChildren(element("path", { class: "cursor", d: `M${place(at)} ${top}V${bottom}` }));
      tip.replaceChildren(document.createTextNode(`step ${at.toLocaleString("en")}`));
      for (const { curve, i } of shown) {
        hover.appendChild(element("circle", { class: curve.colour, cx: place(curve.steps[i]), cy: curve.y[i], r: 4 }));
        const line = document.createElement("div"), mark = document.createElement("i");
        line.className = curve.colour; line.append(mark, `${curve.text[i]}  ${chart.curves.length > 1 ? curve.label : ""}`);
        tip.appendChild(line);
      }
      tip.hidden = false;
      const frame = card.getBoundingClientRect(), x = event.clientX - frame.left, width = tip.offsetWidth;
      tip.style.left = `${x + 14 + width < frame.width - 4 ? x + 14 : Math.max(4, x - 14 - width)}px`;
      tip.style.top = `${box.top - frame.top + 6}px`;
    });
    svg.addEventListener("pointerleave", () => { hover.replaceChildren(); tip.hidden = true; });
  }

  // A click on a heading sorts the runs: by their numbers, the largest first, or by their texts; a second click turns it.
  for (const table of document.querySelectorAll("table.sortable")) {
    const [head, ...rows] = table.rows;
    [...head.cells].forEach((cell, column) => cell.addEventListener("click", () => {
      const up = cell.dataset.sorted === "down";
      [...head.cells].forEach(one => delete one.dataset.sorted);
      cell.dataset.sorted = up ? "up" : "down";
      const value = row => row.cells[column].dataset.value, text = row => row.cells[column].textContent;
      const numbers = rows.some(row => value(row) !== undefined);
      const missing = row => numbers && value(row) === undefined;
      const order = (a, b) => numbers ? value(b) - value(a) : text(a).localeCompare(text(b), "en", { numeric: true });
      rows.sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : up ? order(b, a) : order(a, b)));
      table.tBodies[0].append(...rows);
    }));
  }

  // One sampled step at a time, in the order asked for.
  for (const part of document.querySelectorAll(".all-samples")) {
    const step = part.querySelector(".steps"), order = part.querySelector(".order"), groups = [...part.querySelectorAll(".of-step")];
    const drawn = groups.map(group => [...group.children]);
    const show = () => groups.forEach((group, i) => {
      group.hidden = group.dataset.step !== step.value;
      const sign = { "best first": -1, "worst first": 1 }[order.value] || 0;
      const reward = card => "reward" in card.dataset ? Number(card.dataset.reward) : sign * Infinity;
      group.replaceChildren(...(sign ? [...drawn[i]].sort((a, b) => sign * (reward(a) - reward(b)) || 0) : drawn[i]));
    });
    step.value = groups[groups.length - 1].dataset.step;
    step.addEventListener("change", show); order.addEventListener("change", show); show();
  }
}
start();
