//! What operators ask for: servers, decisions about what they show, clients, calls.

use std::collections::BTreeMap;
use std::sync::Arc;

use torpor_protocol::mcp_gateway::{
    AddMcpServer, DecideMcpItems, McpCall, McpClient, McpClientPolicy, McpDiff, McpServer,
    McpServerSpec, McpTokens,
};
use torpor_protocol::{ErrorCode, Name};
use torpor_service::keys::Caller;
use torpor_service::{Error, Result};
use torpor_store::McpServerRow;

use crate::audit::CallFeed;
use crate::pins::{self, Taken};
use crate::policy::Policy;
use crate::servers::Server;
use crate::upstream::Upstream;
use crate::{Entry, Gateway, ROOT, understood};

/// Upstream servers of one gateway.
const SERVERS_MAX: usize = 200;
/// Clients with a policy.
const CLIENTS_MAX: usize = 10_000;
/// Bytes of a policy.
const POLICY_MAX: usize = 256 * 1024;
/// The gateway's own tools begin with these.
const OWN: [&str; 3] = ["call", "describe", "find"];

impl Gateway {
    // === Servers ===

    /// Recorded, and asked what it shows; nothing of it is there for clients until it is approved.
    pub async fn add(&self, request: AddMcpServer) -> Result<McpServer> {
        let AddMcpServer { name, spec, approve, replace } = request;
        if OWN.contains(&name.as_str()) {
            return Err(Error::invalid(format!(
                "name: tools of the gateway itself begin with {name}_"
            )));
        }
        Upstream::check(&self.service, &spec)?;
        self.check_secrets(&spec).await?;
        let server = match self.server(name.as_str()).filter(|_| replace) {
            Some(old) => self.respecified(&old, spec).await?,
            None => self.recorded(&name, spec).await?,
        };
        // What goes wrong is in its status: it is there, and may be asked again.
        if server.list_again().await.is_ok() && approve {
            let digest = self.diff(&name)?.digest;
            self.approve(&name, &DecideMcpItems { digest, ..DecideMcpItems::default() }).await?;
        }
        Ok(server.shown())
    }

    async fn recorded(&self, name: &Name, spec: McpServerSpec) -> Result<Arc<Server>> {
        let _writing = self.version.writing().await;
        if self.servers.read().len() >= SERVERS_MAX {
            let message = format!("there are {SERVERS_MAX} servers already");
            return Err(Error::new(ErrorCode::LimitReached, message));
        }
        let row = McpServerRow {
            name: name.clone(),
            spec,
            approved: Vec::new(),
            seen: Vec::new(),
            rejected: Vec::new(),
            listed_at_ms: None,
            revision: 0,
            created_at_ms: self.service.fleet.clock().now_ms(),
        };
        if !self.service.ledger.add_mcp_server(&row).await? {
            let message = format!("there is a server {name} already");
            return Err(Error::with_hint(
                ErrorCode::AlreadyExists,
                message,
                "`replace` makes it this one",
            ));
        }
        let server = Arc::new(Server::new(&self.service, row));
        self.servers.write().insert(name.clone(), Arc::clone(&server));
        Ok(server)
    }

    /// Another server in the place of one; its sandbox goes.
    async fn respecified(&self, old: &Server, spec: McpServerSpec) -> Result<Arc<Server>> {
        let _writing = self.version.writing().await;
        let row = (*old.row()).clone();
        if !self.service.ledger.respecify_mcp_server(&row.name, &spec).await? {
            return Err(Error::new(
                ErrorCode::NotFound,
                format!("there is no MCP server {}", row.name),
            ));
        }
        let name = row.name.clone();
        let server =
            Arc::new(Server::new(&self.service, McpServerRow { spec, seen: Vec::new(), ..row }));
        // At once, whoever may go away while the old one is removed.
        self.servers.write().insert(name, Arc::clone(&server));
        old.upstream.remove().await;
        Ok(server)
    }

    /// Secrets of a sandbox are missed now, and not when it is made.
    async fn check_secrets(&self, spec: &McpServerSpec) -> Result<()> {
        let McpServerSpec::Stdio(spec) = spec else { return Ok(()) };
        let Some(network) = &spec.network else { return Ok(()) };
        for name in &network.secrets {
            torpor_service::calls::secrets::find(&self.service, name).await?;
        }
        Ok(())
    }

    pub fn servers(&self) -> Vec<McpServer> {
        self.all_servers().iter().map(|server| server.shown()).collect()
    }

    pub fn show(&self, name: &Name) -> Result<McpServer> {
        Ok(self.known(name)?.shown())
    }

    /// Asks it again what it shows.
    pub async fn refresh(&self, name: &Name) -> Result<McpServer> {
        let server = self.known(name)?;
        // The status says what went wrong.
        let _ = server.list_again().await;
        Ok(server.shown())
    }

    /// With its sandbox.
    pub async fn remove(&self, name: &Name) -> Result<()> {
        let server = self.known(name)?;
        {
            let _writing = self.version.writing().await;
            self.service.ledger.drop_mcp_server(name).await?;
            self.servers.write().remove(name);
        }
        server.upstream.remove().await;
        Ok(())
    }

    pub fn diff(&self, name: &Name) -> Result<McpDiff> {
        let server = self.known(name)?;
        Ok(pins::diff(&server.row(), &self.taken(name)))
    }

    pub async fn approve(&self, name: &Name, wanted: &DecideMcpItems) -> Result<McpServer> {
        let taken = self.taken(name);
        self.decide_on(name, |row| pins::approve(row, &taken, wanted)).await
    }

    pub async fn reject(&self, name: &Name, wanted: &DecideMcpItems) -> Result<McpServer> {
        let taken = self.taken(name);
        self.decide_on(name, |row| pins::reject(row, &taken, wanted)).await
    }

    async fn decide_on(
        &self,
        name: &Name,
        decide: impl FnOnce(
            &McpServerRow,
        )
            -> Result<(Vec<torpor_protocol::mcp_gateway::McpItem>, Vec<String>)>,
    ) -> Result<McpServer> {
        let server = self.known(name)?;
        let _writing = self.version.writing().await;
        let row = server.row();
        let (approved, rejected) = decide(&row)?;
        let ledger = &self.service.ledger;
        if !ledger.decide_mcp_items(name, &approved, &rejected, row.revision).await? {
            let message = format!("somebody else decided about {name} meanwhile");
            return Err(Error::with_hint(
                ErrorCode::InUse,
                message,
                "look again, and decide again",
            ));
        }
        server.decided(approved, rejected);
        Ok(server.shown())
    }

    fn taken(&self, name: &Name) -> Taken {
        let rows: Vec<_> = self.all_servers().iter().map(|server| server.row()).collect();
        Taken::by_others(rows.iter().map(|row| &**row), name.as_str())
    }

    fn known(&self, name: &Name) -> Result<Arc<Server>> {
        let missing = || Error::new(ErrorCode::NotFound, format!("there is no MCP server {name}"));
        self.server(name.as_str()).ok_or_else(missing)
    }

    // === Clients ===

    pub async fn set_client(
        &self,
        caller: &Caller,
        key: &str,
        policy: McpClientPolicy,
    ) -> Result<McpClient> {
        Policy::compile(&policy, 0)?;
        if serde_json::to_string(&policy).map_or(usize::MAX, |text| text.len()) > POLICY_MAX {
            return Err(Error::invalid(format!("a policy has at most {POLICY_MAX} bytes")));
        }
        let _writing = self.version.writing().await;
        if key != ROOT && !self.service.keys.is_there(key).await? {
            let message = format!("there is no API key {key}; `torpor key ls` shows their ids");
            return Err(Error::new(ErrorCode::NotFound, message));
        }
        if key != ROOT && self.client(caller).await?.key == key {
            return Err(Error::with_hint(
                ErrorCode::InvalidRequest,
                "a key that has a policy opens the MCP gateway only, and this is the one that you ask with",
                "make another key for the client: torpor key create LABEL",
            ));
        }
        let clients = self.clients.read().len();
        if clients >= CLIENTS_MAX && !self.clients.read().contains_key(key) {
            return Err(Error::new(
                ErrorCode::LimitReached,
                format!("there are {CLIENTS_MAX} clients already"),
            ));
        }
        let revision = self.service.ledger.put_mcp_client(key, &policy).await?;
        let client = McpClient { key: key.to_owned(), policy, revision };
        let (key, entry) = understood(client.clone());
        self.clients.write().insert(key, entry);
        self.confine();
        Ok(client)
    }

    pub fn clients(&self) -> Vec<McpClient> {
        let all: BTreeMap<_, _> = self
            .clients
            .read()
            .values()
            .map(|Entry { client, .. }| (client.key.clone(), client.clone()))
            .collect();
        all.into_values().collect()
    }

    pub fn show_client(&self, key: &str) -> Result<McpClient> {
        let found = self.clients.read().get(key).map(|entry| entry.client.clone());
        found.ok_or_else(|| no_policy(key))
    }

    pub async fn remove_client(&self, key: &str) -> Result<()> {
        match self.forget_client(key).await? {
            true => Ok(()),
            false => Err(no_policy(key)),
        }
    }

    /// A key that is not valid any more when this returns goes with its policy; the key first: without its policy
    /// it would open everything.
    pub async fn revoke(&self, key: &str) -> Result<()> {
        self.service.keys.revoke(key).await?;
        self.forget_client(key).await.map(drop)
    }

    async fn forget_client(&self, key: &str) -> Result<bool> {
        let _writing = self.version.writing().await;
        let was_there = self.service.ledger.drop_mcp_client(key).await?;
        self.clients.write().remove(key);
        self.confine();
        Ok(was_there)
    }

    pub fn tokens(&self, key: &str) -> McpTokens {
        self.tokens_of(&self.client_of(key))
    }

    // === Calls ===

    /// At most `limit` before this id, newest first.
    pub async fn calls(&self, before: Option<u64>, limit: usize) -> Result<Vec<McpCall>> {
        self.calls.recent(before, limit).await
    }

    pub fn follow_calls(&self) -> CallFeed {
        self.calls.follow()
    }
}

fn no_policy(key: &str) -> Error {
    let key: String = key.chars().take(80).collect();
    Error::new(ErrorCode::NotFound, format!("the key {key} has no policy"))
}
