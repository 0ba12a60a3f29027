//! A second address, for clients that expect one.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::Config;

/// Where Tensorlake's command line looks for sandboxes when it finds the API at [`USUAL`].
const EXPECTED_BESIDE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9443);
/// Where the API is if nobody says otherwise.
pub(super) const USUAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8900);

/// What was said about a second address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ListenAlso {
    Off,
    At(SocketAddr),
}

impl TryFrom<String> for ListenAlso {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "off" => Ok(Self::Off),
            address => address.parse().map(Self::At).map_err(|_| {
                format!("{address:?} is neither an address like 127.0.0.1:9443 nor off")
            }),
        }
    }
}

impl From<ListenAlso> for String {
    fn from(also: ListenAlso) -> Self {
        match also {
            ListenAlso::Off => "off".to_owned(),
            ListenAlso::At(address) => address.to_string(),
        }
    }
}

/// A second address to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Second {
    /// Somebody wants it.
    Asked(SocketAddr),
    /// It would be nice to have.
    Usual(SocketAddr),
}

impl Config {
    /// The second address of a daemon that listens on `first`: the one that was asked for, or, at the
    /// usual place, the one that clients expect beside it.
    pub(crate) fn second_address(&self, first: SocketAddr) -> Option<Second> {
        match self.listen_also {
            Some(ListenAlso::Off) => None,
            Some(ListenAlso::At(address)) => Some(Second::Asked(address)),
            None => (first == USUAL).then_some(Second::Usual(EXPECTED_BESIDE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_address_is_listened_on_when_asked_for_and_at_the_usual_place() {
        let elsewhere = "127.0.0.1:1".parse().unwrap();
        let second = |also: Option<&str>, first| {
            let listen_also = also.map(|text| text.to_owned().try_into().unwrap());
            Config { listen_also, ..Config::default() }.second_address(first)
        };
        assert_eq!(second(None, USUAL), Some(Second::Usual(EXPECTED_BESIDE)));
        assert_eq!(second(None, elsewhere), None);
        assert_eq!(second(Some("off"), USUAL), None);
        let asked = Some(Second::Asked("127.0.0.1:2".parse().unwrap()));
        assert_eq!(second(Some("127.0.0.1:2"), elsewhere), asked);
        assert_eq!(second(Some("127.0.0.1:2"), USUAL), asked);
    }

    #[test]
    fn what_is_said_about_it_is_written_as_it_is_read() {
        for text in ["off", "127.0.0.1:9443", "[::1]:80"] {
            let also: ListenAlso = text.to_owned().try_into().unwrap();
            assert_eq!(String::from(also), text);
        }
        for text in ["", "on", "9443", "localhost:9443"] {
            assert!(ListenAlso::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
