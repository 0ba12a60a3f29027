//! What runsc says of root images that it can't run.
//!
//! runsc maps files of an EROFS image straight into the guest. It can't map file ends that are
//! packed beside their inodes, nor compressed files; `mkfs.erofs -x-1 -E noinline_data` makes images
//! without either. An image made otherwise shows at the start of the agent, which can't be loaded.

use torpor_lifecycle::engine::{AGENT_PATH, EngineError};

/// What the sandbox says when the agent can't be loaded, in words that help; `None` if it complains
/// about something else.
pub(super) fn unloadable(message: &str) -> Option<EngineError> {
    if !message.contains("failed to load") {
        return None;
    }
    Some(EngineError::Image(if message.contains("bad address") {
        "its programs can't be mapped: make it with `mkfs.erofs -x-1 -E noinline_data`".into()
    } else {
        format!("the agent at {AGENT_PATH} can't be loaded: {message}")
    }))
}
