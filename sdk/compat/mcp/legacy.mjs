// The TypeScript client of before, as most programs have it.
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const client = new Client({ name: "test", version: "1" });
const transport = new StreamableHTTPClientTransport(new URL(process.argv[2]));
await client.connect(transport);
assert.equal(transport.sessionId, undefined);
const { tools } = await client.listTools();
assert(tools.length <= 16 && tools.some((tool) => tool.name === "run"));
const told = [];
const ran = await client.callTool(
  { name: "run", arguments: { command: "echo hi; sleep 2; echo there" } },
  undefined,
  { onprogress: (progress) => told.push(progress) },
);
assert.equal(ran.structuredContent.stdout, "hi\nthere\n");
assert(told.length >= 1);
const begun = await client.callTool({ name: "run", arguments: { command: "sleep 600", wait: 0 } });
assert.equal(begun.structuredContent.running, true);
await client.callTool({ name: "process_stop", arguments: { process: begun.structuredContent.process, grace: 0 } });
await client.ping();
await client.close();
console.log(`${tools.length} tools`);
