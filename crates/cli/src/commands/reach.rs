//! Arguments that several verbs share: what a sandbox may reach, and who may reach it.

use clap::{Args, ValueEnum};
use torpor_protocol::{Destination, Network, PortAccess};

use crate::error::{Error, Result};

/// What a sandbox that is to be may reach.
#[derive(Debug, Clone, Args)]
pub(super) struct ReachArgs {
    /// Let it reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    /// Let it reach these public addresses only, such as 192.0.2.0/24; may be given several times.
    #[arg(long, value_name = "RANGE")]
    allow: Vec<Destination>,
    /// Never let it reach these addresses; may be given several times.
    #[arg(long, value_name = "RANGE")]
    deny: Vec<Destination>,
}

impl ReachArgs {
    pub(super) fn network(self) -> Network {
        Network { internet: !self.no_internet, allow: self.allow, deny: self.deny, ..Network::default() }
    }
}

/// What is to be changed of what a sandbox may reach.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct ReachChanges {
    /// Whether it reaches public addresses.
    #[arg(long, value_name = "on|off", hide_possible_values = true)]
    internet: Option<Switch>,
    /// Let it reach these public addresses only, instead of those so far; may be given several times.
    #[arg(long, value_name = "RANGE")]
    allow: Vec<Destination>,
    /// It is not limited to some addresses any more.
    #[arg(long, conflicts_with = "allow")]
    no_allow: bool,
    /// Never let it reach these addresses, instead of those so far; may be given several times.
    #[arg(long, value_name = "RANGE")]
    deny: Vec<Destination>,
    /// No addresses are kept from it any more.
    #[arg(long, conflicts_with = "deny")]
    no_deny: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl ReachChanges {
    /// None: nothing is to be changed. The API replaces it as a whole, so what is there goes along.
    pub(super) fn over(self, network: &Network) -> Option<Network> {
        let given = self.internet.is_some()
            || self.no_allow
            || self.no_deny
            || !self.allow.is_empty()
            || !self.deny.is_empty();
        let replaced = |list: Vec<Destination>, emptied: bool, were: &[Destination]| {
            if emptied || !list.is_empty() { list } else { were.to_vec() }
        };
        given.then(|| Network {
            internet: self.internet.map_or(network.internet, |switch| switch == Switch::On),
            allow: replaced(self.allow, self.no_allow, &network.allow),
            deny: replaced(self.deny, self.no_deny, &network.deny),
            ..network.clone()
        })
    }
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
