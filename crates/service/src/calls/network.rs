//! What a sandbox may reach, against what there is: secrets, ways out, and what was saved.

use std::collections::BTreeSet;

use torpor_lifecycle::store::StoreError;
use torpor_protocol::{HostBinding, Network, NetworkLimits, SecretName};

use crate::Service;
use crate::admission::network::{secrets_of, unbound};
use crate::error::{Error, Result};

/// Whether everything is there that a policy names. What is missing is missed at once, not when the
/// first request goes out.
pub(super) async fn known(app: &Service, network: &Network) -> Result<()> {
    app.egress.check(network).map_err(|why| Error::invalid(format!("network: {why}")))?;
    for route in &network.routes {
        let names: BTreeSet<_> = secrets_of(route).into_iter().collect();
        for name in names {
            let hosts = bound_to(app, &name).await?;
            if !hosts.is_empty()
                && let Some(host) = unbound(&route.hosts, &hosts)
            {
                return Err(Error::invalid(format!(
                    "network.routes: {name} may not be sent to {host}: `torpor secret set {name} \
                     --host …` says where it may"
                )));
            }
        }
    }
    for name in &network.secrets {
        if bound_to(app, name).await?.is_empty() {
            return Err(Error::invalid(format!(
                "network.secrets: {name} is bound to no host, so its placeholder would be replaced \
                 nowhere: `torpor secret set {name} --host …` says where it may go"
            )));
        }
    }
    Ok(())
}

/// The hosts of a secret that is there.
async fn bound_to(app: &Service, name: &SecretName) -> Result<Vec<HostBinding>> {
    let secret = app.vault.find(name).await?;
    let secret = secret.ok_or_else(|| StoreError::NoSuchSecret(name.to_string()))?;
    Ok(secret.hosts)
}

/// What begins at a moment reaches no more than what was saved: its lists and limits hold besides
/// what is asked for, and it leaves through the same gateway. What was put into its requests is put in
/// again, unless something else is asked for.
pub(super) fn narrowed(asked: Network, had: &Network) -> Result<Network> {
    let restricted = !had.internet || !had.allow.is_empty();
    let mut deny = asked.deny;
    deny.extend(had.deny.iter().cloned());
    deny.sort();
    deny.dedup();
    let gateway = match (asked.gateway, &had.gateway) {
        (Some(asked), Some(had)) if asked != *had => {
            return Err(Error::invalid(format!(
                "network.gateway: what was saved leaves through {had}, and so does what begins there"
            )));
        }
        (asked, had) => had.clone().or(asked),
    };
    // Nobody asks for what puts nothing in: then it is as it was.
    let says_nothing = asked.routes.is_empty() && asked.secrets.is_empty();
    let (routes, secrets) = match says_nothing {
        true => (had.routes.clone(), had.secrets.clone()),
        false => (asked.routes, asked.secrets),
    };
    Ok(Network {
        internet: asked.internet && had.internet,
        allow: if restricted { had.allow.clone() } else { asked.allow },
        deny,
        routes,
        secrets,
        gateway,
        limits: tighter(asked.limits, had.limits),
    })
}

fn tighter(one: NetworkLimits, other: NetworkLimits) -> NetworkLimits {
    fn least<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
        one.into_iter().chain(other).min()
    }
    NetworkLimits {
        bytes_per_sec: least(one.bytes_per_sec, other.bytes_per_sec),
        connections_per_sec: least(one.connections_per_sec, other.connections_per_sec),
        connections: least(one.connections, other.connections),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn network(value: &Value) -> Network {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn begun(asked: &Value, had: &Value) -> Value {
        serde_json::to_value(narrowed(network(asked), &network(had)).unwrap()).unwrap()
    }

    #[test]
    fn lists_of_what_was_saved_hold_for_what_begins_there() {
        let had = json!({"internet": true, "allow": ["a.example"], "deny": ["b.example"]});
        let asked = json!({"allow": ["c.example"], "deny": ["d.example"]});
        let now = begun(&asked, &had);
        assert_eq!(now["allow"], json!(["a.example"]));
        assert_eq!(now["deny"], json!(["b.example", "d.example"]));
        let now = begun(&json!({"allow": ["c.example"]}), &json!({}));
        assert_eq!(now["allow"], json!(["c.example"]));
        assert_eq!(begun(&json!({}), &json!({"internet": false}))["internet"], false);
    }

    #[test]
    fn limits_get_tighter_only() {
        let had = json!({"limits": {"connections": 10, "bytes_per_sec": 5000}});
        let asked = json!({"limits": {"connections": 100, "connections_per_sec": 7}});
        let limits = json!({"connections": 10, "bytes_per_sec": 5000, "connections_per_sec": 7});
        assert_eq!(begun(&asked, &had)["limits"], limits);
    }

    #[test]
    fn the_gateway_of_what_was_saved_is_kept() {
        let had = json!({"gateway": "office"});
        assert_eq!(begun(&json!({}), &had)["gateway"], "office");
        assert_eq!(begun(&had, &had)["gateway"], "office");
        assert_eq!(begun(&had, &json!({}))["gateway"], "office");
        assert!(narrowed(network(&json!({"gateway": "home"})), &network(&had)).is_err());
    }

    #[test]
    fn routes_and_grants_are_as_they_were_unless_others_are_asked_for() {
        let route = |host: &str| json!([{"hosts": [host], "headers": {"a": "b"}}]);
        let had = json!({"routes": route("a.example"), "secrets": ["KEY"]});
        let now = begun(&json!({}), &had);
        assert_eq!((&now["routes"], &now["secrets"]), (&had["routes"], &had["secrets"]));
        let now = begun(&json!({"routes": route("b.example")}), &had);
        assert_eq!((&now["routes"], &now["secrets"]), (&route("b.example"), &Value::Null));
    }
}
