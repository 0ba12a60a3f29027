//! Kernels, modules and packages that were never built: small, and as wrong as a test wants them.

use std::io::Write;

pub(crate) fn ar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = b"!<arch>\n".to_vec();
    for (name, data) in members {
        let header =
            format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 0, 100_644, data.len());
        archive.extend(header.as_bytes());
        archive.extend(*data);
        if data.len() % 2 == 1 {
            archive.push(b'\n');
        }
    }
    archive
}

/// Paths as they are given, also those that no packer would write.
pub(crate) fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, data) in files {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        archive.append(&header, *data).unwrap();
    }
    archive.into_inner().unwrap()
}

pub(crate) fn package(files: &[(&str, &[u8])]) -> Vec<u8> {
    ar(&[
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", &xz(&tar(&[]))),
        ("data.tar.xz", &xz(&tar(files))),
    ])
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

pub(crate) fn xz(bytes: &[u8]) -> Vec<u8> {
    let options = lzma_rust2::XzOptions::with_preset(0);
    let mut packer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// Nothing but literals.
pub(crate) fn lz4(bytes: &[u8]) -> Vec<u8> {
    let mut block = vec![0xf0];
    let mut more = bytes.len() - 15;
    while more >= 255 {
        block.push(255);
        more -= 255;
    }
    block.push(u8::try_from(more).unwrap());
    block.extend(bytes);
    let mut frame = crate::lz4::MAGIC.to_vec();
    frame.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
    frame.extend(block);
    frame
}

pub(crate) fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 1; // sectors of the setup, besides the first
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image.extend([0; 16]);
    image.extend(payload);
    image
}

/// A bzImage of [`vmlinux`], as packages have it.
pub(crate) fn vmlinuz(release: &str) -> Vec<u8> {
    bzimage(&gzip(&vmlinux(release)))
}

pub(crate) fn vmlinux(release: &str) -> Vec<u8> {
    let note =
        [&4u32.to_le_bytes()[..], &4u32.to_le_bytes(), &18u32.to_le_bytes(), b"Xen\0", &[0; 4]];
    let text = format!("\0%s version %s (Linux version )\0Linux version {release} (x@y) #1\n\0");
    elf(2, &note.concat(), ".rodata", text.as_bytes())
}

pub(crate) fn module(release: &str, depends: &[&str]) -> Vec<u8> {
    let depends = depends.join(",");
    let text = format!(
        "license=GPL\0\0parm=\u{fffd}:odd\0depends={depends}\0vermagic={release} SMP mod_unload \0"
    );
    elf(1, &[], ".modinfo", text.as_bytes())
}

pub(crate) fn signed(module: &[u8]) -> Vec<u8> {
    let mut signed = [module, b"signature"].concat();
    signed.extend([0, 0, 2, 0, 0, 0, 0, 0]);
    signed.extend(9u32.to_be_bytes());
    signed.extend(b"~Module signature appended~\n");
    signed
}

/// One segment of notes and one section, besides that of the names.
fn elf(kind: u16, note: &[u8], section: &str, data: &[u8]) -> Vec<u8> {
    const HEADER: usize = 64;
    const SEGMENT: usize = 56;
    let names = format!("\0.shstrtab\0{section}\0");
    let data_at = HEADER + SEGMENT + note.len();
    let names_at = data_at + data.len();
    let table_at = names_at + names.len();

    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    for number in [kind, 62] {
        file.extend(number.to_le_bytes());
    }
    file.extend(1u32.to_le_bytes());
    for number in [0, HEADER as u64, table_at as u64] {
        file.extend(number.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for number in [HEADER as u16, SEGMENT as u16, 1, 64, 3, 1] {
        file.extend(number.to_le_bytes());
    }
    for number in [4u32, 4] {
        file.extend(number.to_le_bytes());
    }
    let place = [(HEADER + SEGMENT) as u64, 0, 0, note.len() as u64, note.len() as u64, 4];
    file.extend(place.iter().flat_map(|number| number.to_le_bytes()));
    file.extend(note);
    file.extend(data);
    file.extend(names.as_bytes());
    for (name, at, length) in [(0, 0, 0), (1, names_at, names.len()), (11, data_at, data.len())] {
        file.extend([name, 1u32].iter().flat_map(|number| number.to_le_bytes()));
        let fields = [0, 0, at as u64, length as u64, 0, 1, 0];
        file.extend(fields.iter().flat_map(|number| number.to_le_bytes()));
    }
    file
}
