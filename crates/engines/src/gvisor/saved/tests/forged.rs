//! Saves that no sentry writes: every one is refused, soon and by name.

use torpor_lifecycle::engine::{Change, ChangeKind, EngineError};

use super::super::find;
use super::super::upper::Found;
use super::encoder::{
    Bytes, Encoder, array, flag, int, map, nil, number, pointer, pointer_into, slice, text, uint,
};

const PAGE: u64 = 4096;

/// A machine whose upper layer is made by hand.
#[derive(Clone)]
struct Forge {
    encoder: Encoder,
    filesystem: u64,
    root: u64,
    names: Vec<(Bytes, Bytes)>,
}

/// How builds of 2026 name a memory file.
fn owner_of_2026(encoder: &mut Encoder) -> Bytes {
    let fields = [("ContainerName", text(b"box")), ("Path", text(b"/"))];
    encoder.structure("pkg/sentry/checkpoint.ResourceID", &fields)
}

impl Forge {
    fn new() -> Self {
        Self::with_disk(|_| text(b"box:/"))
    }

    fn with_disk(disk: impl FnOnce(&mut Encoder) -> Bytes) -> Self {
        let mut encoder = Encoder::default();
        let kernel = encoder.structure("pkg/sentry/kernel.Kernel", &[("vfs", nil())]);
        encoder.object(kernel);
        let disk = disk(&mut encoder);
        let filesystem = encoder.structure("pkg/sentry/fsimpl/tmpfs.filesystem", &[("mf", disk)]);
        let filesystem = encoder.object(filesystem);
        let root = encoder.reserve();
        Self { encoder, filesystem, root, names: Vec::new() }
    }

    fn inode(&mut self, mode: u64, at: u64) -> Bytes {
        let of = "pkg/sentry/vfs/memxattr.SimpleExtendedAttributes";
        let attributes = self.encoder.structure(of, &[("xattrs", nil())]);
        let value = |encoder: &mut Encoder, of, value| encoder.structure(of, &[("value", value)]);
        let mode = value(&mut self.encoder, "pkg/atomicbitops.Uint32", uint(mode));
        let owner = value(&mut self.encoder, "pkg/atomicbitops.Uint32", uint(7));
        let mtime = value(&mut self.encoder, "pkg/atomicbitops.Int64", int(-1_500_000));
        let fields = [
            ("fs", pointer(self.filesystem)),
            ("xattrs", attributes),
            ("mode", mode),
            ("uid", owner.clone()),
            ("gid", owner),
            ("mtime", mtime),
            ("impl", pointer(at)),
        ];
        self.encoder.structure("pkg/sentry/fsimpl/tmpfs.inode", &fields)
    }

    fn dentry(&mut self, of: u64) -> Bytes {
        let inode = pointer_into(of, "inode");
        self.encoder.structure("pkg/sentry/fsimpl/tmpfs.dentry", &[("inode", inode)])
    }

    /// A directory at `id`, with names to dentries.
    fn directory(&mut self, id: u64, names: &[(Bytes, Bytes)]) {
        let inode = self.inode(0o40755, id);
        let dentry = self.dentry(id);
        let names = self.encoder.object(map(names));
        let fields = [("dentry", dentry), ("inode", inode), ("childMap", pointer(names))];
        let directory = self.encoder.structure("pkg/sentry/fsimpl/tmpfs.directory", &fields);
        self.encoder.put(id, directory);
    }

    /// A file whose first page is at `offset` of the disk.
    fn file(&mut self, size: u64, offset: u64) -> u64 {
        let id = self.encoder.reserve();
        let inode = self.inode(0o100_640, id);
        let range = [("Start", nil()), ("End", uint(PAGE)), ("Value", uint(offset))];
        let of = "pkg/sentry/fsutil.FileRangeFlatSegment";
        let range = self.encoder.structure(of, &range);
        let ranges = self.encoder.object(array(&[range]));
        let of = "pkg/sentry/fsutil.FileRangeSet";
        let data = self.encoder.structure(of, &[("root", slice(1, ranges))]);
        let fields = [("inode", inode), ("data", data), ("size", uint(size))];
        let file = self.encoder.structure("pkg/sentry/fsimpl/tmpfs.regularFile", &fields);
        self.encoder.put(id, file);
        id
    }

    /// Another file of which only the mode matters.
    fn special(&mut self, mode: u64) -> u64 {
        let id = self.encoder.reserve();
        let inode = self.inode(mode, id);
        let special =
            self.encoder.structure("pkg/sentry/fsimpl/tmpfs.socketFile", &[("inode", inode)]);
        self.encoder.put(id, special);
        id
    }

    /// A name in the root.
    fn name(&mut self, name: &[u8], of: u64) {
        let dentry = self.dentry(of);
        let dentry = self.encoder.object(dentry);
        self.names.push((text(name), pointer(dentry)));
    }

    /// An overlay that the guest mounted, without an upper layer.
    fn add_overlay(&mut self) {
        let upper = [("dentry", nil())];
        let upper = self.encoder.structure("pkg/sentry/vfs.VirtualDentry", &upper);
        let of = "pkg/sentry/fsimpl/overlay.FilesystemOptions";
        let options = self.encoder.structure(of, &[("UpperRoot", upper)]);
        let of = "pkg/sentry/fsimpl/overlay.filesystem";
        let overlay = self.encoder.structure(of, &[("opts", options)]);
        self.encoder.object(overlay);
    }

    fn graphs(mut self) -> Bytes {
        let (root, names) = (self.root, self.names.clone());
        self.directory(root, &names);
        let dentry = [("impl", pointer_into(root, "dentry"))];
        let dentry = self.encoder.structure("pkg/sentry/vfs.Dentry", &dentry);
        let dentry = self.encoder.object(dentry);
        let upper = [("dentry", pointer(dentry))];
        let upper = self.encoder.structure("pkg/sentry/vfs.VirtualDentry", &upper);
        let of = "pkg/sentry/fsimpl/overlay.FilesystemOptions";
        let options = self.encoder.structure(of, &[("UpperRoot", upper)]);
        let overlay = [("opts", options)];
        let overlay = self.encoder.structure("pkg/sentry/fsimpl/overlay.filesystem", &overlay);
        self.encoder.object(overlay);
        self.encoder.stream()
    }

    fn read(self) -> Result<Found, EngineError> {
        Ok(find(&self.graphs(), &meta(), 3 * PAGE)?)
    }

    fn refusal(self) -> String {
        let error = self.read().err().expect("it is refused");
        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
    }
}

/// The machine's memory has one saved page; the disk has pages at 0 (zero), 4096 and 8192.
fn meta() -> Bytes {
    let ranges = |ranges: &[(u64, u64, bool)]| {
        let mut encoder = Encoder::default();
        let root = encoder.reserve();
        let mut range = |&(start, end, saved): &(u64, u64, bool)| {
            let of = "pkg/sentry/pgalloc.memAcctInfo";
            let value = encoder.structure(of, &[("knownCommitted", flag(saved))]);
            let fields = [("Start", uint(start)), ("End", uint(end)), ("Value", value)];
            encoder.structure("pkg/sentry/pgalloc.memAcctFlatSegment", &fields)
        };
        let values: Vec<Bytes> = ranges.iter().map(&mut range).collect();
        let values = encoder.object(array(&values));
        let fields = [("root", slice(ranges.len() as u64, values))];
        let set = encoder.structure("pkg/sentry/pgalloc.memAcctSet", &fields);
        encoder.put(root, set);
        encoder.stream()
    };
    let mut names = Encoder::default();
    let root = names.reserve();
    let list = names.object(array(&[text(b"box:/")]));
    let of = "pkg/sentry/kernel.privateMemoryFileMetadata";
    let owners = names.structure(of, &[("owners", slice(1, list))]);
    names.put(root, owners);
    [
        ranges(&[(0, PAGE, true)]),
        number(PAGE),
        names.stream(),
        ranges(&[(0, PAGE, false), (PAGE, 3 * PAGE, true)]),
        number(2 * PAGE),
    ]
    .concat()
}

#[test]
fn a_small_machine_made_by_hand_is_read() {
    let mut forge = Forge::new();
    forge.add_overlay();
    let file = forge.file(10, PAGE);
    forge.name(b"b", file);
    forge.name(b"a", file);
    let socket = forge.special(0o140_755);
    forge.name(b"c", socket);
    let found = forge.read().unwrap();
    let change = |path: &[u8], kind, mode| {
        let path = path.to_vec();
        Change { path, kind, mode, uid: 7, gid: 7, modified_at_ms: -2 }
    };
    let expected = [
        change(b"a", ChangeKind::File { size: 10 }, 0o640),
        change(b"b", ChangeKind::HardLink { to: b"a".to_vec() }, 0o640),
        change(b"c", ChangeKind::Socket, 0o755),
    ];
    assert_eq!(found.changes, expected);
    // After the one page of memory.
    assert_eq!(found.extents[0].iter().map(|extent| extent.page).collect::<Vec<_>>(), [PAGE]);
    assert!(found.extents[1].is_empty());
}

/// The same as [`meta`], as builds of 2026 write it.
fn meta_of_2026() -> Bytes {
    let message = |ranges: &[(u64, u64, bool)]| {
        let field = |of: u8, value: u64| [vec![of << 3], number(value)].concat();
        let mut message = Bytes::new();
        for &(start, end, saved) in ranges {
            let range = [field(1, start), field(2, end), field(5, saved.into())].concat();
            message.extend([vec![3 << 3 | 2], number(range.len() as u64), range].concat());
        }
        [(message.len() as u64).to_le_bytes().to_vec(), message].concat()
    };
    let mut names = Encoder::default();
    let root = names.reserve();
    let owner = owner_of_2026(&mut names);
    let list = names.object(array(&[owner]));
    let of = "pkg/sentry/kernel.privateMemoryFileMetadata";
    let owners = names.structure(of, &[("owners", slice(1, list))]);
    names.put(root, owners);
    [
        message(&[(0, PAGE, true)]),
        names.stream(),
        message(&[(0, PAGE, false), (PAGE, 3 * PAGE, true)]),
    ]
    .concat()
}

#[test]
fn a_small_machine_of_2026_made_by_hand_is_read_and_a_cut_one_refused() {
    let mut forge = Forge::with_disk(owner_of_2026);
    let file = forge.file(10, PAGE);
    forge.name(b"a", file);
    let (graphs, meta) = (forge.graphs(), meta_of_2026());
    let found = find(&graphs, &meta, 3 * PAGE).unwrap();
    assert_eq!(found.changes.len(), 1);
    assert_eq!(found.extents[0].iter().map(|extent| extent.page).collect::<Vec<_>>(), [PAGE]);
    assert!(find(&graphs, &meta, 3 * PAGE - 1).is_err(), "pages are missing");
    for cut in [4, 12, meta.len() / 2, meta.len() - 1] {
        assert!(find(&graphs, &meta[..cut], 3 * PAGE).is_err(), "cut at {cut}");
    }
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in [&b".."[..], b".", b"", b"a/b", b"/etc", b"a\0b", &[b'a'; 256]] {
        let mut forge = Forge::new();
        let file = forge.file(10, PAGE);
        forge.name(name, file);
        assert_eq!(forge.refusal(), "a file has an impossible name");
    }
}

#[test]
fn a_directory_within_itself_is_refused() {
    let mut forge = Forge::new();
    let dir = forge.encoder.reserve();
    let dentry = pointer_into(dir, "dentry");
    forge.directory(dir, &[(text(b"self"), dentry.clone())]);
    forge.names.push((text(b"dir"), dentry));
    assert_eq!(forge.refusal(), "a name is in two directories");
}

#[test]
fn a_directory_with_two_names_is_refused() {
    let mut forge = Forge::new();
    let dir = forge.encoder.reserve();
    forge.directory(dir, &[]);
    forge.name(b"one", dir);
    forge.name(b"two", dir);
    assert_eq!(forge.refusal(), "a directory has two names");
}

#[test]
fn names_that_all_lead_to_one_large_object_are_refused() {
    let mut forge = Forge::new();
    let fields = [("names", map(&[])), ("filler", text(&vec![b'x'; 1 << 20]))];
    let large = forge.encoder.structure("large", &fields);
    let large = forge.encoder.object(large);
    for index in 0..2000 {
        let id = forge.encoder.reserve();
        let inode = forge.inode(0o40755, id);
        let names = pointer_into(large, "names");
        let fields = [("dentry", nil()), ("inode", inode), ("childMap", names)];
        let directory = forge.encoder.structure("pkg/sentry/fsimpl/tmpfs.directory", &fields);
        forge.encoder.put(id, directory);
        forge.name(format!("{index}").as_bytes(), id);
    }
    assert_eq!(forge.refusal(), "it goes in circles");
}

#[test]
fn paths_longer_than_can_be_named_are_refused_as_the_guests_fault() {
    let mut forge = Forge::new();
    let file = forge.file(1, PAGE);
    let dentry = forge.dentry(file);
    let mut below = pointer(forge.encoder.object(dentry));
    for _ in 0..17 {
        let dir = forge.encoder.reserve();
        forge.directory(dir, &[(text(&[b'd'; 255]), below)]);
        below = pointer_into(dir, "dentry");
    }
    forge.names.push((text(b"top"), below));
    let Err(EngineError::GuestFiles(why)) = forge.read() else { panic!("it is read") };
    assert!(why.starts_with("a path is too long"), "{why}");
}

#[test]
fn a_file_may_have_zeros_but_nothing_beyond_its_disk() {
    let mut forge = Forge::new();
    let (zero, beyond) = (forge.file(10, 0), forge.file(10, 1 << 40));
    forge.name(b"zero", zero);
    forge.name(b"beyond", beyond);
    let found = forge.clone().read().unwrap();
    assert!(found.extents.iter().all(Vec::is_empty), "neither has a saved page");
    let wild = forge.file(10, u64::MAX - 3);
    forge.name(b"wild", wild);
    assert_eq!(forge.refusal(), "a file is outside its disk");
}

#[test]
fn a_field_or_type_of_another_build_is_named() {
    let mut graphs = Forge::new().graphs();
    let at = graphs.windows(9).position(|bytes| bytes == b"UpperRoot").unwrap();
    graphs[at] = b'u';
    let error = EngineError::from(find(&graphs, &meta(), 3 * PAGE).err().unwrap());
    assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
    let missing = "overlay.FilesystemOptions has no field UpperRoot";
    assert!(error.to_string().ends_with(missing), "{error}");

    let at = graphs.windows(18).position(|bytes| bytes == b"overlay.filesystem").unwrap();
    graphs[at] = b'O';
    let error = EngineError::from(find(&graphs, &meta(), 3 * PAGE).err().unwrap());
    assert!(error.to_string().ends_with("there is no type pkg/sentry/fsimpl/overlay.filesystem"));
}

#[test]
fn pages_that_are_missing_are_noticed() {
    let mut forge = Forge::new();
    let file = forge.file(10, PAGE);
    forge.name(b"a", file);
    let error = find(&forge.graphs(), &meta(), 3 * PAGE - 1).err().unwrap();
    assert_eq!(error.to_string(), "pages.img has 12287 bytes instead of 12288");
}

#[test]
fn values_without_end_are_refused() {
    let object = |value: Bytes| [number(1 << 63 | 1), uint(1), value].concat();
    let arrays = |count: usize| [[9, 1].repeat(count), vec![5]].concat();
    let any = |count: usize| [[14, 5].repeat(count), vec![5]].concat();
    let pointers = |count: usize| [vec![14], [1].repeat(count), vec![5, 5]].concat();
    let refused = [
        ("it is nested too deeply", object(arrays(100_000))),
        ("it is nested too deeply", object(any(100_000))),
        ("it is nested too deeply", object(pointers(100_000))),
        (
            "a count is larger than what is left",
            object([vec![9], number(u64::MAX), vec![5]].concat()),
        ),
        ("a text is longer than what is left", object([vec![7], number(u64::MAX)].concat())),
        ("a number has no end", object([vec![2], vec![0xff; 20]].concat())),
        ("it ends too early", object(Vec::new())),
        ("a count is larger than what is left", number(u64::MAX)),
    ];
    for (why, bytes) in refused {
        let error = find(&bytes, &meta(), 3 * PAGE).err().unwrap().to_string();
        assert!(error.starts_with(why), "{error} instead of {why}");
    }
}
