/** Train a classifier of digits in the browser, show how it goes, and learn the digits that the user draws. */

import * as ort from "./onnxruntime/ort.webgpu.min.mjs";
import { at, attempt, fail, give, say } from "./controls.js";
import { draw, path, smooth } from "./curve.js";
import { Trainer, loadFromIndexedDB, saveToIndexedDB } from "./index.js";

const BATCH = 32;
const STEPS = 600; // of one press of Train
const MEASURED = 20; // the steps between two measurements of accuracy
const PERSONAL = 20; // the steps after each drawn digit
const PIXELS = 64;
const NAME = "digits";
const [ORANGE, BLUE] = [
  [255, 120, 40],
  [60, 140, 255],
];

const history = { losses: [], accuracies: [] };
const drawn = []; // the user's digits: { image, label }
const pictures = []; // files of the user, of which the first is on the pad
let trainer, digits, provider;
let training = false;
let prediction = Promise.resolve(); // the one shown last

async function main() {
  ort.env.wasm.wasmPaths = new URL("./onnxruntime/", import.meta.url).href;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  digits = await loadDigits();
  provider = new URLSearchParams(location.search).get("provider") ?? "wasm"; // of so small a network, wasm is faster
  trainer = await Trainer.create(ort, new URL("./host", import.meta.url), {
    executionProviders: [provider],
    report: ["loss"],
    stepsPerCall: MEASURED,
  });
  at("train").onclick = () => (training ? stop() : act(train));
  at("reset").onclick = () => act(startOver);
  at("download").onclick = () => act(download);
  at("store").onclick = () => act(store);
  at("restore").onclick = () => act(restore);
  at("rate").oninput = setRate;
  setUpPad();
  setUpPictures();
  setRate();
  await measure();
  drawCurve();
  enable(true);
  say(`Ready: ONNX Runtime Web, ${provider === "webgpu" ? "WebGPU" : "WebAssembly"}.`);
}

async function loadDigits() {
  const read = async (name) => (await fetch(new URL(name, import.meta.url))).arrayBuffer();
  const { count, held_out: heldOut, scale } = JSON.parse(new TextDecoder().decode(await read("digits.json")));
  const images = Float32Array.from(new Uint8Array(await read("images.bin")), (x) => x / scale);
  const labels = new Uint8Array(await read("labels.bin"));
  return { images, labels, training: count - heldOut, count };
}

/** Return a batch of digits drawn at random; a share of them the user's own, moved by up to a pixel. */
function batch(own = 0) {
  const x = new Float32Array(BATCH * PIXELS);
  const target = new BigInt64Array(BATCH);
  for (let row = 0; row < BATCH; row++) {
    const mine = row < own ? drawn[Math.floor(Math.random() * drawn.length)] : undefined;
    const i = Math.floor(Math.random() * digits.training);
    x.set(mine ? moved(mine.image) : digits.images.subarray(i * PIXELS, (i + 1) * PIXELS), row * PIXELS);
    target[row] = BigInt(mine ? mine.label : digits.labels[i]);
  }
  return { x, target };
}

function moved(image) {
  const [down, right] = [0, 1].map(() => Math.floor(Math.random() * 3) - 1);
  const at = (row, column) => (row < 0 || row > 7 || column < 0 || column > 7 ? 0 : image[row * 8 + column]);
  return Float32Array.from(image, (_, i) => at((i >> 3) - down, (i & 7) - right));
}

async function train() {
  training = true;
  at("train").textContent = "Stop";
  at("train").disabled = false;
  say("Training …");
  await steps(STEPS, () => batch(Math.min(4, drawn.length)));
  say("Draw a digit, or train on.");
}

function stop() {
  training = false;
}

/** Do steps in calls of several, and show how it goes. */
async function steps(count, next) {
  for (let done = 0; done < count && training; done += MEASURED) {
    const batches = Array.from({ length: Math.min(MEASURED, count - done) }, next);
    const start = performance.now();
    const reports = await trainer.run(batches);
    const time = (performance.now() - start) / batches.length;
    history.losses.push(...reports.map(({ loss }) => loss));
    at("time").textContent = `${time.toFixed(2)} ms`;
    await measure();
    drawCurve();
    await predictDrawing();
    await new Promise(requestAnimationFrame);
  }
}

/** Measure accuracy on the digits held out. */
async function measure() {
  const rows = digits.count - digits.training;
  const x = digits.images.subarray(digits.training * PIXELS);
  const { data } = (await trainer.predict({ x })).y;
  let right = 0;
  for (let row = 0; row < rows; row++) {
    right += largest(data.subarray(row * 10, (row + 1) * 10)) === digits.labels[digits.training + row];
  }
  history.accuracies.push([history.losses.length, right / rows]);
  at("steps").textContent = history.losses.length;
  at("loss").textContent = history.losses.length ? smooth(history.losses).at(-1).toFixed(3) : "–";
  at("accuracy").textContent = `${((100 * right) / rows).toFixed(1)} %`;
}

function largest(numbers) {
  return numbers.indexOf(Math.max(...numbers));
}

async function startOver() {
  await trainer.load(await (await fetch(new URL("./host/state.safetensors", import.meta.url))).arrayBuffer());
  history.losses.length = history.accuracies.length = drawn.length = 0;
  showMine();
  await measure();
  drawCurve();
  await predictDrawing();
  say("The weights are the initial ones again.");
}

function setRate() {
  const rate = 10 ** at("rate").value;
  at("rate-shown").textContent = rate.toFixed(4);
  trainer.set({ learning_rate: rate });
}

async function download() {
  const files = await trainer.trained();
  give(files);
  say(`Downloaded ${Object.keys(files).join(", ")}. Keep them in one folder.`);
}

async function store() {
  await saveToIndexedDB(NAME, await trainer.save());
  say("Saved in this browser.");
}

async function restore() {
  const bytes = await loadFromIndexedDB(NAME);
  if (!bytes) return say("Nothing is saved in this browser yet.");
  await trainer.load(bytes);
  await measure();
  drawCurve();
  await predictDrawing();
  say("Loaded what was saved in this browser.");
}

// The curve

function drawCurve() {
  draw(at("curve"), { losses: history.losses, measured: history.accuracies, steps: STEPS });
}

// The pad

function setUpPad() {
  const pad = at("pad");
  const paper = pad.getContext("2d", { willReadFrequently: true });
  let last;
  const place = ({ offsetX, offsetY }) => [
    (offsetX * pad.width) / pad.clientWidth,
    (offsetY * pad.height) / pad.clientHeight,
  ];
  pad.onpointerdown = (event) => {
    pad.setPointerCapture(event.pointerId);
    last = place(event);
    pad.onpointermove(event);
  };
  pad.onpointermove = (event) => {
    if (!last) return;
    const here = place(event);
    Object.assign(paper, { lineWidth: 34, lineCap: "round", lineJoin: "round", strokeStyle: "white" });
    path(paper, [last, here]);
    last = here;
  };
  pad.onpointerup = pad.onpointercancel = () => {
    last = undefined;
    predictDrawing();
  };
  at("clear").onclick = clearPad;
  for (let label = 0; label < 10; label++) {
    const button = document.createElement("button");
    button.textContent = label;
    button.onclick = () => act(() => learn(label));
    at("answers").append(button);
    const bar = document.createElement("div");
    bar.innerHTML = `<i></i>${label}`;
    at("bars").append(bar);
  }
}

function setUpPictures() {
  const take = (files) => {
    pictures.push(...[...files].filter(({ type }) => type.startsWith("image/")));
    return pictures.length ? showPicture() : say("Expected pictures, such as PNG or JPEG.");
  };
  at("pictures").onchange = async ({ target }) => {
    await act(() => take(target.files));
    target.value = "";
  };
  at("drawing").ondragover = (event) => event.preventDefault();
  at("drawing").ondrop = (event) => {
    event.preventDefault();
    act(() => take(event.dataTransfer.files));
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = drawCurve;
}

/** Put the ink of the first picture onto the pad. */
async function showPicture() {
  clearPad();
  if (!pictures.length) return;
  let bitmap;
  try {
    bitmap = await createImageBitmap(pictures[0]);
  } catch {
    return say(`${pictures.shift().name}: expected a picture that this browser reads.`);
  }
  const ink = inkOf(bitmap);
  at("pad").getContext("2d").putImageData(ink, (256 - ink.width) / 2, (256 - ink.height) / 2);
  await predictDrawing();
  say(`${pictures[0].name}: which digit is it?${pictures.length > 1 ? ` ${pictures.length - 1} more.` : ""}`);
}

/** Return the ink of a picture, in white: the rarer of dark and bright, where the light of the room is left out. */
function inkOf(bitmap) {
  const scale = 256 / Math.max(bitmap.width, bitmap.height);
  const size = [Math.ceil(bitmap.width * scale), Math.ceil(bitmap.height * scale)];
  const small = scaled(bitmap, ...size);
  const light = greys(scaled(scaled(small, 4, 4), ...size));
  const values = greys(small).map((value, i) => value - light[i] + 255);
  const threshold = otsu(values);
  const bright = values.reduce((count, value) => count + (value > threshold), 0);
  const ink = new ImageData(...size);
  values.forEach((value, i) => {
    if (value > threshold === bright < values.length / 2) ink.data.fill(255, 4 * i, 4 * i + 4);
  });
  return ink;
}

function scaled(picture, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  const paper = canvas.getContext("2d", { willReadFrequently: true });
  paper.imageSmoothingQuality = "high";
  paper.drawImage(picture, 0, 0, width, height);
  return canvas;
}

function greys(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return Float32Array.from(
    { length: data.length / 4 },
    (_, i) => 0.3 * data[4 * i] + 0.59 * data[4 * i + 1] + 0.11 * data[4 * i + 2],
  );
}

/** Return the threshold between two groups of numbers from 0 to 510 whose means are farthest apart (Otsu, 1979). */
function otsu(values) {
  const counts = new Float64Array(511);
  for (const value of values) counts[Math.round(value)]++;
  const total = counts.reduce((sum, count, i) => sum + i * count, 0);
  let [below, sum, best, threshold] = [0, 0, -1, 0];
  counts.forEach((count, i) => {
    below += count;
    sum += i * count;
    const above = values.length - below;
    if (!below || !above) return;
    const between = below * above * (sum / below - (total - sum) / above) ** 2;
    if (between > best) [best, threshold] = [between, i + 0.5];
  });
  return threshold;
}

function clearPad() {
  at("pad").getContext("2d").clearRect(0, 0, 256, 256);
  predictDrawing();
}

/** Return what is drawn as 8 x 8 pixels, centered and as large as the digits learned from; undefined where nothing is. */
function drawing() {
  const { data } = at("pad").getContext("2d").getImageData(0, 0, 256, 256);
  const ink = Float32Array.from({ length: 256 * 256 }, (_, i) => data[4 * i + 3] / 255);
  let [top, bottom, left, right] = [256, -1, 256, -1];
  ink.forEach((value, i) => {
    if (value < 0.5) return;
    [top, bottom] = [Math.min(top, i >> 8), Math.max(bottom, i >> 8)];
    [left, right] = [Math.min(left, i & 255), Math.max(right, i & 255)];
  });
  if (bottom < 0) return undefined;
  const side = Math.max(bottom - top + 1, (right - left + 1) * 1.15); // of a square around it
  const [y0, x0] = [(top + bottom + 1 - side) / 2, (left + right + 1 - side) / 2];
  const parts = 8; // samples of a pixel, in each direction
  return Float32Array.from({ length: PIXELS }, (_, i) => {
    let sum = 0;
    for (let j = 0; j < parts * parts; j++) {
      const y = Math.floor(y0 + (((i >> 3) + ((j >> 3) + 0.5) / parts) * side) / 8);
      const x = Math.floor(x0 + (((i & 7) + ((j & 7) + 0.5) / parts) * side) / 8);
      sum += y < 0 || y > 255 || x < 0 || x > 255 ? 0 : ink[y * 256 + x];
    }
    return Math.round((255 * sum) / (parts * parts)) / 255; // as shown: 8 bits may turn a kink
  });
}

/** Return a number for each pixel: how much it speaks for the predicted digit. */
async function explain(image) {
  const session = await ort.InferenceSession.create(new URL("./host/explained.onnx", import.meta.url).href, {
    externalData: [{ path: trainer.host.files.state, data: await trainer.save() }], // the weights of now
  });
  const feeds = { x: new ort.Tensor("float32", image, [1, 1, 8, 8]), class: new ort.Tensor("int64", [-1n], [1]) };
  const [explanation] = Object.values(await session.run(feeds));
  await session.release();
  return explanation.data;
}

/** Show what the network takes the drawing for, one after the other: sessions opened together share external data. */
function predictDrawing() {
  return (prediction = prediction.catch(() => {}).then(showPrediction));
}

async function showPrediction() {
  const image = drawing();
  showSeen(image ?? new Float32Array(PIXELS));
  const shares = image ? softmax((await trainer.predict({ x: image })).y.data) : new Float32Array(10);
  const best = image ? largest(shares) : -1;
  [...at("bars").children].forEach((bar, i) => {
    bar.className = i === best ? "best" : "";
    bar.firstChild.style.height = `${78 * shares[i]}%`;
  });
  showHeat(image && (await explain(image)));
}

function softmax(scores) {
  const most = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

function showSeen(image) {
  const paper = at("seen").getContext("2d");
  const pixels = paper.createImageData(8, 8);
  image.forEach((value, i) => pixels.data.set([255, 255, 255, 255 * value], 4 * i));
  paper.putImageData(pixels, 0, 0);
}

/** Color the pad: orange speaks for the predicted digit, and blue against it. */
function showHeat(numbers) {
  const paper = at("heat").getContext("2d");
  const pixels = paper.createImageData(8, 8);
  const most = Math.max(...(numbers ?? []).map(Math.abs)) || 1;
  numbers?.forEach((x, i) => pixels.data.set([...(x < 0 ? BLUE : ORANGE), (255 * Math.abs(x)) / most], 4 * i));
  paper.putImageData(pixels, 0, 0);
}

/** Learn the drawing under a label, among digits of others so that those are not forgotten. */
async function learn(label) {
  const image = drawing();
  if (!image) return say("Draw a digit first.");
  drawn.push({ image, label });
  showMine();
  training = true;
  await steps(PERSONAL, () => batch(4));
  say(`Learned your ${label}.`);
  if (pictures.length) {
    pictures.shift();
    await showPicture();
  }
}

function showMine() {
  at("mine").textContent = drawn.length ? `So far it has ${drawn.length} of yours.` : "";
}

// Buttons

/** Do one thing at a time, and say what went wrong. */
async function act(what) {
  enable(false);
  await attempt(what);
  training = false;
  at("train").textContent = "Train";
  enable(true);
}

function enable(on) {
  for (const id of ["train", "reset", "download", "store", "restore"]) at(id).disabled = !on;
  for (const button of at("answers").children) button.disabled = !on;
}

main().catch(fail);
