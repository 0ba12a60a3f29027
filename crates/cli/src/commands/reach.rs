//! Arguments that several verbs share: what a sandbox may reach, and who may reach it.

mod route;

use clap::{Args, ValueEnum};
use torpor_protocol::{Destination, Name, Network, NetworkLimits, PortAccess, SecretName};

use crate::error::{Error, Result};
use crate::units;
use route::{RouteFile, merged};

/// What a sandbox that is to be may reach.
#[derive(Debug, Clone, Args)]
pub(super) struct ReachArgs {
    /// Let it reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    /// Let it reach this and nothing else: a host, all hosts below one, methods and the beginning of a
    /// path of it, or addresses. Such as api.example.com, *.example.com, 'GET,HEAD example.com/v1/' and
    /// 192.0.2.0/24; may be given several times.
    #[arg(long, value_name = "WHAT")]
    allow: Vec<Destination>,
    /// Never let it reach this, written the same way; may be given several times.
    #[arg(long, value_name = "WHAT")]
    deny: Vec<Destination>,
    #[command(flatten)]
    way: WayArgs,
}

impl ReachArgs {
    pub(super) fn network(self) -> Network {
        let Self { no_internet, allow, deny, way } = self;
        let limits = way.limits(NetworkLimits::default());
        let routes = merged(way.route, way.route_file);
        let (secrets, gateway) = (way.grant, way.gateway);
        Network { internet: !no_internet, allow, deny, routes, secrets, gateway, limits }
    }
}

/// What is put into requests on their way out, which way that is, and how wide.
#[derive(Debug, Clone, Default, Args)]
struct WayArgs {
    /// Put a header into its requests to these hosts, where it does not see it: such as
    /// 'api.example.com: Authorization=Bearer {{SECRET:TOKEN}}'; may be given several times.
    #[arg(long, value_name = "HOSTS: HEADER=VALUE", value_parser = route::parse)]
    route: Vec<torpor_protocol::Route>,
    /// The same from a file: a route or a list of routes as JSON, also for fields of bodies and queries;
    /// may be given several times.
    #[arg(long, value_name = "FILE", value_parser = route::read)]
    route_file: Vec<RouteFile>,
    /// Replace {{SECRET:NAME}} in its requests to the hosts that this secret is bound to; may be given
    /// several times.
    #[arg(long, value_name = "SECRET")]
    grant: Vec<SecretName>,
    /// Its connections leave through this gateway of the daemon; `torpor egress gateways` lists them.
    #[arg(long, value_name = "NAME")]
    gateway: Option<Name>,
    /// What it may send, and receive, in a second, such as 10mb/s.
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate)]
    bandwidth: Option<u64>,
    /// Connections it may have open.
    #[arg(long, value_name = "N")]
    connections: Option<u32>,
    /// Connections it may open in a second.
    #[arg(long, value_name = "N")]
    connection_rate: Option<u32>,
}

impl WayArgs {
    fn limits(&self, were: NetworkLimits) -> NetworkLimits {
        NetworkLimits {
            bytes_per_sec: self.bandwidth.or(were.bytes_per_sec),
            connections_per_sec: self.connection_rate.or(were.connections_per_sec),
            connections: self.connections.or(were.connections),
        }
    }

    fn are_given(&self) -> bool {
        let Self { route, route_file, grant, gateway, .. } = self;
        !route.is_empty()
            || !route_file.is_empty()
            || !grant.is_empty()
            || gateway.is_some()
            || !self.limits(NetworkLimits::default()).is_none()
    }
}

/// What is to be changed of what a sandbox may reach.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct ReachChanges {
    /// Whether it reaches public addresses.
    #[arg(long, value_name = "on|off", hide_possible_values = true)]
    internet: Option<Switch>,
    /// Let it reach this and nothing else, instead of what it was: such as api.example.com,
    /// *.example.com, 'GET,HEAD example.com/v1/' and 192.0.2.0/24; may be given several times.
    #[arg(long, value_name = "WHAT")]
    allow: Vec<Destination>,
    /// It is not limited to some hosts and addresses any more.
    #[arg(long, conflicts_with = "allow")]
    no_allow: bool,
    /// Never let it reach this, instead of what it was; may be given several times.
    #[arg(long, value_name = "WHAT")]
    deny: Vec<Destination>,
    /// Nothing is kept from it any more.
    #[arg(long, conflicts_with = "deny")]
    no_deny: bool,
    #[command(flatten)]
    way: WayArgs,
    /// Nothing is put into its requests any more.
    #[arg(long, conflicts_with_all = ["route", "route_file"])]
    no_route: bool,
    /// No placeholders are replaced in its requests any more.
    #[arg(long, conflicts_with = "grant")]
    no_grant: bool,
    /// Its connections leave through this host itself.
    #[arg(long, conflicts_with = "gateway")]
    no_gateway: bool,
    /// It may use the network as much as it can.
    #[arg(long, conflicts_with_all = ["bandwidth", "connections", "connection_rate"])]
    no_limits: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl ReachChanges {
    /// None: nothing is to be changed. The API replaces it as a whole, so what is there goes along.
    pub(super) fn over(self, network: &Network) -> Option<Network> {
        if !self.are_given() {
            return None;
        }
        let were = network.clone();
        let limits = match self.no_limits {
            true => NetworkLimits::default(),
            false => self.way.limits(were.limits),
        };
        let gateway = self.way.gateway.or(were.gateway).filter(|_| !self.no_gateway);
        let routes = merged(self.way.route, self.way.route_file);
        Some(Network {
            internet: self.internet.map_or(were.internet, |switch| switch == Switch::On),
            allow: instead(self.allow, self.no_allow, were.allow),
            deny: instead(self.deny, self.no_deny, were.deny),
            routes: instead(routes, self.no_route, were.routes),
            secrets: instead(self.way.grant, self.no_grant, were.secrets),
            gateway,
            limits,
        })
    }

    fn are_given(&self) -> bool {
        let emptied = [
            self.no_allow,
            self.no_deny,
            self.no_route,
            self.no_grant,
            self.no_gateway,
            self.no_limits,
        ];
        self.internet.is_some()
            || emptied.contains(&true)
            || !self.allow.is_empty()
            || !self.deny.is_empty()
            || self.way.are_given()
    }
}

/// What is given, unless nothing is; then what was there.
fn instead<T>(given: Vec<T>, emptied: bool, were: Vec<T>) -> Vec<T> {
    if emptied || !given.is_empty() { given } else { were }
}

/// Which ports of a sandbox that is to be are reached from outside.
#[derive(Debug, Clone, Args)]
pub(super) struct PortArgs {
    /// Only this port is reached by previews, with a key if there are keys; may be given several times
    /// [default: all are, without a key].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    expose: Vec<u16>,
    /// Its exposed ports are reached without an API key, too.
    #[arg(long, requires = "expose")]
    public: bool,
}

impl PortArgs {
    pub(super) fn access(self) -> Option<PortAccess> {
        let given = !self.expose.is_empty();
        given.then_some(PortAccess { exposed: self.expose, public: self.public })
    }
}

/// What is to be changed of the ports that are reached from outside.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct PortChanges {
    /// Only this port is reached by previews, instead of those so far; may be given several times.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    expose: Vec<u16>,
    /// No port is reached from outside any more.
    #[arg(long, conflicts_with_all = ["expose", "public", "private"])]
    no_expose: bool,
    /// Its exposed ports are reached without an API key, too.
    #[arg(long)]
    public: bool,
    /// Its exposed ports are reached with an API key only, if there are keys.
    #[arg(long, conflicts_with = "public")]
    private: bool,
}

impl PortChanges {
    /// None: nothing is to be changed.
    pub(super) fn over(self, were: Option<&PortAccess>) -> Result<Option<PortAccess>> {
        if self.no_expose {
            return Ok(Some(PortAccess::default()));
        }
        if self.expose.is_empty() && !self.public && !self.private {
            return Ok(None);
        }
        let were = were.cloned().unwrap_or_default();
        let exposed = if self.expose.is_empty() { were.exposed } else { self.expose };
        if exposed.is_empty() {
            return Err(Error::Usage {
                message: "none of its ports is exposed".to_owned(),
                hint: Some("say which with --expose PORT".to_owned()),
            });
        }
        let public = self.public || (were.public && !self.private);
        Ok(Some(PortAccess { exposed, public }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(texts: &[&str]) -> Vec<Destination> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_not_mentioned_of_a_network_stays() {
        let were = Network { allow: ranges(&["192.0.2.0/24"]), ..Network::default() };
        assert_eq!(ReachChanges::default().over(&were), None);
        let off = ReachChanges { internet: Some(Switch::Off), ..ReachChanges::default() };
        let now = off.over(&were).unwrap();
        assert_eq!((now.internet, now.allow), (false, were.allow.clone()));
        let deny = ReachChanges { deny: ranges(&["198.51.100.7"]), ..ReachChanges::default() };
        let now = deny.over(&were).unwrap();
        assert_eq!((now.allow, now.deny), (were.allow.clone(), ranges(&["198.51.100.7"])));
        let free = ReachChanges { no_allow: true, ..ReachChanges::default() };
        assert_eq!(free.over(&were), Some(Network::default()));
    }

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        reach: ReachChanges,
    }

    fn changes(words: &[&str]) -> ReachChanges {
        let words = [&["torpor"], words].concat();
        <Line as clap::Parser>::try_parse_from(words).unwrap().reach
    }

    #[test]
    fn routes_grants_gateway_and_limits_are_changed_one_by_one() {
        let header = "a.example: X-Key={{SECRET:A}}";
        let given =
            ["--route", header, "--grant", "A", "--gateway", "office", "--connections", "9"];
        let first = changes(&given).over(&Network::default()).unwrap();
        assert_eq!(first.routes[0].headers["X-Key"], "{{SECRET:A}}");
        assert_eq!((first.secrets.len(), first.limits.connections), (1, Some(9)));
        let then = changes(&["--bandwidth", "1mb/s", "--no-grant"]).over(&first).unwrap();
        assert_eq!((&then.routes, &then.gateway), (&first.routes, &first.gateway));
        assert_eq!((then.limits.bytes_per_sec, then.limits.connections), (Some(1 << 20), Some(9)));
        assert!(then.secrets.is_empty());
        let bare = changes(&["--no-route", "--no-gateway", "--no-limits"]).over(&then);
        assert_eq!(bare, Some(Network::default()));
    }

    #[test]
    fn ports_are_public_or_not_only_if_there_are_some() {
        let were = PortAccess { exposed: vec![80], public: true };
        let changed = |changes: PortChanges, were: Option<&PortAccess>| changes.over(were).unwrap();
        assert_eq!(changed(PortChanges::default(), Some(&were)), None);
        let private = PortChanges { private: true, ..PortChanges::default() };
        let now = changed(private.clone(), Some(&were)).unwrap();
        assert_eq!((now.exposed, now.public), (vec![80], false));
        let other = PortChanges { expose: vec![81], ..PortChanges::default() };
        let now = changed(other.clone(), Some(&were)).unwrap();
        assert_eq!((now.exposed, now.public), (vec![81], true));
        assert!(!changed(other, None).unwrap().public);
        let none = PortChanges { no_expose: true, ..PortChanges::default() };
        assert_eq!(changed(none, Some(&were)), Some(PortAccess::default()));
        assert!(private.over(None).is_err());
    }
}
