//! `torpor volume` and `torpor drive`: the same verbs on both kinds, but for the words of putting one into a sandbox.

mod files;
mod parse;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::volume::{
    CreateVolume, DriveAccess, DrivePermission, MountRequest, SnapshotVolume, UpdateVolume,
    Volume as Kept, VolumeList,
};
use torpor_protocol::{ErrorCode, GuestPath, Mount, Name, SandboxRef, VolumeKind, VolumeRef};

use super::removal::remove;
use super::{cp, parse_pair};
use crate::error::Result;
use crate::output::{self, plain};
use crate::progress::Progress;
use crate::units;
use files::InVolume;
use parse::{DrivePart, parse_permission};
pub(super) use parse::{parse_fork, parse_mount};

/// Manage volumes: directories that outlive sandboxes, each written by one at a time.
///
/// A volume has a fixed size, which grows, and is never part of what is saved of a sandbox. One sandbox writes to it;
/// any number may read it meanwhile.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor volume create data --size 5g\n  \
    torpor create --name db -v data:/data\n  torpor volume attach web data /data --ro\n  \
    torpor volume cp ./seed data:/\n  torpor volume snapshot data before-upgrade")]
pub(super) struct Volume {
    #[command(subcommand)]
    action: VolumeAction,
}

/// Manage drives: directories that any number of sandboxes share, reading and writing.
///
/// What one writes the others see at once. A drive can be mounted whole or a folder of it, and its permissions say
/// which sandboxes may, by their labels.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor drive create shared --size 10g\n  \
    torpor drive create team --allow team=a --allow-ro team=b\n  \
    torpor drive mount web shared:/team /mnt/team\n  torpor drive cp notes.txt shared:/team/\n  \
    torpor drive ls shared:/team")]
pub(super) struct Drive {
    #[command(subcommand)]
    action: DriveAction,
}

#[derive(Debug, Subcommand)]
enum VolumeAction {
    #[command(flatten)]
    Common(Action),
    /// Give a sandbox a volume, also while it runs.
    Attach {
        /// Name or id.
        sandbox: SandboxRef,
        /// Name or id.
        volume: VolumeRef,
        /// Directory in the sandbox; it is made if it is not there.
        path: GuestPath,
        /// To read only.
        #[arg(long)]
        ro: bool,
    },
    /// Take a volume from a sandbox.
    Detach {
        /// Name or id.
        sandbox: SandboxRef,
        /// Where it is in the sandbox.
        path: GuestPath,
    },
}

#[derive(Debug, Subcommand)]
enum DriveAction {
    #[command(flatten)]
    Common(Action),
    /// Mount a drive in a sandbox, also while it runs.
    Mount {
        /// Name or id.
        sandbox: SandboxRef,
        /// Name or id, and maybe a folder of it.
        #[arg(value_name = "DRIVE[:/FOLDER]")]
        drive: DrivePart,
        /// Directory in the sandbox; it is made if it is not there.
        path: GuestPath,
        /// To read only.
        #[arg(long)]
        ro: bool,
    },
    /// Take a drive from a sandbox.
    Unmount {
        /// Name or id.
        sandbox: SandboxRef,
        /// Where it is in the sandbox.
        path: GuestPath,
    },
}

/// What can be done with both.
#[derive(Debug, Subcommand)]
enum Action {
    /// Make one and print its name.
    Create(Create),
    /// List them, or a directory of one: NAME:PATH.
    #[command(visible_alias = "files")]
    Ls {
        #[arg(value_name = "NAME:PATH")]
        place: Option<InVolume>,
        /// The whole tree below it.
        #[arg(short = 'R', long, requires = "place")]
        recursive: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show all about one.
    Inspect {
        /// Name or id.
        name: VolumeRef,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Give one more room. While it is used, if the host can do that; else put its sandboxes to sleep first.
    Resize {
        /// Name or id.
        name: VolumeRef,
        /// Such as 10g.
        #[arg(value_parser = units::parse_mib)]
        size: u64,
    },
    /// Keep its files as they are now: a copy with a name of its own.
    Snapshot {
        /// Name or id.
        name: VolumeRef,
        /// What to call the copy [default: its name and the time].
        copy: Option<Name>,
    },
    /// Make another one with its files.
    Clone {
        /// Name or id.
        name: VolumeRef,
        /// What to call the copy.
        copy: Name,
    },
    /// Remove them with their files. Refused while a sandbox has one.
    Rm {
        #[arg(required = true)]
        names: Vec<VolumeRef>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    /// Copy files and directories to and from one, as torpor cp does.
    Cp(files::Cp),
    /// Print a file of one.
    Cat {
        #[arg(value_name = "NAME:PATH")]
        place: InVolume,
    },
}

#[derive(Debug, Args)]
struct Create {
    name: Name,
    /// Such as 5g [default: 1g, or that of what it begins with].
    #[arg(long, value_parser = units::parse_mib)]
    size: Option<u64>,
    /// Label to find it by.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Begin with the files of this directory.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["from_template", "from_snapshot"])]
    from_dir: Option<PathBuf>,
    /// Begin with the files of this volume or drive.
    #[arg(long, value_name = "NAME", conflicts_with = "from_snapshot")]
    from_template: Option<VolumeRef>,
    /// Begin with the files of this snapshot of a volume or drive.
    #[arg(long, value_name = "NAME")]
    from_snapshot: Option<VolumeRef>,
    /// Of a drive: sandboxes with this label may mount it, and others not, but for those of other rules.
    #[arg(long, value_name = "KEY=VALUE[:/FOLDER]", value_parser = parse_permission)]
    allow: Vec<DrivePermission>,
    /// The same, to read only.
    #[arg(long, value_name = "KEY=VALUE[:/FOLDER]", value_parser = parse_permission)]
    allow_ro: Vec<DrivePermission>,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Volume {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            VolumeAction::Common(action) => return action.run(client, VolumeKind::Volume).await,
            VolumeAction::Attach { sandbox, volume, path, ro } => {
                let part = DrivePart { volume, subpath: None };
                attach(client, &sandbox, part, path, ro).await?;
            }
            VolumeAction::Detach { sandbox, path } => detach(client, &sandbox, &path).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Drive {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            DriveAction::Common(action) => return action.run(client, VolumeKind::Drive).await,
            DriveAction::Mount { sandbox, drive, path, ro } => {
                attach(client, &sandbox, drive, path, ro).await?;
            }
            DriveAction::Unmount { sandbox, path } => detach(client, &sandbox, &path).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// `/v1/volumes` or `/v1/drives`
fn routes(kind: VolumeKind) -> Route {
    match kind {
        VolumeKind::Volume => Route::new("/v1/volumes"),
        VolumeKind::Drive => Route::new("/v1/drives"),
    }
}

fn route(kind: VolumeKind, of: &VolumeRef) -> Route {
    routes(kind).part(&of.to_string())
}

async fn attach(
    client: &Client,
    sandbox: &SandboxRef,
    part: DrivePart,
    path: GuestPath,
    read_only: bool,
) -> Result<()> {
    let DrivePart { volume, subpath } = part;
    let request = MountRequest { volume: volume.to_string(), path, subpath, read_only };
    let mount: Mount = client.post(&Route::sandbox(sandbox).then("/mounts"), &request).await?;
    output::line(&plain(mount.path.as_str()))
}

async fn detach(client: &Client, sandbox: &SandboxRef, path: &GuestPath) -> Result<()> {
    let route = Route::sandbox(sandbox).then("/mounts").query("path", path.as_str());
    Ok(client.delete(&route).await?)
}

impl Action {
    async fn run(self, client: &Client, kind: VolumeKind) -> Result<ExitCode> {
        match self {
            Self::Create(verb) => verb.run(client, kind).await?,
            Self::Ls { place: Some(place), recursive, json } => {
                place.list(client, kind, recursive, json).await?;
            }
            Self::Ls { place: None, recursive: _, json } => {
                let list: VolumeList = client.list(&routes(kind)).await?;
                output::show(json, &list, || table(&list.volumes, units::now_ms()))?;
            }
            Self::Inspect { name, json } => {
                let found: Kept = client.get(&route(kind, &name)).await?;
                output::show(json, &found, || output::fields(&describe(&found)))?;
            }
            Self::Resize { name, size } => {
                let request = UpdateVolume { size_mib: Some(size), ..UpdateVolume::default() };
                let _progress = Progress::waiting(format!("growing {name}"));
                let grown: Kept = client.patch(&route(kind, &name), &request).await?;
                output::line(&units::show_mib(grown.size_mib))?;
            }
            Self::Snapshot { name, copy } => {
                let _progress = Progress::waiting(format!("copying {name}"));
                let request = SnapshotVolume { name: copy };
                let made: Kept =
                    client.post(&route(kind, &name).then("/snapshot"), &request).await?;
                output::line(made.name.as_str())?;
            }
            Self::Clone { name, copy } => {
                let request = CreateVolume { from: Some(name.to_string()), ..wish(copy) };
                let made = create(client, kind, &request).await?;
                output::line(made.name.as_str())?;
            }
            Self::Rm { names, force } => {
                let route = |name: &VolumeRef| route(kind, name);
                remove(client, &names, route, force, ErrorCode::VolumeNotFound).await?;
            }
            Self::Cp(verb) => return verb.run(client, kind).await,
            Self::Cat { place } => place.print(client, kind).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn wish(name: Name) -> CreateVolume {
    CreateVolume {
        name,
        size_mib: None,
        labels: Default::default(),
        permissions: Vec::new(),
        from: None,
    }
}

async fn create(client: &Client, kind: VolumeKind, request: &CreateVolume) -> Result<Kept> {
    let _progress = Progress::waiting(format!("making {kind} {}", request.name));
    Ok(client.post(&routes(kind), request).await?)
}

impl Create {
    async fn run(self, client: &Client, kind: VolumeKind) -> Result<()> {
        let read_only = self
            .allow_ro
            .into_iter()
            .map(|rule| DrivePermission { access: DriveAccess::Ro, ..rule });
        let request = CreateVolume {
            size_mib: self.size,
            labels: self.label.into_iter().collect(),
            permissions: self.allow.into_iter().chain(read_only).collect(),
            from: self.from_template.or(self.from_snapshot).map(|from| from.to_string()),
            ..wish(self.name)
        };
        let made = create(client, kind, &request).await?;
        let of = route(kind, &VolumeRef::Id(made.id.clone()));
        if let Some(dir) = self.from_dir {
            let source = cp::Side::Here(dir.join("."));
            let filled =
                cp::copy(client, source, cp::Side::Inside(of.clone(), "/".into()), ("", "")).await;
            if let Err(error) = filled {
                // Half of it is of no use to anybody.
                let _ = client.delete(&of).await;
                return Err(error);
            }
        }
        output::show_line(self.json, &made, made.name.as_str())
    }
}

fn table(volumes: &[Kept], now_ms: u64) -> String {
    let row = |volume: &Kept| {
        vec![
            volume.name.to_string(),
            units::show_mib(volume.size_mib),
            volume.used_bytes.map_or_else(|| "-".to_owned(), units::show_bytes),
            users(volume),
            units::show_age(volume.created_at_ms, now_ms),
        ]
    };
    let header = ["NAME", "SIZE", "USED", "SANDBOXES", "AGE"];
    output::table(&header, volumes.iter().map(row).collect())
}

/// Who has it, and who only reads it.
fn users(volume: &Kept) -> String {
    let names = volume.attachments.iter().map(|held| {
        let name = held.sandbox_name.as_ref().map_or(held.sandbox.as_str(), Name::as_str);
        if held.read_only { format!("{name} (ro)") } else { name.to_owned() }
    });
    let names: Vec<_> = names.collect();
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

fn describe(volume: &Kept) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("id", volume.id.to_string()),
        ("name", volume.name.to_string()),
        ("kind", volume.kind.to_string()),
        ("size", units::show_mib(volume.size_mib)),
        ("used", volume.used_bytes.map_or_else(|| "-".to_owned(), units::show_bytes)),
        ("on disk", units::show_bytes(volume.stored_bytes)),
        ("labels", output::pairs(&volume.labels)),
        ("created", units::show_time(volume.created_at_ms)),
    ];
    if let Some(of) = &volume.copy_of {
        fields.push(("copy of", of.to_string()));
    }
    for rule in &volume.permissions {
        let access = match rule.access {
            DriveAccess::Rw => "read and write",
            DriveAccess::Ro => "read",
        };
        let below = rule.subpath.as_ref().map_or("/", GuestPath::as_str);
        let labels = output::pairs(&rule.labels);
        fields.push(("permission", format!("{labels}: {access} {}", plain(below))));
    }
    for held in &volume.attachments {
        let name = held.sandbox_name.as_ref().map_or(held.sandbox.as_str(), Name::as_str);
        let (from, at) = (plain(held.subpath.as_str()), plain(held.path.as_str()));
        let ro = if held.read_only { ", to read" } else { "" };
        fields.push(("mounted", format!("{from} in {name} at {at}{ro}")));
    }
    fields
}
