//! What strangers who connect and say nothing, or half of something, cost a daemon of its own, and
//! whether somebody with a key is answered meanwhile.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use torpor_client::{Client, Route};
use torpor_protocol::api::Info;

use crate::error::{Error, Result};
use crate::home::{Daemon, Home, fresh_key};
use crate::load::{Summary, at_times, timed};
use crate::report::{Report, Start};
use crate::{Bench, cost};

const QUICK_CONNECTIONS: u32 = 1000;
/// From one address: loopback has as many as are wanted, and each has its own ports.
const PER_ADDRESS: u32 = 2500;
/// Opened at the same time.
const AT_ONCE: usize = 64;
/// Of a request that does not end.
const HALF_HEAD: usize = 4096;
/// Files that this program and the daemon have open besides.
const OTHER_FILES: u64 = 1024;
/// Between the last connection and the measure of memory.
const SETTLE: Duration = Duration::from_secs(1);
/// Requests of somebody with a key: on a connection that is kept, and each on a new one.
const REQUESTS: u32 = 200;
const NEWCOMERS: u32 = 20;
const EVERY: Duration = Duration::from_millis(20);
/// How long one of them may take: strangers are cut off after half a minute, and all must be over by then.
const ANSWER_MAX: Duration = Duration::from_secs(10);
const CONNECT_MAX: Duration = Duration::from_secs(10);

pub(crate) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    if !Home::possible() {
        report.note("many connections: skipped, a daemon of its own needs root");
        return Ok(());
    }
    let count =
        if bench.quick { bench.connections.min(QUICK_CONNECTIONS) } else { bench.connections };
    raise_file_limit(u64::from(count) + OTHER_FILES)?;
    let key = fresh_key()?;
    let home = Home::make(Some(key.clone()))?;
    let daemon = home.serve().await?;
    asked(&daemon.client, "before", report).await?;
    let before = daemon.processes().memory();
    let strangers = strangers(&daemon, count).await?;
    tokio::time::sleep(SETTLE).await;
    let more = daemon.processes().memory() - before;
    let open = || cost::count(strangers.iter().filter(|stranger| is_open(stranger)).count());
    let held = open();
    report.figure("connections: of strangers, opened", f64::from(count), "");
    report.figure("connections: … and still open after a second", held, "");
    report.figure("connections: memory of the daemon before", before, "MB");
    report.figure("connections: … and more with them", more, "MB");
    report.figure("connections: … for each", more * 1e3 / held.max(1.0), "KB");
    asked(&daemon.client, "beside them", report).await?;
    newcomers(&daemon, &key, report).await?;
    report.figure("connections: of strangers, still open at the end", open(), "");
    drop(strangers);
    daemon.stop().await
}

/// One after another, so on one connection that is kept.
async fn asked(client: &Client, when: &str, report: &mut Report) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..REQUESTS {
        times.push(timed(ask(client.clone())).await?);
    }
    let name = format!("connections: request with a key, {when}");
    report.latency(name, Start::Running, Summary::of(&times));
    Ok(())
}

/// Each on a connection of its own.
async fn newcomers(daemon: &Daemon, key: &str, report: &mut Report) -> Result<()> {
    let server = daemon.client.server();
    let clients = (0..NEWCOMERS).map(|_| Client::new(server.clone(), Some(key)));
    let clients = clients.collect::<Result<Vec<_>, _>>()?;
    let due: Vec<_> = (0..NEWCOMERS).map(|number| EVERY * number).collect();
    let outcomes = at_times(&due, |number| ask(clients[number].clone())).await?;
    let (well, failed): (Vec<_>, Vec<_>) =
        outcomes.iter().partition(|outcome| outcome.error.is_none());
    let times: Vec<_> = well.iter().map(|outcome| outcome.latency).collect();
    let name = "connections: the same on new connections, beside them";
    report.latency(name, Start::Running, Summary::of(&times));
    report.figure("connections: new ones that were not answered", cost::count(failed.len()), "");
    Ok(())
}

async fn ask(client: Client) -> Result<()> {
    let asked = timeout(ANSWER_MAX, client.get::<Info>(&Route::new("/v1/info"))).await;
    asked.map_err(|_| Error::failed("no answer"))??;
    Ok(())
}

/// Every other one says nothing, the rest begin a request and do not end it.
async fn strangers(daemon: &Daemon, count: u32) -> Result<Vec<TcpStream>> {
    let address: SocketAddr = daemon.address().parse().map_err(|_| Error::failed("no address"))?;
    let half = format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {}", "x".repeat(HALF_HEAD));
    let open = async |number: u32| {
        let from = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 0, 1, 1)) + number / PER_ADDRESS);
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddrV4::new(from, 0).into())?;
        let connected = timeout(CONNECT_MAX, socket.connect(address)).await;
        let mut stream = connected.map_err(|_| std::io::ErrorKind::TimedOut)??;
        if number.is_multiple_of(2) {
            stream.write_all(half.as_bytes()).await?;
        }
        Ok(stream)
    };
    let opened = stream::iter(0..count).map(open).buffer_unordered(AT_ONCE).try_collect();
    opened.await.map_err(|error: std::io::Error| Error::local("open a connection", error))
}

fn is_open(stream: &TcpStream) -> bool {
    let waits = |error: std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    stream.try_read(&mut [0; 1]).is_err_and(waits)
}

/// For this program, and for the daemon that it starts.
fn raise_file_limit(wanted: u64) -> Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum.map(|most| most.max(wanted));
    let limit = Rlimit { current: maximum, maximum };
    setrlimit(Resource::Nofile, limit).map_err(|error| {
        Error::local(
            format!("raise the limit of open files to {wanted} (see fs.nr_open)"),
            error.into(),
        )
    })
}
