//! Numbers of calls through the MCP gateway.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};
use torpor_protocol::mcp_gateway::McpCall;

use super::{Histograms, histogram};

/// Tools are approved by hand, so there are few. Other names are made up by clients, and are no labels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    server: String,
    tool: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServerLabels {
    server: String,
}

pub(super) struct McpCalls {
    calls: Family<CallLabels, Counter>,
    seconds: Histograms<ServerLabels>,
}

impl Default for McpCalls {
    fn default() -> Self {
        Self { calls: Family::default(), seconds: Family::new_with_constructor(histogram) }
    }
}

impl McpCalls {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("mcp_calls", "Calls through the MCP gateway", self.calls.clone());
        let help = "From a call through the MCP gateway to its end";
        registry.register_with_unit("mcp_call", help, Unit::Seconds, self.seconds.clone());
    }

    pub(super) fn note(&self, call: &McpCall, known: bool) {
        let named = |text: &str| if known { text.to_owned() } else { String::new() };
        let (server, tool) = (named(&call.server), named(&call.tool));
        if known {
            let labels = ServerLabels { server: server.clone() };
            self.seconds.get_or_create(&labels).observe(call.took_us as f64 / 1e6);
        }
        let labels = CallLabels { server, tool, outcome: call.outcome.as_str() };
        self.calls.get_or_create(&labels).inc();
    }
}
