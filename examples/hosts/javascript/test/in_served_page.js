/**
 * Use the page of `graphopt serve` as a visitor does, and print what it shows:
 * node in_served_page.js ADDRESS MODEL.onnx FOLDER|TABLE.csv TRAINED.onnx FIELDS AS JSON [SCREENSHOT.png]
 */

import { browser } from "./browser.js";

const [address, model, data, trained, fields, screenshot] = process.argv.slice(2);
const chromium = await browser();
const page = await chromium.newPage({ viewport: { width: 1240, height: 1000 } });
const errors = [];
page.on("pageerror", (error) => errors.push(error.message));
const idle = () => page.waitForFunction(() => !document.getElementById("model").disabled, null, { timeout: 120000 });
const shown = (id) => page.textContent(`#${id}`);

await page.goto(address);
await idle();
await page.setInputFiles("#model", model);
await idle();
await page.setInputFiles(data.endsWith(".csv") ? "#table" : "#folder", data);
await idle();
const { stops, ...chosen } = JSON.parse(fields);
for (const [id, value] of Object.entries(chosen)) {
  if (id === "trains") await page.click(`#trains label:has([value=${value}])`);
  else if (await page.evaluate((id) => document.getElementById(id).tagName === "SELECT", id)) await page.selectOption(`#${id}`, value);
  else await page.fill(`#${id}`, String(value));
  await idle();
}
if (await page.isEnabled("#train")) await page.click("#train");
if (stops) {
  await page.waitForFunction(() => document.getElementById("status").textContent.startsWith("Compiling"));
  await page.click("#train");
}
await idle();
const [status, what] = [await shown("status"), await shown("what")];
const found = { status, what, ...(await page.evaluate(async () => (await import("./page.js")).history)), errors };
if (screenshot) await page.screenshot({ path: screenshot });
if (found.losses.length) {
  found.orders = await page.evaluate(async (epochs) => {
    const [{ shuffled, training }, many] = [await import("./page.js"), Array.from({ length: epochs }, (_, i) => i)];
    return many.map((epoch) => shuffled(training(), epoch));
  }, JSON.parse(fields).epochs);
  const downloading = page.waitForEvent("download");
  await page.click("#download");
  await (await downloading).saveAs(trained);
  await idle();
  found.downloaded = await shown("status");
  await page.click("#reset");
  await idle();
  found.again = await page.evaluate(async () => (await import("./page.js")).history.measured);
  await page.evaluate(async () => {
    const { history } = await import("./page.js");
    for (let i = 0; i < 200000; i++) history.losses.push(1);
  });
  await page.setViewportSize({ width: 800, height: 800 }); // which draws the curve of many steps
  await page.evaluate(() => new Promise((done) => setTimeout(done, 200)));
}
await chromium.close();
console.log(JSON.stringify(found));
