// The official TypeScript client, in every mode.
import assert from "node:assert/strict";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

const said = [];
for (const mode of ["auto", "legacy", { pin: "2026-07-28" }]) {
  const client = new Client({ name: "test", version: "1" }, { versionNegotiation: { mode } });
  await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2])));
  const { tools } = await client.listTools();
  assert(tools.some((tool) => tool.name === "run" && tool.outputSchema));
  const told = [];
  const command = "for n in 1 2 3; do echo $n; sleep 1; done; exit 4";
  const ran = await client.callTool(
    { name: "run", arguments: { command } },
    { onprogress: (progress) => told.push(progress) },
  );
  assert.equal(ran.structuredContent.exit_code, 4);
  assert.equal(ran.structuredContent.stdout, "1\n2\n3\n");
  assert(told.length >= 2, JSON.stringify(told));
  // What is aborted is killed: nothing of it is there a moment later.
  const marker = `sleep 7${Math.floor(Math.random() * 1e6)}`;
  const stop = new AbortController();
  const aborted = client.callTool({ name: "run", arguments: { command: `exec ${marker}` } }, { signal: stop.signal });
  const count = async () => {
    const found = await client.callTool({ name: "process_list", arguments: {} });
    return found.structuredContent.processes.filter((it) => it.running && it.command.includes(marker)).length;
  };
  const until = async (wanted) => {
    for (const end = Date.now() + 30_000; (await count()) !== wanted; ) {
      assert(Date.now() < end, `there never were ${wanted}`);
      await new Promise((wake) => setTimeout(wake, 100));
    }
  };
  if (mode !== "legacy") {
    await until(1);
    stop.abort("enough");
    await assert.rejects(aborted);
    await until(0);
  } else {
    // Without a session nobody knows whose request a message about it means: it goes on until it is stopped.
    await until(1);
    stop.abort("enough");
    await assert.rejects(aborted);
    const found = await client.callTool({ name: "process_list", arguments: {} });
    for (const it of found.structuredContent.processes.filter((it) => it.command.includes(marker) && it.running)) {
      await client.callTool({ name: "process_stop", arguments: { process: it.process, grace: 0 } });
    }
  }
  const bad = await client.callTool({ name: "run", arguments: { command: "" } });
  assert(bad.isError);
  said.push(JSON.stringify(mode));
  await client.close();
}
console.log(`modes ${said.join(", ")}`);
