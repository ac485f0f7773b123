/* Shows the numbers of a chart below the pointer, or at the place that the arrow keys move to, and sorts tables. */
const text = (tag, words, name) => Object.assign(document.createElement(tag), { textContent: words, className: name ?? "" });
const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
for (const plot of document.querySelectorAll("[data-chart]")) {
  const { along, unit, x, at, lines, low, high, log } = JSON.parse(plot.dataset.chart);
  const scale = log ? Math.log : (value) => value;
  const rule = plot.appendChild(text("div", "", "rule"));
  const tip = plot.appendChild(text("div", "", "tip"));
  const dots = lines.map(([, color]) => plot.appendChild(text("i", "", `dot c${color}`)));
  let place = x.length - 1;
  const show = (i) => {
    place = Math.max(0, Math.min(x.length - 1, i));
    const left = `${100 * at[place]}%`;
    plot.classList.add("pointed");
    rule.style.left = left;
    tip.replaceChildren(text("b", `${along} ${number(x[place])}`));
    lines.forEach(([name, color, heights], k) => {
      const height = heights[place];
      dots[k].hidden = height === null || (log && height <= 0);
      if (height === null) return;
      const share = (scale(height) - scale(low)) / (scale(high) - scale(low));
      Object.assign(dots[k].style, { left, bottom: `${100 * Math.max(0, Math.min(1, share))}%` });
      const row = tip.appendChild(text("span", `${name} `, `c${color}`));
      row.append(text("b", number(height) + unit));
    });
    const right = at[place] > 0.5;
    Object.assign(tip.style, { left: right ? "auto" : left, right: right ? `${100 - 100 * at[place]}%` : "auto" });
  };
  const hide = () => plot.classList.remove("pointed");
  plot.onpointermove = plot.onpointerdown = ({ clientX }) => {
    const box = plot.getBoundingClientRect();
    const share = (clientX - box.left) / box.width;
    show(at.reduce((best, one, i) => (Math.abs(one - share) < Math.abs(at[best] - share) ? i : best), 0));
  };
  plot.onpointerleave = plot.onblur = hide;
  plot.onfocus = () => plot.matches(":focus-visible") && show(place);
  plot.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -x.length, End: x.length }[event.key];
    if (step) event.preventDefault();
    if (step) show(place + step);
    if (event.key === "Escape") hide();
  };
}
for (const table of document.querySelectorAll("table[data-sorted]")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const key = (row, i) => row.cells[i].dataset.key;
  heads.forEach((head, i) => {
    const button = text("button", head.textContent);
    button.type = "button";
    button.onclick = () => {
      const order = head.ariaSort === "ascending" ? "descending" : "ascending";
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].filter((row) => key(row, i) !== "");
      const without = [...body.rows].filter((row) => key(row, i) === "");
      const numbers = rows.every((row) => !Number.isNaN(Number(key(row, i))));
      const compare = (a, b) => (numbers ? a - b : a.localeCompare(b, "en", { numeric: true }));
      rows.sort((a, b) => sign * compare(key(a, i), key(b, i)));
      body.append(...rows, ...without);
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.ariaSort = order;
    };
    head.replaceChildren(button);
  });
}
