//! The MCP gateway: tools of many servers behind one address, pinned, decided on for each key, and audited.
//!
//! ```text
//!  client ─▶ endpoint ─▶ dispatch: policy ─ pins ─▶ upstream ─┬─▶ HTTP
//!   (either era)            │                                 ├─▶ a program in a sandbox of its own
//!                           └──▶ audit                        └─▶ an HTTP API (OpenAPI)
//! ```
//!
//! Invariants
//! - What is forwarded is pinned, and only what is pinned is forwarded (see [`pins`]).
//! - What may be called is decided on the body of each call, whatever was listed or stands in headers.
//! - Nothing of a server runs on the host. No token of a client goes to a server, no secret to a client.
//! - Every call leaves a line in the audit, without a value of its arguments.

mod admin;
mod audit;
mod canonical;
mod dispatch;
mod endpoint;
mod pins;
mod policy;
mod search;
mod servers;
mod suspicion;
mod throttle;
mod upstream;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::Semaphore;
use torpor_lifecycle::chain;
use torpor_lifecycle::ledger::{Aggregate, CacheVersion, PAGE, REFRESH, everything};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::Name;
use torpor_protocol::mcp_gateway::McpClient;
use torpor_service::keys::Caller;
use torpor_service::{Result, Service};

pub use audit::CallFeed;
pub use endpoint::{Headers, Reply};

use audit::Calls;
use policy::Policy;
use servers::Server;
use throttle::Throttles;
use upstream::Upstream;

/// Calls that are under way in the daemon, as of the servers of sandboxes.
const CALLS_MAX: usize = 512;

/// Stands for the key of the configuration, and for everybody where no key is needed.
pub const ROOT: &str = "root";

/// What the operator says.
#[derive(Debug, Clone, Copy, Default)]
pub struct Settings {
    /// Whether keys without a policy may call everything that is approved.
    pub open: bool,
}

/// One per daemon, in an `Arc`.
pub struct Gateway {
    service: Arc<Service>,
    settings: Settings,
    servers: RwLock<BTreeMap<Name, Arc<Server>>>,
    clients: RwLock<HashMap<String, Entry>>,
    version: CacheVersion,
    calls: Calls,
    throttles: Throttles,
    /// Of calls that are under way.
    seats: Semaphore,
}

/// A client as it was written, and understood.
#[derive(Clone)]
struct Entry {
    client: McpClient,
    policy: Arc<Policy>,
}

/// Who calls.
#[derive(Clone)]
pub(crate) struct Client {
    key: String,
    policy: Arc<Policy>,
}

impl Gateway {
    pub async fn open(
        service: &Arc<Service>,
        settings: Settings,
    ) -> std::result::Result<Arc<Self>, StoreError> {
        let changes = service.ledger.changes();
        let gateway = Arc::new(Self {
            service: Arc::clone(service),
            settings,
            servers: RwLock::default(),
            clients: RwLock::default(),
            version: CacheVersion::now(changes, Aggregate::McpGateway).await?,
            calls: Calls::new(service),
            throttles: Throttles::default(),
            seats: Semaphore::new(CALLS_MAX),
        });
        gateway.load().await?;
        Ok(gateway)
    }

    /// Follows other nodes until the daemon stops, and clears away what servers left that were removed: there,
    /// or by a daemon that died over it.
    pub async fn follow(self: Arc<Self>) {
        loop {
            Upstream::sweep(&self.service, |name| self.server(name).is_some()).await;
            tokio::time::sleep(REFRESH).await;
            if let Err(error) = self.version.refresh(self.load()).await {
                tracing::warn!(cache = "mcp_gateway", error = chain(&error), "not read again");
            }
        }
    }

    /// Writes down what was noted.
    pub async fn close(&self) {
        self.calls.flush().await;
    }

    async fn load(&self) -> std::result::Result<(), StoreError> {
        let ledger = &self.service.ledger;
        let rows = everything(
            |after: Option<Name>| async move { ledger.mcp_servers(after.as_ref(), PAGE).await },
            |row| row.name.clone(),
        );
        let rows = rows.await?;
        let clients = everything(
            |after: Option<String>| async move { ledger.mcp_clients(after.as_deref(), PAGE).await },
            |client| client.key.clone(),
        );
        let clients = clients.await?;
        let mut servers = self.servers.write();
        let mut now = BTreeMap::new();
        for row in rows {
            let server = match servers.remove(&row.name) {
                Some(server) if server.row().spec == row.spec => {
                    server.replace(row.clone());
                    server
                }
                Some(_) | None => Arc::new(Server::new(&self.service, row.clone())),
            };
            now.insert(row.name, server);
        }
        *servers = now;
        drop(servers);
        *self.clients.write() = clients.into_iter().map(understood).collect();
        self.confine();
        Ok(())
    }

    /// Keys that have a policy open nothing but the gateway.
    fn confine(&self) {
        let clients = self.clients.read().keys().filter(|key| *key != ROOT).cloned().collect();
        self.service.keys.confine(clients);
    }

    /// Who this is, and what it may.
    async fn client(&self, caller: &Caller) -> Result<Client> {
        let key = self.service.keys.id_of(caller).await?;
        Ok(self.client_of(key.as_deref().unwrap_or(ROOT)))
    }

    fn client_of(&self, key: &str) -> Client {
        let found = self.clients.read().get(key).map(|entry| Arc::clone(&entry.policy));
        let policy = found
            .unwrap_or_else(|| Arc::new(Policy::default_of(key == ROOT || self.settings.open)));
        Client { key: key.to_owned(), policy }
    }

    fn server(&self, name: &str) -> Option<Arc<Server>> {
        let name: Name = name.parse().ok()?;
        self.servers.read().get(&name).cloned()
    }

    fn all_servers(&self) -> Vec<Arc<Server>> {
        self.servers.read().values().cloned().collect()
    }
}

/// A policy that was understood when it was written, and is not now, lets nothing through.
fn understood(client: McpClient) -> (String, Entry) {
    let policy = Policy::compile(&client.policy, client.revision).unwrap_or_else(|error| {
        let error = chain(&error);
        tracing::error!(
            key = client.key,
            error,
            "policy of an MCP client not understood, nothing is let through"
        );
        Policy::default_of(false)
    });
    (client.key.clone(), Entry { client, policy: Arc::new(policy) })
}
