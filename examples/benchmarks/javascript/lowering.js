/**
 * Time a step in WebAssembly in Node, of graphs as they are and as `export_hosts` writes them. All numbers are 0.
 *
 * python lowering.py && npm install && node lowering.js
 */

import { readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as ort from "onnxruntime-web";

const build = join(dirname(fileURLToPath(import.meta.url)), "build", "lowering");
const TYPES = { float: ["float32", Float32Array], int64: ["int64", BigInt64Array], bool: ["bool", Uint8Array] };
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";

function zeros([type, shape]) {
  const [name, numbers] = TYPES[type];
  return new ort.Tensor(name, new numbers(shape.reduce((a, b) => a * b, 1)), shape);
}

for (const model of ["MLP", "CNN", "transformer"]) {
  const inputs = Object.entries(JSON.parse(await readFile(join(build, `${model}.json`), "utf8")));
  const feeds = Object.fromEntries(inputs.map(([name, input]) => [name, zeros(input)]));
  const sessions = {};
  for (const target of ["plain", "portable"]) {
    const file = await readFile(join(build, `${model}.${target}.onnx`));
    sessions[target] = await ort.InferenceSession.create(file, { logSeverityLevel: 4 });
  }
  const times = { plain: [], portable: [] };
  for (let round = 0; round < 60; round++) {
    for (const [target, session] of Object.entries(sessions)) {
      const own = Object.fromEntries(session.inputNames.map((name) => [name, feeds[name]]));
      const begun = performance.now();
      await session.run(own);
      if (round > 9) times[target].push(performance.now() - begun);
    }
  }
  const [plain, lowered] = Object.values(times).map((each) => each.sort((a, b) => a - b)[each.length >> 1]);
  console.log(`${model}: ${plain.toFixed(2)} ms as it is, ${lowered.toFixed(2)} ms as exported`);
}
