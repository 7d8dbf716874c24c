// What the theme's own script makes late: regions that scroll can be reached by the keyboard, and the buttons of each block of code have a name.
(() => {
  const watched = ".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset .formula, .md-typeset p:has(> svg.picture)"
  const mend = () => {
    for (const one of document.querySelectorAll(watched)) {
      if (one.scrollWidth > one.clientWidth) one.setAttribute("tabindex", "0")
      else one.removeAttribute("tabindex")
    }
    document.querySelectorAll(".md-code__nav").forEach((one, n) => one.setAttribute("aria-label", `Code ${n + 1}`))
  }
  document.addEventListener("DOMContentLoaded", mend)
  window.addEventListener("load", mend)
  window.addEventListener("resize", mend)
  new MutationObserver(mend).observe(document.body, { childList: true, subtree: true })
})()
