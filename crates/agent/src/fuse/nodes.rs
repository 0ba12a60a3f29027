//! The files that the kernel knows, by the numbers that it knows them by.
//!
//! The table is in the memory of the guest, so it sleeps, wakes and is forked with it.

use std::collections::HashMap;

use rustix::io::Errno;
use torpor_protocol::guest::files::Handle;

use super::abi::ROOT;

/// Files that the kernel may know at once. For each it keeps a kilobyte itself, and forgets them when memory is short.
const NODES_MAX: usize = 1 << 20;

struct Node {
    handle: Handle,
    /// How often the kernel was told of it, less how often it forgot it.
    lookups: u64,
    opens: u64,
    /// It was removed while it was open, and the service keeps it.
    hidden: bool,
}

#[derive(Default)]
pub(super) struct Nodes {
    nodes: HashMap<u64, Node>,
    numbers: HashMap<Handle, u64>,
    next: u64,
    /// Open files in all.
    opens: u64,
}

impl Nodes {
    pub(super) fn set_root(&mut self, handle: Handle) {
        let root = Node { handle, lookups: 1, opens: 0, hidden: false };
        self.nodes.insert(ROOT, root);
        self.numbers.insert(handle, ROOT);
    }

    pub(super) fn has_root(&self) -> bool {
        self.nodes.contains_key(&ROOT)
    }

    pub(super) fn handle(&self, number: u64) -> Result<Handle, Errno> {
        self.nodes.get(&number).map(|node| node.handle).ok_or(Errno::STALE)
    }

    /// The number of a file that the kernel is told of.
    pub(super) fn tell(&mut self, handle: Handle) -> Result<u64, Errno> {
        if let Some(number) = self.numbers.get(&handle)
            && let Some(node) = self.nodes.get_mut(number)
        {
            node.lookups += 1;
            return Ok(*number);
        }
        if self.nodes.len() >= NODES_MAX {
            return Err(Errno::NFILE);
        }
        // Never one that was used before.
        self.next += 1;
        let number = ROOT + self.next;
        self.nodes.insert(number, Node { handle, lookups: 1, opens: 0, hidden: false });
        self.numbers.insert(handle, number);
        Ok(number)
    }

    pub(super) fn forget(&mut self, number: u64, lookups: u64) {
        if number != ROOT
            && let Some(node) = self.nodes.get_mut(&number)
        {
            node.lookups = node.lookups.saturating_sub(lookups);
            self.tidy(number);
        }
    }

    fn tidy(&mut self, number: u64) {
        let unused = |node: &Node| node.lookups == 0 && node.opens == 0;
        if self.nodes.get(&number).is_some_and(unused)
            && let Some(node) = self.nodes.remove(&number)
        {
            self.numbers.remove(&node.handle);
        }
    }

    pub(super) fn open(&mut self, number: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.opens += 1;
            self.opens += 1;
        }
    }

    /// Whether files are open.
    pub(super) fn any_open(&self) -> bool {
        self.opens > 0
    }

    /// One open file less. The handle, if the service keeps it for nobody now.
    pub(super) fn release(&mut self, number: u64) -> Option<Handle> {
        let node = self.nodes.get_mut(&number)?;
        if node.opens > 0 {
            node.opens -= 1;
            self.opens -= 1;
        }
        let last = node.opens == 0 && std::mem::take(&mut node.hidden);
        let handle = node.handle;
        self.tidy(number);
        last.then_some(handle)
    }

    /// The service keeps a file that was removed. Whether it is needed.
    pub(super) fn hide(&mut self, handle: &Handle) -> bool {
        let node = self.numbers.get(handle).and_then(|number| self.nodes.get_mut(number));
        let open = node.filter(|node| node.opens > 0);
        open.map(|node| node.hidden = true).is_some()
    }

    pub(super) fn is_hidden(&self, number: u64) -> bool {
        self.nodes.get(&number).is_some_and(|node| node.hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_number_until_the_kernel_forgets_it() {
        let mut nodes = Nodes::default();
        let handle = Handle::new(b"a").unwrap();
        let number = nodes.tell(handle).unwrap();
        assert_eq!(nodes.tell(handle), Ok(number));
        nodes.open(number);
        nodes.forget(number, 2);
        assert_eq!(nodes.handle(number), Ok(handle), "it is open");
        assert!(nodes.any_open() && nodes.hide(&handle) && nodes.is_hidden(number));
        assert_eq!(nodes.release(number), Some(handle));
        assert_eq!(nodes.handle(number), Err(Errno::STALE));
        assert_ne!(nodes.tell(handle).unwrap(), number);
        assert!(!nodes.any_open() && !nodes.hide(&handle));
    }
}
