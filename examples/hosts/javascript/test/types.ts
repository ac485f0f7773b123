// What the compiler of TypeScript checks the types with: tsc -p .

import * as ort from "onnxruntime-node";
import * as web from "onnxruntime-web";
import { GraphoptError, NonFiniteLoss, Trainer, loadFromOPFS, saveToOPFS, type Reports } from "../../../../graphopt/hosts/javascript/index.js";

export async function train(files: Record<string, Uint8Array>): Promise<Reports[]> {
  const trainer = await Trainer.create(ort, files, {
    executionProviders: ["cpu"],
    stepsPerCall: 4,
    onNonfinite: "skip",
  });
  const batch = {
    x: new Float32Array(6),
    target: [
      [1, 2],
      [3, 4],
    ],
  };
  const { loss } = await trainer.step(batch);
  await trainer.run([batch]).catch((error) => {
    if (error instanceof NonFiniteLoss) console.log(error.step, error.reports.loss, error.done.length);
  });
  if (!Number.isFinite(loss)) throw new GraphoptError(trainer.host.files.train);
  trainer.set({ learning_rate: 1e-4 });
  await trainer.load((await loadFromOPFS("mine")) ?? (await trainer.save()));
  await saveToOPFS("mine", (await trainer.adapter("peft"))["adapter_model.safetensors"]);
  // @ts-expect-error: no such form
  await trainer.adapter("gguf");
  await Trainer.create(web, "./host/", { executionProviders: ["webgpu"] });
  // @ts-expect-error: no such option
  await Trainer.create(web, "./host/", { providers: ["webgpu"] });
  return trainer.run([batch, batch]);
}
