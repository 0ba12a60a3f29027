//! What it costs to be decided about by name: the way out through the egress proxy beside the direct one,
//! many connections at once, and a change of policy.
//!
//! The far side is a program of the benchmark in a network namespace of its own, with a public address
//! of the range for documentation behind a router. So this needs the daemon's own host, and root.

use std::time::Duration;

use torpor_client::{Client, Route};
use torpor_protocol::api::{Command, CreateSandbox, RunResult, UpdateSandbox};
use torpor_protocol::{Destination, Network, Status};

use crate::Bench;
use crate::error::{Error, Result};
use crate::far::Far;
use crate::load::{Summary, timed};
use crate::report::{Report, Start};

/// Turns that the two ways take.
const BLOCKS: u32 = 4;
/// Connections at the same time.
const MANY: u32 = 1000;
/// Bytes that are fetched in one go, and of a quick run.
const BULK_BYTES: u64 = 256 << 20;
const QUICK_BULK_BYTES: u64 = 64 << 20;

/// The client inside. `new`: connect, a byte there and back, close; `same`: a byte there and back on
/// an open connection; `bulk`: so many bytes; `many`: so many connections open at the same time.
const INSIDE: &str = "import selectors, socket, sys, time
what, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def connect():
    s = socket.create_connection((host, port), 30)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s
def beat(s):
    s.sendall(b'\\x01')
    assert s.recv(1) == b'\\x01'
if what in ('new', 'same'):
    s = connect() if what == 'same' else None
    for _ in range(count):
        begun = time.perf_counter()
        beat(s or connect())
        print(time.perf_counter() - begun)
elif what == 'bulk':
    s = connect()
    begun = time.perf_counter()
    s.sendall(b'\\x02' + count.to_bytes(8, 'big'))
    left, room = count, bytearray(1 << 18)
    while left:
        got = s.recv_into(room)
        assert got
        left -= got
    print(time.perf_counter() - begun)
else:
    begun = time.perf_counter()
    held = [connect() for _ in range(count)]
    for s in held: s.sendall(b'\\x01')
    for s in held: assert s.recv(1) == b'\\x01'
    print(time.perf_counter() - begun)";

/// A sandbox and its way out.
struct Way {
    name: &'static str,
    route: Route,
    short: Vec<Duration>,
    kept: Vec<Duration>,
    bulk: Vec<Duration>,
    many: Vec<Duration>,
}

pub(crate) async fn measure(bench: &Bench, client: &Client, report: &mut Report) -> Result<()> {
    let far = match Far::start() {
        Ok(far) => far,
        Err(why) => {
            report.note(format!("egress was not measured: {why}"));
            return Ok(());
        }
    };
    let only = Destination::Range(far.address.to_string().parse().expect("an address is a range"));
    let direct = Network { allow: vec![only], ..Network::CLOSED };
    // A name in the policy, so that somebody has to look: everything else is the same.
    let nobody: Destination = "nobody.invalid".parse().expect("a host");
    let proxied = Network { deny: vec![nobody], ..direct.clone() };
    let mut ways = [
        Way::open(bench, client, "direct", &direct).await?,
        Way::open(bench, client, "by name", &proxied).await?,
    ];
    let bulk = if bench.quick { QUICK_BULK_BYTES } else { BULK_BYTES };
    for _ in 0..BLOCKS {
        for way in &mut ways {
            way.turn(client, &far, bench.rounds, bulk).await?;
        }
    }
    compare(&ways, bulk, report);
    changes(bench, client, &ways[1].route, &proxied, report).await?;
    for way in ways {
        client.delete(&way.route).await?;
    }
    Ok(())
}

impl Way {
    async fn open(
        bench: &Bench,
        client: &Client,
        name: &'static str,
        network: &Network,
    ) -> Result<Self> {
        let wish = CreateSandbox { network: network.clone(), ..bench.sandbox() };
        let status: Status = client.post(&Route::new("/v1/sandboxes"), &wish).await?;
        let (short, kept, bulk, many) = Default::default();
        Ok(Self { name, route: Route::sandbox(&status.id), short, kept, bulk, many })
    }

    async fn turn(&mut self, client: &Client, far: &Far, rounds: u32, bulk: u64) -> Result<()> {
        self.short.extend(self.inside(client, far, "new", u64::from(rounds)).await?);
        self.kept.extend(self.inside(client, far, "same", u64::from(rounds)).await?);
        self.bulk.extend(self.inside(client, far, "bulk", bulk).await?);
        self.many.extend(self.inside(client, far, "many", u64::from(MANY)).await?);
        Ok(())
    }

    async fn inside(
        &self,
        client: &Client,
        far: &Far,
        what: &str,
        count: u64,
    ) -> Result<Vec<Duration>> {
        let (host, port, count) =
            (far.address.to_string(), far.port.to_string(), count.to_string());
        let command = ["python3", "-c", INSIDE, what, &host, &port, &count];
        let command = command.map(str::to_owned).to_vec();
        let command = Command { command, ..Command::default() };
        let result: RunResult = client.post(&self.route.clone().then("/run"), &command).await?;
        let times = result.stdout.lines().map(|line| line.parse().map(Duration::from_secs_f64));
        match times.collect::<std::result::Result<Vec<_>, _>>() {
            Ok(times) if !times.is_empty() => Ok(times),
            Ok(_) | Err(_) => {
                let why = result.stderr.lines().last().unwrap_or_default().to_owned();
                Err(Error::failed(format!(
                    "the client inside failed, {} ({what}): {why}",
                    self.name
                )))
            }
        }
    }
}

fn compare(ways: &[Way; 2], bulk: u64, report: &mut Report) {
    let [direct, named] = ways;
    let added = |report: &mut Report, what: &str, a: &[Duration], b: &[Duration]| {
        let (direct, named) = (Summary::of(a), Summary::of(b));
        report.figure(format!("{what}: added, p50"), named.p50 - direct.p50, "ms");
        report.figure(format!("{what}: added, p99"), named.p99 - direct.p99, "ms");
        report.latency(format!("{what}, direct"), Start::Running, direct);
        report.latency(format!("{what}, by name"), Start::Running, named);
    };
    added(report, "connect and a byte back", &direct.short, &named.short);
    added(report, "a byte there and back", &direct.kept, &named.kept);
    #[expect(clippy::cast_precision_loss, reason = "megabytes for people")]
    let speed = |way: &Way| bulk as f64 / 1e3 / Summary::of(&way.bulk).p50;
    report.figure("download, direct", speed(direct), "MB/s");
    report.figure("download, by name", speed(named), "MB/s");
    report.figure("download, by name / direct", speed(named) / speed(direct), "×");
    for way in ways {
        let name = format!("{MANY} connections at the same time, {}", way.name);
        report.latency(name, Start::Running, Summary::of(&way.many));
    }
}

/// Between two policies with names, in a running sandbox.
async fn changes(
    bench: &Bench,
    client: &Client,
    route: &Route,
    policy: &Network,
    report: &mut Report,
) -> Result<()> {
    let other = Network { internet: true, ..policy.clone() };
    let mut times = Vec::new();
    for round in 0..bench.rounds {
        let network = if round % 2 == 0 { &other } else { policy };
        let update = UpdateSandbox { network: Some(network.clone()), ..UpdateSandbox::default() };
        let change = async { Ok(client.patch::<Status>(route, &update).await.map(drop)?) };
        times.push(timed(change).await?);
    }
    report.latency("a change of policy", Start::Running, Summary::of(&times));
    Ok(())
}
