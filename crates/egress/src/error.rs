//! What can go wrong before anybody is let out.

/// Egress can't begin.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    /// What was configured can't be used, and why.
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Ca(#[from] crate::CaError),
    #[error("could not {action}")]
    Failed {
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl EgressError {
    /// `EgressError::failed("read the key")(error)`, for `map_err`.
    pub(crate) fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        action: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::Failed { action, source: source.into() }
    }
}
