// The official TypeScript clients, of now in every mode and of before, through the MCP gateway: the server behind
// it, `web`, is a sandbox's own.
import assert from "node:assert/strict";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { Client as OldClient } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport as OldTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const url = new URL(process.argv[2]);

async function use(client, transport) {
  await client.connect(transport);
  const { tools } = await client.listTools();
  assert(tools.every((tool) => tool.name.startsWith("web_")), JSON.stringify(tools));
  const run = tools.find((tool) => tool.name === "web_run");
  assert(run.inputSchema.properties.command && run.outputSchema && run.annotations, JSON.stringify(run));
  const ran = await client.callTool({ name: "web_run", arguments: { command: "echo out; exit 3" } });
  assert.equal(ran.structuredContent.exit_code, 3);
  assert.equal(ran.structuredContent.stdout, "out\n");
  const bad = await client.callTool({ name: "web_read_file", arguments: { path: "/no/such" } });
  assert(bad.isError && bad.content[0].text.includes("/no/such"), JSON.stringify(bad));
  await assert.rejects(client.callTool({ name: "web_nothing", arguments: {} }), /there is no web_nothing/);
  await client.close();
}

const said = [];
for (const mode of ["auto", "legacy", { pin: "2026-07-28" }]) {
  const client = new Client({ name: "test", version: "1" }, { versionNegotiation: { mode } });
  await use(client, new StreamableHTTPClientTransport(url));
  said.push(JSON.stringify(mode));
}
await use(new OldClient({ name: "test", version: "1" }), new OldTransport(url));
console.log(`modes ${said.join(", ")}, and the client of before`);
