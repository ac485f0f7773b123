/**
 * Train an ONNX model in Node or in a browser, from the files that `graphopt.export_hosts` writes.
 * index.d.ts says what each call does. Checked here is what ONNX Runtime does not check, or reports without a name.
 */

import { byNames, GraphoptError, named, NonFiniteLoss, told } from "./errors.js";
import { bytesOf, contractOf, put, reader, safetensors } from "./files.js";
import { agreed, batchOf, difference, firstNode, keyOf, remember } from "./proof.js";
import { arrayClass, isFinite, isTensor, sizeOf, tensorOf, valueOf } from "./tensors.js";

export { GraphoptError, NonFiniteLoss } from "./errors.js";
export * from "./storage.js";

export class Trainer {
  #ort;
  #options;
  #onDevice; // whether state stays on a GPU
  #read; // returns the bytes of a file of the host folder
  #initial; // the file of the initial state, whose layout checkpoints have
  #held = {}; // tensors by name: state and hyperparameters
  #sessions = {}; // promises, by the name of the graph
  #weights; // a promise: the file of weights that do not train, which all graphs read
  #proof; // a promise: the file of the proof
  #onHost = new Set(); // graphs that run elsewhere than the training graph, and read the state in host memory
  #steps = 0; // that were done
  #last = Promise.resolve(); // the newest call: a session runs one at a time
  #disposed = false;
  proofs = {}; // what is known of each open graph

  static async create(ort, files, options = {}) {
    const trainer = new Trainer();
    trainer.#ort = ort?.InferenceSession ? ort : ort?.default;
    if (!trainer.#ort?.InferenceSession || !trainer.#ort.Tensor)
      throw new GraphoptError(
        `ort: expected ONNX Runtime, found ${told(ort)}: import * as ort from "onnxruntime-node"`,
      );
    trainer.#options = { stepsPerCall: 16, onNonfinite: "raise", ...byNames("options", options, Object.keys(OPTIONS)) };
    trainer.#read = reader(files);
    trainer.host = contractOf(await trainer.#read("host.json"));
    const [first, version] = [trainer.host.runtime?.onnxruntime, trainer.#ort.env?.versions?.common];
    if (minor(version) < minor(first))
      throw new GraphoptError(`ort: expected ONNX Runtime ${first} or later, whose kernels are right, found ${version}`);
    for (const [name, [fits, expected]] of Object.entries(OPTIONS)) {
      const option = trainer.#options[name];
      if (option !== undefined && !fits(option, trainer.host))
        throw new GraphoptError(`${name}: expected ${expected(trainer.host)}, found ${JSON.stringify(option)}`);
    }
    trainer.#onDevice = isOnDevice(options.executionProviders);
    trainer.#initial = await trainer.#read(trainer.host.files.state);
    trainer.#restore(trainer.#initial);
    Object.assign(trainer.#held, trainer.#defaults());
    await (trainer.#sessions.train = trainer.#open("train"));
    return trainer;
  }

  step(feeds) {
    return this.#turn(() => this.#train(this.#tensors("train", feeds)));
  }

  run(batches) {
    return this.#turn(async () => {
      if (typeof batches?.[Symbol.iterator] !== "function")
        throw new GraphoptError(`batches: expected an array of batches, found ${told(batches)}`);
      const tensors = Array.from(batches, (feeds) => this.#tensors("train", feeds)); // before the first step
      const most = this.host.graphs.train_steps && !this.#onDevice ? this.#options.stepsPerCall : 1;
      const reports = [];
      while (tensors.length) {
        const some = tensors.splice(0, most);
        const shapes = some.map((batch) => JSON.stringify(Object.values(batch).map(({ dims }) => dims)));
        const stacked = some.length > 1 && new Set(shapes).size === 1 && (await this.#several(some));
        if (stacked) reports.push(...stacked);
        else for (const batch of some) reports.push(await this.#train(batch, reports));
      }
      return reports;
    });
  }

  evaluate(feeds) {
    return this.#turn(async () => (await this.#run("evaluate", this.#tensors("evaluate", feeds))).reports);
  }

  predict(feeds) {
    return this.#turn(async () => (await this.#run("predict", this.#tensors("predict", feeds))).reports);
  }

  set(values) {
    const tensors = this.#checked(byNames("hyperparameters", values, Object.keys(byName(this.host.hyperparameters))));
    this.#turn(async () => Object.assign(this.#held, tensors)).catch(() => {});
  }

  state() {
    return this.#turn(async () => {
      const state = {};
      for (const { name } of this.host.state) state[name] = (await this.#held[name].getData()).slice();
      return state;
    });
  }

  async save() {
    const [state, bytes] = [await this.state(), this.#initial.slice()];
    for (const { name, offset } of this.host.state) bytes.set(new Uint8Array(state[name].buffer), offset);
    return bytes;
  }

  load(checkpoint) {
    return this.#turn(async () => this.#restore(bytesOf("checkpoint", checkpoint)));
  }

  async trained() {
    const { inference, state, weights } = this.host.files;
    const shared = weights ? { [weights]: await (this.#weights ??= this.#read(weights)) } : {};
    return { [inference]: await this.#read(inference), [state]: await this.save(), ...shared };
  }

  async adapter(form = "onnxruntime") {
    const known = this.host.adapters;
    if (!known) throw new GraphoptError("adapter: expected a graph with passes.LoRA, found another");
    const files = named("form", form, known, ": graphopt.save_adapter in Python writes it, or says why");
    const computed = this.host.graphs.adapter && this.#turn(() => this.#run("adapter", {}));
    const [made, state] = await Promise.all([computed, this.state()]); // no step comes between
    for (const [name, { data }] of Object.entries(made?.reports ?? {})) state[name] = data;
    const filled = Object.entries(files).map(async ([name, blocks]) => {
      const bytes = bytesOf(name, await this.#read(name));
      for (const block of blocks) put(bytes, block, state[block.state]);
      return [name, bytes];
    });
    return Object.fromEntries(await Promise.all(filled));
  }

  dispose() {
    if (this.#disposed) return this.#last;
    return this.#turn(async () => {
      this.#disposed = true;
      for (const tensor of Object.values(this.#held)) tensor.dispose(); // before the session that made them
      for (const session of await Promise.all(Object.values(this.#sessions))) await session.release();
      this.#sessions = {};
    });
  }

  /** Do work after all earlier calls. */
  #turn(work) {
    const turn = this.#last.then(() => {
      if (!this.#disposed) return work();
      throw new GraphoptError("trainer: expected an open one, found one after dispose(): create another");
    });
    this.#last = turn.catch(() => {});
    return turn;
  }

  /** Open a graph on the first provider whose numbers agree with the proof of the folder. */
  async #open(graph) {
    let providers = this.#options.executionProviders;
    const content = await this.#read(this.host.files[graph]);
    for (;;) {
      const session = await this.#opened(graph, content, providers);
      const line = await this.#differs(graph, content, session, providers);
      if (line === undefined) return session;
      await session.release();
      const rest = providers?.slice(1) ?? [];
      const others = rest.length || !isOnDevice(providers) ? rest : ["cpu"];
      if (!others.length) throw new GraphoptError(`${line}: take another version of ONNX Runtime, and please report it`);
      console.warn(`${line}: ${nameOf(others)} computes it`);
      if (graph === "train") {
        this.#options.executionProviders = others;
        this.#onDevice = isOnDevice(others);
      } else this.#onHost.add(graph);
      providers = others;
    }
  }

  /** Return a line if a graph computes other numbers of the initial state than the proof; note what is known. */
  async #differs(graph, content, session, providers) {
    const { files, state, hyperparameters, graphs } = this.host;
    if (!files.proof) return void (this.proofs[graph] = "not proven: the folder has no proof");
    const of = graph === "train_steps" ? "train" : graph;
    try {
      const proof = await (this.#proof ??= this.#read(files.proof));
      if (!Object.hasOwn(safetensors(proof).entries, `graph.${of}`)) throw new GraphoptError("the proof has none of this graph");
      const { report, stepsPerCall, onNonfinite, externalData, ...options } = this.#options; // those of sessions
      const read = [proof, content, this.#initial, await this.#weights].filter(Boolean);
      const key = await keyOf({ graph, host: this.host, ...options }, providers, this.#ort.env, read);
      if (await agreed(key)) return void (this.proofs[graph] = "proven before");
      let given = batchOf(this.#ort, proof, this.host.feeds.filter(({ name }) => graphs[graph].feeds.includes(name)), arrayClass);
      if (graph === "train_steps") given = this.#stacked([given]);
      const held = { ...this.#stateOf(this.#initial), ...this.#defaults() };
      for (const { name } of [...state, ...hyperparameters]) if (session.inputNames.includes(name)) given[name] = held[name];
      const next = of === "train" ? state.map((x) => x.next) : [];
      const before = Object.fromEntries(next.map((name, i) => [name, held[state[i].name]]));
      const line = await difference(session, proof, `graph.${of}`, [...next, ...graphs[of].reports], given, before);
      if (line === undefined) return void ((this.proofs[graph] = "proven"), await remember(key));
      const open = async (bytes) => this.#ort.InferenceSession.create(bytes, await this.#sessionOptions(providers));
      const find = async () => firstNode(open, content, await this.#read(files.debug), given);
      const node = graph === "train" && files.debug ? await find().catch(() => {}) : undefined;
      return `${nameOf(providers) ?? "ort"}: ${files[graph]}: output ${line}${node ? `, first in node ${node}` : ""}`;
    } catch (error) {
      this.proofs[graph] = `not proven: ${String(error.message).split("\n")[0]}`;
    }
  }

  #defaults() {
    return this.#checked(mapped(byName(this.host.hyperparameters), (x) => x.default));
  }

  async #sessionOptions(executionProviders) {
    const planless = minor(this.#ort.env?.versions?.common) < 19 && { enableMemPattern: false }; // its plans overlap
    const options = { ...this.#options, ...planless, ...(executionProviders && { executionProviders }) };
    const path = this.host.files.weights;
    if (path) options.externalData = [{ path, data: await (this.#weights ??= this.#read(path)) }];
    return options;
  }

  async #opened(graph, content, executionProviders) {
    const file = this.host.files[graph];
    const floats = this.host.state.filter(({ type }) => type.startsWith("float"));
    const preferredOutputLocation = Object.fromEntries(floats.map(({ next }) => [next, "gpu-buffer"]));
    const located = isOnDevice(executionProviders) && { preferredOutputLocation };
    const options = { ...located, ...(await this.#sessionOptions(executionProviders)) };
    const session = await this.#ort.InferenceSession.create(content, options).catch((error) => {
      throw new GraphoptError(`${file}: ONNX Runtime cannot open it: ${String(error.message).split("\n")[0]}`);
    });
    const { state, hyperparameters } = this.host.graphs[graph];
    const missing = [...state, ...hyperparameters].find((name) => !session.inputNames.includes(name));
    const absent = this.#outputs(graph).find((name) => !session.outputNames.includes(name));
    if (missing === undefined && absent === undefined) return session;
    await session.release();
    const what = missing === undefined ? `an output '${absent}'` : `a plain input '${missing}'`;
    throw new GraphoptError(`${file}: expected ${what}, found none: write it with export_hosts`);
  }

  /** Do one training step; if its loss or new state is not finite, keep the old state. */
  async #train(feeds, done = []) {
    const { reports, next, wrong } = await this.#run("train", feeds);
    if (wrong) await this.#refuse(wrong, reports, next, done);
    else this.#adopt(next, 1);
    return reports;
  }

  /** Do several steps in one call, and return what each reports; nothing, and no step, if one is not finite. */
  async #several(batches) {
    const { reports, next, wrong } = await this.#run("train_steps", this.#stacked(batches));
    if (wrong) return mapped(next, (tensor) => tensor.dispose()) && undefined;
    this.#adopt(next, batches.length);
    return batches.map((_, i) => this.#row(reports, i));
  }

  /** Return the names of what a graph reports and, in training, of the new state and of what tells whether it is finite. */
  #outputs(graph) {
    const { check, state, graphs } = this.host;
    if (!graph.startsWith("train")) return graphs[graph].reports;
    const read = this.#options.report ?? graphs[graph].reports;
    return [...new Set([...read, "loss", ...(check ? [check] : []), ...state.map(({ next }) => next)])]; // older folders: loss
  }

  /** Check that a graph computed what host.json says, before any of it becomes state or is reported. */
  #checkOutputs(graph, found, steps) {
    const told = (type, dims) => `${type} [${dims}]`;
    const number = steps === undefined ? [] : [steps];
    const expected = Object.fromEntries(this.host.state.map(({ next, type, shape }) => [next, told(type, shape)]));
    const loss = this.host.reports.find(({ name }) => name === "loss");
    if (loss) expected.loss = told(loss.type, number);
    if (this.host.check) expected[this.host.check] = told("float32", number);
    for (const [name, { type, dims }] of Object.entries(found)) {
      const other = told(type, dims);
      if ((expected[name] ?? other) === other) continue;
      for (const tensor of Object.values(found)) tensor.dispose();
      throw new GraphoptError(
        `${this.host.files[graph]}: output '${name}': expected ${expected[name]}, found ${other}: write it with export_hosts`,
      );
    }
  }

  /** Run a graph on feeds and the state; return what it reports, the next state, and whether one is not finite. */
  async #run(graph, feeds) {
    this.#sessions[graph] ??= this.#open(graph);
    const session = await this.#sessions[graph].catch((error) => {
      delete this.#sessions[graph];
      throw error;
    });
    const { state, hyperparameters, reports } = this.host.graphs[graph];
    const written = graph.startsWith("train") ? this.host.state : [];
    const check = written.length ? ["loss", ...(this.host.check ? [this.host.check] : [])] : []; // older folders: loss
    const read = (written.length && this.#options.report) || reports;
    const steps = graph === "train_steps" ? Object.values(feeds)[0].dims[0] : undefined;
    for (const name of [...state, ...hyperparameters]) feeds[name] = this.#held[name];
    if (this.#onHost.has(graph)) for (const name of state) feeds[name] = await this.#inHostMemory(feeds[name]);
    const found = await session.run(feeds, this.#outputs(graph)).catch((error) => {
      throw new GraphoptError(`${this.host.files[graph]}: ONNX Runtime cannot run it: ${String(error.message).split("\n")[0]}`);
    });
    this.#checkOutputs(graph, found, steps);
    return {
      reports: Object.fromEntries(read.map((name) => [name, valueOf(found[name])])),
      next: Object.fromEntries(written.map(({ name, next }) => [name, found[next]])),
      wrong: check.some((name) => !isFinite(found[name])) && found.loss,
    };
  }

  async #inHostMemory(tensor) {
    return new this.#ort.Tensor(tensor.type, await tensor.getData(), tensor.dims);
  }

  /** Replace the state, all of it before anything else can run. */
  #adopt(next, steps) {
    for (const [name, tensor] of Object.entries(next)) {
      this.#held[name].dispose();
      this.#held[name] = tensor;
    }
    this.#steps += steps;
  }

  /** Drop a new state; raise an error that names what is not finite, unless such steps are skipped. */
  async #refuse(loss, reports, next, done) {
    let what = `a finite loss, found ${valueOf(loss)}`;
    if (isFinite(loss)) {
      what = "finite numbers in the new state, found others, though the loss is finite";
      for (const [name, tensor] of Object.entries(next)) {
        const [before, after] = [await this.#held[name].getData(), await tensor.getData()];
        if (isFinite({ type: tensor.type, data: after }) || !isFinite({ type: tensor.type, data: before })) continue;
        what = `finite numbers in state '${name}', found others, though the loss is finite`;
        break;
      }
    }
    for (const tensor of Object.values(next)) tensor.dispose();
    if (this.#options.onNonfinite === "skip") return;
    const advice = "the state is as before; look for NaN in the batch, lower the learning rate, or clip gradients";
    const error = new NonFiniteLoss(`step ${this.#steps}: expected ${what}: ${advice}`, this.#steps, reports);
    error.done = [...done];
    throw error;
  }

  /** Return what a graph reads of feeds, as tensors that fit. */
  #tensors(graph, feeds) {
    const read = named("graph", graph, this.host.graphs).feeds;
    const known = byName(this.host.feeds);
    for (const name of Object.keys(byNames("feeds", feeds, read))) {
      const isSet = this.host.hyperparameters.some((x) => x.name === name);
      named("feed", name, known, isSet ? `: call set({ ${name} })` : "");
    }
    const sizes = {}; // of dimensions, by name
    return Object.fromEntries(read.map((name) => [name, tensorOf(this.#ort, known[name], feeds[name], sizes)]));
  }

  /** Return values of hyperparameters as tensors. */
  #checked(values) {
    return mapped(values, (value, name) => {
      const { type, shape } = named("hyperparameter", name, byName(this.host.hyperparameters));
      const numbers = isTensor(value) || ArrayBuffer.isView(value) ? Array.from(value.data ?? value) : [value].flat(9);
      const least = name.endsWith("learning_rate") ? 0 : -Infinity;
      const held = type === "float32" ? Math.fround : Number;
      const wrong = numbers.find((x) => typeof x !== "number" || !Number.isFinite(held(x)) || x < least);
      if (numbers.length === sizeOf(shape) && wrong === undefined && !numbers.includes(undefined))
        return new this.#ort.Tensor(type, numbers, shape);
      const expected = `${shape.length ? `finite numbers [${shape}]` : "a finite number"}${least === 0 ? ", 0 or more" : ""}`;
      const found = numbers.length === 1 ? told(numbers[0]) : `${numbers.length} numbers`;
      throw new GraphoptError(`hyperparameter '${name}': expected ${expected}, found ${found}`);
    });
  }

  /** Return batches of one shape as one, with an axis of steps first. */
  #stacked(batches) {
    return mapped(batches[0], ({ type, dims, size, data }, name) => {
      const stacked = new data.constructor(size * batches.length);
      batches.forEach((batch, i) => stacked.set(batch[name].data, i * size));
      return new this.#ort.Tensor(type, stacked, [batches.length, ...dims]);
    });
  }

  #row(reports, i) {
    return mapped(reports, ({ type, data, dims }) => {
      const size = data.length / dims[0];
      return valueOf(new this.#ort.Tensor(type, data.slice(i * size, (i + 1) * size), dims.slice(1)));
    });
  }

  #restore(bytes) {
    const tensors = this.#stateOf(bytes);
    for (const { name } of this.host.state) this.#held[name]?.dispose();
    Object.assign(this.#held, tensors);
  }

  /** Return the state in a checkpoint, whose tensors may stand in another order and beside metadata. */
  #stateOf(bytes) {
    const [own, found] = [safetensors(this.#initial), safetensors(bytes)];
    const told = (entry) => (entry ? `${entry.dtype} [${entry.shape}]` : "none");
    for (const name of Object.keys({ ...own.entries, ...found.entries })) {
      const [expected, other] = [told(own.entries[name]), told(found.entries[name])];
      const difference = `checkpoint: state '${name}': expected ${expected}, found ${other}`;
      if (other !== expected) throw new GraphoptError(`${difference}: take a checkpoint of this training graph`);
    }
    const [expected, length] = [own.numbers.length, found.numbers.length];
    if (length !== expected)
      throw new GraphoptError(`checkpoint: expected ${expected} bytes after its header, found ${length}: it is cut`);
    const begin = bytes.length - found.numbers.length;
    for (const { name, type, shape, offset, bytes: size } of this.host.state) {
      const { dtype, shape: dims, data_offsets: at } = found.entries[name] ?? {};
      const whole = Array.isArray(at) && at.every((n) => Number.isSafeInteger(n) && n >= 0) && at.length === 2;
      if (!whole || at[0] > at[1] || at[1] > length)
        throw new GraphoptError(`checkpoint: state '${name}': expected its place in the file, found ${JSON.stringify(at)}`);
      const [own, here] = [`${STORED[type]} [${shape}] of ${size} bytes`, `${dtype} [${dims}] of ${at[1] - at[0]} bytes`];
      if (own !== here || sizeOf(shape) * arrayClass(this.#ort, type).BYTES_PER_ELEMENT !== size)
        throw new GraphoptError(`host.json: state '${name}': expected ${here} as in its file, found ${own}`);
      if (bytes === this.#initial && begin + at[0] !== offset)
        throw new GraphoptError(`host.json: state '${name}': expected offset ${begin + at[0]}, found ${offset}`);
    }
    const tensors = this.host.state.map(({ name, type, shape }) => {
      const { buffer } = found.numbers.slice(...found.entries[name].data_offsets);
      const Numbers = arrayClass(this.#ort, type);
      return [name, new this.#ort.Tensor(type, new Numbers(buffer), shape)];
    });
    return Object.fromEntries(tensors);
  }
}

const STORED = { float32: "F32", float64: "F64", float16: "F16", int64: "I64", int32: "I32", int16: "I16", int8: "I8" };
Object.assign(STORED, { uint8: "U8", uint16: "U16", uint32: "U32", uint64: "U64", bool: "BOOL", bfloat16: "BF16" });
const minor = (version) => Number(/^1\.(\d+)/.exec(version)?.[1]); // NaN, which is not less, of anything else
const nameOf = (providers) => providers?.[0]?.name ?? providers?.[0];
const isOnDevice = (providers) => nameOf(providers) === "webgpu";
const isWhole = (x) => Number.isInteger(x) && x > 0;
const reports = (host) => host.graphs.train.reports;
const OPTIONS = {
  stepsPerCall: [isWhole, () => "a whole number from 1"],
  report: [
    (names, host) => Array.isArray(names) && names.every((name) => reports(host).includes(name)),
    (host) => `an array of names of ${reports(host).join(", ")}`,
  ],
  onNonfinite: [(x) => ["raise", "skip"].includes(x), () => "'raise' or 'skip'"],
  executionProviders: [Array.isArray, () => "an array such as ['webgpu']"],
};
const byName = (entries) => Object.fromEntries(entries.map((entry) => [entry.name, entry]));
const mapped = (object, f) => Object.fromEntries(Object.entries(object).map(([name, x]) => [name, f(x, name)]));
