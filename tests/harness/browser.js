// What tests look at in a page; see browser.py.

function painted() {
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))));
}

async function settled() {
  await painted();
  for (const {view} of await drawn) await view.runAsync();
  return painted();
}

function luminance(colour) {
  const parts = colour.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
  const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function labels(chart) {
  const seen = (text) => text.textContent.trim() && getComputedStyle(text).opacity > 0;
  return [...chart.querySelectorAll("text")].filter(seen).map((text) => [text, text.getBoundingClientRect()]);
}

function* ofChart(chart) {
  const frame = chart.getBoundingClientRect();
  const paper = getComputedStyle(document.body).backgroundColor;
  const every = labels(chart);
  for (const [at, [text, box]] of every.entries()) {
    const name = JSON.stringify(text.textContent);
    const out = Math.max(frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom);
    if (out > 1.5) yield `${name} is cut by ${out} pixels`;
    if (contrast(getComputedStyle(text).fill, paper) < 4.5) yield `${name} is hard to read`;
    for (const [other, another] of every.slice(at + 1)) {
      const across = Math.min(box.right, another.right) - Math.max(box.left, another.left);
      const down = Math.min(box.bottom, another.bottom) - Math.max(box.top, another.top);
      if (across > 1 && down > 1.5) yield `${name} and ${JSON.stringify(other.textContent)} overlap`;
    }
  }
  if (every.length < 2) yield "a chart has no labels";
}

function* ofText() {
  const paper = getComputedStyle(document.body).backgroundColor;
  for (const each of document.querySelectorAll("h1, h2, p, td, li, summary, figcaption, th")) {
    if (!each.checkVisibility()) continue;
    if (contrast(getComputedStyle(each).color, paper) < 4.5) yield `${each.tagName} is hard to read`;
    if (each.clientWidth && each.scrollWidth > each.clientWidth + 1) {
      yield `${each.tagName} is cut: ${each.textContent.slice(0, 60)}`;
    }
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) yield `the page is ${wide} pixels wide in a window of ${innerWidth}`;
}

function problems() {
  const found = [...ofText()];
  for (const chart of document.querySelectorAll(".chart")) found.push(...ofChart(chart));
  if (window.hacked) found.push(`a name was run: ${window.hacked}`);
  return found.slice(0, 40);
}
