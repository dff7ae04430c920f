// Run in a page: is it wider than the window, which controls have no name, which texts are too faint to read (WCAG AA)?

const visible = (element) => element.getClientRects().length > 0;

const nameless = [...document.querySelectorAll("button, a, input, select, textarea, progress, meter, audio, video")]
  .filter((element) => visible(element) && element.getAttribute("aria-hidden") !== "true")
  .filter((element) => !(element.textContent.trim() && ["A", "BUTTON"].includes(element.tagName)))
  .filter((element) => !element.getAttribute("aria-label") && !(element.labels && element.labels.length))
  .map((element) => element.outerHTML.slice(0, 120));

const channels = (colour) => colour.match(/[\d.]+/g).map(Number);

function luminance(colour) {
  const [r, g, b] = channels(colour).map((value) => {
    const share = value / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function ground(element) {
  for (let around = element; around; around = around.parentElement) {
    const colour = getComputedStyle(around).backgroundColor;
    if (!colour.startsWith("rgba") || channels(colour)[3] === 1) return colour;
  }
  return "rgb(255, 255, 255)";
}

const faint = [...document.querySelectorAll("body *")]
  .filter((element) => visible(element) && !element.disabled && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .map((element) => {
    const [one, other] = [getComputedStyle(element).color, ground(element)].map(luminance);
    return [(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), element.outerHTML.slice(0, 120)];
  })
  .filter(([contrast]) => contrast < 4.5);

return { wide: document.documentElement.scrollWidth > window.innerWidth, nameless, faint };
