//! A second address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

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

#[cfg(test)]
mod tests {
    use super::*;

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
