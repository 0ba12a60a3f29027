//! Entry points of fuzz targets, beside what they are about.

#[path = "../../../fuzz/input.rs"]
pub(crate) mod input;

pub use crate::glance::fuzzing::glance_first_bytes;
pub use crate::names::fuzzing::egress_dns;
pub use crate::read::fuzzing::{decode, redact};
