// Hands a trace to ui.perfetto.dev as it documents: open its window, ping until it answers, post the bytes.
"use strict";
const said = (text) => { document.getElementById("said").textContent = text; };
document.getElementById("open").addEventListener("click", async () => {
  const target = window.open(PERFETTO);
  if (!target) { said("The browser did not allow a new window."); return; }
  said("Converting...");
  try {
    const answer = await fetch("trace.pftrace.gz");
    if (!answer.ok) throw new Error(await answer.text());
    const buffer = await answer.arrayBuffer();
    let tries = 0;
    const timer = setInterval(() => {
      if (++tries > 300) { clearInterval(timer); said("Perfetto did not answer: is the network up?"); return; }
      target.postMessage("PING", PERFETTO);
    }, 100);
    addEventListener("message", (event) => {
      if (event.source !== target || event.origin !== PERFETTO || event.data !== "PONG") return;
      clearInterval(timer);
      target.postMessage({ perfetto: { buffer, title: fileName, fileName: `${fileName}.pftrace.gz` } }, PERFETTO);
      said("Handed over.");
    });
  } catch (error) {
    said(String(error.message || error));
  }
});
