//! Descriptors that are used again, the least recently used given up first.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::handle::FileId;

/// Descriptors of one volume that are kept: the files that a busy guest works with at a time. A daemon with hundreds of
/// volumes stays far from its limit.
const KEPT_MAX: usize = 512;
/// How many are given up at once, so that looking for them is seldom.
const BATCH: usize = 64;

/// What a descriptor is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Use {
    /// Attributes, and names below.
    Path,
    /// Content, for reading only.
    Read,
    /// Content.
    Write,
}

#[derive(Debug, Default)]
pub(crate) struct Cache {
    kept: HashMap<(FileId, Use), (Arc<OwnedFd>, u64)>,
    clock: u64,
}

impl Cache {
    pub(crate) fn get(&mut self, id: FileId, how: Use) -> Option<Arc<OwnedFd>> {
        self.clock += 1;
        let (descriptor, used) = self.kept.get_mut(&(id, how))?;
        *used = self.clock;
        Some(Arc::clone(descriptor))
    }

    pub(crate) fn insert(&mut self, id: FileId, how: Use, descriptor: &Arc<OwnedFd>) {
        if self.kept.len() >= KEPT_MAX {
            let mut times: Vec<u64> = self.kept.values().map(|(_, used)| *used).collect();
            let (_, last, _) = times.select_nth_unstable(BATCH);
            let last = *last;
            self.kept.retain(|_, (_, used)| *used > last);
        }
        self.clock += 1;
        self.kept.insert((id, how), (Arc::clone(descriptor), self.clock));
    }

    /// Whoever is removed must not be held by us.
    pub(crate) fn forget(&mut self, id: FileId) {
        for how in [Use::Path, Use::Read, Use::Write] {
            self.kept.remove(&(id, how));
        }
    }

    pub(crate) fn clear(&mut self) {
        self.kept.clear();
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.kept.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_descriptors_are_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let mut cache = Cache::default();
        let ids: Vec<FileId> = (0..KEPT_MAX + 100)
            .map(|number| {
                let file =
                    std::fs::File::create(directory.path().join(number.to_string())).unwrap();
                let id = FileId::of(&file).unwrap();
                cache.insert(id, Use::Path, &Arc::new(file.into()));
                assert!(cache.get(id, Use::Path).is_some() && cache.len() <= KEPT_MAX);
                id
            })
            .collect();
        assert!(cache.get(ids[0], Use::Path).is_none());
        let last = ids[ids.len() - 1];
        cache.forget(last);
        assert!(cache.get(last, Use::Path).is_none());
    }
}
