//! Entry points of fuzz targets, beside what they are about.

#[path = "../../../fuzz/input.rs"]
pub(crate) mod input;

pub use crate::intercept::fuzzing::{decode, redact};
pub use crate::names::fuzzing::egress_dns;
pub use crate::sniff::fuzzing::sniff_first_bytes;
