//! Certificates for tests; nobody has their keys.

pub(super) const ONE: &str = include_str!("../../tests/certificates/one.pem");
pub(super) const OTHER: &str = include_str!("../../tests/certificates/other.pem");
