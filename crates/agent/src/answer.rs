//! Every request and what answers it.

use std::rc::Rc;

use torpor_protocol::guest::{
    Failure, FailureCode, FileStat, Identity, Reply, Request, TerminalSize,
};

use crate::Mode;
use crate::agent::Agent;
use crate::failure::failure;
use crate::kept::{keep, resume};
use crate::quiesce::{quiesce, unquiesce};
use crate::stream::Stream;
use crate::{archive, files, identity, mounts, ports, process};

/// Answers completely, but for the `End`; or says why not.
pub(crate) async fn answer(
    agent: &Rc<Agent>,
    stream: &Rc<Stream>,
    request: Request,
) -> Result<(), Failure> {
    let stat = |stat: FileStat| Reply::Stat(stat);
    let reply = match request {
        Request::Identify(identity) => identify(agent, identity).map(done),
        Request::Health => Ok(Reply::Health(agent.health())),
        Request::Quiesce => quiesce(agent).await.map(|processes| Reply::Quiesced { processes }),
        Request::Unquiesce { now_us, entropy } => unquiesce(agent, now_us, &entropy).map(done),

        Request::SetMounts { mounts } => mounts::set(agent, &mounts).map(done),
        Request::FlushMounts => mounts::flush(agent).map(done),
        Request::HeldPaths => Ok(Reply::Held { paths: mounts::held(agent) }),

        Request::Run(spec) => return process::run(agent, stream, spec).await,
        Request::Start(spec) => process::start(agent, spec, false).map(status),
        Request::Attach { pid, replay, follow, stamps } => {
            let show = process::Show { replay, follow, stamps };
            return process::attach(agent, stream, pid, show).await;
        }
        Request::Process { pid } => agent.processes.find(pid).map(status),
        Request::ProcessNamed { name } => agent.processes.find_named(&name).map(status),
        Request::Processes => return process::list(agent, stream).await,
        Request::Signal { pid, signal } => process::signal(agent, pid, signal).map(done),
        Request::Kill { pid, grace_ms } => process::kill(agent, pid, grace_ms).await.map(done),
        Request::Restart { pid } => process::restart(agent, pid).await.map(Reply::Process),
        Request::WriteStdin { pid, close } => {
            return process::write_stdin(agent, stream, pid, close).await;
        }
        Request::Resize { pid, cols, rows } => {
            process::resize(agent, pid, TerminalSize { cols, rows }).map(done)
        }

        Request::ReadFile { path, offset, length } => {
            return files::read(stream, &path, offset, length).await;
        }
        Request::WriteFile { path, mode, append, owner } => {
            files::write(stream, &path, mode, append, owner.as_deref()).await.map(stat)
        }
        Request::Stat { path } => files::stat(&path).map(stat),
        Request::List { path, depth } => return files::list(stream, &path, depth).await,
        Request::MakeDir { path, mode, owner } => {
            files::make_dir(&path, mode, owner.as_deref()).map(stat)
        }
        Request::Move { from, to } => files::rename(&from, &to).await.map(stat),
        Request::Remove { path, recursive } => files::remove(&path, recursive).await.map(done),
        Request::Chmod { path, mode } => files::chmod(&path, mode).map(stat),
        Request::Watch { path, recursive } => return files::watch(stream, &path, recursive).await,
        Request::Pack { path } => return archive::pack(stream, &path).await,
        Request::Unpack { path, owner, layer } => {
            may_unpack(agent, &path, layer)?;
            archive::unpack(stream, &path, owner.as_deref(), layer).await.map(done)
        }

        Request::Lines { after_us } => {
            process::send_lines(agent, stream, after_us).await;
            Ok(Reply::Done)
        }

        Request::Connect { port } => return ports::connect(stream, port).await,
        Request::ConnectKept { port, token } => return keep(agent, stream, port, token).await,
        Request::Resume { token, reached } => return resume(agent, stream, &token, reached).await,
        Request::ServeFiles { .. } | Request::StopFiles { .. } => Err(no_line()),
    };
    stream.reply(&reply?).await;
    Ok(())
}

fn done((): ()) -> Reply {
    Reply::Done
}

fn status(process: Rc<process::Process>) -> Reply {
    Reply::Process(process.status())
}

/// Files have a thread of their own, where the channel is a line (`fuse/`).
fn no_line() -> Failure {
    failure(FailureCode::Invalid, "files are served to machines with a line only")
}

/// In another program's process `/` is somebody's real system.
fn may_unpack(agent: &Agent, path: &str, layer: bool) -> Result<(), Failure> {
    if layer && agent.mode == Mode::InProcess && path == "/" {
        let message = "no layer goes onto the root of this process";
        return Err(failure(FailureCode::Denied, message));
    }
    Ok(())
}

fn identify(agent: &Rc<Agent>, identity: Identity) -> Result<(), Failure> {
    let somebody_else = identity.boot_id.is_some();
    identity::assume(agent, identity)?;
    if somebody_else {
        // What was kept is the original's.
        agent.kept.clear();
    }
    Ok(())
}
