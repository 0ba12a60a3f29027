//! What the host sends on behalf of guests.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use torpor_protocol::Network as Policy;

use super::verbs::connect_marked;
use super::world::{ELSEWHERE, FORBIDDEN, HOST, PORT, PUBLIC, ROUTER, fresh_tag, on_a_host};

#[test]
fn marked_connections_reach_no_more_than_their_mark_says() {
    on_a_host(async |world| {
        let network = world.network(&fresh_tag()).await;
        let slot = network.take(&Policy::OPEN).await.expect("a slot");
        network.guest(&slot).serve();
        let proxy = network.egress_proxy();
        let _six = TcpListener::bind((Ipv6Addr::LOCALHOST, PORT)).expect("the host's");
        let reserved = |to: &Ipv4Addr| to.octets()[0] >= 240;
        let forbidden = FORBIDDEN.map(|text| text.parse().expect("an address"));
        // The kernel itself routes nothing to reserved addresses on some versions.
        let private: Vec<Ipv4Addr> =
            forbidden.into_iter().filter(|to| !reserved(to)).chain([HOST, ROUTER]).collect();
        let reaches = |mark: u32, to: SocketAddr| match connect_marked(mark, to) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to}: not by silence");
                false
            }
        };
        for (mark, may) in [(proxy.public_mark, false), (proxy.private_mark, true), (7, true)] {
            for to in [PUBLIC, ELSEWHERE] {
                assert!(reaches(mark, (to, PORT).into()), "{to}");
            }
            for to in &private {
                assert_eq!(reaches(mark, (*to, PORT).into()), may, "{to} {mark:x}");
            }
            let own = mark == 7;
            let never = [
                SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)),
                (Ipv4Addr::UNSPECIFIED, PORT).into(),
                (slot.address(), PORT).into(),
                (Ipv6Addr::LOCALHOST, PORT).into(),
            ];
            for to in never {
                assert_eq!(reaches(mark, to), own, "{to} {mark:x}");
            }
        }
    });
}
