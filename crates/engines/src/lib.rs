//! Isolation technologies.
