/** Draw how a training goes: the loss of each step, and what was measured on rows held out. */

const MOST_POINTS = 1000; // of a line

/** Return a running mean of losses. */
export function smooth(losses) {
  let mean = 0;
  return losses.map((loss, i) => (mean += Math.max(0.08, 1 / (i + 1)) * (loss - mean)));
}

/**
 * Draw on a canvas.
 *
 * @param {number[]} losses of each step
 * @param {[number, number][]} measured after so many steps: a share of the axis on the right
 * @param {number} steps at least so many fit on the axis
 * @param {number} top of the axis of losses
 * @param {string} name of what is measured
 * @param {(share: number) => string} label of the axis on the right
 */
export function draw(canvas, { losses, measured, steps, top = 2.5, name = "accuracy", label = (x) => `${Math.round(100 * x)} %` }) {
  const paper = canvas.getContext("2d");
  const { width, height } = canvas;
  const box = { left: 64, right: width - 84, top: 36, bottom: height - 44 };
  const most = Math.max(steps, losses.length);
  const x = (step) => box.left + ((box.right - box.left) * step) / most;
  const y = (share) => box.bottom - (box.bottom - box.top) * share;
  const style = getComputedStyle(document.documentElement);
  const [red, blue, soft, line] = ["--loss", "--accuracy", "--soft", "--line"].map((name) =>
    style.getPropertyValue(name),
  );
  paper.clearRect(0, 0, width, height);
  paper.font = "20px system-ui, sans-serif";
  paper.lineWidth = 1.5;
  for (let i = 0; i <= 5; i++) {
    paper.strokeStyle = line;
    path(paper, [
      [box.left, y(i / 5)],
      [box.right, y(i / 5)],
    ]);
    text(paper, shown((top * i) / 5, top), box.left - 12, y(i / 5) + 7, red, "right");
    text(paper, label(i / 5), box.right + 12, y(i / 5) + 7, blue, "left");
  }
  const tick = Math.max(1, round(most / 6));
  for (let step = 0; step <= most; step += tick) text(paper, step, x(step), height - 12, soft, "center");
  text(paper, "loss", box.left - 12, 18, red, "right");
  text(paper, name, width - 8, 18, blue, "right");
  text(paper, "steps", (box.left + box.right) / 2, 18, soft, "center");
  const every = Math.ceil(losses.length / MOST_POINTS);
  const points = (losses) =>
    losses.map((loss, i) => [x(i + 1), y(Math.min(1, loss / top))]).filter((_, i) => i % every === 0 || i === losses.length - 1);
  paper.globalAlpha = 0.25;
  paper.strokeStyle = red;
  path(paper, points(losses));
  paper.globalAlpha = 1;
  paper.lineWidth = 3.5;
  if (losses.length) path(paper, points(smooth(losses)));
  paper.strokeStyle = blue;
  path(
    paper,
    measured.map(([step, share]) => [x(step), y(Math.min(1, share))]),
  );
}

/** Return a number as the axis from 0 to `top` shows it. */
function shown(number, top) {
  return top >= 1000 ? number.toExponential(1) : number.toFixed(Math.max(0, 1 - Math.floor(Math.log10(top))));
}

/** Return the number of the form 1, 2 or 5 times a power of ten at or above a number. */
export function round(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return power * [1, 2, 5, 10].find((times) => times * power >= number * (1 - 1e-9));
}

export function path(paper, points) {
  paper.beginPath();
  points.forEach(([x, y]) => paper.lineTo(x, y));
  paper.stroke();
}

function text(paper, what, x, y, color, align) {
  paper.fillStyle = color;
  paper.textAlign = align;
  paper.fillText(what, x, y);
}
