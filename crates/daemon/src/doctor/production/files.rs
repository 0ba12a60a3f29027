//! Who else on this host may read or replace what belongs to the daemon.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::super::{failed, fine};
use super::host::Host;
use crate::config::Config;
use torpor_engines::probe::Finding;

const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;
/// Keys of the configuration whose values are nobody's business.
const SECRETS: [&str; 2] = ["api_key", "secret_key"];

impl Host {
    /// `file` is the configuration.
    pub(super) fn permissions(&self, config: &Config, file: &Path) -> Finding {
        let private = self.private(config, file);
        let runtime = self.within(&config.runtime_dir);
        let open = runtime.iter().map(PathBuf::as_path).chain([&*config.runtime_dir, file]);
        let mut faults: Vec<String> = Vec::new();
        for path in &private {
            faults.extend(self.fault(path, OTHERS, "be read or changed by others"));
        }
        for path in private.iter().map(PathBuf::as_path).chain(open) {
            for dir in path.ancestors().filter(|dir| !private.iter().any(|known| known == dir)) {
                faults.extend(self.fault(dir, OTHERS_WRITE, "be changed or replaced by others"));
            }
        }
        faults.sort();
        faults.dedup();
        if faults.is_empty() {
            let count = private.len();
            return fine("permissions", format!("{count} files and directories are only ours"));
        }
        let remedy = "chmod go-rwx what holds secrets and the data directory, chmod go-w the \
                      directories above, and chown them to the user of the daemon";
        failed("permissions", faults.join("; "), remedy)
    }

    /// What nobody else may even read: keys, and all that sandboxes wrote.
    fn private(&self, config: &Config, file: &Path) -> Vec<PathBuf> {
        let text = fs::read_to_string(self.at(file)).unwrap_or_default();
        let tells = |line: &str| SECRETS.iter().any(|key| line.trim_start().starts_with(key));
        let file = text.lines().any(tells).then(|| file.to_owned());
        let within = self.within(&config.data_dir).into_iter();
        let keys = within.filter(|path| path.extension().is_some_and(|end| end == "key"));
        let named = [config.data_dir.clone()].into_iter().chain(config.tls.key.clone());
        named.chain(file).chain(keys).filter(|path| self.at(path).exists()).collect()
    }

    fn within(&self, dir: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.at(dir)).into_iter().flatten().flatten();
        entries.map(|entry| dir.join(entry.file_name())).collect()
    }

    /// What is wrong with the rights of a path; nothing if it is not there.
    fn fault(&self, path: &Path, forbidden: u32, what: &str) -> Option<String> {
        let metadata = fs::metadata(self.at(path)).ok()?;
        let (mode, shown) = (metadata.mode() & 0o7777, path.display());
        if ![self.owner, ROOT].contains(&metadata.uid()) {
            return Some(format!("{shown} belongs to user {}", metadata.uid()));
        }
        // `/tmp`: everybody may make names there, and nobody may take those of others.
        let keeps_names = metadata.is_dir() && mode & STICKY != 0 && forbidden == OTHERS_WRITE;
        let shared = mode & forbidden != 0 && !keeps_names;
        shared.then(|| format!("{shown} can {what} (mode {mode:04o})"))
    }
}
