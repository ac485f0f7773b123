/**
 * Return ONNX Runtime whose first provider computes nodes of one kind wrongly: `Type:factor`, or nothing.
 * A node's output is computed by a node of the same kind and multiplied: the graph's bytes are what a shim can change.
 */

export function planted(ort, fault) {
  if (fault === "none") return ort;
  const [type, provider] = fault.split("@");
  const InferenceSession = {
    async create(bytes, options = {}) {
      const [first] = options.executionProviders ?? [];
      const isFaulty = provider === undefined || (first?.name ?? first) === provider;
      return ort.InferenceSession.create(isFaulty ? changed(bytes, type) : bytes, options);
    },
  };
  return { ...ort, env: ort.env, Tensor: ort.Tensor, InferenceSession };
}

/** Return a graph in which operators of a type are others with the same inputs: `Tanh>Sin`, of names as long. */
export function changed(bytes, swap) {
  const [from, to] = swap.split(">");
  const text = new TextEncoder();
  const [old, other] = [from, to].map((name) => text.encode(name));
  const tagged = Uint8Array.from([0x22, old.length, ...old]); // NodeProto.op_type is field 4
  const found = Uint8Array.from(bytes);
  for (let i = 0; i + tagged.length <= found.length; i++)
    if (tagged.every((x, k) => found[i + k] === x)) found.set(other, i + 2);
  return found;
}
