//! Tars: directories of ours packed, and what a sandbox sends unpacked without trusting it.

#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod pack;
mod place;
mod unpack;

pub(crate) use pack::{Choice, Owners, Packed, pack};
pub(crate) use place::{Directory, put_file};
pub(crate) use unpack::unpack;
