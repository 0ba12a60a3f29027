//! A kernel out of its boot image, and whether a machine can boot it.
//!
//! A bzImage holds an ELF file, compressed, which a guest would unpack by itself: in an emulated guest
//! that costs as much as the rest of the boot. The offsets are those of the kernel's
//! `Documentation/arch/x86/boot.rst`.

use crate::elf::{EXECUTABLE, Elf};
use crate::lz4;
use crate::unpack::{self, Packing};

/// Several times a distribution's kernel (57 MB).
pub(crate) const VMLINUX_MAX: u64 = 256 << 20;

/// Of the number behind the payload.
const LENGTH: usize = 4;
/// The first protocol that says where the payload is.
const PROTOCOL: u16 = 0x0208;
/// `XEN_ELFNOTE_PHYS32_ENTRY`: where PVH begins.
const PVH_NOTE: u32 = 18;
/// Before the release, in what the kernel prints first.
const BANNER: &[u8] = b"Linux version ";

/// The uncompressed kernel: of a bzImage, or the ELF file as it is.
pub(crate) fn vmlinux(image: Vec<u8>) -> Result<Vec<u8>, String> {
    if image.starts_with(b"\x7fELF") {
        return Ok(image);
    }
    let payload = payload(&image)?;
    let unpacked = match Packing::of(payload) {
        Packing::Plain if payload.starts_with(lz4::MAGIC) => {
            let end = payload.len() - LENGTH.min(payload.len());
            lz4::unpack(&payload[..end], VMLINUX_MAX)
        }
        Packing::Plain => Err("how it is packed is not known here".to_owned()),
        Packing::Gzip | Packing::Xz | Packing::Zstd => {
            unpack::whole(payload, VMLINUX_MAX).map_err(|error| error.to_string())
        }
    };
    let unpacked = unpacked.map_err(|why| format!("it can't be unpacked: {why}"))?;
    // All packers but gzip are followed by the length, and gzip ends with it.
    let length = payload.last_chunk::<LENGTH>().map(|length| u32::from_le_bytes(*length));
    if length.map(u64::from) != Some(unpacked.len() as u64) {
        return Err("its payload is not as long as it says".to_owned());
    }
    Ok(unpacked)
}

fn payload(image: &[u8]) -> Result<&[u8], String> {
    let short = "it ends within its header";
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err("it is neither an ELF file nor a bzImage".to_owned());
    }
    let word = |at: usize| image.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    let protocol = word(0x206).map(u32::from_le_bytes).ok_or(short)? & 0xffff;
    if protocol < u32::from(PROTOCOL) {
        return Err("its boot protocol is too old".to_owned());
    }
    // Zero means four, for kernels older than anybody's.
    let sectors = match image[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let offset = word(0x248).map(u32::from_le_bytes).ok_or(short)? as usize;
    let length = word(0x24c).map(u32::from_le_bytes).ok_or(short)? as usize;
    let begin = (sectors + 1) * 512 + offset;
    image.get(begin..begin + length).ok_or_else(|| "it ends within its payload".to_owned())
}

/// The release of a kernel that a microVM can boot.
pub(crate) fn check(vmlinux: &[u8]) -> Result<String, String> {
    let elf = Elf::parse(vmlinux)?;
    if elf.kind != EXECUTABLE {
        return Err("it is no kernel".to_owned());
    }
    if !elf.has_note("Xen", PVH_NOTE)? {
        return Err("it has no PVH entry (CONFIG_PVH), by which microVMs boot".to_owned());
    }
    // Stripped of its sections it is still a kernel.
    let text = elf.section(".rodata")?.unwrap_or(vmlinux);
    release(text).ok_or_else(|| "it does not say which version it is".to_owned())
}

fn release(mut text: &[u8]) -> Option<String> {
    while let Some(at) = find(text, BANNER) {
        text = &text[at + BANNER.len()..];
        let end = text.iter().take(256).position(|byte| *byte == b' ');
        let release = end.and_then(|end| std::str::from_utf8(&text[..end]).ok());
        // The same words are also in a format string.
        if let Some(release) = release.filter(|release| crate::release::is_name(release)) {
            return Some(release.to_owned());
        }
    }
    None
}

/// Horspool's search: tens of megabytes, looked at in steps of the needle's length.
fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let last = needle.len() - 1;
    let mut skips = [needle.len(); 256];
    for (at, byte) in needle[..last].iter().enumerate() {
        skips[usize::from(*byte)] = last - at;
    }
    let mut at = 0;
    while let Some(window) = hay.get(at..at + needle.len()) {
        if window == needle {
            return Some(at);
        }
        at += skips[usize::from(window[last])];
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge;

    const RELEASE: &str = "6.12.95+deb12-cloud-amd64";

    #[test]
    fn a_kernel_comes_out_of_every_image_and_says_who_it_is() {
        let kernel = forge::vmlinux(RELEASE);
        let length = u32::try_from(kernel.len()).unwrap().to_le_bytes();
        let packed = [forge::zstd(&kernel), forge::xz(&kernel), forge::lz4(&kernel)];
        let mut payloads: Vec<Vec<u8>> =
            packed.into_iter().map(|packed| [&packed[..], &length[..]].concat()).collect();
        payloads.push(forge::gzip(&kernel));
        for payload in payloads {
            let unpacked = vmlinux(forge::bzimage(&payload)).unwrap();
            assert_eq!(unpacked, kernel);
            assert_eq!(check(&unpacked).unwrap(), RELEASE);
        }
        assert_eq!(vmlinux(kernel.clone()).unwrap(), kernel);
    }

    #[test]
    fn an_image_that_lies_about_its_payload_is_refused() {
        let kernel = forge::vmlinux(RELEASE);
        let mut payload = forge::zstd(&kernel);
        payload.extend(7u32.to_le_bytes());
        let error = vmlinux(forge::bzimage(&payload)).unwrap_err();
        assert_eq!(error, "its payload is not as long as it says");
        let mut image = forge::bzimage(&forge::gzip(&kernel));
        image[0x248..0x24c].copy_from_slice(&u32::MAX.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(vmlinux(image).unwrap_err(), "it ends within its payload");
    }

    #[test]
    fn no_cut_of_an_image_is_a_kernel() {
        let image = forge::bzimage(&forge::gzip(&forge::vmlinux(RELEASE)));
        for length in 0..image.len() {
            assert!(vmlinux(image[..length].to_vec()).is_err(), "{length}");
        }
    }

    #[test]
    fn a_kernel_without_the_entry_is_refused() {
        let mut kernel = forge::vmlinux(RELEASE);
        let at = find(&kernel, b"Xen\0").unwrap();
        kernel[at] = b'Y';
        assert!(check(&kernel).unwrap_err().contains("CONFIG_PVH"));
    }

    #[test]
    fn a_release_that_could_be_a_path_is_no_release() {
        let error = check(&forge::vmlinux("../../etc")).unwrap_err();
        assert_eq!(error, "it does not say which version it is");
    }

    #[test]
    fn needles_are_found_wherever_they_are() {
        for length in 0..40 {
            let mut hay = vec![b'n'; length];
            assert_eq!(find(&hay, BANNER), None);
            hay.extend(BANNER);
            hay.extend(b"Linux");
            assert_eq!(find(&hay, BANNER), Some(length));
        }
    }
}
