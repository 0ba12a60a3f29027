//! Whether this host is fit for Torpor, and what to do if not.
pub struct Finding;
pub async fn doctor(_config: &crate::Config) -> Vec<Finding> { Vec::new() }
