//! Numbers in the order of bytes that ext4 uses: little end first.
//!
//! The caller has made sure that the bytes are there.

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// A number in two halves that are not side by side.
pub(crate) fn wide(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
