//! Slowing down what a guest sends, before the firewall cuts off what is too much of it.
//!
//! The firewall alone holds a cap, and it can only drop. Guests take that badly: one whose network is
//! gVisor's recovers from many lost packets at once with two of them every 200 ms, and gets a fifth of
//! its cap. So packets wait a moment in a queue at the far end of its slot, from which they leave at the
//! rate of the cap (the kernel's *token bucket filter*). Where the kernel has none, the cap holds all
//! the same.

use futures_util::StreamExt;
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage,
    NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};

use super::NetworkError;
use super::links::Links;

/// What may leave at once: a fiftieth of a second, and room for a few packets at tiny rates.
const BURST_BYTES: (u64, u64) = (16 << 10, 1 << 20);
/// What may wait: a tenth of a second. Longer would make every answer slow.
const QUEUE_BYTES: (u64, u64) = (32 << 10, 16 << 20);

// Numbers of the kernel's interface: linux/pkt_sched.h.
const KIND: &str = "tbf";
const PARAMETERS: u16 = 1;
const RATE: u16 = 4;
const BURST: u16 = 6;
/// Two rates of 12 bytes each, then limit, buffer and largest packet.
const PARAMETERS_BYTES: usize = 36;
const ETHERNET: u8 = 1;

impl Links {
    /// Lets no more than `rate` bytes a second out of a link. Idempotent.
    pub(super) async fn pace(&self, index: u32, rate: u64) -> Result<(), NetworkError> {
        let failed = NetworkError::kernel("slow down a link");
        let mut message = of_root(index);
        message.attributes.push(TcAttribute::Kind(KIND.to_owned()));
        message.attributes.push(TcAttribute::Options(options(rate)));
        let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewQueueDiscipline(message));
        request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        let mut answers = self.handle.clone().request(request).map_err(&failed)?;
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload {
                return Err(failed(rtnetlink::Error::NetlinkError(error)));
            }
        }
        Ok(())
    }

    /// Lets out of a link what there is. Idempotent.
    pub(super) async fn unpace(&self, index: u32) -> Result<(), NetworkError> {
        let mut request = self.handle.qdisc().del(0);
        *request.message_mut() = of_root(index);
        match request.execute().await {
            // It is not paced, or not there.
            Err(rtnetlink::Error::NetlinkError(error))
                if [libc::ENOENT, libc::EINVAL, libc::ENODEV].contains(&-error.raw_code()) =>
            {
                Ok(())
            }
            done => done.map_err(NetworkError::kernel("let a link go at full speed")),
        }
    }
}

fn of_root(index: u32) -> TcMessage {
    let mut message = TcMessage::with_index(i32::try_from(index).expect("indices are positive"));
    message.header.parent = TcHandle::ROOT;
    message
}

fn options(rate: u64) -> Vec<TcOption> {
    let within = |bytes: u64, (least, most): (u64, u64)| {
        u32::try_from(bytes.clamp(least, most)).expect("some megabytes")
    };
    let mut parameters = vec![0; PARAMETERS_BYTES];
    parameters[1] = ETHERNET;
    parameters[8..12].copy_from_slice(&u32::try_from(rate).unwrap_or(u32::MAX).to_ne_bytes());
    let queue = within(rate / 10, QUEUE_BYTES);
    parameters[24..28].copy_from_slice(&queue.to_ne_bytes());
    let burst = within(rate / 50, BURST_BYTES);
    let options = [
        (PARAMETERS, parameters),
        (RATE, rate.to_ne_bytes().to_vec()),
        (BURST, burst.to_ne_bytes().to_vec()),
    ];
    options.map(|(kind, value)| TcOption::Other(DefaultNla::new(kind, value))).into()
}
