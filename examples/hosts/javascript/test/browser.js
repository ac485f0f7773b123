/** Serve static files and open them in headless Chromium. */

import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { chromium } from "playwright-core";

const TYPES = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css" };
const FLAGS = [
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--enable-features=Vulkan",
];

/** Serve folders by the first part of a path, as in {"package": "/where/it/is"}; return the server and its address. */
export async function serve(folders) {
  const server = createServer(async (request, response) => {
    const [, first, ...rest] = normalize(decodeURIComponent(new URL(request.url, "http://x").pathname)).split("/");
    try {
      const path = join(folders[first], ...rest);
      const content = await readFile(path);
      response.writeHead(200, {
        "content-type":
          TYPES[extname(path)] ?? (extname(path) === ".wasm" ? "application/wasm" : "application/octet-stream"),
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-embedder-policy": "require-corp",
      });
      response.end(content);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { address: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}

/** Open headless Chromium. */
export function browser() {
  return chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
}
