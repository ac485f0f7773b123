/** Train a visitor's model on the visitor's pictures or table, and give the file back. */

import * as ort from "./onnxruntime/ort.webgpu.min.mjs";
import { compile } from "./compile.js";
import { at, attempt, fail, give, say } from "./controls.js";
import { draw, round, smooth } from "./curve.js";
import { Trainer } from "./index.js";
import { inOneFile, withLabels } from "./onnx_file.js";
import { dropped, features, pictures, table, withTarget } from "./rows.js";

const FEWEST = 10; // rows of which some are held out
const HELD_OUT = 5; // each fifth row
const TOGETHER = 16; // the most steps of a call
const SHOWN = 100; // milliseconds between two pictures of the curve
const MOST_THREADS = 4;
const MOST_BYTES = 2 ** 29; // of a model, as the server takes it

export const history = { losses: [], measured: [] };
let model; // { name, bytes }
let brought; // rows, as rows.js has them
let data; // the same with a target, or none as long as they have none
let trainer, compiled, rows, initial;
let isTraining = false;
let compiling; // an AbortController

async function main() {
  ort.env.wasm.wasmPaths = new URL("./onnxruntime/", import.meta.url).href;
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency) : 1;
  ort.env.logLevel = "error";
  if (!(await navigator.gpu?.requestAdapter())) at("device").lastElementChild.disabled = true;
  at("model").onchange = ({ target }) => act(() => takeModel(target.files[0]));
  at("folder").onchange = ({ target }) =>
    act(() => takeData([...target.files].map((file) => ({ file, path: file.webkitRelativePath }))));
  at("table").onchange = ({ target }) => act(() => takeData([...target.files].map((file) => ({ file, path: file.name }))));
  takeDrops(at("drop-model"), ([first]) => takeModel(first?.file));
  takeDrops(at("drop-data"), takeData);
  at("target").onchange = () => act(setTarget);
  at("trains").onchange = () => (at("of-rank").hidden = chosen("trains") !== "lora");
  at("train").onclick = () => (isTraining ? stop() : act(train));
  at("reset").onclick = () => act(startOver);
  at("download").onclick = () => act(download);
  matchMedia("(prefers-color-scheme: dark)").onchange = drawCurve;
  new ResizeObserver(drawCurve).observe(at("curve"));
  drawCurve();
  enable(true);
  say("Bring a model, and what it should learn from.");
}

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

// What the visitor brings

function takeDrops(place, take) {
  place.ondragover = (event) => event.preventDefault() ?? place.classList.add("over");
  place.ondragleave = () => place.classList.remove("over");
  place.ondrop = (event) => {
    event.preventDefault();
    place.classList.remove("over");
    if (isTraining || at("reset").dataset.busy) return;
    const files = dropped(event.dataTransfer.items);
    act(async () => take(await files));
  };
}

async function takeModel(file) {
  if (!file?.name.endsWith(".onnx")) throw new Error(`${file?.name ?? "model"}: expected a file that ends in .onnx`);
  if (file.size > MOST_BYTES) throw new Error(`${file.name}: expected at most ${MOST_BYTES / 2 ** 20} MB, found ${told(file.size)}`);
  model = { name: file.name, bytes: new Uint8Array(await file.arrayBuffer()) };
  at("model-name").textContent = file.name;
  at("model-told").textContent = told(file.size);
  at("drop-model").classList.add("full");
  say(data ? "Ready to train." : "Now bring pictures, or a table.");
}

async function takeData(files) {
  const isTable = files.length === 1 && /\.(csv|tsv|txt)$/i.test(files[0].path);
  brought = isTable ? table(await files[0].file.text()) : pictures(files);
  at("of-target").hidden = !isTable;
  at("of-pixels").hidden = isTable;
  at("data-name").textContent = isTable ? files[0].path : `${brought.count} pictures`;
  at("drop-data").classList.add("full");
  if (isTable) {
    at("target").replaceChildren(...brought.names.map((name) => new Option(name)));
    at("target").value = brought.names.find((name) => name === "target") ?? brought.names.at(-1);
  }
  setTarget();
  say(model ? "Ready to train." : "Now bring a model.");
}

function setTarget() {
  data = undefined; // so that nothing trains on another target than the page shows
  at("data-told").textContent = `${brought.count} rows`;
  data = brought.kind === "table" ? withTarget(brought, at("target").value) : brought;
  tellData();
}

function tellData() {
  const [few, rest] = [data.labels?.slice(0, 5).join(", "), (data.labels?.length ?? 0) - 5];
  const classes = data.labels && `${data.labels.length} classes: ${few}${rest > 0 ? `, and ${rest} more` : ""}`;
  at("data-told").textContent = [data.kind === "table" && `${data.count} rows`, classes ?? "numbers to predict"].filter(Boolean).join(", ");
  at("loss-kind").value = data.labels ? "cross_entropy" : "mean_squared_error";
}

// Training

function choice() {
  const number = (id) => {
    const value = Number(at(id).value);
    if (value > 0) return value;
    throw new Error(`${at(id).parentElement.firstChild.textContent.trim()}: expected a number above 0, found ${at(id).value || "none"}`);
  };
  const loss = at("loss-kind").value;
  if (loss === "cross_entropy" && !data.labels) throw new Error("Loss: expected classes in the target, found numbers: choose the loss of numbers");
  if (loss !== "cross_entropy" && data.values?.every(Number.isFinite) !== true)
    throw new Error("Loss: expected numbers in the target, found classes: choose the loss of classes");
  return {
    trains: chosen("trains"),
    loss,
    outputs: loss === "cross_entropy" ? data.labels.length : 1,
    optimizer: at("optimizer").value,
    learning_rate: number("rate"),
    rank: number("rank"),
    device: at("device").value,
    batch: Math.floor(number("batch")) || 1,
    epochs: Math.floor(number("epochs")) || 1,
  };
}

/** Compile what the visitor chose, unless it is what has been compiled, and open it. */
async function open({ batch, epochs, ...choice }) {
  const { learning_rate: rate, ...others } = choice;
  const key = [model, data, JSON.stringify([others, at("pixels").value])];
  if (!key.every((part, i) => part === compiled?.[i])) {
    say("Compiling …");
    await trainer?.dispose();
    compiled = trainer = undefined;
    forget();
    compiling = new AbortController();
    const files = await compile(model.bytes, choice, compiling.signal);
    const { feeds } = JSON.parse(new TextDecoder().decode(files["host.json"]));
    const reading = async (count) => {
      say(`Reading ${count} of ${data.count} …`);
      await new Promise(requestAnimationFrame);
    };
    const input = feeds.find(({ role }) => role === "data");
    const read = await features(data, input.shape, at("pixels").value, reading);
    say("Opening …");
    const opened = await Trainer.create(ort, files, {
      executionProviders: [choice.device],
      report: ["loss"],
      stepsPerCall: TOGETHER,
    });
    const target = feeds.find(({ role }) => role === "target");
    [trainer, rows, initial] = [opened, rowsOf(data, input, target.name, ...read, others.loss), await opened.save()];
    compiled = key;
    tellWhat();
    await measure();
  }
  trainer.set({ learning_rate: rate });
}

/** Return the rows that train and those that are held out, and a function that returns a batch of some. */
function rowsOf(data, input, target, dims, numbers, loss) {
  const width = dims.reduce((a, b) => a * b, 1);
  const all = Array.from({ length: data.count }, (_, i) => i);
  const isHeldOut = (i) => data.count >= FEWEST && i % HELD_OUT === HELD_OUT - 1;
  const ofClasses = loss === "cross_entropy";
  const feed = (some) => {
    const x = new Float32Array(some.length * width);
    some.forEach((row, i) => x.set(numbers.subarray(row * width, (row + 1) * width), i * width));
    return { [input.name]: input.type === "float32" ? new ort.Tensor("float32", x, [some.length, ...dims]) : x };
  };
  return {
    ofClasses,
    labels: ofClasses ? data.labels : undefined,
    training: all.filter((i) => !isHeldOut(i)),
    heldOut: data.count >= FEWEST ? all.filter(isHeldOut) : all,
    feed,
    wanted: (row) => (ofClasses ? data.classes[row] : data.values[row]),
    batch: (some) => ({
      ...feed(some),
      [target]: ofClasses
        ? BigInt64Array.from(some, (row) => BigInt(data.classes[row]))
        : Float32Array.from(some, (row) => data.values[row]),
    }),
  };
}

/** Return the rows that train. */
export const training = () => rows.training;

/** Return rows in an order that depends on a number alone (Fisher and Yates; the generator is mulberry32). */
export function shuffled(rows, seed) {
  const order = [...rows];
  let state = seed;
  for (let i = order.length - 1; i > 0; i--) {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    const j = Math.floor((((t ^ (t >>> 14)) >>> 0) / 2 ** 32) * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

async function train() {
  if (!model || !data) throw new Error(`expected ${model ? "pictures or a table" : "an ONNX file"}: bring ${model ? "them" : "it"} first`);
  const said = choice();
  isTraining = true;
  at("train").textContent = "Stop";
  at("train").disabled = false;
  await open(said);
  say("Training …");
  const perEpoch = Math.ceil(rows.training.length / said.batch);
  const end = history.losses.length + perEpoch * said.epochs;
  let [together, drawn] = [1, performance.now()];
  for (let epoch = 0; epoch < said.epochs && isTraining; epoch++) {
    const order = shuffled(rows.training, Math.round(history.losses.length / perEpoch));
    const batches = Array.from({ length: perEpoch }, (_, i) => order.slice(i * said.batch, (i + 1) * said.batch));
    while (batches.length && isTraining) {
      const some = batches.splice(0, together);
      const start = performance.now();
      history.losses.push(...(await trainer.run(some.map(rows.batch))).map(({ loss }) => loss));
      const time = (performance.now() - start) / some.length;
      at("time").textContent = `${time.toFixed(time < 10 ? 2 : 0)} ms`;
      together = Math.max(1, Math.min(TOGETHER, Math.floor(SHOWN / time)));
      if (performance.now() - drawn < SHOWN) continue;
      show(end);
      await new Promise(requestAnimationFrame);
      drawn = performance.now();
    }
    await measure();
    show(end);
  }
  say(isTraining ? "Trained. Download the model, or train on." : "Stopped. Train goes on from here.");
}

function stop() {
  isTraining = false;
  compiling?.abort();
}

/** Measure on rows held out: the share that is right, or the mean squared error. */
async function measure() {
  const { graphs, reports } = trainer.host;
  const isOfFloats = (name) => reports.some((report) => report.name === name && /float/.test(report.type));
  const scores = graphs.predict.reports.find(isOfFloats); // which the loss reads
  let sum = 0;
  for (let start = 0; start < rows.heldOut.length; start += 64) {
    const some = rows.heldOut.slice(start, start + 64);
    const { data: numbers } = (await trainer.predict(rows.feed(some)))[scores];
    const width = numbers.length / some.length;
    some.forEach((row, i) => {
      const own = numbers.subarray(i * width, (i + 1) * width);
      sum += rows.ofClasses ? own.indexOf(own.reduce((a, b) => Math.max(a, b))) === rows.wanted(row) : (own[0] - rows.wanted(row)) ** 2;
    });
  }
  history.measured.push([history.losses.length, sum / rows.heldOut.length]);
}

async function startOver() {
  if (!trainer) return say("Nothing is trained yet.");
  await trainer.load(initial);
  forget();
  tellWhat();
  await measure();
  say("The weights are the initial ones again.");
}

function forget() {
  history.losses.length = history.measured.length = 0;
  at("time").textContent = "–";
  at("what").textContent = "";
}

async function download() {
  if (!trainer) return say("Train first.");
  const files = await trainer.trained();
  const name = model.name.replace(/\.onnx$/, ".trained.onnx");
  const trained = inOneFile(files[trainer.host.files.inference], files);
  give({ [name]: rows.labels ? withLabels(trained, rows.labels) : trained });
  say(`Downloaded ${name}: ${rows.labels ? `its outputs are ${rows.labels.slice(0, 8).join(", ")}${rows.labels.length > 8 ? ", …" : ""}` : "any ONNX Runtime runs it"}.`);
}

// What the page shows

function show(end) {
  const { losses, measured } = history;
  at("steps").textContent = losses.length;
  at("loss").textContent = losses.length ? number(smooth(losses).at(-1)) : "–";
  const [, last] = measured.at(-1) ?? [];
  at("measure").textContent = `${rows?.ofClasses === false ? "squared error" : "accuracy"} on ${data?.count < FEWEST ? "all rows" : "rows held out"}`;
  at("accuracy").textContent = last === undefined ? "–" : rows.ofClasses ? `${(100 * last).toFixed(1)} %` : number(last);
  drawCurve(end);
}

function drawCurve(end) {
  const { losses, measured } = history;
  const isOfNumbers = rows?.ofClasses === false;
  const { clientWidth, clientHeight } = at("curve"); // so that its words are as large on a phone
  const [width, height] = [2 * clientWidth, 2 * clientHeight];
  if (at("curve").width !== width || at("curve").height !== height) Object.assign(at("curve"), { width, height });
  const seen = [...smooth(losses), ...(isOfNumbers ? measured.map(([, value]) => value) : [])].filter(Number.isFinite);
  const top = seen.length ? round(seen.reduce((a, b) => Math.max(a, b), 1e-9)) : 2.5;
  const steps = Math.max(typeof end === "number" ? end : 0, losses.length, 10);
  const others = isOfNumbers && {
    measured: measured.map(([step, value]) => [step, value / top]),
    name: "held out",
    label: (share) => number(share * top),
  };
  draw(at("curve"), { losses, measured, steps, top, ...others });
}

function tellWhat() {
  const count = (entries) => entries.reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b, 1), 0);
  const trains = count(trainer.host.state.filter(({ role }) => role === "parameter"));
  const proof = trainer.proofs.train;
  const checked = proof?.startsWith("proven") ? " The first step is proven on this device." : "";
  at("what").textContent = `${trains.toLocaleString("en")} numbers train.${checked}`;
}

const number = (x) => (x >= 1e5 || (x && Math.abs(x) < 1e-3) ? x.toExponential(2) : x.toPrecision(4));
const told = (bytes) => (bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(1)} kB` : `${(bytes / 2 ** 20).toFixed(1)} MB`);

/** Do one thing at a time, and say what went wrong. */
async function act(what) {
  enable(false);
  await attempt(what);
  isTraining = false;
  at("train").textContent = "Train";
  enable(true);
  show(history.losses.length);
}

function enable(on) {
  at("reset").dataset.busy = on ? "" : "busy";
  for (const control of document.querySelectorAll("button, input, select")) control.disabled = !on;
  for (const id of ["reset", "download"]) at(id).disabled = !on || !trainer;
  at("train").disabled = !on || !model || !data;
}

main().catch(fail);
