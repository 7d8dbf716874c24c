// What site_check.py asks of an open page.  arguments: the least size of code, and of text in a picture, in pixels.
const [leastCode, leastText] = arguments
const all = (selector, within = document) => [...within.querySelectorAll(selector)]
const room = window.innerWidth
const wide = document.documentElement.scrollWidth
const scrolls = "pre, .md-typeset__scrollwrap, .md-typeset__table, .formula, p:has(> svg.picture)"
const pictures = all(".md-content svg[role=img], .md-content img")
const title = (one) => one.getAttribute("aria-label") || one.getAttribute("alt") || one.querySelector("title")?.textContent
const sizeOf = (one) => parseFloat(getComputedStyle(one).fontSize)
const textOf = (one) => {
  const scale = one.getBoundingClientRect().width / one.viewBox.baseVal.width
  return Math.min(...all("text", one).map((part) => parseFloat(part.getAttribute("font-size")) * scale))
}
return {
  wide,
  room,
  out: wide <= room ? [] : all(".md-content *")
    .filter((one) => one.getBoundingClientRect().right > room + 1 && !one.closest(scrolls))
    .slice(0, 3)
    .map((one) => one.outerHTML.slice(0, 100)),
  small: all("pre code").filter((one) => one.offsetParent && sizeOf(one) < leastCode).length,
  untitled: pictures.filter((one) => !title(one)).length,
  tiny: pictures.filter((one) => one.matches("svg.picture") && textOf(one) < leastText)
    .map((one) => `${title(one)}: ${textOf(one).toFixed(1)}`),
  far: performance.getEntriesByType("resource").map((one) => one.name)
    .filter((one) => ![location.origin, "data:", "blob:"].some((near) => one.startsWith(near))),
}
