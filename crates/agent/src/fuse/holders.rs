//! Who uses a mount: processes that have a path below it, open, mapped, or as a directory they are in.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// More are not named.
const NAMED_MAX: usize = 20;

/// What a process is called, and its number. Looks at names of paths only: nothing here waits for the mount.
pub(super) fn of(mount: &Path) -> Vec<String> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = processes.flatten().filter_map(|it| it.file_name().to_str()?.parse().ok());
    let holds = numbers.filter(|pid: &u32| holds(&Path::new("/proc").join(pid.to_string()), mount));
    let name = |pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name: String = name.trim().chars().filter(|letter| !letter.is_control()).collect();
        format!("{name} ({pid})")
    };
    holds.take(NAMED_MAX).map(name).collect()
}

fn holds(process: &Path, mount: &Path) -> bool {
    let below = |link: &Path| fs::read_link(link).is_ok_and(|path| path.starts_with(mount));
    ["cwd", "root", "exe"].iter().any(|link| below(&process.join(link)))
        || fs::read_dir(process.join("fd"))
            .is_ok_and(|open| open.flatten().any(|entry| below(&entry.path())))
        || fs::read(process.join("maps")).is_ok_and(|maps| {
            let paths = maps.split(|byte| *byte == b'\n').filter_map(|line| {
                let start = line.iter().position(|byte| *byte == b'/')?;
                Some(Path::new(std::ffi::OsStr::from_bytes(&line[start..])))
            });
            paths.into_iter().any(|path| path.starts_with(mount))
        })
}
