//! The network card of a machine, as the control socket wants it.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::network::Link;

/// Sends and receives up to so many bytes at once through the host's segmentation.
const GSO_MAX: u32 = 65_536;

/// The argument of `Network.CreateLinksAndRoutes`; a packet socket goes beside it.
pub(super) fn links_and_routes(card: &Link) -> Value {
    json!({
        "LoopbackLinks": [{
            "Name": "lo",
            "Addresses": [
                { "Address": "127.0.0.1", "PrefixLen": 8 },
                { "Address": "::1", "PrefixLen": 128 },
            ],
            "Routes": [route("127.0.0.0", &[255, 0, 0, 0]), route("::1", &[255; 16])],
        }],
        "FDBasedLinks": [fd_link(card)],
        "Defaultv4Gateway": {
            "Name": card.name,
            "Route": {
                "Destination": { "IP": "0.0.0.0", "Mask": base64(&[0; 4]) },
                "Gateway": card.gateway.to_string(),
            },
        },
        // Else a saved machine with an open connection could not be saved.
        "DisconnectOk": true,
    })
}

fn fd_link(card: &Link) -> Value {
    let mask = u32::MAX.checked_shl(32 - u32::from(card.prefix)).unwrap_or(0);
    let network = std::net::Ipv4Addr::from(u32::from(card.address) & mask);
    json!({
        "Name": card.name,
        "MTU": card.mtu,
        "Addresses": [{ "Address": card.address.to_string(), "PrefixLen": card.prefix }],
        "Routes": [route(&network.to_string(), &mask.to_be_bytes())],
        "GSOMaxSize": GSO_MAX,
        "GVisorGSOEnabled": false,
        "GVisorGRO": true,
        "RXChecksumOffload": true,
        "LinkAddress": base64(&card.mac),
        "QDisc": 1,
        // The gateway's address is known, so nobody inside can claim to be it.
        "Neighbors": [{
            "IP": card.gateway.to_string(),
            "HardwareAddr": base64(&card.gateway_mac),
        }],
        "NumChannels": 1,
    })
}

fn route(network: &str, mask: &[u8]) -> Value {
    json!({ "Destination": { "IP": network, "Mask": base64(mask) }, "Gateway": "" })
}

fn base64(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}
