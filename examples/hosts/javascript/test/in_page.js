/** Use the page as a visitor does, and print what it shows: node in_page.js SITE [SCREENSHOT.png] */

import { join } from "node:path";
import { browser, serve } from "./browser.js";

const THREE = "30,22 42,13 58,13 68,23 66,36 56,45 44,48 58,52 70,62 70,76 58,87 42,87 29,78"; // percent of the pad

const [site, screenshot] = process.argv.slice(2);
const server = await serve({ site });
const chromium = await browser();
const page = await chromium.newPage({ viewport: { width: 1240, height: 900 } });
const errors = [];
const downloads = [];
const saved = [];
page.on("pageerror", (error) => errors.push(error.message));
page.on("download", (download) => {
  downloads.push(download.suggestedFilename());
  saved.push(download.saveAs(join(site, "..", download.suggestedFilename())));
});
const idle = () => page.waitForFunction(() => !document.getElementById("reset").disabled, null, { timeout: 120000 });
const shown = (id) => page.textContent(`#${id}`);

await page.goto(`${server.address}/site/index.html`);
await idle();
const before = await shown("accuracy");
await page.click("#train");
await idle();
const trained = await shown("accuracy");
const { x, y, width, height } = await page.locator("#pad").boundingBox();
const points = THREE.split(" ").map((point) => point.split(",").map((percent) => percent / 100));
for (const [i, [across, down]] of points.entries()) {
  await page.mouse.move(x + across * width, y + down * height, { steps: 4 });
  if (!i) await page.mouse.down();
}
await page.mouse.up();
await page.waitForFunction(() => document.querySelector("#bars .best"));
const asDrawn = await seen();
await page.locator("#answers button").nth(3).click();
await idle();
const learned = await shown("status");
await page.waitForFunction(() => document.querySelector("#bars .best"));
const best = await page.textContent("#bars .best");
if (screenshot) await page.screenshot({ path: screenshot });
await page.click("#store");
await idle();
const kept = await shown("accuracy");
const heat = [await seen(), await pixels("heat")]; // by the weights that are downloaded
await page.click("#download");
await idle();
await page.click("#reset");
await idle();
const reset = await shown("accuracy");
await page.click("#restore");
await idle();
await page.waitForTimeout(500); // downloads come late
const restored = await shown("accuracy");
await Promise.all(saved);
await page.setInputFiles("#pictures", [
  await photograph(),
  { name: "a.png", mimeType: "image/png", buffer: Buffer.from("none") },
]);
await idle();
const photographed = { seen: [asDrawn, await seen()], status: await shown("status") };
await page.locator("#answers button").nth(3).click();
await idle();
photographed.then = await shown("status");
await chromium.close();
server.close();
console.log(JSON.stringify({ before, trained, learned, best, kept, reset, restored, photographed, heat, downloads, errors }));

/** Return the 64 pixels that the network sees. */
async function seen() {
  return (await pixels("seen")).map(([, , , opacity]) => opacity);
}

/** Return the 64 pixels of a small canvas. */
function pixels(id) {
  return page.evaluate((id) => {
    const { data } = document.getElementById(id).getContext("2d").getImageData(0, 0, 8, 8);
    return Array.from({ length: 64 }, (_, i) => [...data.subarray(4 * i, 4 * i + 4)]);
  }, id);
}

/** Return a picture of a 3 in dark ink on paper that is brighter on one side. */
async function photograph() {
  const url = await page.evaluate((points) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 900, height: 1200 });
    const paper = canvas.getContext("2d");
    const light = paper.createLinearGradient(0, 0, 900, 0);
    light.addColorStop(0, "#777268");
    light.addColorStop(1, "#f4efe4");
    paper.fillStyle = light;
    paper.fillRect(0, 0, 900, 1200);
    Object.assign(paper, { lineWidth: 60, lineCap: "round", lineJoin: "round", strokeStyle: "#2b3350" });
    paper.beginPath();
    for (const point of points.split(" ")) paper.lineTo(...point.split(",").map((percent) => 150 + 6 * percent));
    paper.stroke();
    return canvas.toDataURL("image/png");
  }, THREE);
  return { name: "three.png", mimeType: "image/png", buffer: Buffer.from(url.split(",")[1], "base64") };
}
