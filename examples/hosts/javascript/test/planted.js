let made = 0;

/**
 * Return ONNX Runtime that computes one node wrongly on a provider: it opens another training graph in its place. Its
 * versions are its own, so that a browser does not remember it as the right one.
 */
export function planted(ort, right, faulty, provider) {
  const InferenceSession = {
    async create(bytes, options = {}) {
      const [first] = options.executionProviders ?? [];
      const isFaulty = !provider || (first?.name ?? first) === provider;
      const isTrain = bytes.length >= right.length && right.every((x, i) => bytes[i] === x);
      if (!isFaulty || !isTrain) return ort.InferenceSession.create(bytes, options);
      const rest = bytes.subarray(right.length); // of the graph that names a node
      const whole = new Uint8Array(faulty.length + rest.length);
      whole.set(faulty);
      whole.set(rest, faulty.length);
      return ort.InferenceSession.create(whole, options);
    },
  };
  const versions = { ...ort.env.versions, fault: faulty === right ? 0 : ++made };
  return { env: { ...ort.env, versions }, Tensor: ort.Tensor, InferenceSession };
}

/**
 * Open a host folder and do a step, with each wrong graph in the place of the training graph; return what is said.
 *
 * @param files returns a file of the folder
 * @param count the number of wrong graphs, `faulty-0.onnx` on; the right one comes first
 */
export async function faults(Trainer, ort, files, count, options, provider) {
  const right = await files("train.onnx");
  const results = [];
  for (let i = -1; i < count; i++) {
    const result = { warned: [] };
    console.warn = (line) => result.warned.push(line);
    try {
      const faulty = i < 0 ? right : await files(`faulty-${i}.onnx`);
      const begun = performance.now();
      const trainer = await Trainer.create(planted(ort, right, faulty, provider), files, options);
      result.ms = performance.now() - begun;
      result.proofs = { ...trainer.proofs };
      await trainer.dispose();
    } catch (error) {
      result.error = `${error.name}: ${error.message}`;
    }
    results.push(result);
  }
  return results;
}
