//! Takes packets from the channel and gives them to the streams.
//!
//! The loop waits for nothing but packets, except to greet and to refuse: both answer the daemon,
//! which has to read to get on.

use std::io;
use std::rc::Rc;

use torpor_protocol::guest::{
    FailureCode, Frame, GUEST_VERSION, HEADER, Hello, Kind, MAX_PAYLOAD, MAX_STREAMS, Request,
};

use crate::agent::Agent;
use crate::answer::answer;
use crate::failure::failure;
use crate::stream::{Closed, Stream};

/// Packets taken in a row before the streams get their turn.
const PACKETS_IN_A_ROW: u32 = 16;

/// Serves the channel until the other side is gone.
pub(crate) async fn converse(agent: &Rc<Agent>) -> io::Result<()> {
    // One byte more than the largest packet, so that a larger one is seen as such.
    let mut buffer = vec![0; HEADER + MAX_PAYLOAD + 1];
    let mut row = 0;
    loop {
        let length = agent.channel.receive(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        // What is no frame is from nobody we know.
        if let Ok(frame) = Frame::parse(&buffer[..length]) {
            take(agent, frame).await;
        }
        row += 1;
        if row % PACKETS_IN_A_ROW == 0 {
            tokio::task::yield_now().await;
        }
    }
}

async fn take(agent: &Rc<Agent>, frame: Frame<'_>) {
    match frame.kind {
        Kind::Hello => {
            if let Ok(hello) = frame.json::<Hello>() {
                greet(agent, &hello).await;
            }
        }
        Kind::Open => open(agent, frame).await,
        Kind::Data => {
            let Some(stream) = agent.streams.find(frame.stream) else { return };
            if stream.deliver(frame.payload).is_err() {
                agent.streams.close(frame.stream, Closed::Reset);
                stream.abort().await;
            }
        }
        Kind::Credit => {
            if let (Some(stream), Ok(bytes)) = (agent.streams.find(frame.stream), frame.credit()) {
                stream.grant(bytes);
            }
        }
        Kind::End => {
            if let Some(stream) = agent.streams.find(frame.stream) {
                stream.deliver_end();
            }
        }
        Kind::Reset => agent.streams.close(frame.stream, Closed::Reset),
        // Only the agent sends these.
        Kind::Reply | Kind::DataErr => {}
    }
}

async fn greet(agent: &Agent, hello: &Hello) {
    agent.streams.close_all(Closed::Forgotten);
    let answer = Hello { version: GUEST_VERSION, session: hello.session };
    let sent = agent.channel.turn().await.send_json(0, Kind::Hello, &answer).await;
    debug_assert!(sent.is_ok(), "a hello is short");
}

async fn open(agent: &Rc<Agent>, frame: Frame<'_>) {
    let stream = Rc::new(Stream::new(frame.stream, agent.channel.clone()));
    if frame.stream == 0 || agent.streams.find(frame.stream).is_some() {
        agent.streams.close(frame.stream, Closed::Reset);
        return stream.abort().await;
    }
    if agent.streams.len() >= MAX_STREAMS {
        let message = format!("{MAX_STREAMS} streams are open already");
        return stream.fail(failure(FailureCode::Limit, message)).await;
    }
    let request = match frame.json::<Request>() {
        Ok(request) => request,
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            let message = format!("{error}: {}", source.unwrap_or_default());
            return stream.fail(failure(FailureCode::Invalid, message)).await;
        }
    };
    agent.streams.insert(&stream);
    let agent = agent.clone();
    tokio::task::spawn_local(async move {
        // Closed first: nothing is sent on a stream after it was closed.
        tokio::select! {
            biased;
            () = stream.closed() => {}
            () = complete(&agent, &stream, request) => {}
        }
        agent.streams.remove(&stream);
    });
}

async fn complete(agent: &Rc<Agent>, stream: &Rc<Stream>, request: Request) {
    if let Request::Run(_) | Request::Start(_) | Request::Restart { .. } = request {
        agent.quiesce.unquiesced().await;
    }
    match answer(agent, stream, request).await {
        Ok(()) => stream.end().await,
        Err(failed) => stream.fail(failed).await,
    }
}
