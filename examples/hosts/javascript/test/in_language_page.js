/**
 * Use the page that teaches a language model as a visitor does: node in_language_page.js SITE OUT PROVIDER LINES [SCREENSHOT].
 * Downloads go to OUT; it prints what the page shows as JSON. SCREENSHOT is the beginning of names of pictures.
 */

import { join } from "node:path";
import { browser, serve } from "./browser.js";

const [site, out, provider, lines, screenshot] = process.argv.slice(2);
const server = await serve({ site });
const chromium = await browser();
const page = await chromium.newPage({ viewport: { width: 1240, height: 900 } });
const errors = [];
const downloads = [];
page.on("pageerror", (error) => errors.push(error.message));
page.on("download", (download) => downloads.push([download.suggestedFilename(), download]));
const idle = () => page.waitForFunction(() => !document.getElementById("reset").disabled, null, { timeout: 120000 });
const shown = (id) => page.textContent(`#${id}`);
const found = { provider, errors };

await page.goto(`${server.address}/site/index.html?provider=${provider}`);
await idle();
found.ready = await shown("status");
await page.fill("#prompt", lines.split(" ").slice(0, 3).join(" "));
await page.fill("#lines", "");
await page.click("#train");
await idle();
found.refused = await shown("status");
await page.fill("#lines", lines);
await page.click("#train");
await idle();
for (const id of ["steps", "loss", "time", "status", "now"]) found[id] = await shown(id);
await page.click("#continue");
await idle();
found.again = await shown("now");
found.before = await shown("before");
for (const id of ["download", "peft"]) {
  await page.click(`#${id}`);
  await idle();
}
found.downloaded = await shown("status");
await page.waitForTimeout(500); // downloads come late
for (const [name, download] of downloads) await download.saveAs(join(out, name));
found.downloads = downloads.map(([name]) => name);
for (const scheme of screenshot ? ["light", "dark"] : []) {
  await page.emulateMedia({ colorScheme: scheme });
  for (const width of [1240, 390]) {
    await page.setViewportSize({ width, height: 900 });
    await page.waitForTimeout(200);
    await page.screenshot({ path: `${screenshot}-${scheme}-${width}.png`, fullPage: true });
  }
}
await page.click("#reset");
await idle();
found.reset = await shown("now");
await chromium.close();
server.close();
console.log(JSON.stringify(found));
