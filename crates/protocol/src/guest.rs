//! Frames between the daemon and the agent inside a machine.
//!
//! The channel carries packets (on gVisor a SEQPACKET socketpair, in a microVM a serial port: see
//! [`line`]). One packet is one frame:
//!
//! ```text
//!  0        4      5
//!  ┌────────┬──────┬───────────────────────────────┐
//!  │ stream │ kind │ payload (≤ MAX_PAYLOAD bytes) │
//!  │ u32 LE │  u8  │ JSON or raw bytes, by kind    │
//!  └────────┴──────┴───────────────────────────────┘
//! ```
//!
//! - Stream 0 belongs to the channel itself: `Hello` only.
//! - The daemon opens streams (`Open`, a [`Request`]); the agent answers with `Reply` frames
//!   ([`Reply`]) and bytes, and closes with `End` after its last reply, or with a
//!   [`Reply::Failed`] followed by `End`. A stream is over when both sides sent `End`, or when
//!   either sent `Reset`.
//! - `Data` is stdin, stdout, file content or TCP bytes; `DataErr` is stderr.
//! - Flow control: each side may send [`WINDOW`] bytes of `Data`/`DataErr` per stream before the
//!   other grants more with `Credit` (u32 LE, bytes consumed). A stream nobody reads stops itself
//!   and nobody else. Replies are not counted; the agent sends them one at a time.
//! - `Hello` starts a session: the agent forgets all streams of the session before it (processes
//!   live on), the daemon ignores every frame until the `Hello` that carries its session number.
//!   So a daemon that was restarted, and a machine that was revived, resynchronise by saying hello.
//! - Stream numbers begin anew with each session and frames carry no session number, so a late `Reset`
//!   would hit the stream that has the number now. The order of packets alone keeps sessions apart:
//!   the agent takes what was sent before a `Hello` before it, and after its answer sends nothing of
//!   an older session; **the daemon sends nothing of an older session once it sent a `Hello`**. What
//!   could still send (tasks, dropped streams) is over, or lost its channel, before that.
//! - A session that ends takes nothing with it but its streams. A process that was attached runs on,
//!   unslowed; its output is kept for `Attach`; the stdin that had arrived is written; its stdin stays
//!   open unless `End` had arrived. A request that was not answered may or may not have been done.
//! - A *kept* connection (`ConnectKept`) outlives the session too: see [`Unconfirmed`].

mod changes;
pub mod files;
mod identity;
mod kept;
pub mod line;
mod mounts;
mod process;

use serde::{Deserialize, Serialize};

use crate::excerpt::Excerpt;
use crate::snapshot::SavedProcess;

pub use changes::{ChangeKind, FileChange};
pub use identity::Identity;
pub use kept::{KEPT_MAX, KEPT_WINDOW, Reached, Unconfirmed};
pub use mounts::{BoundMount, HeldPath};
pub use process::{
    Exit, HealthCheck, HealthReport, HealthState, LastExit, LogLine, ProcessSpec, ProcessStatus,
    RestartPolicy, Supervision, TerminalSize,
};

/// Raised when a frame changes meaning. Agent and daemon of one build always agree; an older agent
/// in a revived machine may not, and is told apart by this.
pub const GUEST_VERSION: u32 = 1;
/// Bytes before the payload.
pub const HEADER: usize = 5;
/// Largest payload: large enough for full speed, small enough that streams take turns.
pub const MAX_PAYLOAD: usize = 128 * 1024;
/// Bytes of data that may be under way on one stream in one direction.
pub const WINDOW: u32 = 1024 * 1024;
/// Streams of [`Request::ServeFiles`] and [`Request::StopFiles`] have numbers with this bit, and no number is used in two
/// sessions: a part of the agent takes them that does not answer `Hello`, and may send after it.
pub const FILES_STREAM: u32 = 1 << 31;
/// Streams one channel may have open at once.
pub const MAX_STREAMS: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// JSON [`Hello`], both ways, stream 0.
    Hello = 0,
    /// JSON [`Request`], daemon → agent.
    Open = 1,
    /// JSON [`Reply`], agent → daemon.
    Reply = 2,
    Data = 3,
    DataErr = 4,
    /// u32 LE: the receiver consumed so many bytes of this stream.
    Credit = 5,
    /// The sender will send no more data on this stream.
    End = 6,
    /// The sender is not interested in this stream any more.
    Reset = 7,
}

impl Kind {
    pub fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Hello,
            1 => Self::Open,
            2 => Self::Reply,
            3 => Self::Data,
            4 => Self::DataErr,
            5 => Self::Credit,
            6 => Self::End,
            7 => Self::Reset,
            _ => return None,
        })
    }
}

/// One packet, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub stream: u32,
    pub kind: Kind,
    pub payload: &'a [u8],
}

/// The other side does not speak this protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    #[error("a packet of {0} bytes is no frame")]
    Size(usize),
    #[error("frame kind {0} is not known")]
    Kind(u8),
    #[error("the payload of a {kind:?} frame is not valid")]
    Payload {
        kind: Kind,
        #[source]
        source: JsonError,
    },
    #[error("a credit of {0} bytes is no credit")]
    Credit(usize),
}

/// A JSON error as text, so that frames can be compared in tests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct JsonError(Excerpt);

impl<'a> Frame<'a> {
    /// Takes a packet apart; whatever the guest sent, this only borrows.
    pub fn parse(packet: &'a [u8]) -> Result<Self, BadFrame> {
        let Some((header, payload)) = packet.split_first_chunk::<HEADER>() else {
            return Err(BadFrame::Size(packet.len()));
        };
        if payload.len() > MAX_PAYLOAD {
            return Err(BadFrame::Size(packet.len()));
        }
        let [a, b, c, d, kind] = *header;
        let kind = Kind::from_byte(kind).ok_or(BadFrame::Kind(kind))?;
        Ok(Self { stream: u32::from_le_bytes([a, b, c, d]), kind, payload })
    }

    /// The payload as JSON.
    pub fn json<T: Deserialize<'a>>(&self) -> Result<T, BadFrame> {
        serde_json::from_slice(self.payload).map_err(|error| BadFrame::Payload {
            kind: self.kind,
            source: JsonError(error.to_string().into()),
        })
    }

    /// The payload as a credit.
    pub fn credit(&self) -> Result<u32, BadFrame> {
        let bytes = self.payload.try_into().map_err(|_| BadFrame::Credit(self.payload.len()))?;
        Ok(u32::from_le_bytes(bytes))
    }
}

/// A packet with this payload, which must not be larger than [`MAX_PAYLOAD`].
pub fn packet(stream: u32, kind: Kind, payload: &[u8]) -> Vec<u8> {
    debug_assert!(payload.len() <= MAX_PAYLOAD, "callers cut payloads");
    let mut packet = Vec::with_capacity(HEADER + payload.len());
    packet.extend_from_slice(&stream.to_le_bytes());
    packet.push(kind as u8);
    packet.extend_from_slice(payload);
    packet
}

/// A packet that carries `value` as JSON.
pub fn json_packet<T: Serialize>(stream: u32, kind: Kind, value: &T) -> Vec<u8> {
    let payload = serde_json::to_vec(value).expect("guest messages have text keys only");
    packet(stream, kind, &payload)
}

/// Starts a session. The agent answers with the same session number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u32,
    pub session: u64,
}

/// What the daemon asks of the agent. One stream each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// Who the machine is from now on. → `Done`
    Identify(Identity),
    /// → `Health`
    Health,
    /// The machine will stand still, and its kernel will not notice: every process but the agent stops,
    /// and what was written is on the disk. It stays so, whoever says hello, until `Unquiesce`. →
    /// `Quiesced`
    #[serde(rename = "rest")]
    Quiesce,
    /// The machine goes on, perhaps as somebody else: its clock is set, its kernel's randomness is
    /// made anew, and only then its processes go on. Also for one that is not quiesced. → `Done`
    #[serde(rename = "rise")]
    Unquiesce {
        /// Unix time.
        now_us: u64,
        entropy: String,
    },

    /// Which volumes of the host are to be where; all of them. What is in use is not taken away (`Busy`). → `Done`
    SetMounts { mounts: Vec<BoundMount> },
    /// Has the host close what nobody inside has open any more. → `Done`
    FlushMounts,
    /// What processes hold of volumes. → `Held`
    HeldPaths,

    /// Starts a process and stays attached: `Data` to stdin (`End` closes it), output back,
    /// → `Started`, then `Exited`. While attached, a slow reader slows the process down.
    Run(ProcessSpec),
    /// Starts a process and leaves it. → `Process`
    Start(ProcessSpec),
    /// Attaches to a process: its captured output if `replay`, then what follows; `Data` goes to
    /// its stdin. → `Started`, then `Exited` when it ends (at once if it ended). A slow reader
    /// misses output (`Skipped`), the process is not slowed down.
    /// With `stamps`, an `At` before output says when the process said it.
    Attach {
        pid: u32,
        replay: bool,
        follow: bool,
        #[serde(default)]
        stamps: bool,
    },
    /// → `Process`
    Process { pid: u32 },
    /// By name of a supervised process. → `Process`
    ProcessNamed { name: String },
    /// → `Processes`… in batches
    Processes,
    /// To the whole process group. → `Done`
    Signal { pid: u32, signal: i32 },
    /// SIGKILL to the process and everything it started; no restart. With `grace_ms`, SIGTERM to its
    /// group first, and so long to end by itself. → `Done` when it is gone
    Kill {
        pid: u32,
        #[serde(default)]
        grace_ms: Option<u64>,
    },
    /// Stops the process and starts it anew (supervised ones only). → `Process`
    Restart { pid: u32 },
    /// `Data` goes to its stdin. → `Done` at `End`
    WriteStdin { pid: u32, close: bool },
    /// Size of its terminal. → `Done`
    Resize { pid: u32, cols: u16, rows: u16 },

    /// → `Stat`, `Data`…
    ReadFile { path: String, offset: u64, length: Option<u64> },
    /// `Data`… `End` → `Stat`. Without `append` the file is replaced as a whole: what was there
    /// stays until the last byte has arrived, and stays if the stream is reset.
    WriteFile { path: String, mode: Option<u32>, append: bool, owner: Option<String> },
    /// Does not follow a last symbolic link. → `Stat`
    Stat { path: String },
    /// Sorted by path; `depth` 1 = its entries only. → `Entries`… in batches, `Done`
    List { path: String, depth: u32 },
    /// With its parents; an existing directory is fine. → `Stat`
    MakeDir { path: String, mode: Option<u32>, owner: Option<String> },
    /// Replaces a file at `to`. → `Stat`
    Move { from: String, to: String },
    /// → `Done`
    Remove { path: String, recursive: bool },
    /// → `Stat`
    Chmod { path: String, mode: u32 },
    /// → `Done` once watching, then `Changed`… until the stream ends
    Watch { path: String, recursive: bool },
    /// A tar of a file or directory, names relative to its parent. → `Stat`, `Data`…
    Pack { path: String },
    /// `Data`… is a tar, unpacked below the directory `path`, which is made if need be. With `layer`
    /// it is an OCI layer: its whiteouts remove, its entries replace whatever is there, and what
    /// belongs to the kernel or the agent is left alone. → `Done`
    Unpack {
        path: String,
        owner: Option<String>,
        #[serde(default)]
        layer: bool,
    },

    /// The lines that processes without a terminal said after `after_us` ([`LogLine::stamp_us`]), as
    /// far as they are kept. → `Lines`… in batches, `Done`
    Lines { after_us: u64 },

    /// A TCP connection to loopback inside. → `Done`, then `Data` both ways
    Connect { port: u16 },
    /// The same, under a token that only the daemon knows. When its session ends, the connection
    /// stays for `Resume`; when its stream is reset, or the machine becomes somebody else, it goes.
    /// Consumed bytes are granted again at once, and at most [`KEPT_WINDOW`] are under way. → `Done`,
    /// then `Data` both ways
    ConnectKept { port: u16, token: String },
    /// Goes on with a kept connection on this stream, where the one before stopped. → `Resumed`, then
    /// `Data` both ways
    Resume { token: String, reached: Reached },

    /// Files of a file service at `path`, a directory that is made if need be. Mounts them, if that number is not
    /// mounted; whoever asked before for the same number gets no more calls. → `Done`, then `Data` both ways: see
    /// [`files`]. When the stream ends, the mount stays and whoever uses it waits.
    ServeFiles {
        mount: u16,
        path: String,
        read_only: bool,
        /// Others change these files too, and what they change is to be seen at once.
        shared: bool,
    },
    /// Takes a mount away. Unless `force`, not while processes use it: [`FailureCode::Busy`], and who. → `Done`, also
    /// if there is none
    StopFiles { mount: u16, force: bool },
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Reply {
    Done,
    Health(Health),
    Started(ProcessStatus),
    Exited(ProcessStatus),
    Process(ProcessStatus),
    Processes {
        processes: Vec<ProcessStatus>,
    },
    /// So many bytes of output are gone because they were not read in time.
    Skipped {
        bytes: u64,
    },
    /// The output that follows was said then, Unix milliseconds.
    At {
        ms: u64,
    },
    Lines {
        lines: Vec<LogLine>,
    },
    Stat(FileStat),
    Entries {
        entries: Vec<FileStat>,
    },
    Changed(FileChange),
    /// How far the agent is.
    Resumed(Reached),
    Held {
        paths: Vec<HeldPath>,
    },
    /// All stands still. The processes there are, for people: a thousand at most.
    #[serde(rename = "rested")]
    Quiesced {
        processes: Vec<SavedProcess>,
    },
    Failed(Failure),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub agent_version: String,
    pub uptime_ms: u64,
    pub running: u32,
    /// How many processes keep the sandbox awake: running, or waiting to be started again.
    pub keeping_awake: u32,
    pub started: u64,
    pub memory_kib: u64,
    pub open_files: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    /// As asked for; in listings relative to the directory listed. Bytes that are not UTF-8 show
    /// as U+FFFD.
    pub path: String,
    pub kind: FileKind,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub modified_at_ms: i64,
    /// Where a symbolic link points.
    pub target: Option<String>,
}

/// Why the agent did not do it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub code: FailureCode,
    /// What and why, for people.
    pub message: String,
}

impl Failure {
    /// What it is, also from an agent in a save that has no code for it: those said it in words.
    pub fn code(&self) -> FailureCode {
        let no_user = self.message.starts_with("no such user: ");
        if self.code == FailureCode::CannotStart && no_user {
            return FailureCode::NoSuchUser;
        }
        self.code
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The request makes no sense.
    Invalid,
    NoSuchProcess,
    NoSuchFile,
    NotADirectory,
    IsADirectory,
    Exists,
    NotEmpty,
    Denied,
    DiskFull,
    /// Program not found, not executable, directory or group missing.
    CannotStart,
    NoSuchUser,
    NotListening,
    /// A limit of the agent: processes, streams, watches.
    Limit,
    /// Somebody uses it.
    Busy,
    /// Any other error of the guest's kernel.
    Io,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_frame_survives_the_wire() {
        let packet = packet(7, Kind::Data, b"abc");
        let frame = Frame::parse(&packet).unwrap();
        assert_eq!(frame, Frame { stream: 7, kind: Kind::Data, payload: b"abc" });
    }

    #[test]
    fn agents_in_old_saves_understand_when_they_are_quiesced() {
        let request = Request::Unquiesce { now_us: 1, entropy: "00".to_owned() };
        let texts = [
            serde_json::to_string(&Request::Quiesce).unwrap(),
            serde_json::to_string(&request).unwrap(),
            serde_json::to_string(&Reply::Quiesced { processes: Vec::new() }).unwrap(),
        ];
        let known = [
            r#"{"do":"rest"}"#,
            r#"{"do":"rise","now_us":1,"entropy":"00"}"#,
            r#"{"is":"rested","processes":[]}"#,
        ];
        assert_eq!(texts, known);
    }

    #[test]
    fn a_request_survives_the_wire() {
        let request =
            Request::Run(ProcessSpec { command: vec!["ls".into()], ..Default::default() });
        let packet = json_packet(1, Kind::Open, &request);
        assert_eq!(Frame::parse(&packet).unwrap().json::<Request>().unwrap(), request);
    }

    #[test]
    fn an_archive_is_no_layer_unless_it_is_said() {
        let unpack = serde_json::from_str(r#"{"do":"unpack","path":"/","owner":null}"#).unwrap();
        assert_eq!(Request::Unpack { path: "/".into(), owner: None, layer: false }, unpack);
    }

    proptest! {
        #[test]
        fn whatever_a_guest_sends_is_a_frame_or_an_error(
            packet in proptest::collection::vec(any::<u8>(), 0..600)
        ) {
            if let Ok(frame) = Frame::parse(&packet) {
                let _ = frame.json::<Reply>();
                let _ = frame.credit();
            }
        }
    }
}
