/**
 * Time training steps in Node and in headless Chromium beside TensorFlow.js and jax-js, on the same weights and batches.
 *
 * python export.py && npm install && npm install --prefix ../../hosts/javascript/test && node benchmark.js [mlp] [cnn] [transformer] [node] [wasm] [threads] [gpu]
 */

import { readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { browser, serve } from "../../hosts/javascript/test/browser.js";
import { graphopt, jaxjs, problem, race, tensorflow } from "./contenders.js";

const here = dirname(fileURLToPath(import.meta.url));
const root = dirname(dirname(here));

async function inNode(model) {
  const node = (await import("onnxruntime-node")).default;
  const web = await import("onnxruntime-web");
  const tf = (await import("@tensorflow/tfjs")).default;
  await import("@tensorflow/tfjs-backend-wasm");
  const jax = await import("@jax-js/jax");
  web.env.wasm.numThreads = 1;
  await jax.init("wasm");
  jax.defaultDevice("wasm");
  const contenders = {
    "graphopt, onnxruntime-node": graphopt(node, {}),
    "graphopt, onnxruntime-node, 16 steps a call": graphopt(node, { together: 16 }),
    "graphopt, onnxruntime-web wasm": graphopt(web, {}),
    "graphopt, onnxruntime-web wasm, 16 steps a call": graphopt(web, { together: 16 }),
    "TensorFlow.js, wasm": withBackend(tf, "wasm"),
    "jax-js, wasm": jaxjs(jax),
  };
  return race(
    contenders,
    await problem(async (name) => new Uint8Array(await readFile(join(here, "build", model, name)))),
    { log: console.error },
  );
}

function withBackend(tf, backend) {
  return async (...given) => {
    await tf.setBackend(backend);
    await tf.ready();
    return tensorflow(tf)(...given);
  };
}

/** Time one group in a page of its own, so that no backend of another is alive. */
async function inChromium(model, group) {
  const server = await serve({ examples: root, graphopt: join(root, "../graphopt") });
  const chromium = await browser();
  const page = await chromium.newPage();
  page.on("console", (message) => console.error(message.text().slice(0, 300)));
  await page.goto(`${server.address}/examples/hosts/javascript/test/blank.html`);
  const modules = "/examples/benchmarks/javascript/node_modules";
  for (const script of ["tfjs/dist/tf.min.js", "tfjs-backend-wasm/dist/tf-backend-wasm.min.js"]) {
    await page.addScriptTag({ url: `${server.address}${modules}/@tensorflow/${script}` });
  }
  const found = await page.evaluate(
    async ({ model, group, modules }) => {
      const { graphopt, jaxjs, problem, race, tensorflow } =
        await import("/examples/benchmarks/javascript/contenders.js");
      const files = async (name) => {
        const response = await fetch(
          `/examples/benchmarks/javascript/build/${model}${group === "webgpu" ? "_webgpu" : ""}/${name}`,
        );
        return new Uint8Array(await response.arrayBuffer());
      };
      const file = group === "webgpu" ? "ort.webgpu.min.mjs" : "ort.wasm.min.mjs";
      const ort = await import(`${modules}/onnxruntime-web/dist/${file}`);
      const threads = group === "threads" ? navigator.hardwareConcurrency : 1;
      ort.env.wasm.numThreads = threads;
      ort.env.logLevel = "error";
      const jax = await import(`${modules}/@jax-js/jax/dist/index.js`);
      const { tf } = globalThis;
      const device = group === "webgpu" ? "webgpu" : "wasm";
      const jaxReady = async (...given) => {
        await jax.init(device);
        jax.defaultDevice(device);
        return jaxjs(jax)(...given);
      };
      const tfReady =
        (backend) =>
        async (...given) => {
          tf.wasm.setWasmPaths(`${modules}/@tensorflow/tfjs-backend-wasm/dist/`);
          tf.wasm.setThreadsCount(threads);
          if (!(await tf.setBackend(backend))) throw new Error(`no backend ${backend}`);
          await tf.ready();
          return tensorflow(tf)(...given);
        };
      const contenders =
        group === "webgpu"
          ? {
              "graphopt, WebGPU": graphopt(ort, { executionProviders: ["webgpu"] }),
              "TensorFlow.js, WebGL": tfReady("webgl"),
              "jax-js, WebGPU": jaxReady,
            }
          : {
              "graphopt, wasm": graphopt(ort, { executionProviders: ["wasm"], threads }),
              "graphopt, wasm, 16 steps a call": graphopt(ort, { executionProviders: ["wasm"], together: 16, threads }),
              "TensorFlow.js, wasm": tfReady("wasm"),
              "TensorFlow.js, JavaScript": tfReady("cpu"),
              "jax-js, wasm": jaxReady,
            };
      return race(contenders, await problem(files), {
        log: console.log,
        milliseconds: group === "webgpu" ? 1500 : 400,
        ...(group === "webgpu" && model === "cnn" && { checked: 4, rounds: 3 }), // a step takes about a second
      });
    },
    { model, group, modules },
  );
  await chromium.close();
  server.close();
  return found;
}

function table(title, found) {
  const own = Object.entries(found).filter(([name, time]) => name.startsWith("graphopt") && typeof time === "number");
  const best = Math.min(...own.map(([, time]) => time));
  console.log(`\n${title}\n\n| contender | ms a step | times graphopt's fastest |\n|---|---:|---:|`);
  for (const [name, time] of Object.entries(found)) {
    const timed = typeof time === "number";
    console.log(`| ${name} | ${timed ? time.toPrecision(3) : time} | ${timed ? (time / best).toFixed(2) : "-"} |`);
  }
}

const HOSTS = {
  node: (model) => inNode(model),
  wasm: (model) => inChromium(model, "wasm"),
  threads: (model) => inChromium(model, "threads"),
  gpu: (model) => inChromium(model, "webgpu"),
};

const asked = (known) => known.filter((name) => process.argv.includes(name));
const chosen = (known) => (asked(known).length ? asked(known) : known);
for (const model of chosen(["mlp", "cnn", "transformer"])) {
  for (const host of chosen(Object.keys(HOSTS))) table(`${model}, ${host}`, await HOSTS[host](model));
}
process.exit(0);
