/** Train a LoRA adapter of a decoder in 4 bits on the lines of the user, and give it as files. */

import * as ort from "./onnxruntime/ort.webgpu.min.mjs";
import { at, attempt, fail, give, say } from "./controls.js";
import { Trainer } from "./index.js";
import { Tokenizer } from "./tokenizers.min.mjs";

const STEPS = 60; // of one press of Learn
const ROWS = 8; // the most lines of a step
const LONGEST = 128; // tokens of a line
const WRITTEN = 24; // the most tokens of an answer
const IGNORED = -100; // the label of a token that does not count

const read = async (name) => (await fetch(new URL(name, import.meta.url))).arrayBuffer();
const json = async (name) => JSON.parse(new TextDecoder().decode(await read(name)));
const losses = [];
let trainer, tokenizer, end, initial;
let training = false;

async function main() {
  ort.env.wasm.wasmPaths = new URL("./onnxruntime/", import.meta.url).href;
  ort.env.logLevel = "error";
  const asked = new URLSearchParams(location.search).get("provider");
  const provider = asked ?? ((await navigator.gpu?.requestAdapter()) ? "webgpu" : "wasm");
  const config = await json("tokenizer_config.json");
  tokenizer = new Tokenizer(await json("tokenizer.json"), config);
  end = tokenizer.token_to_id(config.eos_token?.content ?? config.eos_token);
  at("name").textContent = (await json("page.json")).name;
  trainer = await Trainer.create(ort, new URL(`./${provider}`, import.meta.url), {
    executionProviders: [provider],
    report: ["loss"],
  });
  initial = await trainer.save();
  const trained = trainer.host.state.filter(({ role }) => role === "parameter");
  const count = trained.reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b, 1), 0);
  at("size").textContent = count.toLocaleString("en");
  at("train").onclick = () => (training ? stop() : act(train));
  at("reset").onclick = () => act(startOver);
  at("ask").onsubmit = (event) => event.preventDefault() ?? act(ask);
  at("download").onclick = () => act(() => download("onnxruntime", "Load it beside the model with slots."));
  at("peft").onclick = () => act(() => download("peft", "Keep them in one folder."));
  at("rate").oninput = setRate;
  setRate();
  await ask();
  drawCurve();
  enable(true);
  say(`Ready: ONNX Runtime Web, ${provider === "webgpu" ? "WebGPU" : "WebAssembly"}.`);
}

/** Return the tokens of each line, with the one that ends a text. */
function rows() {
  const lines = at("lines").value.split("\n").filter((line) => line.trim());
  if (!lines.length) throw new Error("lines: expected one or more, found none: write what to learn, a text a line");
  return lines.map((line) => [...tokenizer.encode(line.trim()).ids.slice(0, LONGEST - 1), end]);
}

/** Return a batch of rows of one length; what fills them does not count. */
function batch(rows) {
  const width = Math.max(...rows.map((row) => row.length));
  const filled = (value) => rows.map((row) => [...row, ...Array(width - row.length).fill(value)]);
  return { input_ids: filled(end), labels: filled(IGNORED) };
}

async function train() {
  const all = rows();
  training = true;
  at("train").textContent = "Stop";
  at("train").disabled = false;
  say("Learning …");
  let shown = performance.now();
  for (let done = 0; done < STEPS && training; done++) {
    const first = all.length > ROWS ? losses.length * ROWS : 0;
    const some = Array.from({ length: Math.min(ROWS, all.length) }, (_, i) => all[(first + i) % all.length]);
    const start = performance.now();
    losses.push((await trainer.step(batch(some))).loss);
    const now = performance.now();
    at("steps").textContent = losses.length;
    at("loss").textContent = losses.at(-1).toFixed(3);
    at("time").textContent = `${(now - start).toFixed(now - start < 10 ? 1 : 0)} ms`;
    if (now - shown < 100 && done + 1 < STEPS) continue;
    shown = now;
    drawCurve();
    await new Promise(requestAnimationFrame);
  }
  drawCurve();
  at("now").replaceChildren(...(await answer(at("prompt").value)));
  say("Try the beginning of a line, or learn on.");
}

function stop() {
  training = false;
}

async function startOver() {
  await trainer.load(initial);
  losses.length = 0;
  at("steps").textContent = "0";
  at("loss").textContent = at("time").textContent = "–";
  drawCurve();
  await ask();
  say("The adapter is empty again.");
}

/** Continue the beginning of a line with the model as it was, and as it is. */
async function ask() {
  const kept = await trainer.save();
  await trainer.load(initial);
  try {
    at("before").replaceChildren(...(await answer(at("prompt").value)));
  } finally {
    await trainer.load(kept);
  }
  at("now").replaceChildren(...(await answer(at("prompt").value)));
}

/** Return the beginning of a line and, in bold, the likeliest tokens after it. */
async function answer(prompt) {
  const given = tokenizer.encode(prompt).ids.slice(0, LONGEST);
  if (!given.length) throw new Error("prompt: expected the beginning of a line, found none: write a word or two");
  const ids = [...given];
  for (let i = 0; i < WRITTEN; i++) {
    const { data, dims } = Object.values(await trainer.predict({ input_ids: [ids] }))[0];
    const scores = data.subarray(data.length - dims.at(-1));
    const next = scores.reduce((best, score, i) => (score > scores[best] ? i : best), 0);
    if (next === end) break;
    ids.push(next);
  }
  const text = (tokens) => tokenizer.decode(tokens, { skip_special_tokens: true });
  const [start, whole] = [text(given), text(ids)];
  return [start, Object.assign(document.createElement("b"), { textContent: whole.slice(start.length) })];
}

function setRate() {
  const rate = 10 ** at("rate").value;
  at("rate-shown").textContent = rate.toFixed(4);
  trainer.set({ learning_rate: rate });
}

async function download(form, advice) {
  const files = await trainer.adapter(form);
  give(files);
  say(`Downloaded ${Object.keys(files).join(" and ")}. ${advice}`);
}

function drawCurve() {
  const canvas = at("curve");
  const paper = canvas.getContext("2d");
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = devicePixelRatio;
  Object.assign(canvas, { width: width * ratio, height: height * ratio }); // which clears it
  paper.scale(ratio, ratio);
  paper.font = "12px system-ui, sans-serif";
  const box = { left: 34, right: width - 8, top: 26, bottom: height - 24 };
  const most = Math.max(STEPS, losses.length);
  const top = Math.max(1, Math.ceil(Math.max(0, ...losses.filter(Number.isFinite))));
  const x = (step) => box.left + ((box.right - box.left) * step) / most;
  const y = (loss) => box.bottom - ((box.bottom - box.top) * Math.min(loss, top)) / top;
  const style = getComputedStyle(document.documentElement);
  const [red, soft, line] = ["--loss", "--soft", "--line"].map((name) => style.getPropertyValue(name));
  const path = (points, color, lineWidth) => {
    Object.assign(paper, { strokeStyle: color, lineWidth, lineJoin: "round" });
    paper.beginPath();
    for (const point of points) paper.lineTo(...point);
    paper.stroke();
  };
  const text = (what, x, y, fillStyle, textAlign) => {
    Object.assign(paper, { fillStyle, textAlign });
    paper.fillText(what, x, y);
  };
  for (let i = 0; i <= 4; i++) {
    const loss = (top * i) / 4;
    path([box.left, box.right].map((x) => [x, y(loss)]), line, 1); // prettier-ignore
    text(loss.toFixed(1), box.left - 8, y(loss) + 4, red, "right");
  }
  const tick = 10 * Math.ceil((most * 40) / (box.right - box.left) / 10);
  for (let step = 0; step <= most; step += tick) text(step, x(step), height - 6, soft, step === most ? "right" : "center");
  text("loss by step", box.left, 14, soft, "left");
  path(losses.map((loss, i) => [x(i + 1), y(loss)]), red, 2); // prettier-ignore
}

/** Do one thing at a time, and say what went wrong. */
async function act(what) {
  enable(false);
  await attempt(what);
  training = false;
  at("train").textContent = "Learn";
  enable(true);
}

function enable(on) {
  for (const id of ["train", "reset", "continue", "download", "peft"]) at(id).disabled = !on;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurve);
addEventListener("resize", drawCurve);
main().catch(fail);
