// Runs Perfetto's trace processor (WebAssembly, as its web page ships it) under Node: requests from stdin, replies to
// stdout, both as the byte stream of perfetto.protos.TraceProcessorRpcStream. Knows nothing of what is asked.
//
//     node trace_processor.cjs FOLDER_OF_THE_PAGE < requests > replies
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const node = process;
const folder = node.argv[2];
const replies = [];
const port = { postMessage: (data) => replies.push(Buffer.from(data)) };
const page = "file:///page/";

// The page's engine is written for a web worker: give it what it looks for there, and hide what it refuses.
Object.defineProperty(globalThis, "process", { value: undefined });
globalThis.self = globalThis;
globalThis.location = { href: page };
globalThis.WorkerGlobalScope = globalThis.constructor;
globalThis.importScripts = () => undefined;
globalThis.XMLHttpRequest = class {
  open(method, url) { this.url = url; }
  send() { this.response = new Uint8Array(fs.readFileSync(path.join(folder, path.basename(this.url)))).buffer; }
};
globalThis.fetch = async (url) => new Response(fs.readFileSync(path.join(folder, path.basename(String(url)))), {
  headers: { "Content-Type": "application/wasm" },
});
const log = console.error;
console.log = log;

vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), { filename: "engine_bundle.js" });
globalThis.onmessage({ data: port });

const requests = new Uint8Array(fs.readFileSync(0));
const size = 1 << 20;
let offset = 0;
const wait = () => {
  // The engine takes requests once its module is compiled; it buffers none before, so ask until the first is taken.
  try {
    for (; offset < requests.length; offset += size) {
      port.onmessage({ data: requests.subarray(offset, Math.min(offset + size, requests.length)) });
    }
  } catch (error) {
    if (offset === 0 && Date.now() < deadline) return void setTimeout(wait, 50);
    log(String(error));
    node.exitCode = 1;
    return;
  }
  fs.writeSync(1, Buffer.concat(replies));
};
const deadline = Date.now() + 60000;
setTimeout(wait, 50);
