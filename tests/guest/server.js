// An HTTP server with something to remember: who asks for /state changes it.
const http = require("http");
const crypto = require("crypto");

const objects = new Map();
for (let n = 0; n < 50000; n++) objects.set(`key-${n}`, { n, text: `value ${n}` });

let hits = 0;
const server = http.createServer((request, response) => {
  if (request.url !== "/state") return response.end(`hello ${request.url}\n`);
  const hash = crypto.createHash("sha256");
  for (const [key, { n, text }] of objects) hash.update(`${key} ${n} ${text}`);
  hits += 1;
  response.end(JSON.stringify({ pid: process.pid, hits, objects: hash.digest("hex") }));
});
server.keepAliveTimeout = 0;
server.listen(Number(process.argv[2]), "127.0.0.1");
