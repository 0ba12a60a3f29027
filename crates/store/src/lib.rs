//! Bytes at rest.
