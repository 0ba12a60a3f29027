//! LZ4 as kernels are packed with it (the "legacy" frame, Debian 12's own kernel among them).
//!
//! ```text
//!   02 21 4c 18  { length 4 | block }*      each block stands for at most 8 MB, on its own
//!   block: { token 1 | more length | literals | distance 2 | more length }*   ends with literals
//! ```

pub(crate) const MAGIC: &[u8] = &[0x02, 0x21, 0x4c, 0x18];
const BLOCK_MAX: usize = 8 << 20;
/// A copy is never shorter, so lengths count from here.
const COPY_MIN: usize = 4;

/// What was packed; more than `limit` bytes are refused.
pub(crate) fn unpack(packed: &[u8], limit: u64) -> Result<Vec<u8>, String> {
    let mut rest = packed.strip_prefix(MAGIC).ok_or("it is not packed with LZ4")?;
    let mut unpacked = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let (block, after) = after.split_at_checked(length).ok_or("it ends within a block")?;
        unpack_block(block, &mut unpacked)?;
        if unpacked.len() as u64 > limit {
            return Err("it is larger than anything expected here".to_owned());
        }
        rest = after;
    }
    match rest {
        [] => Ok(unpacked),
        [..] => Err("it ends within a length".to_owned()),
    }
}

fn unpack_block(block: &[u8], unpacked: &mut Vec<u8>) -> Result<(), String> {
    let begin = unpacked.len();
    let mut rest = Bytes(block);
    loop {
        let token = usize::from(rest.byte()?);
        let literals = rest.length(token >> 4)?;
        unpacked.extend_from_slice(rest.take(literals)?);
        if rest.0.is_empty() {
            return within(unpacked.len() - begin);
        }
        let distance = usize::from(rest.byte()?) | usize::from(rest.byte()?) << 8;
        let length = rest.length(token & 15)? + COPY_MIN;
        within(unpacked.len() - begin + length)?;
        let from = unpacked.len().checked_sub(distance).filter(|from| *from >= begin);
        let from = from.filter(|_| distance > 0).ok_or("a copy is of nothing")?;
        copy(unpacked, from, length);
    }
}

fn within(length: usize) -> Result<(), String> {
    match length <= BLOCK_MAX {
        true => Ok(()),
        false => Err("a block is larger than blocks are".to_owned()),
    }
}

/// Copies what may only come into being by the copying.
fn copy(unpacked: &mut Vec<u8>, from: usize, mut length: usize) {
    while length > 0 {
        let there = length.min(unpacked.len() - from);
        unpacked.extend_from_within(from..from + there);
        length -= there;
    }
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn byte(&mut self) -> Result<u8, String> {
        let (byte, rest) = self.0.split_first().ok_or("a block ends early")?;
        self.0 = rest;
        Ok(*byte)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or("a block ends early")?;
        self.0 = rest;
        Ok(taken)
    }

    /// Fifteen means that bytes follow, and 255 that still more do. A block has less than 2^32 of
    /// them, so the sum fits.
    fn length(&mut self, first: usize) -> Result<usize, String> {
        let mut length = first;
        if first == 15 {
            loop {
                let more = self.byte()?;
                length += usize::from(more);
                if more != 255 {
                    break;
                }
            }
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(blocks: &[&[u8]]) -> Vec<u8> {
        let mut frame = MAGIC.to_vec();
        for block in blocks {
            frame.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            frame.extend(*block);
        }
        frame
    }

    #[test]
    fn literals_and_copies_become_what_they_were() {
        // "abc", nine from three back, "!" ; then a block of its own.
        let first = [0x35, b'a', b'b', b'c', 3, 0, 0x10, b'!'];
        let unpacked = unpack(&framed(&[&first, &[0x20, b'o', b'k']]), 100).unwrap();
        assert_eq!(unpacked, b"abcabcabcabc!ok");
    }

    #[test]
    fn long_lengths_are_added_up() {
        let mut block = vec![0xf0, 255, 1];
        block.extend([b'x'; 15 + 255 + 1]);
        assert_eq!(unpack(&framed(&[&block]), 1000).unwrap(), [b'x'; 271]);
    }

    #[test]
    fn copies_from_before_the_block_are_refused() {
        let whole = [0x40, b'a', b'b', b'c', b'd'];
        for distance in [0, 2, 9] {
            let error = unpack(&framed(&[&whole, &[0x10, b'x', distance, 0, 0]]), 100);
            assert_eq!(error.unwrap_err(), "a copy is of nothing");
        }
    }

    #[test]
    fn a_bomb_ends_at_the_limit() {
        let mut block = vec![0x1f, 0, 1, 0];
        block.extend(vec![255; 16_000]);
        block.extend([0, 0x10, 0]);
        let bomb = framed(&vec![&block[..]; 100]);
        assert!(unpack(&bomb, 5 << 20).unwrap_err().contains("larger than anything"));
        let mut block = vec![0x1f, 0, 1, 0];
        block.extend(vec![255; 40_000]);
        block.extend([0, 0x10, 0]);
        assert!(unpack(&framed(&[&block]), u64::MAX).unwrap_err().contains("blocks are"));
    }

    #[test]
    fn what_ends_early_is_refused() {
        let frame = framed(&[&[0x35, b'a', b'b', b'c', 3, 0, 0x10, b'!']]);
        for length in 0..frame.len() {
            // A frame of no blocks is one.
            assert_eq!(unpack(&frame[..length], 100).is_ok(), length == MAGIC.len(), "{length}");
        }
    }
}
