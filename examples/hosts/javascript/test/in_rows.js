/**
 * Read pictures by the page of `graphopt serve`, and print the first colour of each, or why it is refused:
 * node in_rows.js ADDRESS lost|wide|none PICTURE.png...
 * WebGL loses its context after the first picture, meets one wider than its textures, or is missing.
 */

import { readFile } from "node:fs/promises";
import { basename } from "node:path";
import { browser } from "./browser.js";

const [address, state, ...files] = process.argv.slice(2);
const pictures = await Promise.all(files.map(async (file) => [basename(file), [...(await readFile(file))]]));
const chromium = await browser();
const page = await chromium.newPage();
await page.goto(address);
const found = await page.evaluate(
  async ([state, pictures]) => {
    const [own, contexts, colors] = [OffscreenCanvas.prototype.getContext, [], []];
    OffscreenCanvas.prototype.getContext = function (kind, options) {
      if (kind === "webgl2" && state === "none") return null;
      const context = own.call(this, kind, options);
      if (kind === "webgl2") contexts.push(context);
      return context;
    };
    const { features } = await import("./rows.js");
    for (const [name, bytes] of pictures) {
      const data = { kind: "pictures", count: 1, files: [new File([new Uint8Array(bytes)], name, { type: "image/png" })] };
      const read = features(data, [1, 3, 4, 4], "bytes", () => {});
      colors.push(await read.then(([, x]) => [0, 16, 32].map((i) => Math.round(x[i])), ({ message }) => message));
      if (state === "lost" && colors.length === 1) contexts[0].getExtension("WEBGL_lose_context").loseContext();
    }
    return colors;
  },
  [state, pictures],
);
await chromium.close();
console.log(JSON.stringify(found));
