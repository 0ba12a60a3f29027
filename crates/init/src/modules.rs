//! The parts of the kernel that come as files.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::failure::{Failure, Told};
use crate::tell;

/// Loads all modules of a directory in the order of their names, which is that of their needs.
///
/// One that the kernel does not want is told, and the rest is loaded: what the machine can't do without
/// is missed a moment later, by name.
pub(crate) fn load(directory: &Path) -> Result<(), Failure> {
    for module in listed(directory)? {
        let loaded = File::open(&module)
            .told(module.display())
            .and_then(|file| insert(&file).told(format!("cannot load {}", module.display())));
        if let Err(failed) = loaded {
            tell(&failed);
        }
    }
    Ok(())
}

fn insert(file: &File) -> Result<(), Errno> {
    match rustix::system::finit_module(file, c"", 0) {
        // It is there already.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// None where there is no such directory: the kernel may have all of it built in.
fn listed(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(directory).told(directory.display())?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut modules: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|it| it == "ko")).collect();
    modules.sort();
    Ok(modules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_in_the_order_of_their_names() {
        let directory = std::env::temp_dir().join(format!("torpor-init-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        for name in ["02-b.ko", "10-c.ko", "01-a.ko", "notes"] {
            std::fs::write(directory.join(name), "").unwrap();
        }
        let names = listed(&directory);
        std::fs::remove_dir_all(&directory).unwrap();
        let names: Vec<_> =
            names.unwrap().iter().map(|it| it.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["01-a.ko", "02-b.ko", "10-c.ko"]);
        assert!(listed(&directory).unwrap().is_empty(), "no directory, no modules");
    }
}
