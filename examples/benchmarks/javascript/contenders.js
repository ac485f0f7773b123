/**
 * The same training in graphopt, TensorFlow.js and jax-js: the weights of a host folder, Adam at 1e-3, the same batches.
 * A contender is `async (problem) => async (count) => losses`, which trains on the next `count` batches.
 */

import { Trainer } from "../../../graphopt/hosts/javascript/index.js";

const RATE = 1e-3;
const CLASSES = 10;
const HEADS = 4; // of the transformer
const [FIRST, SECOND, EPSILON] = [0.9, 0.999, 1e-8]; // of Adam

/** Read a host folder, its initial weights by name and as [weight, bias] of each layer, and batches. */
export async function problem(files) {
  const host = JSON.parse(new TextDecoder().decode(await files("host.json")));
  const state = await files("state.safetensors");
  const [layers, weights] = [{}, {}];
  for (const { name, role, offset, bytes, shape } of host.state.filter(({ role }) => role === "parameter")) {
    const [, place, kind] = name.split(".");
    weights[name] = { data: new Float32Array(state.slice(offset, offset + bytes).buffer), shape };
    if (name.startsWith("layers.")) (layers[place] ??= {})[kind] = weights[name];
  }
  const features = host.feeds[0].shape.slice(1);
  const size = features.reduce((a, b) => a * b);
  const x = new Float32Array((await files("x.bin")).slice().buffer);
  const target = await files("target.bin");
  const rows = x.length / size / 16;
  const positions = target.length / rows / 16; // that have a class: 1, or those of a sequence
  const batches = Array.from({ length: 16 }, (_, i) => ({
    x: x.subarray(i * rows * size, (i + 1) * rows * size),
    target: target.subarray(i * rows * positions, (i + 1) * rows * positions),
  }));
  const ordered = Object.keys(layers).sort((a, b) => a - b);
  return {
    files,
    features,
    rows,
    batches,
    weights,
    isOfTokens: host.feeds[0].type === "int64",
    layers: ordered.map((key) => [layers[key].weight, layers[key].bias]),
  };
}

const mapped = (object, f) => Object.fromEntries(Object.entries(object).map(([key, value]) => [key, f(value)]));

function batchesOf(batches, convert) {
  const converted = batches.map(convert);
  let next = 0;
  return () => converted[next++ % converted.length];
}

/** Return a float for each class of each label. */
function oneHot(labels) {
  const all = new Float32Array(labels.length * CLASSES);
  labels.forEach((label, i) => (all[i * CLASSES + label] = 1));
  return all;
}

/**
 * Return the logits of the transformer, [rows * positions, classes], in the operators of a library.
 *
 * @param {object} ops of the library; `keep` returns a value that is used again
 * @param {object} w the weights by name
 * @param x tokens, as a float for each word, [rows * positions, words]
 */
function encoder({ keep, matmul, transpose, softmax, relu, normal }, w, x, rows) {
  const [length, width] = w.positions.shape;
  const linear = (h, name) => matmul(h, w[`${name}.weight`]).add(w[`${name}.bias`]);
  const norm = (h, name) => normal(h).mul(w[`${name}.scale`]).add(w[`${name}.bias`]);
  const split = (h, axes) => transpose(h.reshape([rows, length, HEADS, width / HEADS]), axes);
  let h = matmul(x, w.embedding).reshape([rows, length, width]).add(w.positions).reshape([rows * length, width]);
  for (let i = 0; `blocks.${i}.hidden.weight` in w; i++) {
    const [block, attention] = [`blocks.${i}`, `blocks.${i}.attention`];
    const n = norm(keep(h), `${attention}_norm`);
    const query = split(linear(keep(n), `${attention}.query`), [0, 2, 1, 3]);
    const key = split(linear(keep(n), `${attention}.key`), [0, 2, 3, 1]);
    const value = split(linear(n, `${attention}.value`), [0, 2, 1, 3]);
    const shares = softmax(matmul(query, key).mul(1 / Math.sqrt(width / HEADS)));
    const mixed = transpose(matmul(shares, value), [0, 2, 1, 3]).reshape([rows * length, width]);
    h = h.add(linear(mixed, `${attention}.output`));
    const hidden = relu(linear(norm(keep(h), `${block}.hidden_norm`), `${block}.hidden`));
    h = h.add(linear(hidden, `${block}.output`));
  }
  return linear(norm(h, "norm"), "head");
}

/** Train with graphopt, `together` steps in a call. */
export function graphopt(ort, { executionProviders, together = 1, threads = 1 }) {
  return async ({ files, batches, isOfTokens }) => {
    const trainer = await Trainer.create(ort, files, {
      ...(executionProviders && { executionProviders }),
      intraOpNumThreads: threads,
      interOpNumThreads: 1,
      stepsPerCall: together,
      report: ["loss"],
    });
    const next = batchesOf(batches, ({ x, target }) => ({
      x: isOfTokens ? BigInt64Array.from(x, BigInt) : x,
      target: BigInt64Array.from(target, BigInt),
    }));
    return async (count) => (await trainer.run(Array.from({ length: count }, next))).map(({ loss }) => loss);
  };
}

/** Train with TensorFlow.js, whose backend is set. */
export function tensorflow(tf) {
  return async ({ layers, batches, features, rows, weights, isOfTokens }) => {
    const images = features.length === 3;
    const convolutions = images ? layers.filter(([weight]) => weight.shape.length === 4).length : 0;
    const side = images ? features[1] >> convolutions : 0;
    const depth = images ? layers[convolutions - 1][0].shape[0] : 0;
    const variables = layers.map(([weight, bias], i) => {
      let w = tf.tensor(weight.data, weight.shape);
      if (i < convolutions) w = w.transpose([2, 3, 1, 0]);
      else if (images && i === convolutions) {
        w = w.reshape([depth, side, side, -1]).transpose([1, 2, 0, 3]).reshape(weight.shape);
      }
      return [tf.variable(w), tf.variable(tf.tensor(bias.data, bias.shape))];
    });
    const ops = {
      keep: (x) => x,
      matmul: tf.matMul,
      transpose: tf.transpose,
      softmax: tf.softmax,
      relu: tf.relu,
      normal: (x) => {
        const centred = x.sub(x.mean(-1, true));
        return centred.mul(centred.square().mean(-1, true).add(1e-5).rsqrt());
      },
    };
    const named = isOfTokens && mapped(weights, ({ data, shape }) => tf.variable(tf.tensor(data, shape)));
    const forward = (x) => {
      if (isOfTokens) return encoder(ops, named, x, rows);
      let h = x;
      variables.forEach(([w, b], i) => {
        if (i === convolutions && images) h = h.reshape([rows, -1]);
        h = i < convolutions ? tf.conv2d(h, w, 1, "same").add(b) : h.matMul(w).add(b);
        if (i < variables.length - 1) h = h.relu();
        if (i < convolutions) h = h.maxPool(2, 2, "valid");
      });
      return h;
    };
    const optimizer = tf.train.adam(RATE, FIRST, SECOND, EPSILON);
    const next = batchesOf(batches, ({ x, target }) => [
      isOfTokens ? tf.tensor(oneHot(x), [x.length, CLASSES]) : images ? tf.tensor(x, [rows, ...features]).transpose([0, 2, 3, 1]) : tf.tensor(x, [rows, ...features]),
      tf.tensor(oneHot(target), [target.length, CLASSES]),
    ]);
    return async (count) => {
      const losses = [];
      for (let i = 0; i < count; i++) {
        const [x, t] = next();
        const loss = optimizer.minimize(() => tf.losses.softmaxCrossEntropy(t, forward(x)), true);
        losses.push((await loss.data())[0]);
        loss.dispose();
      }
      return losses;
    };
  };
}

/** Train with jax-js, whose device is set: one compiled function is a step. */
export function jaxjs({ numpy: np, nn, lax, jit, valueAndGrad, tree }) {
  return async ({ layers, batches, features, rows, weights, isOfTokens }) => {
    const ops = {
      keep: (x) => x.ref,
      matmul: np.matmul,
      transpose: np.transpose,
      softmax: (x) => nn.softmax(x, -1),
      relu: nn.relu,
      normal: (x) => nn.standardize(x, -1, { epsilon: 1e-5 }),
    };
    const forward = (parameters, x) => {
      if (isOfTokens) return encoder(ops, parameters, x, rows);
      let h = x;
      parameters.forEach(([w, b], i) => {
        if (w.shape.length === 4) {
          h = lax.convGeneralDilated(h, w, [1, 1], "SAME").add(b.reshape([1, -1, 1, 1]));
          const [n, c, height, width] = h.shape;
          h = np.max(nn.relu(h).reshape([n, c, height / 2, 2, width / 2, 2]), [3, 5]);
          return;
        }
        if (h.shape.length > 2) h = h.reshape([rows, -1]);
        h = np.matmul(h, w).add(b);
        if (i < parameters.length - 1) h = nn.relu(h);
      });
      return h;
    };
    const lossOf = (parameters, x, t) => {
      const share = -CLASSES / t.size;
      return nn.logSoftmax(forward(parameters, x)).mul(t).sum().mul(share);
    };
    const step = jit((parameters, first, second, corrections, x, t) => {
      const [loss, gradients] = valueAndGrad(lossOf)(tree.ref(parameters), x, t);
      const [c1, c2] = corrections;
      const m = tree.map((a, g) => a.mul(FIRST).add(g.mul(1 - FIRST)), first, tree.ref(gradients));
      const v = tree.map((a, g) => a.mul(SECOND).add(np.square(g).mul(1 - SECOND)), second, gradients);
      const moved = (p, a, b) =>
        p.sub(
          a
            .mul(c1.ref)
            .div(np.sqrt(b.mul(c2.ref)).add(EPSILON))
            .mul(RATE),
        );
      const updated = tree.map(moved, parameters, tree.ref(m), tree.ref(v));
      c1.dispose();
      c2.dispose();
      return [loss, updated, m, v];
    });
    const made = (make) => (isOfTokens ? mapped(weights, make) : layers.map((layer) => layer.map(make)));
    let parameters = made(({ data, shape }) => np.array(data).reshape(shape));
    let first = made(({ shape }) => np.zeros(shape));
    let second = made(({ shape }) => np.zeros(shape));
    const next = batchesOf(batches, ({ x, target }) => [
      isOfTokens ? np.array(oneHot(x)).reshape([x.length, CLASSES]) : np.array(x).reshape([rows, ...features]),
      np.array(oneHot(target)).reshape([target.length, CLASSES]),
    ]);
    let steps = 0;
    return async (count) => {
      const losses = [];
      for (let i = 0; i < count; i++) {
        steps += 1;
        const corrections = [FIRST, SECOND].map((beta) => np.array([1 / (1 - beta ** steps)]));
        const [x, t] = next();
        let loss;
        [loss, parameters, first, second] = step(parameters, first, second, corrections, x.ref, t.ref);
        losses.push((await loss.data())[0]);
      }
      return losses;
    };
  };
}

const SLOW = 2000; // milliseconds of a step that is timed a few times only

/**
 * Check that contenders report the same losses in so many steps, then time them in turns.
 *
 * @returns {object} of each contender the milliseconds of a step: the median of rounds, or why it has none
 */
export async function race(contenders, problem, { checked = 10, rounds = 5, milliseconds = 400, log = () => {} } = {}) {
  const found = {};
  const running = {};
  let expected;
  for (const [name, make] of Object.entries(contenders)) {
    try {
      const train = await make(problem);
      const timed = async (count) => {
        const start = performance.now();
        const losses = await train(count);
        return [(performance.now() - start) / count, losses];
      };
      const [, first] = await timed(1); // compiles
      const [once, second] = await timed(1);
      const losses = [...first, ...second, ...(once > SLOW ? [] : await train(checked - 2))];
      expected ??= losses;
      const off = Math.max(...losses.map((loss, i) => Math.abs(loss - (expected[i] ?? loss)) / loss));
      log(`${name}: losses differ by ${off.toExponential(1)}`);
      if (!(off < 1e-3)) throw new Error(`losses differ by ${off.toExponential(1)}`);
      const [time] = once > SLOW ? [once] : await timed(checked);
      const count = Math.max(1, Math.min(320, Math.round(milliseconds / time / 16) * 16 || Math.round(milliseconds / time)));
      running[name] = { timed, count, times: [], rounds: time > SLOW ? 2 : rounds };
    } catch (error) {
      found[name] = String(error.message ?? error)
        .split("\n")[0]
        .slice(0, 120);
      log(`${name}: ${found[name]}`);
    }
  }
  for (let round = 0; round < rounds; round++) {
    for (const { timed, count, times, rounds } of Object.values(running)) {
      if (round < rounds) times.push((await timed(count))[0]);
    }
  }
  const median = (times) => times.sort((a, b) => a - b)[times.length >> 1];
  const names = Object.keys(contenders);
  return Object.fromEntries(names.map((name) => [name, found[name] ?? median(running[name].times)]));
}
