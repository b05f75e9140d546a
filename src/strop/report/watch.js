// Follow the run: ask for its version, and where it is another take the new page over into this one.
const status = document.querySelector(".live");
let version = document.documentElement.dataset.version;
async function follow() {
  try {
    const now = await (await fetch("version")).text();
    if (now !== version) {
      const page = new DOMParser().parseFromString(await (await fetch(".")).text(), "text/html");
      const problem = page.querySelector(".problem");
      if (problem) { status.textContent = problem.textContent; return; }
      if (!page.querySelector("main")) return;
      const open = [...document.querySelectorAll("details")].map(one => one.open);
      const chosen = [...document.querySelectorAll("select")].map(one => one.value);
      for (const part of ["main", ".lead", "#curves"]) document.querySelector(part).replaceWith(page.querySelector(part));
      [...document.querySelectorAll("details")].forEach((one, i) => { one.open = open[i] || false; });
      start();
      [...document.querySelectorAll("select")].forEach((one, i) => {
        if (chosen[i] && [...one.options].some(option => option.value === chosen[i])) one.value = chosen[i];
        one.dispatchEvent(new Event("change"));
      });
      version = now;
    }
    status.textContent = "Following the run; last look " + new Date().toLocaleTimeString();
  } catch (error) {
    status.textContent = "strop report --watch has ended; this page stays as it is.";
  }
}
setInterval(follow, 2000);
